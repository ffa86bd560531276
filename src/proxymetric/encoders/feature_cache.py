"""Pooled features of every image, computed once and kept on disk: what training a head alone needs."""

import dataclasses
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

if TYPE_CHECKING:
    from proxymetric.data.images import ImageSet


class Features(NamedTuple):
    """The features of a set of images; rows are in the order of the set, unreadable images left out."""

    vectors: Tensor
    """(N, F) float32 on the CPU"""
    kept: np.ndarray
    """(N,) index of each row in the set"""
    bad: dict[str, str]
    """title -> reason of the images that could not be read"""


def default_folder() -> Path:
    """`$PROXYMETRIC_CACHE`, else `~/.cache/proxymetric/features`."""
    return Path(os.environ.get("PROXYMETRIC_CACHE") or Path.home() / ".cache" / "proxymetric" / "features")


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
    """`encoder.features` of all `images`, in evaluation mode; those on disk are read, the others computed and written.

    Features lie under `folder/<key>/`, the key being that of the encoder's fingerprint and the view. Each row is found
    by its image (path, size and time of the file, or the pixels), so a killed run goes on where it stopped, and
    another split of the same images finds its features too. The encoder's device does the work and its mode is put
    back afterwards. Unreadable images are not remembered: mended ones are found at the next call.

    Args:
        encoder: what makes the features; its head plays no part.
        images: N labelled images.
        view: image -> uint8 tensor (3, S, S), such as `EvalView`; its attributes are part of the key.
        folder: where to keep them; `default_folder()` by default.
        batch: images at a time.
        shard: images per file; at most so many are lost when the run is killed.
        workers: processes that read images.
        progress: called with (images done, images in all).
    """
    key = hashlib.sha256(f"1 {encoder.fingerprint()} {_settings(view)}".encode()).hexdigest()[:32]
    place = (default_folder() if folder is None else Path(folder)) / key
    names = _names(images)
    rows = _read(place, set(names))
    bad: dict[str, str] = {}
    missing = [index for index, name in enumerate(names) if name not in rows]
    done = len(names) - len(missing)
    if progress is not None and done:
        progress(done, len(names))
    training = encoder.training
    encoder.eval()
    try:
        for start in range(0, len(missing), shard):
            part = missing[start : start + shard]
            report = None if progress is None else _Later(progress, done + start, len(names))
            fresh, unread = _compute(encoder, _some(images, part), view, batch, workers, report)
            bad |= unread
            found = {names[part[i]]: vector for i, vector in fresh.items()}
            if found:
                _write(place, found)
            rows |= found
    finally:
        encoder.train(training)
    kept = np.array([index for index, name in enumerate(names) if name in rows], dtype=np.int64)
    vectors = torch.stack([rows[names[i]] for i in kept.tolist()]) if len(kept) else torch.empty(0, encoder.width)
    return Features(vectors, kept, bad)


def _settings(view: Any) -> str:
    """What a view does, in words: its type and attributes. One that hides them (a lambda) could not be told apart."""
    try:
        told = json.dumps(vars(view), sort_keys=True)
    except TypeError:
        told = "{}"
    if told == "{}":
        raise ValueError(
            f"view={view!r} does not tell its settings; an EvalView or another object with plain attributes is expected"
        )
    return f"{type(view).__name__} {told}"


class _Later:
    """Progress of one shard, counted on from the images done before it."""

    def __init__(self, progress: Callable[[int, int], None], before: int, total: int) -> None:
        self.progress, self.done, self.total = progress, before, total

    def __call__(self, more: int) -> None:
        self.done += more
        self.progress(self.done, self.total)


def _compute(
    encoder: Encoder, images: "ImageSet", view: Any, batch: int, workers: int, report: Callable[[int], None] | None
) -> tuple[dict[int, Tensor], dict[str, str]]:
    """The features of the readable images by their index, and the unreadable ones' titles and reasons."""
    from proxymetric.data.feeds import EvalFeed

    device = encoder.mean.device
    feed = EvalFeed(images, view, batch=batch, device=device, workers=workers)
    parts: list[Tensor] = []
    with torch.inference_mode():
        for piece in feed:
            assert piece.images is not None
            # Convolutions run faster so, on the CPU as on a GPU, and pass the layout on by themselves.
            pictures = piece.images.to(device).contiguous(memory_format=torch.channels_last)
            parts.append(encoder.features(pictures).float().cpu())
            if report is not None:
                report(len(pictures))
    if not parts:
        return {}, dict(feed.bad)
    vectors = torch.cat(parts).clone()
    assert len(vectors) == len(feed.kept), (len(vectors), len(feed.kept))
    return dict(zip(feed.kept.tolist(), vectors)), dict(feed.bad)


def _some(images: "ImageSet", indices: list[int]) -> "ImageSet":
    """The images at `indices` alone, labels and classes as they are."""
    return dataclasses.replace(
        images,
        labels=images.labels[indices],
        paths=None if images.paths is None else [images.paths[i] for i in indices],
        arrays=None if images.arrays is None else images.arrays[indices],
    )


def _names(images: "ImageSet") -> list[str]:
    """One name for each image, the same wherever and whenever it is met: of its pixels, or of its file's state."""
    names = []
    for index in range(len(images)):
        if images.arrays is not None:
            row = np.ascontiguousarray(images.arrays[index])
            content = f"{row.shape} {row.dtype} ".encode() + row.tobytes()
        else:
            assert images.paths is not None
            path = Path(images.paths[index])
            try:
                state = path.stat()
                content = f"{path.resolve()} {state.st_size} {state.st_mtime_ns}".encode()
            except OSError:
                content = f"{path} is not there".encode()
        names.append(hashlib.sha256(content).hexdigest()[:32])
    return names


def _read(place: Path, wanted: set[str]) -> dict[str, Tensor]:
    """The rows of all files under `place` that are among `expected`; a damaged file counts as not there."""
    from safetensors import SafetensorError, safe_open

    rows: dict[str, Tensor] = {}
    for file in sorted(place.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as stored:
                names = json.loads(stored.metadata()["names"])
                if wanted.isdisjoint(names):
                    continue
                vectors = stored.get_tensor("vectors")
        except (SafetensorError, OSError, KeyError, TypeError, ValueError):
            continue
        rows |= {name: row for name, row in zip(names, vectors) if name in wanted}
    return rows


def _write(place: Path, rows: dict[str, Tensor]) -> None:
    """Write `rows` as one file, whole or not at all."""
    from safetensors.torch import save

    names = list(rows)
    data = save({"vectors": torch.stack([rows[name] for name in names])}, {"names": json.dumps(names)})
    target = place / f"{hashlib.sha256(' '.join(names).encode()).hexdigest()[:32]}.safetensors"
    part = target.with_suffix(f".{os.getpid()}.part")
    try:
        place.mkdir(parents=True, exist_ok=True)
        for left in place.glob("*.part"):
            if time.time() - left.stat().st_mtime > 3600:  # of a run that was killed while writing
                left.unlink(missing_ok=True)
        with open(part, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, target)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise OSError(
            error.errno,
            f"features could not be written under {place} ({error.strerror}); what was written before is kept. "
            "PROXYMETRIC_CACHE names another folder",
        ) from error
