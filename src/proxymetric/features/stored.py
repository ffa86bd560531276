"""The cache on disk: its folder, its limit, what it holds, and how it is cleared. Nothing here imports torch.

FOLDER/features/KEY/*.safetensors   features of one backbone with one view, some hundred images in a file
FOLDER/files.sqlite                 the hash of each image file by its path, size and time
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from proxymetric.system.lock import is_being_read

HASH = re.compile(r"[0-9a-f]{32}")
"""the name of a set of features and of each of its files"""
DEFAULT_GB = 5.0
"""the limit of the cache where `PROXYMETRIC_CACHE_GB` is not set"""
GB = 1e9
MAX_PART_SECONDS = 3600
"""age from which an unfinished file counts as left by a process that was killed while it wrote it"""
FEATURES, FILES = "features", "files.sqlite"
"""names in the folder of the cache"""


class StoredFeatures(NamedTuple):
    """The features of one backbone with one view: those of all images that were computed with both and are kept."""

    folder: Path
    images: int
    bytes: int
    used: float
    """when features were last added or read, in seconds since 1970"""


def default_folder() -> Path:
    """Return `$PROXYMETRIC_CACHE`, else `$XDG_CACHE_HOME/proxymetric`, else `~/.cache/proxymetric`.

    A relative `$XDG_CACHE_HOME` does not count, as its specification says.
    """
    if chosen := os.environ.get("PROXYMETRIC_CACHE"):
        return Path(chosen)
    general = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not general.is_absolute():
        try:
            general = Path.home() / ".cache"
        except RuntimeError:  # a user without a home folder
            general = Path(os.devnull)  # nothing can be written there, which is said
    return general / "proxymetric"


def size_limit() -> float:
    """Return the bytes that the cache may have: `$PROXYMETRIC_CACHE_GB`, by default 5; 0 means that nothing is kept.

    Raises:
        ValueError: the variable is not a number of at least 0.

    Example:
        >>> size_limit()
        5000000000.0
    """
    text = os.environ.get("PROXYMETRIC_CACHE_GB", "").strip()
    try:
        number = float(text) if text else DEFAULT_GB
    except ValueError:
        number = -1.0
    if not number >= 0:
        raise ValueError(f"PROXYMETRIC_CACHE_GB: got {text!r}, expected a number of gigabytes of at least 0, such as 5")
    return number * GB


def make_folder(folder: Path) -> None:
    """Create the folder of the cache, which only its owner may read; one that is there stays as it is."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)


def stored_features(folder: str | Path | None = None) -> list[StoredFeatures]:
    """List the features on disk, the largest first.

    Args:
        folder: the folder of the cache; None: `default_folder()`.

    Example:
        >>> stored_features("a folder that is not there")
        []
    """
    sets = []
    for place in _places(folder):
        images, size, used = 0, 0, 0.0
        for file in _files(place):
            with contextlib.suppress(FileNotFoundError):  # another process has removed it
                status = file.stat()
                images, size, used = images + _images(file), size + status.st_size, max(used, status.st_mtime)
        sets.append(StoredFeatures(place, images, size, used))
    return sorted(sets, key=lambda each: -each.bytes)


def total_bytes(folder: str | Path | None = None) -> int:
    """The bytes of the cache: its features, and the hashes of files."""
    return sum(size for _, size, _ in _all_files(folder)) + _size(_root(folder) / FILES)


def clear_features(folder: str | Path | None = None) -> int:
    """Empty the cache; files in its folder that are not its own stay. What needs the features computes them again.

    Args:
        folder: the folder of the cache; None: `default_folder()`.

    Returns:
        The bytes that were freed.
    """
    freed = sum(_remove(file) for file in (_root(folder) / FILES, _root(folder) / f"{FILES}-journal"))
    for place in _places(folder):
        freed += sum(_remove(file) for file in (*_files(place), *place.glob(".*.part")))
        with contextlib.suppress(OSError):  # it holds other files
            place.rmdir()
    return freed


def make_room(folder: Path, limit: float, needed: Collection[Path] = ()) -> float:
    """Remove the files of features that were used least recently, until the cache is not larger than `limit` bytes.

    A file that another process is reading stays. What a process that was killed left unfinished is removed, too.

    Args:
        folder: the folder of the cache.
        limit: bytes that the cache may have.
        needed: files that stay.

    Returns:
        The bytes above the limit that are left: more than 0 if what stays is larger.
    """
    for leftover in (folder / FEATURES).glob("*/.*.part"):
        with contextlib.suppress(OSError):  # another process has removed it
            if time.time() - leftover.stat().st_mtime > MAX_PART_SECONDS:
                leftover.unlink()
    files = sorted(_all_files(folder), key=lambda each: each[2])
    excess = sum(size for _, size, _ in files) + _size(folder / FILES) - limit
    for file, size, _ in files:
        if excess <= 0:
            break
        if file not in needed and not is_being_read(file):
            with contextlib.suppress(OSError):
                file.unlink()
                excess -= size
    return excess


def _root(folder: str | Path | None) -> Path:
    return default_folder() if folder is None else Path(folder)


def _all_files(folder: str | Path | None) -> list[tuple[Path, int, float]]:
    """Each file of features, its bytes, and when it was last used."""
    files = []
    for file in (file for place in _places(folder) for file in _files(place)):
        with contextlib.suppress(OSError):  # another process has removed it
            status = file.stat()
            files.append((file, status.st_size, status.st_mtime))
    return files


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _remove(file: Path) -> int:
    """Remove a file, if it is there; return its size."""
    with contextlib.suppress(FileNotFoundError):  # another process has removed it
        size = file.stat().st_size
        file.unlink()
        return size
    return 0


def _places(folder: str | Path | None) -> list[Path]:
    return sorted(each for each in (_root(folder) / FEATURES).glob("*") if HASH.fullmatch(each.name) and each.is_dir())


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
