"""Durations, and the rate of work that is under way, as text."""

from __future__ import annotations

from typing import NamedTuple


def clock(seconds: float) -> str:
    """Format a duration.

    Example:
        >>> clock(42), clock(130), clock(7300)
        ('42s', '2m10s', '2h01m')
    """
    total = round(seconds)
    if total < 60:
        return f"{total}s"
    if total < 3600:
        return f"{total // 60}m{total % 60:02d}s"
    return f"{total // 3600}h{total % 3600 // 60:02d}m"


class Work(NamedTuple):
    """A piece of work that is under way.

    Example:
        >>> Work("embedding", first=64, started=10.0).facts(done=164, total=464, now=15.0)
        '20 images/s, 15s left'
    """

    what: str
    first: int
    """images that were done at the first report"""
    started: float
    """the time of the first report, in seconds"""

    def facts(self, done: int, total: int, now: float) -> str:
        """The rate and the time left; empty as long as they are unknown."""
        if done <= self.first or now <= self.started:
            return ""
        rate = (done - self.first) / (now - self.started)
        return (
            f"{rate:,.0f} images/s, {clock((total - done) / rate)} left"
            if rate >= 1
            else (f"{1 / rate:.1f} s/image, {clock((total - done) / rate)} left")
        )
