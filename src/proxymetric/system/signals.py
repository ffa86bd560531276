"""Handle Ctrl-C and SIGTERM during long work."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def stop_on_signal(request_stop: Callable[[], bool]) -> Iterator[None]:
    """Call `request_stop` on Ctrl-C and SIGTERM.

    Args:
        request_stop: requests a stop and returns whether there was an earlier request; if so, Ctrl-C raises
            KeyboardInterrupt.
    """

    def stop(number: int, frame: object) -> None:
        if request_stop() and number == signal.SIGINT:
            raise KeyboardInterrupt

    try:
        previous_handlers = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # only the main thread may set signal handlers
        previous_handlers = {}
    try:
        yield
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def interrupt_after() -> Iterator[None]:
    """Hold Ctrl-C back until the end of the block.

    The safetensors library turns a KeyboardInterrupt into an error of its own, so that an intact file seems damaged.

    In a thread, and where Ctrl-C is ignored, this changes nothing.
    """
    signals: list[int] = []
    previous = signal.getsignal(signal.SIGINT)
    if not callable(previous) or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, lambda number, frame: signals.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if signals:
            previous(signal.SIGINT, None)
