"""A service that is killed while it writes: what it has acknowledged is there, and nothing is there by half."""

from __future__ import annotations

import http.client
import json
import os
import random
import shutil
import signal
import socket
import threading
import time
import zlib
from dataclasses import replace

import pytest
import torch

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from proxymetric.search import Index
from service import Client
from training_runs import forks

MOMENTS = 30
WRITERS, TOGETHER = 4, 3
"""clients that write at the same time, and items of a request, of which all or none are there"""
HEADERS = {"Authorization": "Bearer writes", "content-type": "application/json"}


def vector_of(name):
    return torch.randn(8, generator=torch.Generator().manual_seed(zlib.crc32(repr(name).encode()))).tolist()


def write_until_it_ends(port, model, name, acknowledged):
    """Write items in requests of `TOGETHER`, until the service is killed."""
    client, number = Client(port), 0
    while True:
        stem = f"{name}/{number}"
        items = [{"id": f"{stem}/{n}", "vector": vector_of((stem, n)), "model": model, "metadata": {"n": n}}
                 for n in range(TOGETHER)]  # fmt: skip
        try:
            answer = client("POST", "/items", json.dumps({"put": items}), HEADERS)
        except (OSError, http.client.HTTPException):
            return
        assert answer.status == 200, answer
        acknowledged[stem] = answer.json["generation"]
        number += 1


def check(folder, acknowledged):
    """All that was acknowledged is in the index, and of each request everything or nothing."""
    index = Index(folder)
    index.verify()
    written: dict[str, list[int]] = {}
    for item in (item for item in index.ids if item.startswith("moment")):
        stem, _, n = item.rpartition("/")
        written.setdefault(stem, []).append(int(n))
        assert index[item].metadata == {"n": int(n)}
        expected = torch.nn.functional.normalize(torch.tensor(vector_of((stem, int(n)))), dim=0)
        torch.testing.assert_close(index.vector(item), expected)
    assert all(sorted(numbers) == list(range(TOGETHER)) for numbers in written.values()), written
    assert acknowledged.keys() <= written.keys()
    assert all(generation <= index.manifest.generation for generation in acknowledged.values())


def serve_again_and_again(settings, pipe):
    """Serve in a process that begins as a copy of this one, which has imported and loaded everything once."""
    from proxymetric.serve.searcher import Searcher
    from proxymetric.serve.server import serve

    Searcher(settings.index, None, "cpu")
    while pipe.recv():
        child = os.fork()
        if not child:
            serve(settings)
            os._exit(0)
        pipe.send(child)
        os.waitpid(child, 0)
        pipe.send(None)


@pytest.mark.slow
def test_no_acknowledged_write_is_lost(settings, index_folder, tmp_path):
    copy, acknowledged, moments = shutil.copytree(index_folder, tmp_path / "a.index"), {}, random.Random(1)
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        port = place.getsockname()[1]
    chosen, model = replace(settings, index=str(copy), port=port, write_token="writes"), Index(copy).model
    pipe, other = forks.Pipe()
    process = forks.Process(target=serve_again_and_again, args=(chosen, other), daemon=True)
    process.start()
    for moment in range(MOMENTS):
        pipe.send(True)
        served, end, before = pipe.recv(), time.monotonic() + 120, len(acknowledged)
        try:
            while not answers(port):
                assert time.monotonic() < end
                time.sleep(0.01)
            names = [f"moment {moment}/{writer}" for writer in range(WRITERS)]
            writers = [
                threading.Thread(target=write_until_it_ends, args=(port, model, name, acknowledged)) for name in names
            ]
            for writer in writers:
                writer.start()
            while len(acknowledged) == before:
                assert time.monotonic() < end
                time.sleep(0.001)
            time.sleep(moments.uniform(0, 0.1))
        finally:
            os.kill(served, signal.SIGKILL)
        pipe.recv()
        for writer in writers:
            writer.join()
        check(copy, acknowledged)
    pipe.send(False)
    process.join()
    assert len(acknowledged) > MOMENTS


def answers(port):
    """Whether the service answers yet."""
    try:
        return Client(port).get("/healthz").status == 200
    except OSError:
        return False
