"""Handle Ctrl-C and SIGTERM during training."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def stop_on_signal(request_stop: Callable[[], bool]) -> Iterator[None]:
    """Call `request_stop` on Ctrl-C and SIGTERM.

    Args:
        request_stop: returns whether a stop was requested before; if so, a second Ctrl-C raises KeyboardInterrupt.
    """

    def stop(number: int, frame: object) -> None:
        if request_stop() and number == signal.SIGINT:
            raise KeyboardInterrupt

    try:
        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread, which alone may handle signals
        before = {}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
