"""The service: searches, items, the map, errors of one form, batches, limits, tokens, and how it stops."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
import torch

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

import proxymetric as pm
from proxymetric.data import read_image
from proxymetric.search import Index
from proxymetric.search.searching import SearchQuestion
from proxymetric.serve import server
from proxymetric.serve.batching import Batcher
from proxymetric.serve.decoders import Decoders, _Decoder
from proxymetric.serve.searcher import Question, Searcher
from service import BOUNDARY, Client, form, jpeg, serving
from terminal import finished_run, proxymetric


def test_an_upload_finds_what_the_library_finds(client, index_folder, photos):
    image = photos / "class5" / "3.png"
    answer = client.upload(image.read_bytes(), k=5)
    assert answer.status == 200, answer
    index = Index.open(index_folder)
    model = pm.load(index.manifest.run["run"], device="cpu")
    (hits,) = index.search(model.embed([image]), k=5)
    assert [hit["id"] for hit in answer.json["results"]] == [hit.id for hit in hits]
    np.testing.assert_allclose(
        [hit["similarity"] for hit in answer.json["results"]], [hit.similarity for hit in hits], atol=1e-5
    )
    first = answer.json["results"][0]
    assert first | {"similarity": 1} == {
        "id": "class5/3.png",
        "class": "class5",
        "metadata": {},
        "thumbnail": "/thumbnails/class5/3.png",
        "row": 43,
        "rank": 1,
        "similarity": 1,
    }
    by_json = client.ask(image=base64.b64encode(image.read_bytes()).decode(), k=5)
    assert by_json.json == answer.json


def test_a_search_by_an_item_leaves_it_out(client):
    answer = client.ask(id="class5/3.png", k=79)
    ids = [hit["id"] for hit in answer.json["results"]]
    assert len(ids) == 79
    assert "class5/3.png" not in ids


def test_conditions(client, photos):
    image = (photos / "class0" / "0.png").read_bytes()
    answer = client.ask(id="class0/0.png", k=50, where={"class": "class4", "shop": "Ulm"})
    assert [hit["id"] for hit in answer.json["results"]] == ["class4/2.png"]
    assert answer.json["results"][0]["metadata"] == {"shop": "Ulm"}
    answer = client.upload(image, where="shop=Ulm")
    assert {hit["id"] for hit in answer.json["results"]} == {"class0/1.png", "class4/2.png"}
    answer = client.ask(id="class0/0.png", where={"shopp": "Ulm"})
    assert (answer.status, answer.code) == (422, "bad_value")
    assert "did you mean 'shop'?" in answer.json["error"]["message"]


def test_pages_hold_each_result_once(client, index_folder):
    index, query = Index.open(index_folder), "class5/3.png"
    (expected,) = index.search(index.vector(query)[None], 80, ["class!=class9"], [query], min_similarity=-0.5)
    fields = {"id": query, "k": 20, "where": {"class": {"!=": "class9"}}, "min_similarity": -0.5}
    pages = [client.ask(**fields, offset=offset).json for offset in range(0, 80, 20)]
    hits = [hit for page in pages for hit in page["results"]]
    assert [hit["id"] for hit in hits] == [hit.id for hit in expected]
    assert [hit["rank"] for hit in hits] == list(range(1, len(expected) + 1))
    assert [page["more"] for page in pages] == [offset + 20 < len(expected) for offset in range(0, 80, 20)]
    groups = client.ask(id=query, k=20, one_per="class").json
    assert sorted(hit["class"] for hit in groups["results"]) == [f"class{number}" for number in range(10)]
    assert not groups["more"]


def test_several_images_or_items_are_one_query(client, index_folder, photos):
    names = ["class5/3.png", "class0/0.png"]
    index = Index.open(index_folder)
    mean = torch.stack([index.vector(name) for name in names]).mean(dim=0, keepdim=True)
    (expected,) = index.search(mean, 10, without=[names])
    by_item = client.ask(ids=names, k=10)
    assert [hit["id"] for hit in by_item.json["results"]] == [hit.id for hit in expected]
    files = [base64.b64encode((photos / name).read_bytes()).decode() for name in names]
    by_json = client.ask(images=files, k=10)
    (expected,) = index.search(mean, 10)
    assert [hit["id"] for hit in by_json.json["results"]] == [hit.id for hit in expected]
    body = form((photos / names[0]).read_bytes(), k=10)[: -len(f"--{BOUNDARY}--\r\n")]
    body += form((photos / names[1]).read_bytes())
    kind = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}
    assert client("POST", "/search", body, kind).json == by_json.json
    refused = client(
        "POST", "/identify", body.replace(b'name="k"', b'name="far"').replace(b"\r\n10\r\n", b"\r\n0.1\r\n"), kind
    )
    assert "image: got 2 files, expected one" in refused.json["error"]["message"]


def test_items_thumbnails_and_rows(client, index_folder):
    index = Index.open(index_folder)
    item = client.get("/items/class0/1.png")
    assert item.json == {
        "id": "class0/1.png",
        "class": "class0",
        "metadata": {"shop": "Ulm"},
        "thumbnail": "/thumbnails/class0/1.png",
        "row": 1,
    }
    assert client.get("/items/class0%2F1.png").json == item.json
    assert client.get("/rows/1").json == item.json
    picture = client.get(item.json["thumbnail"])
    assert picture.headers["content-type"] == "image/jpeg"
    assert picture.body == index.thumbnail("class0/1.png")
    for path in ("/items/none", "/thumbnails/none", "/rows/80"):
        assert (client.get(path).status, client.get(path).code) == (404, "not_found")
    assert client.get("/rows/-1").status == 422


def test_the_map(client, index_folder):
    index, info = Index.open(index_folder), client.get("/map").json
    assert info["method"] == "tsne"
    assert info["classes"] == [f"class{number}" for number in range(10)]
    points = np.frombuffer(client.get("/map/points").body, "<f4").reshape(-1, 3)
    assert len(points) == info["count"] == 80
    assert np.abs(points[:, :2]).max() == pytest.approx(1)
    assert [info["classes"][int(code)] for code in points[:, 2]] == index.labels


def test_the_proxies_of_the_run_are_placed_like_images(client, index_folder):
    index, answer = Index.open(index_folder), client.get("/map/proxies")
    content = answer.json
    assert answer.status == 200
    assert content["total"] == len(content["proxies"]) == 8
    assert {proxy["class"] for proxy in content["proxies"]} <= set(index.labels)
    assert all(proxy["radius"] == 0 for proxy in content["proxies"]), "points, not Gaussians"
    places = np.array([[proxy["x"], proxy["y"]] for proxy in content["proxies"]])
    assert np.abs(places).max() <= 1 + 1e-6, "among the images"
    assert client.get("/map/proxies").body == answer.body


def test_facts_health_counters_and_description(client, index_folder):
    assert client.get("/healthz").json == {"status": "ok", "items": 80}
    info = client.get("/info").json
    assert (info["count"], info["dim"], info["engine"], info["writable"]) == (80, 8, "exact", False)
    assert info["columns"] == [{"name": "shop", "kind": "text", "values": ["Ulm"], "least": None, "greatest": None}]
    assert info["model"] == Index.open(index_folder).model
    assert info["limits"] == {"bytes": 1_000_000, "pixels": 2_000_000, "results": 100}
    before = counter(client, 'requests_total{route="items",status="404"}')
    client.get("/items/none")
    assert counter(client, 'requests_total{route="items",status="404"}') == before + 1
    found = counter(client, "search_seconds_count")
    client.ask(id="class0/1.png")
    assert counter(client, "search_seconds_count") == found + 1
    assert counter(client, 'search_seconds_bucket{le="+Inf"}') == found + 1
    assert counter(client, "index_items") == 80
    description = client.get("/openapi.json").json
    assert {"/search", "/items/{id}", "/thumbnails/{id}", "/map", "/healthz", "/metrics"} <= description["paths"].keys()
    assert description["paths"]["/search"]["post"]["requestBody"]["content"].keys() == {
        "multipart/form-data",
        "application/json",
    }


def counter(client, name):
    match = re.search(rf"^proxymetric_{re.escape(name)} (\d+)$", client.get("/metrics").body.decode(), re.M)
    return int(match[1]) if match else 0


@pytest.mark.parametrize(
    ("content", "status", "said"),
    [
        ({}, 422, "expected exactly one of them"),
        ({"id": "class0/1.png", "image": "aaaa"}, 422, "expected exactly one of them"),
        ({"id": "none"}, 404, "expected the id of an item"),
        ({"image": "no base64!"}, 422, "is not base64"),
        ({"image": "aaaa"}, 422, "the image format is not recognised"),
        ({"image": ""}, 422, "got no bytes"),
        ({"id": "class0/1.png", "k": 0}, 422, "k: got 0, expected a number of at least 1"),
        ({"id": "class0/1.png", "k": 101}, 422, "k: got 101, expected at most 100"),
        ({"id": "class0/1.png", "k": "3"}, 422, "k: got '3', expected a whole number"),
        ({"id": "class0/1.png", "k": [1]}, 422, "k: got a list, expected a whole number"),
        ({"id": "class0/1.png", "k": "9" * 300}, 422, "9..., expected a whole number"),
        ({"id": "class0/1.png", "wher": {}}, 422, "body: got 'wher', expected only image, images, id, ids, k, where,"),
        ({"id": "class0/1.png", "where": {"class": None}}, 422, "where: got class=None, expected text, a number"),
        ({"id": "class0/1.png", "where": 3}, 422, "where: got 3, expected an object or a list of conditions"),
        ({"id": "class0/1.png", "where": [3]}, 422, "where: got 3, expected text"),
        ({"id": "class0/1.png", "where": ["shop<Ulm"]}, 422, "where: got shop<Ulm, expected a number or a date"),
        ({"id": "class0/1.png", "where": {"class": {"<>": 1}}}, 422, "where class: got '<>', expected one of"),
        ({"id": "class0/1.png", "where": ["class!=a"] * 17}, 422, "where: got 17 conditions, expected at most 16"),
        ({"id": "class0/1.png", "one_per": "shopp"}, 422, "one_per: got 'shopp'"),
        ({"id": "class0/1.png", "offset": 10_001}, 422, "offset: got 10001, expected a number of at most 10000"),
        ({"id": "class0/1.png", "min_similarity": 2}, 422, "min_similarity: got 2, expected a number of at most 1"),
        ({"ids": []}, 422, "ids: got a list, expected at least 1 entries"),
        ({"ids": ["class0/1.png", "none"]}, 404, "id: got 'none', expected the id of an item"),
        ({"ids": ["class0/1.png"] * 9}, 422, "ids: got a list, expected at most 8 entries"),
        ({"images": ["aaaa", "?"]}, 422, "images: got text that is not base64"),
        ({"url": "http://127.0.0.1/"}, 422, "body: got 'url', expected only image, images, id, ids, k, where"),
    ],
)
def test_mistakes_in_a_search(client, content, status, said):
    answer = client.ask(**content)
    assert answer.status == status, answer
    assert answer.code
    assert said in answer.json["error"]["message"]


def test_other_mistakes(client):
    kinds = {"content-type": "application/json"}
    assert client("POST", "/search", "{", kinds).status == 400
    assert client("POST", "/search", "[" * 100_000, kinds).status == 400
    assert client("POST", "/search", "[1]", kinds).status == 422
    assert client("POST", "/search", b"\xff\xfe", kinds).status == 400
    assert client("POST", "/search", b"x", {"content-type": "text/plain"}).code == "unsupported_type"
    assert client("POST", "/search", b"x").code == "unsupported_type"
    assert client("POST", "/search", b"x", {"content-type": "multipart/form-data"}).code == "bad_request"
    broken = {"content-type": "multipart/form-data; boundary=b"}
    assert client("POST", "/search", b"--b\r\nno header", broken).status in (400, 422)
    answer = client.upload(jpeg(), where="class")
    assert "where: got 'class', expected COLUMN=VALUE" in answer.json["error"]["message"]
    assert client("DELETE", "/search").code == "method_not_allowed"
    assert client("DELETE", "/search").headers["allow"] == "POST"
    assert "method: got DELETE for '/search', expected POST" in client("DELETE", "/search").json["error"]["message"]
    assert client.get("/none").code == "not_found"
    said = client.get("/serch").json["error"]["message"]
    assert "path: got '/serch', expected one of /, /search, /identify, /items/{id}" in said
    assert said.endswith("did you mean '/search'?")
    assert client.get("/item/class0/1.png").json["error"]["message"].endswith("did you mean '/items'?")
    assert "row: got 'x', expected a whole number" in client.get("/rows/x").json["error"]["message"]
    answer = client.upload(jpeg(), k="abc")
    assert "k: got 'abc', expected a whole number" in answer.json["error"]["message"]
    kind = {"content-type": "application/json"}
    answer = client("POST", "/identify", '{"id": "class0/1.png", "far": 3}', kind)
    assert "far: got 3, expected a number of at most 0.5" in answer.json["error"]["message"]


def test_headers_of_every_answer(client):
    for path in ("/", "/healthz", "/none"):
        headers = client.get(path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "server" not in headers


def test_a_name_of_another_site_is_refused(client, settings):
    assert client.get("/healthz", Host="evil.example").code == "wrong_host"
    assert client.get("/healthz", Host=f"localhost:{client.port}").status == 200
    with serving(replace(settings, hosts=("search.example",))) as other:
        assert other.get("/healthz", Host="Search.Example").status == 200


def test_a_token_is_needed(settings):
    with serving(replace(settings, token="sécret")) as client:
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "Basic sécret"},
            {"Authorization": ""},
        ):
            for path in (
                "/items/class0/1.png",
                "/thumbnails/class0/1.png",
                "/map",
                "/metrics",
                "/openapi.json",
                "/none",
            ):
                answer = client("GET", path, headers={k: v.encode() for k, v in headers.items()})
                assert (answer.status, answer.code) == (401, "unauthorized"), path
                assert answer.headers["www-authenticate"] == "Bearer"
        assert client.get("/info").status == client.upload(jpeg()).status == 401
        right = {"Authorization": "Bearer sécret".encode()}
        assert client("GET", "/items/class0/1.png", headers=right).status == 200
        assert client.get("/healthz").status == 200
        assert client.get("/").status == 200


def test_a_changed_index_is_opened_also_when_nobody_searches(settings, index_folder, tmp_path):
    copy = shutil.copytree(index_folder, tmp_path / "copy.index")
    with serving(replace(settings, index=str(copy))) as client:
        assert client.get("/items/class0/0.png").status == 200
        Index(copy).delete(["class0/0.png"])
        end = time.monotonic() + 60
        while client.get("/healthz").json["items"] == 80 and time.monotonic() < end:
            time.sleep(0.1)
        assert client.get("/healthz").json["items"] == client.get("/info").json["count"] == 79
        for path in ("/items/class0/0.png", "/thumbnails/class0/0.png"):
            assert client.get(path).status == 404, "a deleted image is not served any more"


def test_the_index_may_change_while_it_is_served(settings, index_folder, tmp_path, caplog):
    copy = shutil.copytree(index_folder, tmp_path / "copy.index")
    with serving(replace(settings, index=str(copy))) as client:
        assert len(client.ask(id="class0/0.png", k=100).json["results"]) == 79
        Index.open(copy).delete(["class0/1.png"])
        end = time.monotonic() + 30
        while len(client.ask(id="class0/0.png", k=100).json["results"]) != 78:
            assert time.monotonic() < end, "the new state was not opened"
            time.sleep(0.1)
        assert client.get("/items/class0/1.png").status == 404
        assert "stale" not in client.get("/healthz").json
        Index.open(copy).change(model="another")
        while "stale" not in client.get("/healthz").json:
            assert time.monotonic() < end, "a state whose model is not there is not noticed"
            time.sleep(0.1)
        assert client.get("/healthz").json["status"] == "ok"
        assert "cannot be opened: the log" in client.get("/healthz").json["stale"]
        assert str(copy) not in client.get("/healthz").json["stale"], "which needs no token"
        assert len(client.ask(id="class0/0.png", k=100).json["results"]) == 78, "a state of another model stays out"
    assert f"{copy}: has changed, and its new state cannot be opened" in caplog.text
    assert caplog.text.count("cannot be opened") == 1, "said once"


@pytest.mark.parametrize("given", [False, True])
def test_an_index_that_another_model_has_rebuilt_is_opened_with_it(given, settings, index_folder, photos, tmp_path):
    """Also images that were cut for the model before are answered, from the state before."""
    copy = shutil.copytree(index_folder, tmp_path / "copy.index")
    run = Index(copy).manifest.run["run"] if given else None
    other = finished_run(photos, tmp_path / "other", "--seed", 3, "--dim", 6, "--size", 24, "--set", "view.resize=24")
    image = photos / "class5" / "3.png"
    searcher = Searcher(str(copy), run, "cpu")
    early = searcher.cut([read_image(image)])
    with serving(replace(settings, index=str(copy), run=run)) as client:
        before = client.get("/info").json
        assert client.get("/map/proxies").status == 200
        answer = proxymetric("index", other, photos, "--out", copy, "--rebuild", "--device", "cpu")
        assert answer.code == 0, answer
        end = time.monotonic() + 60
        while client.get("/info").json["generation"] == before["generation"]:
            assert time.monotonic() < end, "the new state was not opened"
            time.sleep(0.1)
        assert (before["dim"], client.get("/info").json["dim"]) == (8, 6)
        answer = client.upload(image.read_bytes(), k=5)
        index = Index.open(copy)
        (hits,) = index.search(pm.load(other, device="cpu").embed([image]), k=5)
        assert [hit["id"] for hit in answer.json["results"]] == [hit.id for hit in hits]
        assert client.get("/map/proxies").json["generation"] == index.manifest.generation
        assert client.get("/healthz").json == {"status": "ok", "items": 80}
    searcher.look()
    late = searcher.cut([read_image(image)])
    assert early.pixels[0].shape != late.pixels[0].shape
    search = SearchQuestion(1, [], {}, 0, None, None)
    found = searcher.answer([Question(each, search=search) for each in (late, early, late)])
    generations = [each.generation for each in found]
    assert generations == [index.manifest.generation, before["generation"], index.manifest.generation]
    assert [each.hits[0].id for each in found] == ["class5/3.png"] * 3


def test_what_arrives_while_others_are_computed_is_computed_together(settings, monkeypatch):
    """While one search is held, sixteen arrive; they are one or two batches, and each gets its own answer."""
    hold, held, sizes = threading.Event(), threading.Event(), []
    answer = Searcher.answer

    def slow(self, questions):
        sizes.append(len(questions))
        held.set()
        hold.wait(30)
        return answer(self, questions)

    monkeypatch.setattr(Searcher, "answer", slow)
    with serving(settings) as client, ThreadPoolExecutor(20) as threads:
        first = threads.submit(client.ask, id="class9/0.png", k=1)
        assert held.wait(30)
        others = [threads.submit(client.ask, id=f"class{n % 8}/{n // 8}.png", k=1 + n % 3) for n in range(16)]
        end = time.monotonic() + 30
        while counter(client, "pending_searches") < 17:
            assert time.monotonic() < end
            time.sleep(0.01)
        hold.set()
        assert first.result().status == 200
        index = Index.open(settings.index)
        for n, other in enumerate(others):
            item = f"class{n % 8}/{n // 8}.png"
            (hits,) = index.search(index.vector(item)[None], k=1 + n % 3, without=[item])
            assert [hit["id"] for hit in other.result().json["results"]] == [hit.id for hit in hits]
        assert sizes == [1, 16]
        assert counter(client, "batches_total") == 2
        assert counter(client, "batched_searches_total") == 17


def test_more_than_the_limit_is_answered_with_429(settings, monkeypatch):
    hold, answer = threading.Event(), Searcher.answer
    monkeypatch.setattr(Searcher, "answer", lambda self, questions: hold.wait(30) and answer(self, questions))
    with serving(replace(settings, max_pending=3)) as client, ThreadPoolExecutor(8) as threads:
        waiting = [threads.submit(client.upload, jpeg(), k=1) for _ in range(3)]
        end = time.monotonic() + 30
        while counter(client, "pending_searches") < 3:
            assert time.monotonic() < end
            time.sleep(0.01)
        refused = client.upload(jpeg(), k=1)
        assert (refused.status, refused.code, refused.headers["retry-after"]) == (429, "busy", "1")
        assert client.get("/healthz").status == 200, "other requests are answered"
        hold.set()
        assert [future.result().status for future in waiting] == [200] * 3
        assert client.upload(jpeg(), k=1).status == 200


def test_a_stop_ends_what_is_decoded(settings, monkeypatch):
    """A process that decodes and never answers does not keep the service."""
    started: list[Decoders] = []

    class Recorded(Decoders):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            started.append(self)

    monkeypatch.setattr("proxymetric.serve.pipeline.Decoders", Recorded)
    monkeypatch.setattr(server, "STOP_SECONDS", 2)
    with ThreadPoolExecutor(1) as threads:
        with serving(replace(settings, decode_seconds=600)) as client:
            assert client.upload(jpeg(), k=1).status == 200
            (decoder,) = started[0]._all
            os.kill(decoder.process.pid, signal.SIGSTOP)
            asked = threads.submit(client.upload, jpeg(), k=1)
            end = time.monotonic() + 30
            while started[0]._idle:
                assert time.monotonic() < end
                time.sleep(0.01)
        has_ended = decoder.process.poll()
        decoder.process.kill()  # if not, this test would not end either
        assert has_ended == -signal.SIGKILL
        assert (asked.result().status, asked.result().code) == (503, "stopping")


def test_a_slow_decoder_delays_nobody_for_long(settings, monkeypatch):
    """An image whose decoding does not end is refused after `decode_seconds`, and the next one is decoded."""
    monkeypatch.setattr("proxymetric.serve.pipeline.DECODERS", 1)
    monkeypatch.setattr("proxymetric.serve.decoders._Decoder.__init__", stopping_first(_Decoder.__init__))
    with serving(replace(settings, decode_seconds=3)) as client:
        answer = client.upload(jpeg(), k=1)
        assert (answer.status, answer.code) == (422, "bad_image")
        assert "got one that takes more than 3 s to decode" in answer.json["error"]["message"]
        assert client.upload(jpeg(), k=1).status == 200


def stopping_first(start):
    """Halt the first process that is started."""
    halted = []

    def started(self, seconds):
        start(self, seconds)
        if not halted:
            halted.append(self)
            os.kill(self.process.pid, signal.SIGSTOP)

    return started


def test_a_search_that_takes_too_long_is_answered_with_504(settings, monkeypatch):
    hold, answer = threading.Event(), Searcher.answer
    monkeypatch.setattr(Searcher, "answer", lambda self, questions: hold.wait(30) and answer(self, questions))
    with serving(replace(settings, seconds=0.2)) as client:
        answer_of_client = client.ask(id="class0/0.png")
        assert (answer_of_client.status, answer_of_client.code) == (504, "timeout")
        hold.set()


def test_an_error_of_the_program_is_not_shown(settings, monkeypatch):
    def broken(self, questions):
        raise RuntimeError("a secret of the program")

    monkeypatch.setattr(Searcher, "answer", broken)
    with serving(settings) as client:
        answer = client.ask(id="class0/0.png")
        assert (answer.status, answer.code) == (500, "internal")
        assert b"secret" not in answer.body


def test_a_batcher_leaves_out_who_has_gone():
    seen = []

    async def scene():
        hold = threading.Event()

        def work(tasks):
            seen.append(tasks)
            hold.wait(10)
            return [ValueError("two") if task == 2 else task for task in tasks]

        async with Batcher(work, most=4) as batcher:
            tasks = [asyncio.create_task(batcher(n)) for n in range(4)]
            await asyncio.sleep(0.05)
            tasks[1].cancel()
            await asyncio.sleep(0.05)
            late = [asyncio.create_task(batcher(n)) for n in range(10, 16)]
            await asyncio.sleep(0.05)
            late[0].cancel()
            hold.set()
            return await asyncio.gather(*tasks, *late, return_exceptions=True)

    answers = asyncio.run(scene())
    assert seen == [[0, 1, 2, 3], [11, 12, 13], [14, 15]]
    assert isinstance(answers[1], asyncio.CancelledError)
    assert isinstance(answers[2], ValueError)
    assert answers[5:] == [11, 12, 13, 14, 15]


def free_port():
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return place.getsockname()[1]


def is_open(port):
    """Whether somebody listens at a port."""
    with socket.socket() as place:
        return place.connect_ex(("127.0.0.1", port)) == 0


def mapping(parent, file):
    """The processes that a process has started and that have mapped a file into their memory."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [child for child in children if str(file) in Path(f"/proc/{child}/maps").read_text()]


@pytest.fixture
def processes(index_folder):
    """Start `proxymetric serve` in processes of its own, and stop it at the end."""
    started = []

    def start(*words, **environment):
        port = free_port()
        command = [sys.executable, "-m", "proxymetric", "serve", str(index_folder), "--port", str(port), *words]
        process = subprocess.Popen(command, env=os.environ | environment, stderr=subprocess.PIPE, text=True)
        started.append(process)
        end = time.monotonic() + 300
        while True:
            try:
                if Client(port).get("/healthz").status == 200:
                    return process, Client(port)
            except OSError:
                assert process.poll() is None, process.stderr.read()
                assert time.monotonic() < end
                time.sleep(0.1)

    yield start
    for process in started:
        process.terminate()  # a kill would leave the processes that it has started
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stderr.close()


def test_it_stops_gracefully(processes):
    """A search that has begun when the signal comes is answered; then the process ends."""
    process, client = processes("--device", "cpu")
    body = json.dumps({"id": "class0/0.png", "k": 2}).encode()
    with socket.create_connection(("127.0.0.1", client.port), timeout=30) as connection:
        head = f"POST /search HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body[:5])
        end = time.monotonic() + 30
        while counter(client, "receiving_bodies") < 1:
            assert time.monotonic() < end
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        while is_open(client.port):
            assert time.monotonic() < end
            time.sleep(0.01)
        connection.sendall(body[5:])
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
    assert process.wait(30) in (0, -signal.SIGTERM)
    with pytest.raises(ConnectionRefusedError):
        client.get("/healthz")


def test_several_processes_share_the_index_and_the_counters(processes, index_folder):
    process, client = processes("--device", "cpu", "--workers", "2", PROXYMETRIC_TOKEN="secret")
    secret = {"Authorization": "Bearer secret", "content-type": "application/json"}
    for _ in range(40):
        assert client("POST", "/search", '{"id": "class0/0.png", "k": 1}', secret).status == 200
    end = time.monotonic() + 120
    # An answer is counted after it is sent, in the process that sent it.
    while 'status="200"} 40' not in (text := client("GET", "/metrics", headers=secret).body.decode()):
        assert time.monotonic() < end, text
        time.sleep(0.1)
    assert 'proxymetric_requests_total{route="search",status="200"} 40' in text
    assert client.get("/info").status == 401
    vectors = next(index_folder.glob("vectors-*.float32"))
    while len(mapping(process.pid, vectors)) < 2:  # the second process may start later
        assert time.monotonic() < end, "both processes map the same file"
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    process.wait(30)


def test_ids_of_any_alphabet(settings, tmp_path):
    from proxymetric.models.load import load

    index = Index.open(settings.index)
    run = index.manifest.run
    other = Index.create(tmp_path / "b.index", index.dim, load(run["run"], device="cpu"), run=run)
    ids = ["größe/ß 名.jpg", "a?b#c%20&d=e", "../../etc/passwd", "a//b", "'; DROP TABLE items; --"]
    other.add(ids, torch.eye(index.dim)[:5], thumbnails=[b"jpeg" + item.encode() for item in ids])
    with serving(replace(settings, index=str(other.folder))) as client:
        for item in ids:
            assert client.get(f"/items/{quote(item, safe='')}").json["id"] == item
        for hit in client.ask(id=ids[0], k=10).json["results"]:
            assert client.get(hit["thumbnail"]).body == b"jpeg" + hit["id"].encode()


def test_identify_says_what_the_library_says(client, index_folder, photos):
    image = photos / "class5" / "3.png"
    kind = {"content-type": "multipart/form-data; boundary=a-boundary-of-the-tests"}
    answer = client("POST", "/identify", form(image.read_bytes(), far="0.2"), kind)
    assert answer.status == 200, answer
    index = Index.open(index_folder)
    model = pm.load(index.manifest.run["run"], device="cpu")
    (expected,) = index.identify(model.embed([image]), far=0.2)
    found = answer.json
    assert found.keys() == {
        "class", "score", "threshold", "far", "best", "similarity", "runner_up", "runner_up_similarity", "uncertainty",
        "has_uncertainty", "generation",
    }  # fmt: skip
    assert (found["class"], found["best"], found["runner_up"]) == (expected.label, expected.best, expected.runner_up)
    assert found["score"] == pytest.approx(expected.score, abs=1e-4)
    assert found["threshold"] == pytest.approx(expected.threshold, abs=1e-6)
    as_json = {"content-type": "application/json"}
    by_item = client("POST", "/identify", json.dumps({"id": "class5/3.png", "far": 0.2}), as_json)
    (left_out,) = index.identify(index.vector("class5/3.png")[None], far=0.2, without=["class5/3.png"])
    assert by_item.json["score"] == pytest.approx(left_out.score, abs=1e-4)
    assert left_out.score < expected.score, "an item is left out of its own class"
    for content, status in (
        ({"id": "class5/3.png", "far": 2}, 422),
        ({"id": "nothing"}, 404),
        ({"id": "class5/3.png", "k": 3}, 422),
        ({}, 422),
    ):
        refused = client("POST", "/identify", json.dumps(content), as_json)
        assert refused.status == status, refused
        assert refused.code
    assert client("POST", "/identify", b"x" * 2_000_000, as_json).status == 413
