"""A cache on disk of the pooled features of images, to train a head without running the backbone again."""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from proxymetric.encoders.encoder import Encoder
from proxymetric.features.stored import default_folder
from proxymetric.system.files import NotSaved, replacing
from proxymetric.system.signals import interrupt_after, stop_on_signal

if TYPE_CHECKING:
    from proxymetric.data.images import ImageSet

CHECKSUM = "sha256"
"""key of the checksum in the header of a file; files of earlier versions have none, and are read without it"""
MAX_PART_SECONDS = 3600
"""age from which an unfinished file counts as left by a run that was killed while writing"""


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


def cached_features(
    encoder: Encoder,
    images: "ImageSet",
    view: Any,
    *,
    folder: str | Path | None = None,
    batch: int = 32,
    shard: int = 512,
    workers: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Features:
    """Return the features of all `images` in evaluation mode: read those on disk, compute and write the others.

    Features are stored under `folder/<key>/`; the key is a hash of the encoder's fingerprint and the view. Each row is
    identified by its image (path, size and modification time of the file, or the pixels). A run that was killed
    therefore continues where it stopped, and another split of the same images reuses their features. The features are
    computed on the encoder's device, and the encoder's mode is restored afterwards. Unreadable images are not cached:
    the next call reads them again.

    Args:
        encoder: makes the features; its head is not used.
        images: N labelled images.
        view: maps an image to a uint8 tensor (3, S, S), such as `EvalView`; its attributes are part of the key.
        folder: where the features are stored; None: `default_folder()`.
        batch: images per forward pass.
        shard: images per file; a killed run loses the features of at most this many images.
        workers: processes that read images, or threads if the encoder is on the CPU.
        progress: called with the number of images that are done and the total number of images.

    Returns:
        The features, their indices in the set, and the images that could not be read.

    Raises:
        FeaturesStopped: Ctrl-C or SIGTERM; all features computed so far are written.
        ValueError: the view has no plain attributes to identify it by.
        NotSaved: the features cannot be written.
    """
    key = hashlib.sha256(f"1 {encoder.fingerprint()} {_settings(view)}".encode()).hexdigest()[:32]
    cache = (default_folder() if folder is None else Path(folder)) / key
    names = _names(images)
    rows = _read(cache, set(names))
    bad: dict[str, str] = {}
    missing = [index for index, name in enumerate(names) if name not in rows]
    done = len(names) - len(missing)
    if progress is not None and done:
        progress(done, len(names))
    training = encoder.training
    encoder.eval()
    stop = _StopRequest()
    try:
        with stop_on_signal(stop):
            for start in range(0, len(missing), shard):
                part = missing[start : start + shard]
                report = None if progress is None else _ShardProgress(progress, done + start, len(names))
                computed, unreadable = _compute(encoder, images.subset(part), view, batch, workers, report, stop)
                bad |= unreadable
                new_rows = {names[part[i]]: vector for i, vector in computed.items()}
                if new_rows:
                    _write(cache, new_rows)
                rows |= new_rows
                if stop.asked:
                    raise FeaturesStopped(
                        f"stopped; the features of {len(rows)} of {len(names)} images are kept in {cache.parent}, and "
                        "the same command continues from there"
                    )
    finally:
        encoder.train(training)
    kept = np.array([index for index, name in enumerate(names) if name in rows], dtype=np.int64)
    vectors = torch.stack([rows[names[i]] for i in kept.tolist()]) if len(kept) else torch.empty(0, encoder.width)
    return Features(vectors, kept, bad)


def _settings(view: Any) -> str:
    """Return the type and the attributes of a view as text; refuse a view without attributes, such as a lambda."""
    try:
        settings = json.dumps(vars(view), sort_keys=True)
    except TypeError:
        settings = "{}"
    if settings == "{}":
        raise ValueError(f"view: got {view!r}, expected an EvalView or another object with plain attributes")
    return f"{type(view).__name__} {settings}"


class _ShardProgress:
    """Adds the progress of one shard to the number of images that were done before it, and reports the sum."""

    def __init__(self, progress: Callable[[int, int], None], done: int, total: int) -> None:
        self.progress = progress
        self.done = done
        self.total = total

    def __call__(self, count: int) -> None:
        self.done += count
        self.progress(self.done, self.total)


def _compute(
    encoder: Encoder,
    images: "ImageSet",
    view: Any,
    batch: int,
    workers: int,
    report: Callable[[int], None] | None,
    stop: "_StopRequest",
) -> tuple[dict[int, Tensor], dict[str, str]]:
    """Compute features until all are done or there is a request to stop.

    Returns:
        The features of the readable images by index, and the titles and reasons of the unreadable ones.
    """
    from proxymetric.data.feeds import EvalFeed

    device = encoder.mean.device
    feed = EvalFeed(images, view, batch=batch, device=device, workers=workers)
    parts: list[Tensor] = []
    with torch.inference_mode():
        for part in feed:
            assert part.images is not None
            parts.append(encoder.features(encoder.place(part.images)).float().cpu())
            if report is not None:
                report(len(part.images))
            if stop.asked:
                break
    if not parts:
        return {}, dict(feed.bad)
    vectors = torch.cat(parts).clone()
    rows = np.concatenate([batch_rows for batch_rows in feed.read_rows if len(batch_rows)][: len(parts)])
    assert len(vectors) == len(rows), (len(vectors), len(rows))
    return dict(zip(rows.tolist(), vectors)), dict(feed.bad)


class _StopRequest:
    """A request to stop, by Ctrl-C or SIGTERM; `asked` is True once there is one."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self) -> bool:
        """Request the stop; return whether it had been requested before."""
        asked_before, self.asked = self.asked, True
        return asked_before


def _names(images: "ImageSet") -> list[str]:
    """Return one name for each image: a hash of its pixels, or of its file's path, size, time and box."""
    names = []
    for index in range(len(images)):
        if images.arrays is not None:
            row = np.ascontiguousarray(images.arrays[index])
            content = f"{row.shape} {row.dtype} ".encode() + row.tobytes()
        elif images.encoded is not None:
            try:
                content = images.encoded.content(index)
            except OSError:
                content = f"{images.title(index)} is not there".encode()
        else:
            assert images.paths is not None
            path = Path(images.paths[index])
            try:
                state = path.stat()
                content = os.fsencode(f"{path.resolve()} {state.st_size} {state.st_mtime_ns}{_box(images, index)}")
            except OSError:
                content = os.fsencode(f"{path} is not there")
        names.append(hashlib.sha256(content).hexdigest()[:32])
    return names


def _box(images: "ImageSet", index: int) -> str:
    """The box of an image as text; empty for a whole image."""
    box = images.box(index)
    return "" if box is None else f" {box}"


def _read(cache: Path, names: set[str]) -> dict[str, Tensor]:
    """Return the rows called `names` from all files in `cache`; damaged files are ignored."""
    from safetensors import SafetensorError, safe_open

    rows: dict[str, Tensor] = {}
    for file in sorted(cache.glob("*.safetensors")):
        try:
            with interrupt_after(), safe_open(file, framework="pt") as stored:
                header = stored.metadata()
                stored_names = json.loads(header["names"])
                if names.isdisjoint(stored_names):
                    continue
                vectors = stored.get_tensor("vectors")
            if CHECKSUM in header and header[CHECKSUM] != _checksum(header["names"], vectors):
                continue
        except (SafetensorError, OSError, KeyError, TypeError, ValueError):
            continue
        rows |= {name: row for name, row in zip(stored_names, vectors) if name in names}
    return rows


def _write(cache: Path, rows: dict[str, Tensor]) -> None:
    """Write `rows` as one file, completely or not at all."""
    from safetensors.torch import save

    names, vectors = json.dumps(list(rows)), torch.stack(list(rows.values()))
    data = save({"vectors": vectors}, {"names": names, CHECKSUM: _checksum(names, vectors)})
    for leftover in cache.glob("*.part"):
        with contextlib.suppress(OSError):  # another process has removed it
            if time.time() - leftover.stat().st_mtime > MAX_PART_SECONDS:
                leftover.unlink()
    try:
        with replacing(cache / f"{hashlib.sha256(' '.join(rows).encode()).hexdigest()[:32]}.safetensors") as temporary:
            temporary.write_bytes(data)
    except NotSaved as error:
        reason = getattr(error.__cause__, "strerror", None) or error
        raise NotSaved(
            f"folder: got {cache}, but features could not be written there ({reason}); expected a writable folder with "
            "enough space; PROXYMETRIC_CACHE chooses another folder. Features written before are kept"
        ) from error


def _checksum(names: str, vectors: Tensor) -> str:
    """The hash of the names and of the bytes of the vectors, by which a damaged file is noticed."""
    digest = hashlib.sha256(names.encode())
    digest.update(vectors.contiguous().numpy().data)
    return digest.hexdigest()
