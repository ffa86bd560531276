"""Who is told how a study goes."""

from __future__ import annotations

from typing import Any, Protocol


class Reporter(Protocol):
    """Who is told how a study goes."""

    def say(self, text: str) -> None:
        """One event."""

    def status(self, running: list[dict[str, Any]], summary: str) -> None:
        """How things stand, several times a second."""

    def close(self) -> None:
        """It is over."""


class Lines:
    """Tells events as lines of text; nothing in between."""

    def say(self, text: str) -> None:
        print(text, flush=True)

    def status(self, running: list[dict[str, Any]], summary: str) -> None: ...

    def close(self) -> None: ...


def clock(seconds: float) -> str:
    """A span of time as people say it.

    >>> clock(42), clock(130), clock(7300)
    ('42s', '2m10s', '2h01m')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
