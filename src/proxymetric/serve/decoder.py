"""The process that decodes uploads for the service: it reads images from its input and writes pixels to its output.

The service can end it at any time, which it cannot do with a thread. It imports Pillow and NumPy, not torch, so that it
starts in a fraction of a second and needs little memory: `decoders.Decoders` starts it.

A question is `HEAD`, with the limit on pixels and the length of the file, and the file. An answer is a line of JSON,
which holds the size of the image or the reason why it is refused, and the pixels in RGB.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import struct
import sys
from typing import IO, Any

HEAD = struct.Struct("<QQ")
"""the limit on the pixels of an image, and the bytes of its file"""
BYTES_OF_A_PIXEL, BYTES_OF_THE_PROGRAM = 32, 2**30
"""what a process may allocate: for each of `max_pixels`, and besides"""


def main() -> None:
    """Answer until the input ends."""
    seconds = float(sys.argv[1])
    # What a library prints must not get between the pixels.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    _without_torch()
    from proxymetric.data.image_bytes import decode_image

    while len(head := sys.stdin.buffer.read(HEAD.size)) == HEAD.size:
        max_pixels, length = HEAD.unpack(head)
        content = sys.stdin.buffer.read(length)
        if len(content) < length:
            return
        _limit_memory(BYTES_OF_THE_PROGRAM + BYTES_OF_A_PIXEL * max_pixels)
        _end_after(seconds)
        answer, pixels = _answer(decode_image, content, max_pixels)
        _end_after(0)
        _write(answers, json.dumps(answer).encode() + b"\n", pixels)
        del content, pixels


def _answer(decode_image: Any, content: bytes, max_pixels: int) -> tuple[dict[str, Any], bytes]:
    """Decode an image, or say why it is refused."""
    from proxymetric.data.decoding import BadImage
    from proxymetric.data.image_bytes import TooManyPixels

    try:
        image = decode_image(content, max_pixels)
        return {"size": image.size}, image.tobytes()
    except TooManyPixels as error:
        return {"error": "pixels", "reason": error.reason}, b""
    except BadImage as error:
        return {"error": "bad", "reason": error.reason}, b""
    except MemoryError:
        return {"error": "bad", "reason": "decoding it needs more memory than an image of this size should"}, b""


def _write(answers: IO[bytes], line: bytes, pixels: bytes) -> None:
    answers.write(line)
    answers.write(pixels)
    answers.flush()


def _without_torch() -> None:
    """Let the modules of `proxymetric.data` be imported without its `__init__`, which imports torch for two seconds."""
    spec = importlib.util.find_spec("proxymetric.data")
    assert spec is not None
    sys.modules["proxymetric.data"] = importlib.util.module_from_spec(spec)


def _end_after(seconds: float) -> None:
    """Let the system end this process after a time, also where the service that would do so is gone; 0: never."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds)


def _limit_memory(size: int) -> None:
    """Limit what this process may allocate, where the system can."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (size if hard == resource.RLIM_INFINITY else min(size, hard), hard))


if __name__ == "__main__":
    main()
