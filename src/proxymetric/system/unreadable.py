"""Lines that name images that cannot be read: the first ones, and the number of the others."""

from __future__ import annotations

from collections.abc import Sequence

MAX_IMAGES_NAMED = 10


def unreadable_lines(images: Sequence[str], words: str = "left out, cannot be read") -> list[str]:
    """Name the first `MAX_IMAGES_NAMED` images, one on each line, and count the others.

    Args:
        images: the images, each with the reason in brackets.
        words: what is said about each of them.

    Example:
        >>> unreadable_lines([f"{number}.jpg (no image)" for number in range(12)])[8:]
        ['left out, cannot be read: 8.jpg (no image)', 'left out, cannot be read: 9.jpg (no image)', '... and 2 more']
    """
    lines = [f"{words}: {image}" for image in images[:MAX_IMAGES_NAMED]]
    more = len(images) - MAX_IMAGES_NAMED
    return [*lines, f"... and {more} more"] if more > 0 else lines
