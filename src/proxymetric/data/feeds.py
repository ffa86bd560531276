"""Feeds read images from files or from a cache and yield them to the network in batches.

A feed leaves unreadable images out of their batch, records them in `bad` with the reason, and reports each once to
`on_bad`. The content of a batch depends neither on the number of workers nor on where an earlier run stopped. If no
image of a batch can be read, the batch has 0 images.
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
from torch.utils.data import DataLoader, Dataset, get_worker_info

from proxymetric.arguments.signatures import one_of
from proxymetric.core.pieces import Batch
from proxymetric.data.batches import Batches
from proxymetric.data.decoded_cache import Decoded, decode_all, is_shared
from proxymetric.data.decoding import BadImage
from proxymetric.data.image_buffer import ImageBuffer
from proxymetric.data.images import ImageSet
from proxymetric.data.read_ahead import read_ahead
from proxymetric.data.views import Boxes, EvalView, TrainView, cut, shrink

CACHES = ("none", "memory", "device")
DECODINGS = ("full", "reduced")
# The last entry of a seed: it separates the random numbers of `TrainFeed.epoch`, `TrainFeed.views` and `draw_rows`.
_EPOCH_STREAM = 1
_VIEWS_STREAM = 2
_ROWS_STREAM = 3

OnBad = Callable[[str, str], None]
"""called with the title of an unreadable image and the reason"""


class _BatchRequest(NamedTuple):
    """A batch to read: its image indices and, for training, the random numbers of their views."""

    rows: np.ndarray
    draws: np.ndarray | None


class _BatchImages(NamedTuple):
    """The images of a request: pixels and indices of the readable ones, titles of the others with the reasons."""

    images: Tensor
    rows: np.ndarray
    bad: list[tuple[str, str]]


class _Reader(Dataset):
    """Reads and cuts the images of a request, in this process or in a worker process."""

    def __init__(self, images: ImageSet, view: TrainView | EvalView, min_side: int | None = None) -> None:
        self.images = images
        self.view = view
        self.min_side = min_side
        self.cached: _CachedImages | None = None

    def __getitem__(self, request: _BatchRequest) -> _BatchImages:
        size = self.view.size
        pixels = torch.empty((len(request.rows), 3, size, size), dtype=torch.uint8)
        if get_worker_info() is not None:
            # The worker's queue would do this in a thread, whose errors are lost: the main process would wait for ever.
            pixels.share_memory_()
        squares = pixels.numpy()
        readable: list[int] = []
        places: list[int] = []
        bad: list[tuple[str, str]] = []
        boxes = self._cached_boxes(request)
        for k, row in enumerate(request.rows.tolist()):
            try:
                image = self.images.read(row, self.min_side) if self.cached is None else self.cached.read(row)
            except BadImage as error:
                bad.append((error.path, error.reason))
                continue
            if boxes is not None:
                square = cut(image, boxes, k, size, self.view.interpolation)
            elif isinstance(self.view, TrainView):
                assert request.draws is not None
                square = self.view.cut(image, request.draws[k : k + 1]).numpy()
            else:
                square = self.view(image).numpy()
            squares[len(readable)] = square
            readable.append(row)
            places.append(k)
        pixels = pixels[: len(readable)]
        if isinstance(self.view, TrainView) and request.draws is not None:
            finished = self.view.finish(pixels, request.draws[places])
            pixels = pixels.copy_(finished) if finished is not pixels else pixels
        return _BatchImages(pixels, np.array(readable, dtype=np.int64), bad)

    def _cached_boxes(self, request: _BatchRequest) -> Boxes | None:
        """Return the boxes of all training views, if the sizes of the images are known because they are in memory."""
        if self.cached is None:
            return None
        assert isinstance(self.view, TrainView)
        if self.view.transform is not None:
            return None
        assert request.draws is not None
        rows = self.cached.buffer_rows[request.rows]  # -1, the last image, for an image that cannot be read
        buffer = self.cached.buffer
        if not len(buffer.heights):
            return None
        return self.view.boxes(buffer.heights[rows], buffer.widths[rows], request.draws)

    def run(self, requests: Iterable[_BatchRequest], workers: int, pin: bool) -> Iterator[_BatchImages]:
        """Yield the images of the requests in order, read by this process (`workers=0`) or by worker processes."""
        if workers == 0:
            yield from map(self.__getitem__, requests)
            return
        loader = DataLoader(
            self,
            batch_size=None,
            sampler=requests,
            num_workers=workers,
            pin_memory=pin,
            generator=torch.Generator(),  # without it, each epoch draws a number from the global generator
            worker_init_fn=_ignore_signals_of_others,
        )
        batches = iter(loader)
        try:
            yield from batches
        finally:
            # After an error torch would do this when the interpreter ends: then it can wait for ever for a lock of a
            # thread that does not run any more.
            getattr(batches, "_shutdown_workers", lambda: None)()


class _ThreadReader(_Reader):
    """Reads and cuts the images of a request in threads of this process.

    On the CPU, the network uses all cores: threads need no start, no copy between processes and no shared memory.
    """

    def run(self, requests: Iterable[_BatchRequest], workers: int, pin: bool) -> Iterator[_BatchImages]:
        """Yield the images of the requests in order, as `_Reader.run` does, with threads instead of processes."""
        if workers == 0:
            return super().run(requests, workers, pin)
        return read_ahead(self.__getitem__, requests, threads=workers, ahead=workers + 1)


def _ignore_signals_of_others(worker: int) -> None:
    """Make a worker process ignore signals that do not come from the main process.

    Ctrl-C and a batch system's SIGTERM reach every process of a group, but only the main process handles them.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main = multiprocessing.parent_process()
    if main is None or not hasattr(signal, "sigwaitinfo"):
        return
    # The main process ends a worker by SIGTERM, so the worker must check who sent it instead of ignoring it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def wait() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != main.pid:
            pass
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


class _CachedImages:
    """All readable images of a set in one buffer, decoded and reduced to the size that the view needs."""

    def __init__(
        self, images: ImageSet, view: TrainView, device: torch.device, workers: int, min_side: int | None = None
    ) -> None:
        def load(row: int) -> np.ndarray:
            return np.asarray(shrink(images.read(row, min_side), view.stored, view.interpolation))

        loaded = decode_all(images, ("shrunk", view.stored, view.interpolation, min_side), load, workers)
        self.errors = {row: item for row, item in enumerate(loaded) if isinstance(item, BadImage)}
        self.buffer_rows = np.full(len(images), -1, dtype=np.int64)
        readable = [row for row in range(len(images)) if row not in self.errors]
        self.buffer_rows[readable] = np.arange(len(readable))
        pixels = [item for item in loaded if not isinstance(item, BadImage)]
        loaded.clear()
        self.buffer = ImageBuffer(pixels, device)

    def read(self, row: int) -> Image.Image:
        if row in self.errors:
            raise self.errors[row]
        return self.buffer.image(int(self.buffer_rows[row]))


class _SharedReader:
    """Makes evaluation batches from centre crops that feeds share through `keep_decoded`."""

    def __init__(self, images: ImageSet, view: EvalView, threads: int) -> None:
        processing = ("centre", view.size, view.resize, view.interpolation)
        self.size = view.size
        self.crops: list[Decoded] = decode_all(images, processing, lambda row: view(images.read(row)).numpy(), threads)

    def run(self, requests: Iterable[_BatchRequest], workers: int, pin: bool) -> Iterator[_BatchImages]:
        """Yield the images of the requests in order, as `_Reader.run` does."""
        for request in requests:
            items = [(row, self.crops[row]) for row in request.rows.tolist()]
            readable = [(row, item) for row, item in items if not isinstance(item, BadImage)]
            bad = [(item.path, item.reason) for _, item in items if isinstance(item, BadImage)]
            empty = np.empty((0, 3, self.size, self.size), dtype=np.uint8)
            pixels = np.stack([item for _, item in readable]) if readable else empty
            yield _BatchImages(torch.from_numpy(pixels), np.array([row for row, _ in readable], dtype=np.int64), bad)


class TrainFeed:
    """Yields batches of random views for training; the same seeds give the same views.

    The view of an image is a pure function of the seed, the epoch, the step and the position in the global batch. A run
    that resumes in the middle of an epoch, or with another number of workers or processes, sees the same pixels.

    Args:
        images: the training images.
        batches: the image indices of each batch.
        view: cuts the training views.
        cache: "none" reads the files in every epoch. "memory" keeps decoded images in main memory, with the shorter
            side reduced to `view.stored`. "device" keeps them on `device` and cuts whole batches there by bilinear
            interpolation; with `device="cpu"`, this is the fastest cache for small images. Caches are filled
            when the first epoch begins.
        device: device of the images of a batch; labels stay in main memory, so that methods can read them without
            synchronising with the GPU.
        workers: processes that read and cut images ("none", "memory") and threads that fill a cache; 0 uses only this
            process.
        seed: seed of the views, at least 0.
        on_bad: called once for each unreadable image, with its title and the reason.
        decode: "full" decodes every pixel. "reduced" decodes large JPEGs at 1/2, 1/4 or 1/8 of their size, as long as
            the shorter side has at least `view.stored` pixels: this is faster and changes the pixels.

    Attributes:
        bad: for each unreadable image so far, its title and the reason.

    Raises:
        ValueError: an argument is out of range, or `batches` was built for another number of images.

    Example:
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
        decode: str = "full",
    ) -> None:
        _check(cache, workers)
        one_of("decode", decode, DECODINGS)
        if batches.count != len(images):
            raise ValueError(
                f"batches: got batches for {batches.count} images, expected {len(images)}, the number of images"
            )
        if seed < 0:
            raise ValueError(f"seed: got {seed}, expected at least 0")
        if cache == "device" and view.transform is not None:
            raise ValueError(
                "cache: got 'device' with a transform of your own, which changes one image at a time in main memory; "
                "expected 'none' or 'memory'"
            )
        self.images = images
        self.batches = batches
        self.view = view
        self.cache = cache
        self.device = torch.device(device)
        self.workers = workers
        self.seed = seed
        self.on_bad = on_bad
        self.bad: dict[str, str] = {}
        self._min_side = view.stored if decode == "reduced" else None
        self._reader = _Reader(images, view, self._min_side)
        self._labels = torch.from_numpy(images.labels)
        self._cached: _CachedImages | None = None

    @property
    def advice(self) -> str:
        """What to try if training waits for these images; empty if there is nothing to try."""
        if self.cache == "none":
            return (
                "try --cache memory, which decodes each image once, or --set data.decode=reduced, which changes pixels"
            )
        if self.cache == "memory":
            return "try --cache device, which cuts whole batches at once, or more processes: --set data.workers=N"
        return ""

    def __len__(self) -> int:
        """Return the number of steps in an epoch."""
        return len(self.batches)

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of epoch `number`, from step `start` on."""
        self._fill_cache()
        yield from self._batches(self._requests(number, start))

    @property
    def labels(self) -> np.ndarray:
        """The labels (N,) of all images, readable or not."""
        return self.images.labels

    def views(self, rows: np.ndarray, key: int, batch: int = 256) -> Iterator[Batch]:
        """Yield random views of the images `rows`; they are a pure function of the seed, the rows and the key.

        A row that occurs twice gives two different views. Unreadable images are left out.

        Args:
            rows: image indices.
            key: distinguishes the random numbers of several calls.
            batch: images per batch.

        Example:
            >>> from proxymetric.data import digits
            >>> images = digits()
            >>> feed = TrainFeed(images, Batches(images.labels, batch=64), TrainView(32, resize=32), cache="device")
            >>> [len(part.labels) for part in feed.views(np.array([5, 5, 9]), key=0, batch=2)]
            [2, 1]
        """
        self._fill_cache()
        draws = self.view.draw(len(rows), np.random.default_rng([self.seed, key, 0, _VIEWS_STREAM]))
        requests = (_BatchRequest(rows[i : i + batch], draws[i : i + batch]) for i in range(0, len(rows), batch))
        yield from self._batches(requests)

    def _batches(self, requests: Iterator[_BatchRequest]) -> Iterator[Batch]:
        """Yield the batch of each request."""
        if self.cache == "device":
            yield from map(self._cut, requests)
            return
        for result in self._reader.run(requests, self.workers, self.device.type == "cuda"):
            _report_bad(result.bad, self.bad, self.on_bad)
            yield _to_device(Batch(result.images, self._labels[result.rows]), self.device)

    def _requests(self, number: int, start: int) -> Iterator[_BatchRequest]:
        """Yield the requests of this rank for epoch `number`, from step `start` on."""
        for step, rows in enumerate(self.batches.global_batches(number, start), start):
            draws = self.view.draw(len(rows), np.random.default_rng([self.seed, number, step, _EPOCH_STREAM]))
            share = self.batches.share(len(rows))
            yield _BatchRequest(rows[share], draws[share])

    def _fill_cache(self) -> None:
        """Decode all images once, if there is a cache and it is empty."""
        if self.cache == "none" or self._cached is not None:
            return
        device = self.device if self.cache == "device" else torch.device("cpu")
        self._cached = _CachedImages(self.images, self.view, device, self.workers, self._min_side)
        _report_bad([(e.path, e.reason) for e in self._cached.errors.values()], self.bad, self.on_bad)
        self._reader.cached = self._cached

    def _cut(self, request: _BatchRequest) -> Batch:
        """Cut the views of a request from the buffer on the device."""
        assert self._cached is not None
        assert request.draws is not None
        buffer = self._cached.buffer
        buffer_rows = self._cached.buffer_rows[request.rows]
        readable = buffer_rows >= 0
        rows = buffer_rows[readable]
        boxes = self.view.boxes(buffer.heights[rows], buffer.widths[rows], request.draws[readable])
        images = self.view.finish(buffer.cut(rows, boxes, self.view.size), request.draws[readable])
        return Batch(images, self._labels[request.rows[readable]])


class EvalFeed:
    """Yields the centre crops of all readable images in order.

    Args:
        images: the images.
        view: cuts the centre crops.
        batch: images per batch, at least 1; a batch with unreadable images is smaller.
        cache: "none" reads the files in every pass; "memory" and "device" keep the crops of the first full pass,
            (N, 3, size, size) uint8, in main memory or on `device`.
        device: device of the images of a batch; labels stay in main memory.
        workers: processes that read and cut images, or threads if `device` is the CPU; with 0, images are read when
            their batch is asked for.
        on_bad: called once for each unreadable image, with its title and the reason.

    Attributes:
        kept: indices of the images that the last full pass yielded.
        read_rows: indices of the readable images of each batch that the current pass has read.
        bad: for each unreadable image so far, its title and the reason.

    Raises:
        ValueError: an argument is out of range.

    Example:
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
            raise ValueError(f"batch: got {batch}, expected at least 1")
        self.images = images
        self.view = view
        self.batch = batch
        self.cache = cache
        self.device = torch.device(device)
        self.workers = workers
        self.on_bad = on_bad
        self.bad: dict[str, str] = {}
        self.kept = np.empty(0, dtype=np.int64)
        self.read_rows: list[np.ndarray] = []
        self._labels = torch.from_numpy(images.labels)
        self._stored: list[Batch] | None = None

    def __len__(self) -> int:
        """Return the number of batches in a pass if every image can be read."""
        return -(-len(self.images) // self.batch)

    def __iter__(self) -> Iterator[Batch]:
        if self._stored is not None:
            for batch in self._stored:
                yield _to_device(batch, self.device)
            return
        readable = self.read_rows = []
        new_batches: list[Batch] = []
        requests = (
            _BatchRequest(rows, None)
            for rows in np.split(np.arange(len(self.images)), range(self.batch, len(self.images), self.batch))
        )
        cache_device = self.device if self.cache == "device" else torch.device("cpu")
        uses_shared_cache = self.cache != "none" and is_shared(self.images)
        file_reader = _ThreadReader if self.device.type == "cpu" else _Reader
        reader = (
            _SharedReader(self.images, self.view, self.workers)
            if uses_shared_cache
            else file_reader(self.images, self.view)
        )
        for result in reader.run(requests, self.workers, self.device.type == "cuda"):
            _report_bad(result.bad, self.bad, self.on_bad)
            readable.append(result.rows)
            if len(result.rows) == 0:
                continue
            batch = _to_device(Batch(result.images, self._labels[result.rows]), cache_device)
            if self.cache != "none":
                new_batches.append(batch)
            yield _to_device(batch, self.device)
        self.kept = np.concatenate(readable) if readable else self.kept
        if self.cache != "none":
            self._stored = new_batches


def draw_rows(labels: np.ndarray, count: int, seed: int, key: int) -> np.ndarray:
    """Draw `count` random images of each class; the result is a pure function of the arguments.

    Images are drawn without replacement; a class with fewer than `count` images repeats them in turn.

    Args:
        labels: (N,) labels of the images.
        count: images of each class, at least 1.
        seed: seed of the draw, at least 0.
        key: distinguishes the random numbers of several calls.

    Returns:
        (classes x count,) image indices, grouped by class in the order of the labels.

    Example:
        >>> rows = draw_rows(np.array([7, 3, 7, 7, 3]), count=3, seed=0, key=0)
        >>> sorted(rows[3:].tolist()), sorted(set(rows[:3].tolist()))
        ([0, 2, 3], [1, 4])
    """
    if count < 1:
        raise ValueError(f"count: got {count}, expected at least 1")
    order = np.random.default_rng([seed, key, 0, _ROWS_STREAM]).permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    _, starts, class_sizes = np.unique(labels[order], return_index=True, return_counts=True)
    return order[(starts[:, None] + np.arange(count) % class_sizes[:, None]).ravel()]


def _to_device(batch: Batch, device: torch.device) -> Batch:
    assert batch.images is not None
    images = batch.images
    if device.type == "cuda" and images.device.type == "cpu" and not images.is_pinned():
        images = images.pin_memory()  # a copy from other memory waits until the GPU has finished its step
    return batch._replace(images=images.to(device, non_blocking=True))


def _report_bad(errors: Iterable[tuple[str, str]], bad: dict[str, str], on_bad: OnBad | None) -> None:
    """Add unreadable images to `bad` and report the new ones to `on_bad`."""
    for title, reason in errors:
        if title not in bad:
            bad[title] = reason
            if on_bad is not None:
                on_bad(title, reason)


def _check(cache: str, workers: int) -> None:
    one_of("cache", cache, CACHES)
    if workers < 0:
        raise ValueError(f"workers: got {workers}, expected at least 0")
