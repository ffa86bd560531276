"""`proxymetric demo --serve` and `proxymetric serve`: what they serve, and what they refuse."""

from __future__ import annotations

import json
import socket
import sys
import threading
import webbrowser
from dataclasses import replace
from unittest import mock

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from proxymetric.cli import training
from proxymetric.serve import server
from proxymetric.serve.settings import Settings
from service import Client, serving
from terminal import proxymetric, refused


@pytest.fixture
def asked(monkeypatch):
    """Instead of serving for ever, the service is asked once."""
    answers = []

    def serve_a_moment(settings, announce):
        announce(f"http://127.0.0.1:{settings.port}/")
        with serving(replace(settings, port=0)) as client:
            answers.append((settings, client.get("/healthz").json, client.get("/map").json))

    monkeypatch.setattr(server, "serve", serve_a_moment)
    monkeypatch.setattr(webbrowser, "open", lambda address: True)
    return answers


@pytest.mark.usefixtures("only_training")
def test_the_demo_ends_in_a_search(photos, tmp_path, monkeypatch, asked):
    file = tmp_path / "tiny.toml"
    file.write_text(
        f"[data]\npath = {json.dumps(str(photos))}\nworkers = 0\n[view]\nsize = 16\nresize = 16\n"
        '[encoder]\nbackbone = "small"\ndim = 8\n[train]\nepochs = 1\nbatch = 16\n'
    )
    monkeypatch.setattr(training, "DEMO_RECIPE", str(file))
    words = ("demo", "--out", tmp_path / "demo", "--device", "cpu")
    first = proxymetric(*words)
    assert f"proxymetric demo --out {tmp_path / 'demo'} --serve" in first.err
    for times in (1, 2):
        answer = proxymetric(*words, "--serve")
        assert answer.code == 0, answer
        assert "holds a finished demo" in answer.err
        assert "serving 80 images of" in answer.err
        assert len(asked) == times
        _, health, info = asked[-1]
        assert health == {"status": "ok", "items": 80}
        assert info["classes"] == [f"class{number}" for number in range(10)]
    proxymetric(*words)
    assert proxymetric(*words, "--serve").code == 0, "after the demo is trained again, its index is made again"


def test_a_service_is_announced_when_its_model_has_been_loaded(index_folder, tmp_path):
    answer = proxymetric("serve", index_folder, "--run", tmp_path / "gone", "--device", "cpu", "--port", 0)
    assert answer.code == 1
    assert "serving" not in answer.err


def test_serve_takes_its_options(index_folder, tmp_path, asked):
    (tmp_path / "token").write_text(" secret\n")
    words = ["--port", 9000, "--token-file", tmp_path / "token", "--max-megabytes", 2, "--max-megapixels", 0.5]
    answer = proxymetric("serve", index_folder, *words, "--allow-host", "a.example", "--device", "cpu")
    assert answer.code == 0, answer
    settings, *_ = asked[0]
    assert (settings.host, settings.port, settings.token) == ("127.0.0.1", 9000, "secret")
    assert (settings.max_bytes, settings.max_pixels, settings.hosts) == (2_000_000, 500_000, ("a.example",))
    assert "http://127.0.0.1:9000/" in answer.err
    assert "secret" not in answer.err


def test_refusals(index_folder, tmp_path, monkeypatch):
    refused(proxymetric("serve", tmp_path), "which has no images")
    refused(proxymetric("serve", index_folder, "--workers", 0), "workers: got 0, expected at least 1")
    refused(proxymetric("serve", index_folder, "--max-pending", 0), "max_pending: got 0, expected at least 1")
    refused(proxymetric("serve", index_folder, "--seconds", 0), "seconds: got 0, expected more than 0")
    refused(proxymetric("serve", index_folder, "--port", 70_000), "port: got 70000")
    for limit in (-1, 0, "nan", "inf"):
        refused(proxymetric("serve", index_folder, "--max-megabytes", limit), f"--max-megabytes: got {limit}, expected")
    refused(proxymetric("serve", index_folder, "--max-megapixels", -1), "--max-megapixels: got -1, expected a number")
    refused(proxymetric("serve", f"{index_folder}s"), "does not exist", f"did you mean '{index_folder}'?")
    (tmp_path / "token.txt").write_text("secret")
    refused(
        proxymetric("serve", index_folder, "--token-file", tmp_path / "tokn.txt"),
        "--token-file: got",
        "tokn.txt, which does not exist; expected a text file with a token",
        f"did you mean '{tmp_path / 'token.txt'}'?",
    )
    refused(proxymetric("serve", index_folder, "--token-file", tmp_path), "--token-file: got", "cannot be read")
    (tmp_path / "empty").write_text("\n")
    refused(proxymetric("serve", index_folder, "--token-file", tmp_path / "empty"), "which is empty; expected a token")
    for name in [name for name in sys.modules if name.startswith("proxymetric.serve.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("proxymetric.serve.server", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    refused(proxymetric("serve", index_folder), "uvicorn is not installed; expected the extra `serve`")


def test_several_processes_are_not_started_for_a_run_that_is_missing(index_folder, tmp_path, monkeypatch):
    """Each of them would end with a traceback, and be started again without end."""
    monkeypatch.setattr(server, "run_processes", lambda *given: pytest.fail("the processes were started"))
    monkeypatch.setattr(server, "START_SECONDS", 0)
    answer = proxymetric("serve", index_folder, "--workers", 2, "--run", tmp_path / "gone", "--port", 0)
    refused(answer, "gone", "is missing")
    assert "serving" not in answer.err


def test_an_address_that_cannot_be_used_is_refused_before_the_model_is_loaded(index_folder, tmp_path):
    """The run is missing: a refusal that names the address came before the model was looked for."""
    gone = ("--run", tmp_path / "gone", "--device", "cpu")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        for workers in (1, 2):
            answer = proxymetric("serve", index_folder, "--port", port, "--workers", workers, *gone)
            refused(answer, f"--port: got {port}, which another program uses at 127.0.0.1; expected a free port")
            assert "serving" not in answer.err
    for host in ("203.0.113.7", "no such host", "a" * 70):
        answer = proxymetric("serve", index_folder, "--host", host, *gone)
        refused(answer, f"--host: got {host!r}, at which this machine cannot listen", "expected an address of this")


def test_a_service_is_announced_when_it_listens(index_folder):
    """With the address that it took."""
    settings, answers = Settings(str(index_folder), device="cpu", port=0), []

    def announce(address):
        port = int(address.removeprefix("http://127.0.0.1:").removesuffix("/"))
        answers.append(Client(port))
        threading.Thread(target=ask, args=(port,)).start()

    def ask(port):
        answers.append(Client(port).get("/healthz").status)
        running[0].should_exit = True

    running = []

    class Watched(server._AnnouncingServer):
        def __init__(self, *given):
            super().__init__(*given)
            running.append(self)

    with mock.patch.object(server, "_AnnouncingServer", Watched):
        thread = threading.Thread(target=server.serve, args=(settings, announce))
        thread.start()
        thread.join(60)
    assert not thread.is_alive()
    assert answers[1:] == [200]
