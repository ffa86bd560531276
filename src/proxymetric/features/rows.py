"""The features of one backbone with one view on disk: rows by the name of their image, some hundred in a file."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import time
import warnings
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from proxymetric.features.stored import FEATURES, GB, HASH, make_folder, make_room, size_limit
from proxymetric.system.files import DISK_FULL, NotSaved, is_disk_full, replacing
from proxymetric.system.lock import reading
from proxymetric.system.tensor_files import Damaged, read_header, read_tensors, write_tensors

SHARD = 512
"""rows with which a file is full"""
WRITE_SECONDS = 10.0
"""time after which new rows are written, also if their file is not full: a kill loses no more than this"""
MAX_LOADED_BYTES = 256_000_000
"""rows of files that stay in memory"""
_sentences: set[str] = set()
"""the warnings of this process: each is given once"""


class FeatureRows:
    """Rows of features, which processes may read and add to at the same time.

    A file is written completely or not at all, and is never changed: a file that is not full is written again with the
    new rows, and then removed. A damaged file is removed, and its images are missing. If nothing can be written, or the
    rows exceed the limit, further rows are not kept. All this is said by a warning.

    Args:
        folder: the folder of the cache.
        key: 32 hexadecimal digits that name backbone, view and arithmetic.
        shard: rows with which a file is full.
        held: rows that the caller holds in memory; it receives those that cannot be kept on disk.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> rows = FeatureRows(folder, "0" * 32)
        >>> rows.add([("a", torch.ones(2)), ("b", torch.zeros(2))])
        >>> rows.close()
        >>> FeatureRows(folder, "0" * 32).get("a")
        tensor([1., 1.])
    """

    def __init__(self, folder: Path, key: str, shard: int = SHARD, held: dict[str, Tensor] | None = None) -> None:
        self.folder, self.place, self.shard, self.limit = folder, folder / FEATURES / key, shard, size_limit()
        self.held = {} if held is None else held
        self._holds = held is not None
        self.kept = self.limit > 0
        """whether new rows are kept"""
        self._files: dict[str, Path] = {}
        """the file of each row"""
        self._sizes: dict[Path, int] = {}
        """the number of rows of each file"""
        self._loaded: dict[Path, tuple[dict[str, int], Tensor]] = {}
        self._new: dict[str, Tensor] = {}
        """rows of the file that is not full yet"""
        self._unwritten = 0
        self._partial: set[Path] = set()
        """files whose rows are in `_new`"""
        self._written: set[Path] = set()
        self._wrote_at = time.monotonic()
        self._lock = threading.RLock()
        if self.limit:
            self._list()

    def file_of(self, name: str) -> str:
        """The file of a row, as text that rows can be sorted by; empty for a row that is not on disk."""
        return str(self._files.get(name, ""))

    def get(self, name: str) -> Tensor | None:
        """The row with a name; None if there is none. Threads may ask at the same time."""
        with self._lock:
            for rows in (self._new, self.held):
                if name in rows:
                    return rows[name]
            for _ in range(2):
                file = self._files.get(name)
                if file is None:
                    return None
                try:
                    numbers, vectors = self._load(file)
                    return vectors[numbers[name]].clone()
                except FileNotFoundError:  # another process has written its rows to another file, or made room
                    self._list()
                except (Damaged, KeyError, ValueError) as error:
                    self._drop(file, error)
                except OSError:  # it may not be read
                    self._leave_out(file)
            return None

    def add(self, rows: Iterable[tuple[str, Tensor]]) -> None:
        """Add rows; they are on disk within `WRITE_SECONDS`, or when their file is full."""
        with self._lock:
            if not self.kept:
                if self._holds:
                    self.held.update(rows)
                return
            before = len(self._new)
            self._new.update(rows)
            self._unwritten += len(self._new) - before
            if len(self._new) >= self.shard or time.monotonic() - self._wrote_at > WRITE_SECONDS:
                self._write()

    def close(self) -> None:
        """Write all rows that are not on disk yet."""
        with self._lock:
            if self._unwritten and self.kept:
                self._write()

    def _list(self) -> None:
        """Read which rows are in which file."""
        self._files, self._sizes = {}, {}
        for file in sorted(self.place.glob("*.safetensors")):
            if not HASH.fullmatch(file.stem) or not os.access(file, os.R_OK):
                continue
            try:
                names = json.loads(read_header(file)["names"])
            except (KeyError, ValueError) as error:
                if file.is_file():
                    self._drop(file, error)
                continue
            self._files |= dict.fromkeys(names, file)
            self._sizes[file] = len(names)

    def _load(self, file: Path) -> tuple[dict[str, int], Tensor]:
        """The rows of a file: the number of each, and the vectors."""
        if file not in self._loaded:
            with reading(file):
                tensors, header = read_tensors(file)
                vectors = tensors["vectors"].clone()  # the file may be mapped into memory
            names = json.loads(header["names"])
            if vectors.shape[:1] != (len(names),):
                raise ValueError("it has another number of names than of rows")
            with contextlib.suppress(OSError):  # a folder that cannot be written
                os.utime(file)  # this is when it was last used
            while self._loaded and sum(each.nbytes for _, each in self._loaded.values()) > MAX_LOADED_BYTES:
                del self._loaded[next(iter(self._loaded))]
            self._loaded[file] = {name: number for number, name in enumerate(names)}, vectors
        return self._loaded[file]

    def _drop(self, file: Path, error: Exception) -> None:
        """Remove a damaged file, so that its rows are missing."""
        self._leave_out(file)
        with contextlib.suppress(OSError):
            file.unlink()
        _warn(f"features: {file} is damaged ({error}); the features of its images are computed again")

    def _leave_out(self, file: Path) -> None:
        self._files = {name: each for name, each in self._files.items() if each != file}
        self._sizes.pop(file, None)

    def _write(self) -> None:
        """Write the new rows as one file, with those of a file that is not full."""
        if not self._partial:
            self._take_in()
        names = json.dumps(list(self._new))
        file = self.place / f"{hashlib.sha256(names.encode()).hexdigest()[:32]}.safetensors"
        try:
            make_folder(self.folder)
            with replacing(file) as temporary:
                write_tensors(temporary, {"vectors": torch.stack(list(self._new.values()))}, {"names": names})
        except OSError as error:
            cause = error.__cause__ if isinstance(error, NotSaved) and error.__cause__ is not None else error
            reason = DISK_FULL if is_disk_full(cause) else getattr(cause, "strerror", None) or str(cause)
            self._stop_keeping(reason, "PROXYMETRIC_CACHE chooses another folder")
            return
        for earlier in self._partial - {file}:
            with contextlib.suppress(OSError):  # another process has done the same
                earlier.unlink()
            self._sizes.pop(earlier, None)
        self._files |= dict.fromkeys(self._new, file)
        self._sizes[file], self._partial = len(self._new), {file}
        self._written.add(file)
        self._unwritten, self._wrote_at = 0, time.monotonic()
        if len(self._new) >= self.shard:
            self._new, self._partial = {}, set()
        if make_room(self.folder, self.limit, self._written) > 0:
            self._stop_keeping(
                f"the limit of {self.limit / GB:g} GB is reached", "PROXYMETRIC_CACHE_GB sets another limit"
            )

    def _take_in(self) -> None:
        """Add the rows of the smallest file that is not full, so that there are never many small files."""
        partial = [file for file, size in self._sizes.items() if size + len(self._new) <= self.shard]
        if partial:
            file = min(partial, key=lambda each: self._sizes[each])
            with contextlib.suppress(OSError, KeyError, ValueError):  # it is damaged, or gone: it stays as it is
                numbers, vectors = self._load(file)
                rows = {name: vectors[number] for name, number in numbers.items() if vectors.shape[1:] == self._shape()}
                self._new = rows | self._new
                self._partial = {file}

    def _shape(self) -> torch.Size:
        return next(iter(self._new.values())).shape

    def _stop_keeping(self, reason: str, cure: str) -> None:
        """Go on without keeping more rows on disk."""
        self.kept = False
        if self._holds:
            self.held.update(self._new)
        _warn(
            f"features: got the folder {self.folder}, where no more of them can be kept ({reason}); the command goes "
            f"on, and the next one computes them again; {cure}"
        )


def _warn(sentence: str) -> None:
    """Give a warning, once."""
    if sentence not in _sentences:
        _sentences.add(sentence)
        warnings.warn(sentence, stacklevel=3)
