"""Handle Ctrl-C and SIGTERM during long work."""

from __future__ import annotations

import contextlib
import signal
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
