"""Where the features of images by a pre-trained backbone are asked for: each image passes through it once.

Features are known by the content of the image, the backbone, the view and the arithmetic. A backbone that a run has
trained has no features here: `models.Model` and `runs` ask only for one that is as it was before training.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from proxymetric.data.decoding import max_pixels
from proxymetric.data.read_ahead import read_ahead
from proxymetric.encoders.encoder import Encoder
from proxymetric.features.contents import Content, ImageContents
from proxymetric.features.rows import SHARD, FeatureRows
from proxymetric.features.stored import default_folder, size_limit
from proxymetric.system.precision import arithmetic, full_precision
from proxymetric.system.signals import stop_on_signal

if TYPE_CHECKING:
    from proxymetric.data.images import ImageSet

PROGRAM = 1
"""counts the versions of this package that change features: how images are decoded, cut, or run through a backbone"""
MAX_READING_THREADS = 8


class Features(NamedTuple):
    """The features of a set of images, in the order of the set; unreadable images are left out."""

    vectors: Tensor
    """(N, F) float32 on the CPU"""
    kept: np.ndarray
    """(N,) the index of each row in the set"""
    bad: dict[str, str]
    """for each image that could not be read, its title and the reason"""


class FeaturesStopped(KeyboardInterrupt):
    """Ctrl-C or SIGTERM stopped the computation of features; what was computed is kept."""


def feature_key(encoder: Encoder, view: Any) -> str:
    """Return 32 hexadecimal digits that name the features of an encoder's backbone with a view.

    Raises:
        ValueError: the view has no plain attributes to identify it by.
    """
    device = encoder.mean.device
    with full_precision(device.type):
        numbers = arithmetic(device)
    libraries = [f"{name} {version(name)}" for name in ("timm", "pillow")]
    parts = [PROGRAM, encoder.fingerprint(), _settings(view), numbers, *libraries, max_pixels()]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


class FeatureCache:
    """The features of a set of images by one pre-trained backbone with one view: those on disk, and new ones.

    The features are to be computed under `full_precision`, whatever the surrounding training has turned on. An image
    is recognised by its content, so it may be moved, renamed or copied. Close the cache after use: what was added last
    is written then.

    Args:
        key: what `feature_key` returns.
        images: a set of images, or a list of files.
        folder: the folder of the cache; None: `default_folder()`.
        shard: images per file.
        held: for each key, features that the caller holds in memory; it receives those that cannot be kept on disk.
    """

    def __init__(
        self,
        key: str,
        images: "ImageSet | list[Any]",
        folder: str | Path | None = None,
        shard: int = SHARD,
        held: dict[str, dict[str, Tensor]] | None = None,
    ) -> None:
        self.images, self.folder = images, default_folder() if folder is None else Path(folder)
        self._rows = FeatureRows(self.folder, key, shard, None if held is None else held.setdefault(key, {}))
        self._contents = ImageContents(self.folder if size_limit() else None)
        self._names: dict[int, Content] = {}

    def __enter__(self) -> "FeatureCache":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def keeps(self) -> bool:
        """Whether new features are kept on disk."""
        return self._rows.kept

    def get(self, index: int) -> Tensor | None:
        """The features (F,) of an image; None if they are to be computed. Threads may ask at the same time."""
        content = self._content(index)
        return None if content is None else self._rows.get(content.name)

    def all(self, progress: Callable[[int, int], None] | None = None) -> dict[int, Tensor]:
        """The features of all images that have some, by their index.

        Args:
            progress: called with the number of images whose content is known, and the number of images.
        """
        indices = range(len(self.images))
        threads = min(MAX_READING_THREADS, os.cpu_count() or 1)
        for done, _ in enumerate(read_ahead(self._content, indices, threads, ahead=4 * threads), 1):
            if progress is not None:
                progress(done, len(indices))
        self._contents.close()
        contents = sorted(self._names.items(), key=lambda each: self._rows.file_of(each[1].name))
        rows = ((index, self._rows.get(content.name)) for index, content in contents)
        return {index: row for index, row in rows if row is not None}

    def add(self, indices: Sequence[int], vectors: Tensor) -> None:
        """Keep the features (N, F) of images; not those of a file that has changed meanwhile, nor NaN or infinity."""
        rows = []
        for index, vector in zip(indices, vectors.float().cpu(), strict=True):
            content = self._content(index)
            if content is None or self._contents.has_changed(self.images, index, content):
                continue
            if vector.isfinite().all():
                rows.append((content.name, vector))
        self._rows.add(rows)

    def close(self) -> None:
        """Write what is not on disk yet."""
        self._rows.close()
        self._contents.close()

    def _content(self, index: int) -> Content | None:
        """The content of an image; None for a file that cannot be read."""
        if index not in self._names:
            try:
                self._names[index] = self._contents.of(self.images, index)
            except OSError:
                return None
        return self._names[index]


def cached_features(
    encoder: Encoder,
    images: "ImageSet",
    view: Any,
    *,
    folder: str | Path | None = None,
    batch: int = 32,
    shard: int = SHARD,
    workers: int = 0,
    progress: Callable[[int, int], None] | None = None,
    on_read: Callable[[int, int], None] | None = None,
    held: dict[str, dict[str, Tensor]] | None = None,
) -> Features:
    """Return the features of all `images` by a pre-trained backbone: read those on disk, compute and keep the others.

    A run that was killed continues where it stopped, and another split of the same images, or their copies elsewhere,
    find their features. They are computed in evaluation mode on the encoder's device, and the encoder's mode is
    restored afterwards. Unreadable images are not kept: the next call reads them again.

    Args:
        encoder: makes the features; its head is not used.
        images: N labelled images.
        view: maps an image to a uint8 tensor (3, S, S), such as `EvalView`; its attributes are part of the key.
        folder: the folder of the cache; None: `default_folder()`.
        batch: images per forward pass.
        shard: images per file.
        workers: processes that read images, or threads if the encoder is on the CPU.
        progress: called with the number of images that are done and the total number of images.
        on_read: the same for reading the files to know their contents, which comes first.
        held: what the caller holds in memory, so that features are computed once also where they cannot be kept on
            disk; a dictionary that is empty at first, and passed to each call.

    Returns:
        The features, their indices in the set, and the images that could not be read.

    Raises:
        FeaturesStopped: Ctrl-C or SIGTERM; all features computed so far are kept.
        ValueError: the view has no plain attributes to identify it by.
    """
    from proxymetric.data.feeds import EvalFeed

    device, training, stop = encoder.mean.device, encoder.training, _StopRequest()
    with FeatureCache(feature_key(encoder, view), images, folder, shard, held) as cache:
        rows = cache.all(on_read)
        missing = np.array([index for index in range(len(images)) if index not in rows], dtype=np.int64)
        if progress is not None and rows:
            progress(len(rows), len(images))
        feed = EvalFeed(images.subset(missing), view, batch=batch, device=device, workers=workers)
        encoder.eval()
        done = len(images) - len(missing)
        try:
            with stop_on_signal(stop):
                for part in feed:
                    assert part.images is not None
                    with torch.inference_mode(), full_precision(device.type):
                        computed = encoder.features(encoder.place(part.images)).float().cpu()
                    indices = missing[feed.read_rows[-1]].tolist()
                    vectors = computed.clone()  # an ordinary tensor: a head can be trained on it
                    cache.add(indices, vectors)
                    rows |= zip(indices, vectors, strict=True)
                    done += len(indices)
                    if progress is not None:
                        progress(done, len(images))
                    if stop.asked:
                        break
        finally:
            encoder.train(training)
    if stop.asked:
        kept = f"the features of {len(rows)} of {len(images)} images are kept in {cache.folder}, and the same command "
        raise FeaturesStopped(f"stopped; {kept}continues from there" if cache.keeps else "stopped")
    order = sorted(rows)
    stacked = torch.stack([rows[index] for index in order]) if order else torch.empty(0, encoder.width)
    return Features(stacked, np.array(order, dtype=np.int64), dict(feed.bad))


def _settings(view: Any) -> str:
    """Return the type and the attributes of a view as text; refuse a view without attributes, such as a lambda."""
    settings = "{}"
    with contextlib.suppress(TypeError):
        settings = json.dumps(vars(view), sort_keys=True)
    if settings == "{}":
        raise ValueError(f"view: got {view!r}, expected an EvalView or another object with plain attributes")
    return f"{type(view).__name__} {settings}"


class _StopRequest:
    """A request to stop, by Ctrl-C or SIGTERM; `asked` is True once there is one."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self) -> bool:
        """Request the stop; return whether it had been requested before."""
        asked_before, self.asked = self.asked, True
        return asked_before
