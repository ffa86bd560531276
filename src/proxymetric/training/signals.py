"""Ctrl-C and SIGTERM."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def listening(asked: Callable[[], bool]) -> Iterator[None]:
    """Ctrl-C and SIGTERM call `asked`, which says whether it was asked before: then a second Ctrl-C stops at once."""

    def stop(number: int, frame: object) -> None:
        if asked() and number == signal.SIGINT:
            raise KeyboardInterrupt

    try:
        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: whoever runs us has the signals
        before = {}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
