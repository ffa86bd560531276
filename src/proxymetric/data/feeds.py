"""Batches of images on their way to the network, from files or from a cache.

Images that cannot be read are left out of their batch, kept in `bad` with the reason, and told once to `on_bad`. Which
ones those are, and everything else in a batch, depends neither on the number of workers nor on how far an earlier run
had come. A batch in which no image could be read comes with 0 images.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from proxymetric.core.pieces import Batch
from proxymetric.data.batches import Batches
from proxymetric.data.decoded_cache import Decoded, decoded, keeping
from proxymetric.data.image_buffer import ImageBuffer
from proxymetric.data.images import BadImage, ImageSet
from proxymetric.data.views import EvalView, TrainView, shrink

CACHES = ("none", "memory", "device")
# Tell the random numbers of views, of looks taken beside an epoch, and of the sampler apart, all of one seed.
_VIEWS, _LOOKS, _CHOICE = 1, 2, 3

OnBad = Callable[[str, str], None]


class _Job(NamedTuple):
    """One batch to be made: its images, and for training the random numbers of their views."""

    rows: np.ndarray
    draws: np.ndarray | None


class _Made(NamedTuple):
    images: Tensor
    rows: np.ndarray
    bad: list[tuple[str, str]]


class _Maker(Dataset):
    """Makes the images of a job, in this process or in a worker's."""

    def __init__(self, images: ImageSet, view: TrainView | EvalView) -> None:
        self.images, self.view = images, view
        self.cached: _Cached | None = None

    def __getitem__(self, job: _Job) -> _Made:
        squares, kept, bad = [], [], []
        for k, row in enumerate(job.rows.tolist()):
            try:
                image = self.images.read(row) if self.cached is None else self.cached.read(row)
            except BadImage as error:
                bad.append((error.path, error.reason))
                continue
            if isinstance(self.view, TrainView):
                assert job.draws is not None
                squares.append(self.view.apply(image, job.draws[k : k + 1]))
            else:
                squares.append(self.view(image))
            kept.append(row)
        size = self.view.size
        together = torch.stack(squares) if squares else torch.empty((0, 3, size, size), dtype=torch.uint8)
        return _Made(together, np.array(kept, dtype=np.int64), bad)

    def run(self, jobs: Iterable[_Job], workers: int, pin: bool) -> Iterator[_Made]:
        """The jobs in order, made here (`workers=0`) or by worker processes."""
        if workers == 0:
            yield from map(self.__getitem__, jobs)
            return
        loader = DataLoader(
            self,
            batch_size=None,
            sampler=jobs,
            num_workers=workers,
            pin_memory=pin,
            generator=torch.Generator(),  # otherwise each epoch takes a number from the global generator
            worker_init_fn=_obey_the_main_process,
        )
        yield from loader


def _obey_the_main_process(worker: int) -> None:
    """Ctrl-C and a batch system's SIGTERM reach all processes of a group; the main one decides what happens."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main = multiprocessing.parent_process()
    if main is None or not hasattr(signal, "sigwaitinfo"):
        return
    # Ignored altogether, SIGTERM could not serve the main process to end a worker: who sent it must be looked at.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def wait() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != main.pid:
            pass
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


class _Cached:
    """All readable images of a set, decoded and brought down to the view's size, in one buffer."""

    def __init__(self, images: ImageSet, view: TrainView, device: torch.device, workers: int) -> None:
        def load(row: int) -> np.ndarray:
            return np.asarray(shrink(images.read(row), view.stored, view.interpolation))

        loaded = decoded(images, ("shrunk", view.stored, view.interpolation), load, workers)
        self.errors = {row: item for row, item in enumerate(loaded) if isinstance(item, BadImage)}
        self.place = np.full(len(images), -1, dtype=np.int64)
        good = [row for row in range(len(images)) if row not in self.errors]
        self.place[good] = np.arange(len(good))
        pixels = [item for item in loaded if not isinstance(item, BadImage)]
        loaded.clear()
        self.store = ImageBuffer(pixels, device)

    def read(self, row: int) -> Image.Image:
        if row in self.errors:
            raise self.errors[row]
        return self.store.image(int(self.place[row]))


class _Squares:
    """Makes evaluation batches of squares that `keep_decoded` holds from feed to feed."""

    def __init__(self, images: ImageSet, view: EvalView, threads: int) -> None:
        how = ("centre", view.size, view.resize, view.interpolation)
        self.size = view.size
        self.squares: list[Decoded] = decoded(images, how, lambda row: view(images.read(row)).numpy(), threads)

    def run(self, jobs: Iterable[_Job], workers: int, pin: bool) -> Iterator[_Made]:
        """The jobs in order, as `_Maker.run` makes them."""
        for job in jobs:
            items = [(row, self.squares[row]) for row in job.rows.tolist()]
            good = [(row, item) for row, item in items if not isinstance(item, BadImage)]
            bad = [(item.path, item.reason) for _, item in items if isinstance(item, BadImage)]
            empty = np.empty((0, 3, self.size, self.size), dtype=np.uint8)
            pixels = np.stack([item for _, item in good]) if good else empty
            yield _Made(torch.from_numpy(pixels), np.array([row for row, _ in good], dtype=np.int64), bad)


class TrainFeed:
    """Batches of random views, the same ones for the same seeds.

    The view of an image is a pure function of (seed, epoch, step, place in the batch of all ranks), so that a run
    that goes on from the middle of an epoch, or with other numbers of workers or processes, sees the same pixels.

    Arguments:
        images: what to train on.
        batches: which images make up a batch.
        view: how they are cut.
        cache: "none" reads files every time; "memory" keeps decoded images, larger ones brought down to `view.stored`
            on the shorter side, in main memory; "device" keeps them on `device` and cuts whole batches there, by
            bilinear interpolation (with `device="cpu"` the fast path for small images). Caches are filled when the
            first epoch begins.
        device: where the images of a batch go; labels stay in main memory, where methods may plan with them.
        workers: processes that read and cut ("none", "memory"), threads that fill a cache; 0 uses this process alone.
        seed: of the views, 0 or more.
        on_bad: called once with title and reason of each image that cannot be read.

    >>> from proxymetric.data import digits
    >>> images = digits()
    >>> view = TrainView(32, resize=32, crop="none", flip=False)
    >>> feed = TrainFeed(images, Batches(images.labels, batch=64), view, cache="device")
    >>> batch = next(feed.epoch(0))
    >>> batch.images.shape, batch.images.dtype, batch.labels.shape, len(feed)
    (torch.Size([64, 3, 32, 32]), torch.uint8, torch.Size([64]), 28)
    """

    def __init__(
        self,
        images: ImageSet,
        batches: Batches,
        view: TrainView,
        cache: str = "none",
        device: str | torch.device = "cpu",
        workers: int = 0,
        seed: int = 0,
        on_bad: OnBad | None = None,
    ) -> None:
        _check(cache, workers)
        if batches.count != len(images):
            raise ValueError(f"batches are made for {batches.count} images, but images has {len(images)}")
        if seed < 0:
            raise ValueError(f"seed must be 0 or more, got {seed}")
        self.images, self.batches, self.view, self.cache = images, batches, view, cache
        self.device, self.workers, self.seed, self.on_bad = torch.device(device), workers, seed, on_bad
        self.bad: dict[str, str] = {}
        self._maker = _Maker(images, view)
        self._labels = torch.from_numpy(images.labels)
        self._cached: _Cached | None = None

    def __len__(self) -> int:
        """Steps in an epoch."""
        return len(self.batches)

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """The batches of epoch `number`, from step `start` on."""
        self._fill()
        jobs = self._jobs(number, start)
        if self.cache == "device":
            yield from map(self._cut, jobs)
            return
        yield from self._made(jobs)

    @property
    def labels(self) -> np.ndarray:
        """(N,) of all images, readable or not."""
        return self.images.labels

    def views(self, rows: np.ndarray, key: int, batch: int = 256) -> Iterator[Batch]:
        """Random views of the images `rows`, `batch` at a time: a pure function of seed, rows and key.

        A row that is named twice is seen twice, each time otherwise. Images that cannot be read are left out.

        >>> from proxymetric.data import digits
        >>> images = digits()
        >>> feed = TrainFeed(images, Batches(images.labels, batch=64), TrainView(32, resize=32), cache="device")
        >>> [len(part.labels) for part in feed.views(np.array([5, 5, 9]), key=0, batch=2)]
        [2, 1]
        """
        self._fill()
        draws = self.view.draw(len(rows), np.random.default_rng([self.seed, key, 0, _LOOKS]))
        jobs = (_Job(rows[i : i + batch], draws[i : i + batch]) for i in range(0, len(rows), batch))
        yield from map(self._cut, jobs) if self.cache == "device" else self._made(jobs)

    def _made(self, jobs: Iterator[_Job]) -> Iterator[Batch]:
        for made in self._maker.run(jobs, self.workers, self.device.type == "cuda"):
            _note(made.bad, self.bad, self.on_bad)
            yield _moved(Batch(made.images, self._labels[made.rows]), self.device)

    def _jobs(self, number: int, start: int) -> Iterator[_Job]:
        for step, whole in enumerate(self.batches.whole(number, start), start):
            draws = self.view.draw(len(whole), np.random.default_rng([self.seed, number, step, _VIEWS]))
            share = self.batches.share(len(whole))
            yield _Job(whole[share], draws[share])

    def _fill(self) -> None:
        if self.cache == "none" or self._cached is not None:
            return
        where = self.device if self.cache == "device" else torch.device("cpu")
        self._cached = _Cached(self.images, self.view, where, self.workers)
        _note([(e.path, e.reason) for e in self._cached.errors.values()], self.bad, self.on_bad)
        self._maker.cached = self._cached

    def _cut(self, job: _Job) -> Batch:
        assert self._cached is not None
        assert job.draws is not None
        place, store = self._cached.place[job.rows], self._cached.store
        good = place >= 0
        rows = place[good]
        boxes = self.view.boxes(store.heights[rows], store.widths[rows], job.draws[good])
        images = store.cut(rows, boxes, self.view.size)
        return Batch(images, self._labels[job.rows[good]])


class EvalFeed:
    """All readable images in order, each as its centre.

    Arguments:
        batch: images at a time. Batches may be smaller where images could not be read.
        cache: "none" reads the files in every pass; "memory" and "device" keep the finished squares of the first full
            pass, (N, 3, size, size) uint8, in main memory or on `device`.
        The others as for `TrainFeed`.

    `kept` holds the indices of the images that the last full pass gave, `bad` the others with the reason.

    >>> from proxymetric.data import digits
    >>> feed = EvalFeed(digits(), EvalView(32, resize=32))
    >>> sum(len(batch.labels) for batch in feed), len(feed.kept), feed.bad
    (1797, 1797, {})
    """

    def __init__(
        self,
        images: ImageSet,
        view: EvalView,
        batch: int = 256,
        cache: str = "none",
        device: str | torch.device = "cpu",
        workers: int = 0,
        on_bad: OnBad | None = None,
    ) -> None:
        _check(cache, workers)
        if batch < 1:
            raise ValueError(f"batch must be 1 or more, got {batch}")
        self.images, self.view, self.batch, self.cache = images, view, batch, cache
        self.device, self.workers, self.on_bad = torch.device(device), workers, on_bad
        self.bad: dict[str, str] = {}
        self.kept = np.empty(0, dtype=np.int64)
        self._labels = torch.from_numpy(images.labels)
        self._stored: list[Batch] | None = None

    def __len__(self) -> int:
        """Batches in a pass when every image can be read."""
        return -(-len(self.images) // self.batch)

    def __iter__(self) -> Iterator[Batch]:
        if self._stored is not None:
            for stored in self._stored:
                yield _moved(stored, self.device)
            return
        kept: list[np.ndarray] = []
        stored_now: list[Batch] = []
        jobs = (
            _Job(rows, None)
            for rows in np.split(np.arange(len(self.images)), range(self.batch, len(self.images), self.batch))
        )
        where = self.device if self.cache == "device" else torch.device("cpu")
        shared = self.cache != "none" and keeping(self.images)
        maker = _Squares(self.images, self.view, self.workers) if shared else _Maker(self.images, self.view)
        for made in maker.run(jobs, self.workers, self.device.type == "cuda"):
            _note(made.bad, self.bad, self.on_bad)
            kept.append(made.rows)
            if len(made.rows) == 0:
                continue
            batch = _moved(Batch(made.images, self._labels[made.rows]), where)
            if self.cache != "none":
                stored_now.append(batch)
            yield _moved(batch, self.device)
        self.kept = np.concatenate(kept) if kept else self.kept
        if self.cache != "none":
            self._stored = stored_now


def draw_rows(labels: np.ndarray, count: int, seed: int, key: int) -> np.ndarray:
    """Rows of `count` random members of each class, class after class: a pure function of its arguments.

    Without replacement, unless a class has fewer members: then all of them take turns.

    >>> rows = drawn(np.array([7, 3, 7, 7, 3]), count=3, seed=0, key=0)
    >>> sorted(rows[3:].tolist()), sorted(set(rows[:3].tolist()))
    ([0, 2, 3], [1, 4])
    """
    if count < 1:
        raise ValueError(f"count must be 1 or more, got {count}")
    order = np.random.default_rng([seed, key, 0, _CHOICE]).permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    _, first, members = np.unique(labels[order], return_index=True, return_counts=True)
    return order[(first[:, None] + np.arange(count) % members[:, None]).ravel()]


def _moved(batch: Batch, device: torch.device) -> Batch:
    assert batch.images is not None
    return batch._replace(images=batch.images.to(device, non_blocking=True))


def _note(found: Iterable[tuple[str, str]], bad: dict[str, str], on_bad: OnBad | None) -> None:
    for title, reason in found:
        if title not in bad:
            bad[title] = reason
            if on_bad is not None:
                on_bad(title, reason)


def _check(cache: str, workers: int) -> None:
    if cache not in CACHES:
        raise ValueError(f"cache must be one of {', '.join(CACHES)}, got {cache!r}")
    if workers < 0:
        raise ValueError(f"workers must be 0 or more, got {workers}")
