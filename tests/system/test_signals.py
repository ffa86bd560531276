"""Ctrl-C during long work: held back where a library would hide it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from proxymetric.system.signals import interrupt_after


@pytest.fixture(autouse=True)
def interrupt_raises() -> Iterator[None]:
    """Background shells ignore SIGINT, so a handler is set here."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_waits_for_the_end_of_the_block() -> None:
    ends: list[bool] = []

    def work() -> None:
        with interrupt_after():
            signal.raise_signal(signal.SIGINT)
            ends.append(True)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert ends
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_is_not_lost_in_an_error() -> None:
    def work() -> None:
        with interrupt_after():
            signal.raise_signal(signal.SIGINT)
            raise OSError("as a library does")

    with pytest.raises(KeyboardInterrupt):
        work()


def test_without_an_interrupt_nothing_changes() -> None:
    with pytest.raises(OSError, match="of the file"), interrupt_after():
        raise OSError("of the file")


def test_an_ignored_interrupt_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with interrupt_after():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_thread_can_use_it() -> None:
    ended: list[bool] = []

    def work() -> None:
        with interrupt_after():
            ended.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ended
