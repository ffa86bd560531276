"""Durations as text."""

from __future__ import annotations


def clock(seconds: float) -> str:
    """Format a duration.

    Example:
        >>> clock(42), clock(130), clock(7300)
        ('42s', '2m10s', '2h01m')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
