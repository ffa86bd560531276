"""Writes over HTTP: who may, what they change, when searches see it, and what is refused and changes nothing."""

from __future__ import annotations

import base64
import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from proxymetric.search import Index
from proxymetric.search.switching import switch
from proxymetric.serve.searcher import Searcher
from proxymetric.serve.settings import Settings
from proxymetric.serve.writing import Patch, Put, Write, Writer
from proxymetric.system.lock import locked
from service import BOUNDARY, form, jpeg, serving

WRITES = {"Authorization": "Bearer writes"}
READS = {"Authorization": "Bearer reads"}
JSON = {"content-type": "application/json"}
FORM = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}


@pytest.fixture(scope="module")
def copy(index_folder, tmp_path_factory):
    return shutil.copytree(index_folder, tmp_path_factory.mktemp("writes") / "a.index")


@pytest.fixture(scope="module")
def client(settings, copy):
    chosen = replace(settings, index=str(copy), token="reads", write_token="writes", write_seconds=0.3)
    with serving(chosen) as client:
        yield client


@pytest.fixture
def write(client, copy):
    """Send a change; what it refuses has changed nothing."""

    def send(method, path, content=None, headers=WRITES, **more):
        before = Index(copy).manifest
        body, kind = (content, FORM) if isinstance(content, bytes) else (json.dumps(content), JSON)
        answer = client(method, path, None if content is None else body, {**headers, **kind, **more})
        if answer.status != 200:
            assert answer.code
            assert Index(copy).manifest == before
        return answer

    return send


def vector_of(copy, *numbers):
    return {"vector": list(numbers), "model": Index(copy).model}


def said(answer, status):
    assert answer.status == status, answer
    return answer.json["error"]["message"]


def test_an_image_is_put_found_changed_and_deleted(client, write, copy):
    image, path = jpeg(seed=1), "/items/new/gr%C3%B6%C3%9Fe%201"
    fields = {"class": "noise", "metadata": json.dumps({"price": 4.5, "tags": ["red", "new"], "gone": None})}
    answer = write("PUT", path, form(image, **fields))
    generation = Index(copy).manifest.generation
    assert answer.json == {"added": 1, "updated": 0, "deleted": 0, "unchanged": 0, "generation": generation}
    again = write("PUT", path, form(image, **fields))
    assert again.json == {"added": 0, "updated": 0, "deleted": 0, "unchanged": 1, "generation": generation}
    as_json = {"image": base64.b64encode(image).decode(), "class": "noise"}
    assert write("PUT", path, as_json | {"metadata": {"price": 4.5, "tags": ["red", "new"]}}).json["unchanged"] == 1
    found = client.upload(image, READS, k=1, where="tags=new").json
    assert found["generation"] == generation
    (hit,) = found["results"]
    assert (hit["id"], hit["class"], round(hit["similarity"], 4)) == ("new/größe 1", "noise", 1)
    assert hit["metadata"] == {"price": 4.5, "tags": ["red", "new"]}
    assert client("GET", hit["thumbnail"], headers=READS).body[:2] == b"\xff\xd8"
    for _ in range(2):
        answer = write("PATCH", path, {"metadata": {"price": 60, "tags": None}})
        assert answer.json["generation"] == generation + 1
    item = client("GET", path, headers=READS).json
    assert (item["class"], item["metadata"]) == ("noise", {"price": 60})
    assert write("PATCH", path, {"class": None}).json["updated"] == 1
    assert client("GET", path, headers=READS).json["class"] is None
    assert write("DELETE", path).json["deleted"] == 1
    assert write("DELETE", path).json | {"generation": 0} == {
        "added": 0, "updated": 0, "deleted": 0, "unchanged": 1, "generation": 0,
    }  # fmt: skip
    assert client("GET", path, headers=READS).status == 404


def test_several_changes_are_one_step(client, write, copy):
    put = [{"id": f"bulk/{n}", **vector_of(copy, *np.eye(8)[n].tolist()), "metadata": {"price": n}} for n in range(8)]
    change = {"put": put, "patch": [{"id": "class1/0.png", "class": "other"}], "delete": ["class1/1.png", "never"]}
    generation = Index(copy).manifest.generation
    answer = write("POST", "/items", change)
    assert answer.json == {"added": 8, "updated": 1, "deleted": 1, "unchanged": 1, "generation": generation + 1}
    assert write("POST", "/items", change).json["unchanged"] == 11
    body = json.dumps({"id": "bulk/0", "k": 9, "where": ["price>=1", "price<4"]})
    hits = client("POST", "/search", body, {**READS, **JSON}).json["results"]
    assert sorted(hit["id"] for hit in hits) == ["bulk/1", "bulk/2", "bulk/3"]
    (price, shop) = client("GET", "/info", headers=READS).json["columns"]
    assert (price["kind"], price["least"], price["greatest"], shop["kind"]) == ("number", 0, 7, "text")
    for wrong, sentence in (
        ({"put": [put[0], {**put[1], "vector": [1, 2]}]}, "item 'bulk/1': vectors: got a tensor of shape (1, 2)"),
        ({"put": [{**put[0], "id": "a"}, {**put[1], "metadata": {"class": 3}}]}, "item 'bulk/1': metadata: got the"),
        ({"put": [{**put[0], "id": "a\0"}]}, "expected text of printable characters"),
        ({"put": [{**put[0], "vector": [0] * 8}]}, "vector: got one without a direction"),
        ({"put": [{**put[0], "model": "x"}]}, "model: got 'x', expected"),
        ({"put": put[:1], "delete": ["bulk/0"]}, "id: got 'bulk/0' twice"),
        ({"put": [{"id": "a", "image": "aaaa"}, put[0]]}, "item 'a': image: the image format is not recognised"),
        ({"put": [{"vector": [1]}]}, "put.0.id: got nothing, expected it"),
        ({"puts": []}, "body: got 'puts', expected only put, patch, delete"),
        ({"delete": ["a"] * 1001}, "delete: got a list, expected at most 1000 entries"),
    ):
        assert sentence in said(write("POST", "/items", wrong), 422)
    missing = {"put": [{**put[0], "id": "a"}], "patch": [{"id": "never", "class": "x"}]}
    assert "id: got 'never'" in said(write("POST", "/items", missing), 404)
    assert "id: got ''" in said(write("POST", "/items", {"patch": [{"id": "", "class": "x"}]}), 404)


def test_wrong_items_are_refused(write, copy):
    given = vector_of(copy, *range(8))
    for content, status, sentence in (
        ({}, 422, "got several or none of `image` and `vector`"),
        ({**given, "image": "aaaa"}, 422, "got several or none"),
        ({"vector": [1.0] * 8}, 422, "got one of `vector` and `model`, expected both"),
        ({**given, "vector": ["1"] * 8}, 422, "vector.0: got '1', expected a number"),
        ({**given, "metadata": {"a": {"b": 1}}}, 422, "metadata: got a={'b': 1}, expected text, a number"),
        ({**given, "metadata": {"a<b": 1}}, 422, "metadata: got the column 'a<b'"),
        ({**given, "label": "x"}, 422, "body: got 'label', expected only image, vector, model, class, metadata"),
        ({"image": "?"}, 422, "image: got text that is not base64"),
        (form(b"no image"), 422, "the image format is not recognised"),
        (form(b"x" * 1_000_001), 413, "image: got 1,000,001 bytes"),
        (form(jpeg(), metadata="[1]"), 422, "metadata: got list, expected a JSON object"),
    ):
        assert sentence in said(write("PUT", "/items/x", content), status)
    assert "'[1' " not in said(write("PUT", "/items/x", form(jpeg(), metadata="[1")), 400)
    assert said(write("PATCH", "/items/none", {"class": "x"}), 404).startswith("id: got 'none'")
    assert "expected only class, metadata" in said(write("PATCH", "/items/class0/0.png", {"vector": [1]}), 422)


def test_only_the_write_token_writes(client, write, copy):
    content = vector_of(copy, *range(8))
    for method, path in (("PUT", "/items/x"), ("PATCH", "/items/x"), ("DELETE", "/items/x"), ("POST", "/items")):
        assert write(method, path, content, READS).code == "read_only"
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic writes"}):
            refused = write(method, path, content, headers)
            assert (refused.status, refused.code) == (401, "unauthorized")
        for header, value in (
            ("sec-fetch-site", "cross-site"), ("sec-fetch-site", "same-site"), ("origin", "https://evil.example"),
            ("origin", "null"), ("origin", f"http://127.0.0.1:{client.port + 1}"),
        ):  # fmt: skip
            assert write(method, path, content, **{header: value}).code == "cross_site"
    own = {"origin": f"http://127.0.0.1:{client.port}", "sec-fetch-site": "same-origin"}
    assert write("DELETE", "/items/never", **own).status == 200
    assert client("POST", "/items/x", headers=WRITES).headers["allow"] == "DELETE, GET, PATCH, PUT"
    assert client("GET", "/info", headers=WRITES).json["writable"] is True
    assert client("GET", "/info?token=writes&write_token=writes").status == 401, "a token is never in an address"


def test_without_a_write_token_nothing_writes(settings, index_folder):
    with serving(replace(settings, token="reads")) as client:
        before = Index(index_folder).manifest
        for method in ("PUT", "PATCH", "DELETE"):
            assert client(method, "/items/class0/0.png", "{}", {**READS, **JSON}).code == "method_not_allowed"
        assert client("POST", "/items", "{}", {**READS, **JSON}).status in (404, 405)
        assert Index(index_folder).manifest == before
    assert "reads" not in repr(replace(settings, token="reads"))
    with pytest.raises(ValueError, match="write_token: got the token with which the index is read"):
        Settings("a.index", token="a", write_token="a")


def test_a_change_waits_for_another_process(client, write, copy):
    with locked(copy), ThreadPoolExecutor(1) as thread:
        refused = write("DELETE", "/items/class2/0.png")
        assert (refused.status, refused.code, refused.headers["retry-after"]) == (503, "locked", "1")
        assert client("GET", "/items/class2/0.png", headers=READS).status == 200, "searches do not wait"
        waiting = thread.submit(write, "DELETE", "/items/never")
    assert waiting.result().status in (200, 503)
    assert write("DELETE", "/items/class2/0.png").json["deleted"] == 1


def test_what_another_process_writes_is_seen_within_a_second(client, copy):
    Index(copy).put(["elsewhere"], torch.ones(1, 8))
    end = time.monotonic() + 60
    while client("GET", "/items/elsewhere", headers=READS).status == 404:
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture(scope="module")
def searcher(copy):
    return Searcher(str(copy), None, "cpu")


def put(searcher, item, seed, model=None):
    vector = torch.randn(1, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return Write(puts=[Put(item, vector, model or searcher.index.model, None, {"seed": seed}, None)])


def test_what_waits_together_is_one_commit_in_order(searcher, copy):
    writer, before = Writer(searcher, 5), Index(copy).manifest.generation
    writes = [
        put(searcher, "a", 1), put(searcher, "b", 2), put(searcher, "a", 3),
        Write(patches=[Patch("never", (), {})]), Write(patches=[Patch("a", ("wren",), {})]), Write(deleted=["b"]),
    ]  # fmt: skip
    answers = writer(writes)
    assert getattr(answers[3], "status", None) == 404, "the others are made"
    assert [answer.generation - before for answer in answers if not isinstance(answer, Exception)] == [1, 1, 2, 3, 3]
    assert [(answer.added, answer.updated, answer.deleted) for answer in answers[:3]] == [
        (1, 0, 0),
        (1, 0, 0),
        (0, 1, 0),
    ]
    assert (searcher.index["a"].label, searcher.index["a"].metadata) == ("wren", {"seed": 3})
    assert "b" not in searcher.index, "this process sees it at once"
    expected = put(searcher, "a", 3).puts[0].vector
    assert torch.cosine_similarity(Index(copy).vector("a")[None].double(), expected).item() == pytest.approx(1)


def test_a_vector_of_a_model_before_is_not_written(searcher):
    (refused,) = Writer(searcher, 5)([put(searcher, "old", 1, model="another")])
    assert (refused.status, refused.code) == (503, "model_changed")
    assert "old" not in searcher.index


def test_a_batch_sees_one_state(searcher, copy):
    """A state that is open stays as it is while another thread changes the index."""
    state = searcher.state
    count, vectors = len(state.index), state.index.vectors.clone()
    Writer(searcher, 5)([put(searcher, f"more/{number}", number) for number in range(5)])
    assert searcher.state is not state
    assert (len(state.index), len(searcher.index)) == (count, count + 5)
    assert torch.equal(state.index.vectors, vectors)
    assert searcher.newest.store.state.table is searcher.index.store.state.table, "unchanged parts are shared"


def test_a_service_follows_when_another_index_takes_the_name(client, write, copy, index_folder, tmp_path):
    other = shutil.copytree(index_folder, copy.parent / "other.index")
    assert write("DELETE", "/items/class3/0.png").status == 200
    switch(copy, other, drop_missing=True)
    end = time.monotonic() + 60
    while client("GET", "/items/class3/0.png", headers=READS).status == 404:
        assert time.monotonic() < end
        time.sleep(0.02)
    assert write("DELETE", "/items/class3/0.png").json["deleted"] == 1
    switch(copy, other, drop_missing=True)
    assert write("DELETE", "/items/class3/1.png").json["deleted"] == 1
    assert "class3/0.png" not in Index(copy)
    assert "class3/1.png" in Index(other)


def test_writes_of_many_clients_are_all_made(client, write, copy):
    def send(number):
        content = json.dumps({**vector_of_model, "metadata": {"number": number}})
        return client("PUT", f"/items/many/{number}", content, {**WRITES, **JSON}).status

    vector_of_model = vector_of(copy, *range(8))
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(send, range(40))) == [200] * 40
    index = Index(copy)
    assert [index[f"many/{number}"].metadata["number"] for number in range(40)] == list(range(40))
    index.verify()
