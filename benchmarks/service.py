"""Loads the service with clients on this machine, and the map of its page with 50,000 points.

    python benchmarks/service.py load INDEX PHOTOS --seconds 600      64 clients with photos, batching on and off
    python benchmarks/service.py writes RUN --seconds 300             64 clients search while one writes
    python benchmarks/service.py map                                  pan and zoom in Chromium (needs playwright)

`load` starts `proxymetric serve INDEX` three times: below its limit with batches, for the given time; below the limit
without batches, for a tenth of it; and above the limit, for a tenth of it. Below the limit every answer must be 200,
above it 200 or 429. `writes` makes an index of 100,000 random vectors for the model of RUN. 64 clients ask for what is
similar to one of them: for a while alone, and then while one client makes 20 changes a second (two items are put, then
one of them is changed, and one deleted). Every answer must be 200, and afterwards the index must have what was
acknowledged. `map` draws 50,000 points while it is panned and zoomed, and records the time of the script for
each frame: the handlers of its events, and drawing. Results are written to results/service-cpu.json.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import commit

RESULTS = Path(__file__).parent / "results" / "service-cpu.json"
CLIENTS, BOUNDARY = 64, b"a-boundary-of-the-benchmark"
ITEMS, CHANGES_PER_SECOND = 100_000, 20
MAP_POINTS, MAP_FRAMES = 50_000, 240
MAX_SCRIPT_MS = 8.0


@contextlib.contextmanager
def service(index: Path, *options: str) -> Iterator[tuple[int, int]]:
    """Start the service; its port and the number of its process."""
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        port = place.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "proxymetric",
        "serve",
        str(index),
        "--port",
        str(port),
        "--seconds",
        "60",
        *options,
    ]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        while True:
            assert process.poll() is None, "the service did not start"
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=5)
                break
            time.sleep(0.2)
        yield port, process.pid
    finally:
        process.terminate()
        process.wait(60)


def request(photo: bytes) -> bytes:
    """A search with a photo, as a form."""
    head = b'--%b\r\ncontent-disposition: form-data; name="image"; filename="a.jpg"\r\n\r\n' % BOUNDARY
    body = head + photo + b"\r\n--%b--\r\n" % BOUNDARY
    kind = b"content-type: multipart/form-data; boundary=%b\r\n" % BOUNDARY
    return b"POST /search HTTP/1.1\r\nhost: localhost\r\n%bcontent-length: %d\r\n\r\n%b" % (kind, len(body), body)


async def client(port: int, photos: list[bytes], number: int, end: float, answers: list[tuple[int, float]]) -> None:
    """Search again and again, each time when the answer to the last search has come."""
    turn = number
    while time.monotonic() < end:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while time.monotonic() < end:
                started = time.monotonic()
                writer.write(photos[turn % len(photos)])
                await writer.drain()
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
                await reader.readexactly(int(length.split(b":")[1]))
                answers.append((int(head.split(b" ", 2)[1]), time.monotonic() - started))
                turn += 1
        writer.close()


def memory(process: int) -> float:
    """The resident memory of a process in MB."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


async def load(port: int, process: int, photos: list[bytes], clients: int, seconds: float) -> dict[str, Any]:
    """Load a service, and watch its memory."""
    answers: list[tuple[int, float]] = []
    end, sizes = time.monotonic() + seconds, []

    async def watch() -> None:
        while time.monotonic() < end:
            sizes.append(memory(process))
            await asyncio.sleep(seconds / 40)

    await asyncio.gather(watch(), *(client(port, photos, number, end, answers) for number in range(clients)))
    times = sorted(duration for status, duration in answers if status == 200)
    return {
        "clients": clients,
        "seconds": seconds,
        "statuses": dict(Counter(status for status, _ in answers)),
        "searches_per_second": len(times) / seconds,
        "p50_ms": 1000 * times[len(times) // 2],
        "p99_ms": 1000 * times[int(0.99 * len(times))],
        "memory_mb": {"first_quarter": max(sizes[:10]), "last_quarter": max(sizes[-10:])},
    }


def measure_load(index: Path, folder: Path, seconds: float) -> dict[str, Any]:
    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in (".jpg", ".jpeg"))[:200]
    photos = [request(file.read_bytes()) for file in files]
    cases = {
        "below the limit, batches": (["--max-pending", "80"], CLIENTS, seconds),
        "below the limit, no batches": (["--max-pending", "80", "--max-batch", "1"], CLIENTS, seconds / 10),
        "above the limit": (["--max-pending", "16"], CLIENTS, seconds / 10),
    }
    results = {}
    for name, (options, clients, duration) in cases.items():
        with service(index, *options) as (port, process):
            asyncio.run(load(port, process, photos, 8, 5))  # warm up
            results[name] = asyncio.run(load(port, process, photos, clients, duration))
        print(name, json.dumps(results[name]), flush=True)
    return {"photos": len(photos), "mean_bytes": int(statistics.mean(map(len, photos))), "cases": results}


async def write(port: int, token: str, dim: int, model: str, end: float) -> tuple[dict[str, str], Counter[int]]:
    """Make changes at equal distances; return the class of each item that must be there, and the statuses."""
    import numpy as np

    draw, there, statuses = np.random.default_rng(5), dict[str, str](), Counter[int]()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    begin, number = time.monotonic(), 0
    while time.monotonic() < end:
        item, step = f"new/{number // 4 * 2 + (number % 4 == 1)}", number % 4
        body: dict[str, Any] = {"class": f"class {number}"}
        if step < 2:
            body |= {
                "vector": draw.standard_normal(dim).round(4).tolist(),
                "model": model,
                "metadata": {"price": number},
            }
        method = ("PUT", "PUT", "PATCH", "DELETE")[step]
        if step == 3:
            item = f"new/{number // 4 * 2 + 1}"
        content = b"" if step == 3 else json.dumps(body).encode()
        head = f"{method} /items/{item} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {token}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        writer.write(head.encode() + content)
        await writer.drain()
        answer = await reader.readuntil(b"\r\n\r\n")
        length = next(line for line in answer.lower().split(b"\r\n") if line.startswith(b"content-length"))
        await reader.readexactly(int(length.split(b":")[1]))
        status = int(answer.split(b" ", 2)[1])
        statuses[status] += 1
        if status == 200:
            if step == 3:
                there.pop(item, None)
            else:
                there[item] = str(body["class"])
        number += 1
        await asyncio.sleep(max(0.0, begin + number / CHANGES_PER_SECOND - time.monotonic()))
    writer.close()
    return there, statuses


def measure_writes(run: Path, seconds: float) -> dict[str, Any]:
    """Search alone, and while the index changes."""
    import numpy as np

    import proxymetric as pm
    from proxymetric.search import Index

    model, token = pm.load(run, device="cpu"), "a-token-of-the-benchmark"
    with tempfile.TemporaryDirectory() as folder:
        index = Index.create(Path(folder) / "a.index", model.dim, model, run=model.source, map="none")
        vectors = np.random.default_rng(0).standard_normal((ITEMS, model.dim), dtype=np.float32)
        index.add([f"{n:06d}" for n in range(ITEMS)], vectors, labels=[f"class {n % 500}" for n in range(ITEMS)])
        questions = [_question(f"{n:06d}") for n in range(0, ITEMS, 499)]
        os.environ["PROXYMETRIC_WRITE_TOKEN"] = token
        with service(index.folder, "--writable", "--max-pending", "80") as (port, process):
            asyncio.run(load(port, process, questions, 8, 5))  # warm up
            alone = asyncio.run(load(port, process, questions, CLIENTS, seconds))

            async def together() -> tuple[dict[str, Any], tuple[dict[str, str], Counter[int]]]:
                end = time.monotonic() + seconds
                return await asyncio.gather(
                    load(port, process, questions, CLIENTS, seconds),
                    write(port, token, model.dim, model.fingerprint(), end),
                )

            loaded, (there, statuses) = asyncio.run(together())
        opened = Index(index.folder)
        opened.verify()
        lost = [item for item, label in there.items() if item not in opened or opened[item].label != label]
        extra = [item for item in opened.ids if item.startswith("new/") and item not in there]
    return {
        "items": ITEMS,
        "alone": alone,
        "with changes": loaded,
        "changes": dict(statuses),
        "changes_per_second": sum(statuses.values()) / seconds,
        "p99_ratio": loaded["p99_ms"] / alone["p99_ms"],
        "acknowledged_and_lost": len(lost),
        "deleted_and_there": len(extra),
    }


def _question(item: str) -> bytes:
    """A search for what is similar to an item."""
    body = json.dumps({"id": item, "k": 10}).encode()
    head = f"POST /search HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


def measure_map() -> dict[str, Any]:
    """Pan and zoom the map of 50,000 points, and return the time of the script for each frame."""
    import numpy as np
    import torch

    from proxymetric.encoders import build
    from proxymetric.models.model import Model
    from proxymetric.search import Index
    from proxymetric.serve import app
    from proxymetric.serve.settings import Settings

    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
    from browser import browser
    from service import serving

    random = np.random.default_rng(0)
    centres = random.normal(size=(100, 8))
    labels = random.integers(0, 100, MAP_POINTS)
    vectors = torch.from_numpy((centres[labels] + 0.4 * random.normal(size=(MAP_POINTS, 8))).astype(np.float32))
    model = Model(build("small", dim=8), normalise="l2", classes=[], view={"size": 16, "resize": 16})
    with tempfile.TemporaryDirectory() as folder:
        index = Index.create(Path(folder) / "a.index", 8, model, map="pca")
        index.add([f"{n:06d}" for n in range(MAP_POINTS)], vectors, labels=[f"class {n}" for n in labels])
        app.Searcher = lambda *_: _Fixed(index, model)  # type: ignore[assignment, misc]
        with serving(Settings(str(index.folder), port=0)) as page_client, browser() as chromium:
            page = chromium.new_page(viewport={"width": 1280, "height": 900})
            page.goto(f"http://127.0.0.1:{page_client.port}/")
            page.locator("body[data-ready=yes]").wait_for(timeout=60_000)
            box = page.locator("#map").bounding_box()
            middle = (box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
            page.evaluate("searchMap.frames.length = 0")
            page.mouse.move(*middle)
            for turn in range(MAP_FRAMES):
                if turn % 3 == 2:
                    page.mouse.wheel(0, -120 if turn % 60 < 30 else 120)
                    continue
                page.mouse.down()
                page.mouse.move(middle[0] + 40 * (turn % 5 - 2), middle[1] + 30 * (turn % 7 - 3), steps=2)
                page.mouse.up()
            frames = page.evaluate("searchMap.frames")
    times = sorted(frames)
    return {
        "points": MAP_POINTS,
        "frames": len(times),
        "p50_ms": times[len(times) // 2],
        "p95_ms": times[int(0.95 * len(times))],
        "expected_p95_ms": MAX_SCRIPT_MS,
    }


class _Fixed:
    """The parts of a `Searcher` that the page of a map needs."""

    def __init__(self, index: Any, model: Any) -> None:
        self.index, self.model = index, model
        self.answer = lambda questions: [ValueError("no searches here")] * len(questions)

    async def keep_up(self) -> None:
        """The index does not change."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("load", "writes", "map"))
    parser.add_argument("index", type=Path, nargs="?", help="for `writes`, a run")
    parser.add_argument("photos", type=Path, nargs="?")
    parser.add_argument("--seconds", type=float, default=600.0)
    options = parser.parse_args()
    if options.what == "load" and (options.index is None or options.photos is None):
        parser.error("load needs INDEX and PHOTOS")
    if options.what == "writes":
        if options.index is None:
            parser.error("writes needs RUN")
        result = measure_writes(options.index, options.seconds)
    else:
        result = (
            measure_map() if options.what == "map" else measure_load(options.index, options.photos, options.seconds)
        )
    content = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {"benchmark": "service"}
    content["machine"] = {"architecture": platform.machine(), "cores": os.cpu_count()}
    content[options.what] = result | {"measured": commit()}
    RESULTS.write_text(json.dumps(content, indent=2) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
