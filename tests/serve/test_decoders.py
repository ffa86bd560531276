"""Decoding in processes: what takes too long is ended and replaced, memory is bounded, and a stop ends everything."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from PIL import Image

from bombs import encoded, jpeg_of_scans
from proxymetric.data import BadImage
from proxymetric.data.image_bytes import TooManyPixels, decode_image
from proxymetric.serve.decoder import HEAD
from proxymetric.serve.decoders import Decoders, Stopped, TooSlow


@pytest.fixture
def decoders():
    decoders = Decoders(2, max_pixels=50_000_000, seconds=60)
    yield decoders
    decoders.close()


@pytest.fixture(scope="module")
def slow() -> bytes:
    """An image within all limits that takes about ten seconds."""
    return jpeg_of_scans(30, 6400)


def processes(decoders: Decoders) -> list[int]:
    return [decoder.process.pid for decoder in decoders._all]


def until_busy(decoders: Decoders) -> None:
    """Wait until a process decodes."""
    end = time.monotonic() + 60
    while len(decoders._all) == len(decoders._idle):
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("kind", ["jpeg", "png", "webp", "gif", "tiff", "bmp"])
def test_the_pixels_are_those_of_the_reader(decoders, kind):
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (31, 47, 3), dtype=np.uint8)).save(buffer, kind)
    content = buffer.getvalue()
    assert np.array_equal(np.asarray(decoders.decode(content)), np.asarray(decode_image(content, 10**6)))


def test_what_is_refused_costs_no_process(decoders):
    for content, error, reason in (
        (encoded("png", (8000, 7000), "1"), TooManyPixels, "got 8000 x 7000 = 56,000,000 pixels"),
        (b"no image", BadImage, "the image format is not recognised"),
        (jpeg_of_scans(200), BadImage, "got a JPEG of 206 scans, expected at most 100"),
        (b"", BadImage, "got no bytes"),
    ):
        with pytest.raises(error, match=reason):
            decoders.decode(content)
    (before,) = processes(decoders)
    assert decoders.decode(encoded("png")).size == (64, 48)
    assert processes(decoders) == [before]


def test_what_takes_too_long_is_ended_and_replaced(slow):
    decoders = Decoders(1, max_pixels=50_000_000, seconds=0.5)
    try:
        decoders.warm_up()
        (before,) = processes(decoders)
        with pytest.raises(TooSlow, match=r"got one that takes more than 0.5 s to decode"):
            decoders.decode(slow)
        (after,) = processes(decoders)
        assert after != before
        with pytest.raises(ProcessLookupError):
            os.kill(before, 0)
    finally:
        decoders.close()


def test_a_process_that_dies_is_replaced(decoders):
    decoders.warm_up()
    (before,) = processes(decoders)
    os.kill(before, signal.SIGKILL)
    with pytest.raises(BadImage, match="ended the process which decodes it"):
        decoders.decode(encoded("png"))
    assert decoders.decode(encoded("png")).size == (64, 48)


def test_closing_ends_what_is_decoded(slow):
    decoders, said = Decoders(1, max_pixels=50_000_000, seconds=60), []

    def decode() -> None:
        try:
            said.append(decoders.decode(slow))
        except Stopped as error:
            said.append(error)

    thread = threading.Thread(target=decode)
    thread.start()
    until_busy(decoders)
    pids = processes(decoders)
    decoders.close()
    thread.join(30)
    assert isinstance(said[0], Stopped)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    with pytest.raises(Stopped):
        decoders.decode(encoded("png"))


def test_never_more_processes_than_allowed(decoders):
    threads = [threading.Thread(target=decoders.decode, args=(encoded("png", (2000, 2000)),)) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 1 <= len(processes(decoders)) <= 2


def worker() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "proxymetric.serve.decoder", "60"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


def test_the_process_ends_with_the_service():
    """Its input ends when the service does, however that was ended."""
    process = worker()
    assert process.stdin is not None
    process.stdin.write(HEAD.pack(100, 1000) + b"half a file")
    process.stdin.close()
    assert process.wait(60) == 0
    assert process.stdout is not None
    process.stdout.close()


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="needs /proc")
def test_the_process_imports_no_torch():
    process = worker()
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        content = encoded("png")
        process.stdin.write(HEAD.pack(10**6, len(content)) + content)
        process.stdin.flush()
        assert b"64" in process.stdout.readline()
        with open(f"/proc/{process.pid}/maps") as maps:
            assert "libtorch" not in maps.read()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.skipif(not os.path.exists("/proc/self/limits"), reason="needs /proc")
def test_its_memory_is_limited(decoders):
    decoders.decode(encoded("png"))
    (process,) = processes(decoders)
    with open(f"/proc/{process}/limits") as limits:
        (line,) = [line for line in limits if line.startswith("Max address space")]
    assert line.split()[3] == str(2**30 + 32 * 50_000_000)
