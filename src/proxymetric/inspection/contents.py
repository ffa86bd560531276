"""What an inspection knows of each image: digest, vector and grey copy; they are kept on disk as they are made."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from proxymetric.core.normalisation import unit
from proxymetric.data import ImageSet
from proxymetric.data.read_ahead import read_ahead
from proxymetric.features.contents import ImageContents
from proxymetric.features.stored import default_folder, size_limit
from proxymetric.inspection.pixels import SIDE, grey_copy
from proxymetric.models.model import MAX_READING_THREADS, Model
from proxymetric.system.files import replacing
from proxymetric.system.tensor_files import read_tensors, write_tensors
from proxymetric.system.watcher import Watcher

IMAGES_PER_PART = 512
"""images in a file of the store: a killed inspection loses the work on at most this many"""


class Contents(NamedTuple):
    """The readable images of a set.

    Attributes:
        images: the whole set.
        kept: (N,) the index of each readable image in `images`.
        digests: N digests of the files (of the pixels, for a set of arrays); equal files have equal digests.
        vectors: (N, D) of unit length.
        copies: (N, SIDE, SIDE) uint8, see `pixels.grey_copy`.
        unreadable: index in `images` -> why the image cannot be read.
    """

    images: ImageSet
    kept: np.ndarray
    digests: list[str]
    vectors: Tensor
    copies: Tensor
    unreadable: dict[int, str]


def gather(model: Model, images: ImageSet, store: Store, watcher: Watcher) -> Contents:
    """Embed the images and make their grey copies; what the store has already is not made again.

    Images are recognised by the bytes of their files. So a file that was moved or renamed is not embedded again, and
    equal files are embedded once.

    Args:
        model: makes the vectors.
        images: the images.
        store: what earlier inspections by the same model have made; it receives what is new.
        watcher: is told the progress.

    Raises:
        ValueError: none of the images can be read.
    """
    digests = _digests(images, watcher)
    first_with = {digest: index for index, digest in reversed(list(enumerate(digests)))}
    missing = sorted(index for digest, index in first_with.items() if digest not in store)
    reasons: dict[str, str] = {}
    rows: list[int] = []
    vectors: list[Tensor] = []
    copies: dict[int, np.ndarray] = {}

    def keep_copy(row: int, image: Image.Image) -> None:
        copies[row] = grey_copy(image)

    with contextlib.closing(model.parts(images.subset(missing), on_image=keep_copy)) as parts:
        for part in parts:
            reasons |= {digests[missing[row]]: error.reason for row, error in part.bad.items()}
            rows += part.rows
            vectors.append(part.vectors)
            watcher.work("embedding", part.done, len(missing))
            if rows and (len(rows) >= IMAGES_PER_PART or part.done == len(missing)):
                new_copies = torch.from_numpy(np.stack([copies.pop(row) for row in rows]))
                store.add([digests[missing[row]] for row in rows], unit(torch.cat(vectors)), new_copies)
                rows, vectors = [], []
    kept = np.array([index for index, digest in enumerate(digests) if digest in store], dtype=np.int64)
    if not len(kept):
        raise ValueError(
            f"images: got {len(images)} images, none of which can be read; expected images that can be decoded"
        )
    kept_digests = [digests[index] for index in kept]
    unreadable = {index: reasons[digest] for index, digest in enumerate(digests) if digest in reasons}
    return Contents(images, kept, kept_digests, *store.rows(kept_digests), unreadable)


def _digests(images: ImageSet, watcher: Watcher) -> list[str]:
    """The digest of each image, which is remembered in the cache, so that a file is read for it once."""
    threads = min(MAX_READING_THREADS, os.cpu_count() or 1)
    contents = ImageContents(default_folder() if size_limit() else None)
    digests: list[str] = []
    with contextlib.closing(contents):
        read = partial(digest_of, images, contents=contents)
        for digest in read_ahead(read, range(len(images)), threads, ahead=4 * threads):
            digests.append(digest)
            watcher.work("reading", len(digests), len(images))
    return digests


def digest_of(images: ImageSet, index: int, contents: ImageContents | None = None) -> str:
    """The hash of a file, with its box, or of an array; for an unreadable file, a text that no other image has."""
    try:
        return (contents or ImageContents(None)).of(images, index).name
    except OSError:
        return f"cannot be read: {index}"


class Store:
    """Vectors and grey copies by the digests of their files, in a folder.

    Args:
        folder: where the parts are; it is created when there is something to write. None: in memory only.
        model: fingerprint of the model; parts of another model are removed, damaged ones too.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp()) / "store"
        >>> Store(folder, "m").add(["a"], torch.ones(1, 2), torch.zeros(1, SIDE, SIDE, dtype=torch.uint8))
        >>> "a" in Store(folder, "m"), "a" in Store(folder, "another model")
        (True, False)
    """

    def __init__(self, folder: Path | None, model: str) -> None:
        self.folder, self.model = folder, f"{model} {SIDE}"
        self._places: dict[str, tuple[int, int]] = {}
        self._vectors: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._next = 0
        for file in sorted(folder.glob("*.safetensors")) if folder is not None and folder.is_dir() else []:
            if file.stem.isdecimal():
                self._read(file)

    def __contains__(self, digest: str) -> bool:
        return digest in self._places

    def add(self, digests: Sequence[str], vectors: Tensor, copies: Tensor) -> None:
        """Add images; they are on disk when this returns."""
        if self.folder is not None:
            with replacing(self.folder / f"{self._next:08d}.safetensors") as temporary:
                header = {"model": self.model, "digests": json.dumps(list(digests))}
                write_tensors(temporary, {"vectors": vectors, "copies": copies}, header)
            self._next += 1
        self._put(digests, vectors, copies)

    def rows(self, digests: Sequence[str]) -> tuple[Tensor, Tensor]:
        """The vectors and the grey copies of images that the store has."""
        starts = np.cumsum([0, *(len(part) for part in self._vectors)])
        rows = torch.tensor([int(starts[part]) + row for part, row in (self._places[digest] for digest in digests)])
        return torch.cat(self._vectors)[rows], torch.cat(self._copies)[rows]

    def _put(self, digests: Sequence[str], vectors: Tensor, copies: Tensor) -> None:
        self._places |= {digest: (len(self._vectors), row) for row, digest in enumerate(digests)}
        self._vectors.append(vectors)
        self._copies.append(copies)

    def _read(self, file: Path) -> None:
        try:
            tensors, header = read_tensors(file)
            if header["model"] == self.model:
                self._put(json.loads(header["digests"]), tensors["vectors"], tensors["copies"])
                self._next = int(file.stem) + 1
                return
        except (OSError, ValueError, KeyError):
            pass
        file.unlink(missing_ok=True)
