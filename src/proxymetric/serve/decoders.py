"""Images are decoded in processes of their own, which can be ended: one that takes too long, and all when it stops."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from PIL import Image

from proxymetric.data.decoding import BadImage
from proxymetric.data.image_bytes import TooManyPixels
from proxymetric.serve.decoder import HEAD

MOST_ANSWER_BYTES = 10_000
"""length of the line of an answer"""
PIPE_BYTES = 2**20
"""pixels on their way from a process: with more of them it waits less"""


class TooSlow(BadImage):
    """An image took too long to decode; its process was ended."""


class Stopped(Exception):
    """The service stops: the image is not decoded."""


class Decoders:
    """Processes that decode images: started when they are needed, and replaced when they were ended.

    A call blocks its thread until its image is decoded or refused, `seconds` at most.

    Args:
        most: processes at the same time; further calls wait.
        max_pixels: limit on the pixels of an image.
        seconds: time to decode an image.

    Example:
        >>> from io import BytesIO
        >>> decoders, file = Decoders(1, max_pixels=100, seconds=60), BytesIO()
        >>> Image.new("RGB", (4, 2)).save(file, "png")
        >>> decoders.decode(file.getvalue()).size
        (4, 2)
        >>> decoders.close()
    """

    def __init__(self, most: int, max_pixels: int, seconds: float) -> None:
        self.max_pixels, self.seconds = max_pixels, seconds
        self._room = threading.Semaphore(most)
        self._lock = threading.Lock()
        self._idle: list[_Decoder] = []
        self._all: set[_Decoder] = set()
        self._is_closed = False

    def warm_up(self) -> None:
        """Start a process before the first image comes."""
        with suppress(OSError, Stopped):
            decoder = self._start()
            if not self._keep(decoder):
                decoder.end()

    def decode(self, content: bytes) -> Image.Image:
        """Decode an image: upright and in RGB.

        Raises:
            TooManyPixels: the image is larger than the limit.
            BadImage: it cannot be read, or takes too long (`TooSlow`).
            Stopped: `close` was called.
        """
        with self._room, self._process() as decoder:
            return decoder.decode(content, self.max_pixels, self.seconds)

    def close(self) -> None:
        """End all processes, also those that decode."""
        with self._lock:
            self._is_closed = True
            idle, busy = self._idle, self._all.difference(self._idle)
            self._idle = []
        for decoder in busy:
            decoder.process.kill()  # the thread that waits for it ends it
        for decoder in idle:
            decoder.end()

    @contextmanager
    def _process(self) -> Iterator[_Decoder]:
        """Take a process that is idle, or start one; one that was ended meanwhile is replaced."""
        with self._lock:
            decoder = self._idle.pop() if self._idle else None
        decoder = decoder or self._start()
        try:
            yield decoder
        finally:
            if not self._keep(decoder):
                decoder.end()
                self._all.discard(decoder)
                if self._is_closed:
                    raise Stopped
                self.warm_up()

    def _start(self) -> _Decoder:
        with self._lock:
            if self._is_closed:
                raise Stopped
            decoder = _Decoder(self.seconds)
            self._all.add(decoder)
        return decoder

    def _keep(self, decoder: _Decoder) -> bool:
        """Keep a process for the next image; False if it has ended, or `close` was called."""
        with self._lock:
            is_kept = not self._is_closed and decoder.process.poll() is None
            if is_kept:
                self._idle.append(decoder)
        return is_kept


class _Decoder:
    """One process.

    Args:
        seconds: time after which it ends by itself while it decodes.
    """

    def __init__(self, seconds: float) -> None:
        # The modules are those of this process, whatever the working folder holds.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OPENBLAS_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "proxymetric.serve.decoder", str(2 * seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the service, which ends its decoders
        )
        with suppress(ImportError, AttributeError, OSError):  # only Linux has it, and may refuse it
            import fcntl

            fcntl.fcntl(self.process.stdout, fcntl.F_SETPIPE_SZ, PIPE_BYTES)  # type: ignore[arg-type]

    def end(self) -> None:
        """End it, whatever it does."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(OSError):  # what was not sent is lost
                pipe.close()  # type: ignore[union-attr]

    def decode(self, content: bytes, max_pixels: int, seconds: float) -> Image.Image:
        """Decode an image; after an error that is not its own answer the process is killed."""
        timer, started = threading.Timer(seconds, self.process.kill), time.monotonic()
        timer.daemon = True
        timer.start()
        try:
            answer, pixels = self._ask(content, max_pixels)
        except (OSError, ValueError):  # it was killed, or ended itself
            self.process.kill()
            self.process.wait()
            if time.monotonic() - started >= seconds:
                raise TooSlow("image", f"got one that takes more than {seconds:g} s to decode, expected less") from None
            raise BadImage("image", "got one that ended the process which decodes it, expected an image") from None
        finally:
            timer.cancel()
        if "error" in answer:
            raise (TooManyPixels if answer["error"] == "pixels" else BadImage)("image", answer["reason"])
        return Image.frombytes("RGB", tuple(answer["size"]), pixels)

    def _ask(self, content: bytes, max_pixels: int) -> tuple[dict[str, Any], bytearray]:
        """Send an image, and read the answer.

        Raises:
            OSError: the process has ended.
            ValueError: it ended within its answer.
        """
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(HEAD.pack(max_pixels, len(content)))
        stdin.write(content)
        stdin.flush()
        answer = json.loads(stdout.readline(MOST_ANSWER_BYTES))
        width, height = answer.get("size", (0, 0))
        pixels = bytearray(3 * width * height)
        if stdout.readinto(pixels) < len(pixels):  # type: ignore[attr-defined]  # a BufferedReader
            raise ValueError("the answer is not whole")
        return answer, pixels
