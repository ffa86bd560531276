"""Boxes of a CSV: the columns x1, y1, x2, y2 say which part of its image file a row is."""

from __future__ import annotations

import math
import os
from pathlib import Path

from proxymetric.data.decoding import Box, is_inside, upright_sizes
from proxymetric.data.read_ahead import read_ahead
from proxymetric.system.files import printable

COLUMNS = ("x1", "y1", "x2", "y2")
EXPECTED = "x1,y1,x2,y2 in pixels of the upright image with 0 <= x1 < x2 <= width and 0 <= y1 < y2 <= height"
MAX_THREADS = 16


def box_columns(names: list[str], file: Path) -> list[int] | None:
    """Return the numbers of the columns of the box; None if a CSV has no boxes.

    Raises:
        ValueError: some of the four columns are missing.

    Example:
        >>> box_columns(["file", "class", "x1", "y1", "x2", "y2"], Path("a.csv"))
        [2, 3, 4, 5]
    """
    present = [name for name in COLUMNS if name in names]
    if not present:
        return None
    if len(present) < len(COLUMNS):
        missing = [name for name in COLUMNS if name not in names]
        raise ValueError(
            f"{file}, line 1: got {', '.join(present)} without {', '.join(missing)}, expected all of "
            f"{', '.join(COLUMNS)} (if the columns mean something else, rename them)"
        )
    return [names.index(name) for name in COLUMNS]


def read_box(cells: list[str], line: str) -> Box:
    """Return the box of four cells, with fractions of pixels rounded outwards.

    Args:
        cells: x1, y1, x2, y2.
        line: file and line, for messages.

    Raises:
        ValueError: the cells are not the corners of a box.

    Example:
        >>> read_box(["10", "20.5", "60", "70"], "a.csv, line 2")
        (10, 20, 60, 70)
    """
    got = f"{line}: got the box {','.join(cells)}"
    try:
        x1, y1, x2, y2 = (float(cell) for cell in cells)
    except ValueError:
        raise ValueError(f"{got}, expected four numbers: {EXPECTED}") from None
    corners = (x1, y1, x2, y2)
    if not all(map(math.isfinite, corners)):
        raise ValueError(f"{got}, expected four finite numbers: {EXPECTED}")
    if x1 >= x2 or y1 >= y2 or x1 < 0 or y1 < 0:
        swapped = "; are the corners swapped?" if x2 < x1 or y2 < y1 else ""
        raise ValueError(f"{got}, expected {EXPECTED}{swapped}")
    if max(corners) <= 1 and any(corner % 1 for corner in corners):
        raise ValueError(f"{got}, fractions of the image, expected {EXPECTED}")
    return math.floor(x1), math.floor(y1), math.ceil(x2), math.ceil(y2)


def check_inside(paths: list[Path], boxes: list[Box], lines: list[str]) -> None:
    """Refuse boxes that lie outside their images. Files that cannot be read are left to the feeds.

    Args:
        paths: the files.
        boxes: the box of each file.
        lines: file and line of each box, for messages.

    Raises:
        ValueError: a box lies outside; the message has the first one and the number of the others.
    """
    files = list(dict.fromkeys(paths))
    threads = min(MAX_THREADS, os.cpu_count() or 1)
    sizes = dict(zip(files, read_ahead(_sizes, files, threads, ahead=4 * threads)))
    outside = [
        row
        for row, (path, box) in enumerate(zip(paths, boxes))
        if sizes[path] and not any(is_inside(box, size) for size in sizes[path])
    ]
    if outside:
        row = outside[0]
        width, height = sizes[paths[row]][0]
        others = f" ({len(outside) - 1} further boxes lie outside their images)" if len(outside) > 1 else ""
        raise ValueError(
            f"{lines[row]}: got the box {','.join(map(str, boxes[row]))} of {printable(paths[row].name)}, which is "
            f"{width} x {height} pixels when upright; expected {EXPECTED}{others}"
        )


def _sizes(path: Path) -> list[tuple[int, int]]:
    """The sizes that an image may have when it is upright; none if it cannot be read."""
    try:
        if not path.is_file():  # reading a pipe would wait for ever
            return []
        with open(path, "rb") as file:
            return upright_sizes(file, str(path))
    except Exception:  # decoders raise many types of errors for a damaged file, which is left out when it is read
        return []
