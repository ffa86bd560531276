"""Decoded images that outlive one feed: several runs in a process decode each file once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from proxymetric.data.images import BadImage, ImageSet

Decoded = np.ndarray | BadImage
"""the pixels of an image, or why it cannot be read"""


class DecodedCache:
    """Pixels by image file and by how they were made, up to `limit` bytes.

    A file is recognised by its path, size and time of change. Different subsets of a data set share its images, so
    that runs which hold out different classes decode nothing twice. Images past the limit are decoded every time.

    Args:
        limit: bytes of pixels to keep at most.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.used, self.decodings = limit, 0, 0
        self._store: dict[Hashable, Decoded] = {}
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], Decoded]) -> Decoded:
        """The pixels of `key`, from the store or else from `make`."""
        found = self._store.get(key)
        if found is None:
            found = make()
            size = 0 if isinstance(found, BadImage) else found.nbytes
            with self._lock:
                self.decodings += 1
                if self.used + size <= self.limit:
                    self.used += size
                    self._store[key] = found
        return found


_kept: DecodedCache | None = None


@contextlib.contextmanager
def keep_decoded(limit: int = 2**34) -> Iterator[DecodedCache]:
    """Feeds with a cache, made inside of this context, share the images that one of them has decoded.

    Only image files are kept: sets that hold arrays have nothing to decode. Outside of the context each feed decodes
    its own images, and drops them when it is dropped.

    Args:
        limit: bytes of pixels to keep at most.

    Returns:
        A context manager; its value counts `decodings` and the bytes `used`.

    Example:
        >>> with keep_decoded() as kept:
        ...     pass  # train several times on the same folder
        >>> kept.decodings
        0
    """
    global _kept
    before, _kept = _kept, DecodedCache(limit)
    try:
        yield _kept
    finally:
        _kept = before


def keeping(images: ImageSet) -> bool:
    """Whether images of this set are kept now."""
    return _kept is not None and images.paths is not None


def decoded(images: ImageSet, how: Hashable, make: Callable[[int], np.ndarray], threads: int) -> list[Decoded]:
    """`make(row)` of every image, in order.

    Args:
        images: the images; one that raises `BadImage` is given as that error.
        how: what `make` does to an image; pixels are only shared by those who say the same.
        make: gives the pixels of an image.
        threads: how many decode at once. Threads, not processes: Pillow decodes outside the interpreter's lock, and
            nothing has to be copied.
    """
    kept = _kept

    def read(row: int) -> Decoded:
        try:
            return make(row)
        except BadImage as error:
            return error

    def load(row: int) -> Decoded:
        if kept is None or images.paths is None:
            return read(row)
        path = images.paths[row]
        try:
            about = path.stat()
        except OSError:
            return read(row)
        return kept.get((str(path), about.st_size, about.st_mtime_ns, how), lambda: read(row))

    with ThreadPoolExecutor(max_workers=max(1, threads)) as pool:
        return list(pool.map(load, range(len(images))))
