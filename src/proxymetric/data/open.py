"""One door to every kind of data: `open_data`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from pathlib import Path

from proxymetric.data.benchmarks import BENCHMARKS, detect, from_benchmark
from proxymetric.data.digits import digits
from proxymetric.data.folders import from_csv, from_folder
from proxymetric.data.glyphs import glyphs
from proxymetric.data.images import ImageSet

EMBEDDED: dict[str, Callable[[], ImageSet]] = {"glyphs": glyphs, "digits": digits}
LAYOUTS = ("auto", "folder", "csv", *BENCHMARKS)


def open_data(source: str | Path, layout: str = "auto") -> ImageSet:
    """The labelled images at `source`.

    Arguments:
        source: "glyphs" or "digits" (embedded, nothing is downloaded; "glyphs:60" has 60 characters), a folder, or a
            .csv file. For a folder of your own named glyphs, write "./glyphs".
        layout: "folder" (a folder for each class), "csv" (columns file and class), or a benchmark as it is shipped:
            "cub" (CUB-200-2011), "cars" (Cars196), "sop" (Stanford Online Products), "in-shop" (In-Shop Clothes
            Retrieval), "inaturalist" (the retrieval split of iNaturalist 2018), "omniglot", "mnist"; "auto" finds out.

    >>> open_data("digits").classes
    ['0', '1', '2', '3', '4', '5', '6', '7', '8', '9']
    >>> open_data("digits", layout="fodler")
    Traceback (most recent call last):
    ...
    ValueError: layout must be one of auto, folder, csv, cub, ..., mnist, got 'fodler'; did you mean 'folder'?
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}{_nearest(layout, LAYOUTS)}")
    if isinstance(source, str) and source in EMBEDDED and layout == "auto":
        return EMBEDDED[source]()
    if isinstance(source, str) and (some := re.fullmatch(r"glyphs:(\d+)", source)):
        return glyphs(int(some[1]))
    path = Path(source).expanduser()
    if not path.exists():
        hint = _nearest(str(source), tuple(EMBEDDED)) if isinstance(source, str) else ""
        raise ValueError(
            f"there is no folder or CSV file at {str(source)!r}{hint or '.'} "
            f"Data is a folder, a .csv, or one of the embedded sets {' and '.join(EMBEDDED)}"
        )
    if layout == "auto":
        layout = "csv" if path.is_file() else detect(path) or "folder"
    if path.is_dir() and layout == "csv":
        raise ValueError(f"layout 'csv' wants a file, and {path} is a folder")
    if path.is_file():
        if layout != "csv":
            raise ValueError(f"layout {layout!r} wants a folder, and {path} is a file")
        if path.suffix.lower() != ".csv":
            raise ValueError(f"{path} is a file but no .csv; data is a folder or a .csv of file and class")
        return from_csv(path)
    return from_folder(path) if layout == "folder" else from_benchmark(path, layout)


def _nearest(name: str, known: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
