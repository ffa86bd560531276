"""The features on disk: where they are kept, how large they are, and how to remove them. Nothing here imports torch."""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

HASH = re.compile(r"[0-9a-f]{32}")
"""the name of a set of features and of each of its files"""


class StoredFeatures(NamedTuple):
    """The features of one backbone with one view: those of all images that were ever computed with both."""

    folder: Path
    images: int
    bytes: int
    changed: float
    """when features were last added, in seconds since 1970"""


def default_folder() -> Path:
    """Return `$PROXYMETRIC_CACHE`, or `~/.cache/proxymetric/features` if it is not set."""
    return Path(os.environ.get("PROXYMETRIC_CACHE") or Path.home() / ".cache" / "proxymetric" / "features")


def stored_features(folder: str | Path | None = None) -> list[StoredFeatures]:
    """List the features on disk, the largest first.

    Args:
        folder: where features are kept; None: `default_folder()`.

    Example:
        >>> stored_features("a folder that is not there")
        []
    """
    sets = []
    for place in _places(folder):
        files = _files(place)
        sizes = [file.stat() for file in files]
        images = sum(_images(file) for file in files)
        changed = max((status.st_mtime for status in sizes), default=place.stat().st_mtime)
        sets.append(StoredFeatures(place, images, sum(status.st_size for status in sizes), changed))
    return sorted(sets, key=lambda each: -each.bytes)


def clear_features(folder: str | Path | None = None) -> int:
    """Remove the features on disk; files that are not features stay. A run that needs them computes them again.

    Args:
        folder: where features are kept; None: `default_folder()`.

    Returns:
        The bytes that were freed.
    """
    freed = 0
    for place in _places(folder):
        for file in (*_files(place), *place.glob("*.part")):
            with contextlib.suppress(FileNotFoundError):  # another process has removed it
                size = file.stat().st_size
                file.unlink()
                freed += size
        with contextlib.suppress(OSError):  # it holds other files
            place.rmdir()
    return freed


def _places(folder: str | Path | None) -> list[Path]:
    root = default_folder() if folder is None else Path(folder)
    return sorted(each for each in root.glob("*") if HASH.fullmatch(each.name) and each.is_dir())


def _files(place: Path) -> list[Path]:
    return sorted(file for file in place.glob("*.safetensors") if HASH.fullmatch(file.stem))


def _images(file: Path) -> int:
    """The number of rows of a file, from its header; 0 for a damaged file."""
    try:
        with open(file, "rb") as stored:
            header: Any = json.loads(stored.read(int.from_bytes(stored.read(8), "little")))
        return int(header["vectors"]["shape"][0])
    except (OSError, ValueError, KeyError, TypeError, IndexError, OverflowError, MemoryError):
        return 0
