"""Durations as text."""

from __future__ import annotations


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
