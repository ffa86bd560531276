"""Name images by their contents: the hash of a file is remembered, so that the file is read for it once."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
import stat
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from proxymetric.features.stored import FILES, make_folder

if TYPE_CHECKING:
    from proxymetric.data.images import ImageSet

MAX_BYTES = 100_000_000
"""size of the table of hashes (about a million files) from which it is made anew"""
RECENT_SECONDS = 2
"""a file that was changed so recently may change again without a later time: its hash is not remembered"""
LOCK_SECONDS = 5
"""how long another process is waited for that writes the table"""
TABLE = (
    "CREATE TABLE IF NOT EXISTS files (place BLOB PRIMARY KEY, size INTEGER, modified INTEGER, changed INTEGER, "
    "content BLOB) WITHOUT ROWID"
)


class Content(NamedTuple):
    """What an image shows, as far as it can be known without decoding it."""

    name: str
    """32 hexadecimal digits; equal for equal files (and boxes), wherever they lie"""
    state: tuple[int, ...] | None
    """size and times of the file when its bytes were read; None for an image that is not a file of its own"""


class ImageContents:
    """Names images by their contents.

    Args:
        folder: the folder of the cache, where the hashes of files are remembered; None: they are not. A folder that
            cannot be written, or whose disk has no locks, is no error: the files are read each time.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> for name in ("a.jpg", "b.jpg"):
        ...     _ = (folder / name).write_bytes(b"pixels")
        >>> a, b = (ImageContents(None).of([folder / "a.jpg", folder / "b.jpg"], row) for row in (0, 1))
        >>> a.name == b.name
        True
    """

    def __init__(self, folder: Path | None) -> None:
        self._file = None if folder is None else folder / FILES
        self._table: sqlite3.Connection | None = None
        self._new: dict[bytes, tuple[int, int, int, bytes]] = {}
        self._lock = threading.Lock()

    def of(self, images: ImageSet | list[Any], index: int) -> Content:
        """The content of an image; threads may ask at the same time.

        Args:
            images: a set of images, or a list of files.
            index: the number of the image.

        Raises:
            OSError: the file cannot be read.
        """
        box = None
        if isinstance(images, list | tuple):
            path = Path(images[index])
        elif images.arrays is not None:
            row = np.ascontiguousarray(images.arrays[index])
            return Content(_short(f"{row.shape} {row.dtype} ".encode() + row.tobytes()), None)
        elif images.encoded is not None:
            return Content(_short(hashlib.sha256(images.encoded.content(index)).digest()), None)
        else:
            assert images.paths is not None
            path, box = images.paths[index], images.box(index)
        digest, state = self._digest(path)
        return Content(_short(digest if box is None else digest + f" {box}".encode()), state)

    @staticmethod
    def has_changed(images: ImageSet | list[Any], index: int, content: Content) -> bool:
        """Whether the file of an image has changed since its content was named."""
        if content.state is None:
            return False
        path = images[index] if isinstance(images, list | tuple) else images.paths[index]  # type: ignore[index]
        try:
            return _state(os.stat(path)) != content.state
        except OSError:
            return True

    def close(self) -> None:
        """Write what is new to the disk, and close the table."""
        with self._lock:
            new, self._new = self._new, {}
            if new and self._file is not None:
                with contextlib.suppress(OSError, sqlite3.Error):  # then the files are read again
                    make_folder(self._file.parent)
                    table = self._open(self._file)
                    rows = [(place, *values) for place, values in new.items()]
                    with table:
                        table.executemany("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?)", rows)
            self._close()

    def _digest(self, path: Path) -> tuple[bytes, tuple[int, ...]]:
        """The sha256 of a file, and the state of the file that it belongs to."""
        state = _state(os.stat(path))
        place = hashlib.sha256(os.fsencode(os.path.realpath(path))).digest()[:16]
        with self._lock:
            *remembered, digest = self._remembered(place) or (None,)
        if digest is not None and tuple(remembered) == state:
            return digest, state
        with open(path, "rb") as file:
            state = _state(os.fstat(file.fileno()))
            digest = hashlib.file_digest(file, "sha256").digest()
        if time.time_ns() - max(state[1:]) > RECENT_SECONDS * 10**9:
            with self._lock:
                self._new[place] = (*state, digest)  # type: ignore[assignment]
        return digest, state

    def _remembered(self, place: bytes) -> tuple[Any, ...] | None:
        """The size and the times of a file, and its hash."""
        if place in self._new:
            return self._new[place]
        if self._file is None or (self._table is None and not self._file.is_file()):
            return None
        try:
            query = "SELECT size, modified, changed, content FROM files WHERE place = ?"
            row: tuple[Any, ...] | None = self._open(self._file).execute(query, (place,)).fetchone()
            return row
        except sqlite3.OperationalError:  # a folder without locks, or that cannot be written
            self._close()
            self._file = None
        except sqlite3.DatabaseError:  # damaged: it is made anew
            self._close()
            with contextlib.suppress(OSError):
                self._file.unlink()
        return None

    def _open(self, file: Path) -> sqlite3.Connection:
        if self._table is None:
            if file.is_file() and file.stat().st_size > MAX_BYTES:
                file.unlink()
            self._table = sqlite3.connect(file, timeout=LOCK_SECONDS, check_same_thread=False)
            if not self._table.execute("SELECT 1 FROM sqlite_master WHERE name = 'files'").fetchone():
                self._table.execute(TABLE)
        return self._table

    def _close(self) -> None:
        table, self._table = self._table, None
        if table is not None:
            with contextlib.suppress(sqlite3.Error):
                table.close()


def _state(status: os.stat_result) -> tuple[int, ...]:
    """What differs once a file was changed: its size and its times.

    Raises:
        OSError: it is no regular file; reading a pipe would wait for ever.
    """
    if not stat.S_ISREG(status.st_mode):
        raise OSError("it is no file")
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _short(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]
