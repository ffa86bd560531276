"""Attacks on the service from many connections at once, while honest clients search: no honest search fails, and the
memory of the service and of its decoders stays where it is."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from bombs import BOMBS, encoded, jpeg_of_scans
from campaign_cases import SEED, SHARE
from proxymetric.search import Index
from service import BOUNDARY, Client, form, jpeg
from terminal import finished_run, proxymetric

pytestmark = pytest.mark.release
SECONDS = float(os.environ.get("PROXYMETRIC_CAMPAIGN_SECONDS", max(20.0, 180 * SHARE)))
HONEST, STALLED, HALF_OPEN = 4, 300, 100
GROWTH_BYTES = 80e6
"""what the memory of the service and its decoders may grow by in the second half"""
HEAD = b"POST /search HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\nContent-Type: application/json\r\n\r\n"


@pytest.fixture(scope="module")
def service(photos, tmp_path_factory):
    """`proxymetric serve` in a process of its own, with the default limits."""
    place = tmp_path_factory.mktemp("campaign")
    run = finished_run(photos, place / "run")
    assert proxymetric("index", run, photos, "--out", place / "a.index").code == 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "proxymetric", "serve", str(place / "a.index"), "--device", "cpu"]
    with open(place / "log", "wb") as log:
        process = subprocess.Popen([*command, "--port", str(port)], stderr=log)
    client, end = Client(port), time.monotonic() + 120
    while True:
        with contextlib.suppress(OSError):
            if client.get("/healthz").status == 200:
                break
        assert process.poll() is None, (place / "log").read_text()
        assert time.monotonic() < end
        time.sleep(0.1)
    yield process, client, Index.open(place / "a.index")
    process.kill()
    process.wait()
    text = (place / "log").read_text(errors="replace")
    assert "Traceback" not in text, text


def memory(process: subprocess.Popen[bytes]) -> int:
    """Bytes of the service and its decoders."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    total = 0
    for pid in (str(process.pid), *children):
        with contextlib.suppress(OSError):  # a decoder that was ended meanwhile
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return total


class Attacks:
    """Everything that a client can do wrong, drawn by a seed."""

    def __init__(self, client: Client, seed: int) -> None:
        self.client, self.draw = client, random.Random(seed)
        self.bombs = {name: make() for name, (make, _) in BOMBS.items()}
        self.slow = jpeg_of_scans(20, 6400)
        self.stalled: list[socket.socket] = []
        self.half_open: list[socket.socket] = []
        self.ends: Counter[str] = Counter()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.client.port), timeout=30)

    def hold(self, held: list[socket.socket], most: int, content: bytes) -> None:
        """Open connections that send a beginning and nothing more; the oldest ones leave."""
        for _ in range(self.draw.randrange(1, most // 3)):
            held.append(self.connect())
            held[-1].sendall(content)
        while len(held) > most:
            held.pop(0).close()

    def stall(self) -> str:
        self.hold(self.stalled, STALLED, HEAD % self.draw.randrange(10, 20_000_000) + b"{" * self.draw.randrange(2000))
        return "held"

    def half_head(self) -> str:
        self.hold(self.half_open, HALF_OPEN, b"POST /search HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
        return "held"

    def leave(self) -> str:
        body = form(jpeg(200, 200), k=3)
        with self.connect() as connection:
            kind = b"Content-Type: multipart/form-data; boundary=" + BOUNDARY.encode()
            head = b"POST /search HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n%b\r\n\r\n" % (len(body), kind)
            connection.sendall(head + body[: self.draw.randrange(len(body))])
        return "left"

    def bomb(self) -> int:
        return self.client.upload(self.bombs[self.draw.choice(sorted(self.bombs))]).status

    def slow_image(self) -> int:
        return self.client.upload(self.slow).status

    def random_bytes(self) -> int:
        start = self.draw.choice([b"", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"II*\0", b"BM", b"RIFF"])
        return self.client.upload(start + self.draw.randbytes(self.draw.randrange(100_000))).status

    def damaged_image(self) -> int:
        content = bytearray(encoded(self.draw.choice(["jpeg", "png", "webp", "gif", "bmp", "tiff"])))
        for _ in range(self.draw.randrange(1, 20)):
            content[self.draw.randrange(len(content))] = self.draw.randrange(256)
        return self.client.upload(bytes(content[: self.draw.randrange(1, len(content) + 1)])).status

    def wrong_json(self) -> int:
        bodies = ["{", "[" * 100_000, '{"k": 1e999}', '{"id": null}', '{"image": "%%%"}', '{"image": ""}', '"a"', "\0",
                  '{"id": "x", "k": -1}', '{"id": "x", "where": {"a": {}}}', '{"id": "class0/0.png", "k": 9999999}',
                  json.dumps({"id": "x" * 10**6}), json.dumps({str(n): n for n in range(999)}), "9" * 5000]  # fmt: skip
        kind = {"content-type": "application/json"}
        return self.client("POST", self.draw.choice(["/search", "/identify"]), self.draw.choice(bodies), kind).status

    def cross_site(self) -> int:
        return self.client.upload(jpeg(), {"sec-fetch-site": "cross-site"}).status

    def no_http(self) -> str:
        with self.connect() as connection:
            connection.sendall(self.draw.randbytes(self.draw.randrange(1, 5000)) + b"\r\n\r\n")
        return "left"

    def attack(self, end: float) -> None:
        """Draw attacks until a time."""
        kinds = [self.stall, self.half_head, self.leave, self.bomb, self.random_bytes, self.damaged_image,
                 self.wrong_json, self.cross_site, self.no_http]  # fmt: skip
        while time.monotonic() < end:
            kind = self.draw.choice(kinds) if self.draw.random() > 0.01 else self.slow_image
            try:
                self.ends[f"{kind.__name__} {kind()}"] += 1
            except (OSError, http.client.HTTPException) as error:
                self.ends[f"{kind.__name__} {type(error).__name__}"] += 1
        for connection in (*self.stalled, *self.half_open):
            connection.close()


def search(client: Client, index: Index, number: int, end: float, ends: Counter[str], seconds: list[float]) -> None:
    """An honest client: uploads of several sizes, searches by item, questions for the class."""
    draw, items = random.Random(number), [index.at(row).id for row in range(len(index))]
    photos = [jpeg(side, side, seed=side) for side in (40, 300, 1500)]
    while time.monotonic() < end:
        begin = time.monotonic()
        try:
            kind = draw.choice(["upload", "item", "identify"])
            if kind == "upload":
                answer = client.upload(draw.choice(photos), k=3)
            elif kind == "item":
                answer = client.ask(id=draw.choice(items), k=5)
            else:
                json_type = {"content-type": "application/json"}
                answer = client("POST", "/identify", json.dumps({"id": draw.choice(items)}), json_type)
            ends[f"{kind} {answer.status}"] += 1
            seconds.append(time.monotonic() - begin)
        except (OSError, http.client.HTTPException) as error:
            ends[f"{kind} {type(error).__name__}"] += 1
        time.sleep(0.02)


def under_attack(
    client: Client, index: Index, process: subprocess.Popen[bytes], first_seed: int
) -> tuple[Counter[str], Counter[str], list[float], list[int]]:
    """Let two attackers and the honest clients run for a while.

    Returns:
        The answers of the honest clients, what became of the attacks, the seconds of honest searches, and the memory of
        the service: each second, and at last when all have left.
    """
    ends, seconds = Counter[str](), list[float]()
    attacks = [Attacks(client, first_seed + number) for number in range(2)]
    end = time.monotonic() + SECONDS / 2
    threads = [threading.Thread(target=search, args=(client, index, k, end, ends, seconds)) for k in range(HONEST)]
    threads += [threading.Thread(target=each.attack, args=(end,)) for each in attacks]
    for thread in threads:
        thread.start()
    sizes = []
    while any(thread.is_alive() for thread in threads):
        time.sleep(1)
        sizes.append(memory(process))
    latest = time.monotonic() + 60
    while "proxymetric_pending_searches 0" not in client.get("/metrics").body.decode():
        assert time.monotonic() < latest
        time.sleep(0.1)
    return ends, attacks[0].ends + attacks[1].ends, seconds, [*sizes, memory(process)]


def test_honest_clients_are_answered_under_attack(service):
    process, client, index = service
    sizes = []
    for number in range(2):
        ends, answers, seconds, memories = under_attack(client, index, process, SEED + 10 * number)
        sizes.append(memories[-1])
        middle, late, longest = np.percentile(seconds, [50, 99, 100])
        print(f"\nhonest: {dict(sorted(ends.items()))}; {middle:.3f} s, 99 %: {late:.3f} s, at most {longest:.1f} s")
        print(f"attacks: {sum(answers.values())}: {dict(sorted(answers.items()))}")
        print(f"memory: {max(memories) / 1e6:.0f} MB at most, {memories[-1] / 1e6:.0f} MB at the end")
        assert {end.split()[1] for end in ends} == {"200"}, ends
        assert not [end for end in answers if end.split()[1] in ("500", "504", "429")], answers
        assert {end for end in answers if end.startswith("bomb")} == {"bomb 422"}
    assert sizes[1] - sizes[0] < GROWTH_BYTES
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) in (0, -signal.SIGTERM)
