"""A cache of decoded images that feeds share: several runs in one process decode each file once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from proxymetric.data.decoding import BadImage
from proxymetric.data.images import ImageSet

Decoded = np.ndarray | BadImage
"""the pixels of an image, or the error that says why it cannot be read"""


class DecodedCache:
    """Holds up to `limit` bytes of decoded pixels; the key is the image file, its box and how it was processed.

    A file is identified by its path, size and modification time. Different subsets of a data set share its images, so
    runs that hold out different classes decode each file only once. Images beyond the limit are decoded every time.

    Args:
        limit: maximum number of bytes of pixels to hold.

    Attributes:
        used: bytes of pixels that the cache holds.
        decodings: number of images decoded so far.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.decodings = 0
        self._store: dict[Hashable, Decoded] = {}
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], Decoded]) -> Decoded:
        """Return the pixels of `key`, from the cache or from `make`."""
        pixels = self._store.get(key)
        if pixels is None:
            pixels = make()
            size = 0 if isinstance(pixels, BadImage) else pixels.nbytes
            with self._lock:
                self.decodings += 1
                if self.used + size <= self.limit:
                    self.used += size
                    self._store[key] = pixels
        return pixels


_active_cache: DecodedCache | None = None


@contextlib.contextmanager
def keep_decoded(limit: int = 2**34) -> Iterator[DecodedCache]:
    """Share decoded images among the feeds that are created inside this context and have a cache.

    Only image files are cached, because image sets of arrays need no decoding. Outside the context, each feed decodes
    its own images and frees them when it is deleted.

    Args:
        limit: maximum number of bytes of pixels to hold.

    Returns:
        A context manager whose value is the cache; it counts `decodings` and the bytes `used`.

    Example:
        >>> with keep_decoded() as cache:
        ...     pass  # train several times on the same folder
        >>> cache.decodings
        0
    """
    global _active_cache
    outer_cache = _active_cache
    _active_cache = DecodedCache(limit)
    try:
        yield _active_cache
    finally:
        _active_cache = outer_cache


def is_shared(images: ImageSet) -> bool:
    """Return whether feeds currently share the decoded images of this set."""
    return _active_cache is not None and images.paths is not None


def decode_all(
    images: ImageSet, processing: Hashable, make: Callable[[int], np.ndarray], threads: int
) -> list[Decoded]:
    """Return `make(row)` of every image, in order.

    Args:
        images: the images; an image for which `make` raises `BadImage` is replaced by that error.
        processing: identifies what `make` does to an image; only calls with an equal `processing` share pixels.
        make: returns the pixels of an image.
        threads: number of decoding threads. Threads are enough, because Pillow releases the GIL while it decodes, and
            unlike processes they do not have to copy the pixels.
    """
    cache = _active_cache

    def read(row: int) -> Decoded:
        try:
            return make(row)
        except BadImage as error:
            return error

    def load(row: int) -> Decoded:
        if cache is None or images.paths is None:
            return read(row)
        path = images.paths[row]
        try:
            status = path.stat()
        except OSError:
            return read(row)
        key = (str(path), status.st_size, status.st_mtime_ns, images.box(row), processing)
        return cache.get(key, lambda: read(row))

    with ThreadPoolExecutor(max_workers=max(1, threads)) as pool:
        return list(pool.map(load, range(len(images))))
