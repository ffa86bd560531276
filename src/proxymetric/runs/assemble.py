"""Build the parts of a run from its recipe: data, feeds, encoder, criterion."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from proxymetric.core.pieces import Batch
from proxymetric.criterion import Criterion
from proxymetric.data import Batches, EvalFeed, EvalView, ImageSet, Split, TrainFeed, TrainView, open_data, split
from proxymetric.data.feeds import draw_rows
from proxymetric.data.open import check_source
from proxymetric.data.splits import altered
from proxymetric.data.views import named_view
from proxymetric.encoders import Encoder, build
from proxymetric.features.cache import cached_features
from proxymetric.papers import method as make_method
from proxymetric.papers import rows
from proxymetric.papers.class_counts import listed_classes, uses_frequency, with_class_counts
from proxymetric.runs.defaults import is_pretrained
from proxymetric.runs.recipe import Recipe
from proxymetric.runs.score import EmbeddedSet, name_classes
from proxymetric.system.watcher import Watcher
from proxymetric.training import trainer
from proxymetric.training.learner import Learner
from proxymetric.training.parallel import gathered_parameters
from proxymetric.training.process_group import ProcessGroup

EVAL_BATCH = 256
"""images that are embedded at once"""
PIXELS_BATCH = 1024
"""images whose raw pixels are read at once"""
MAX_PIXELS_SIDE = 64
"""images up to this side are also scored as raw pixels, as a baseline"""
MAX_WORKERS = 8
"""most processes that decode images, where `data.workers` is -1"""


@dataclass
class RunContext:
    """What all parts of a run share.

    Attributes:
        recipe: the checked recipe.
        device: where the run computes.
        world: the processes that train together.
        watcher: receives messages and progress.
        bad: images that could not be read, with the reason.
        features: features that cannot be kept on disk.
    """

    recipe: Recipe
    device: torch.device
    world: ProcessGroup
    watcher: Watcher
    bad: dict[str, str]
    features: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def on_bad(self, title: str, reason: str) -> None:
        """Record an image that could not be read, and report it once."""
        if title not in self.bad:
            self.bad[title] = reason
            self.watcher.say(f"left out, cannot be read: {title} ({reason})")

    def cache(self, images: ImageSet) -> str:
        """The value of `data.cache` for these images, with "auto" resolved."""
        setting = self.recipe.data.cache
        if setting != "auto":
            return setting
        return "none" if images.arrays is None or self.recipe.view["transform"] is not None else "device"

    def workers(self, images: ImageSet) -> int:
        """The value of `data.workers` for these images, with -1 resolved."""
        setting = self.recipe.data.workers
        if setting >= 0:
            return setting
        if images.arrays is not None:
            return 0
        cores = os.cpu_count() or 1
        return min(MAX_WORKERS, cores - 1) if self.device.type == "cuda" else min(1, cores - 1)


def eval_view(recipe: Recipe) -> dict[str, Any]:
    """The arguments of the `EvalView` that belongs to the recipe's training view."""
    size, resize = recipe.view["size"], recipe.view["resize"]
    if recipe.view["name"] is not None:
        return named_view(recipe.view["name"], size)["eval"]
    return {
        "size": size,
        "resize": resize if resize is not None and resize >= size else None,
        "interpolation": recipe.view["interpolation"],
    }


def scored_on(recipe: Recipe, images: ImageSet) -> str:
    """Name the classes that are evaluated during training, with their numbers."""
    counts = {"classes": len(images.classes), "images": len(images)}
    return name_classes("test" if recipe.protocol == "papers" else "held-out", counts)


def train_view(recipe: Recipe) -> TrainView:
    """The training view of a recipe.

    Raises:
        ValueError: a setting is out of range; it is named as the recipe names it.
    """
    try:
        return TrainView(**{key: value for key, value in recipe.view.items() if key != "name"})
    except ValueError as error:
        argument = str(error).partition(":")[0]
        raise ValueError(f"view.{error}" if argument in recipe.view else str(error)) from None


def open_split(recipe: Recipe, watcher: Watcher) -> tuple[ImageSet, Split]:
    """Open the images of a recipe and split their classes.

    Returns:
        All images, and the split into training, validation and test classes.

    Raises:
        ValueError: the recipe names no data, or the data cannot be opened or split.
    """
    check_source(recipe.data.path)
    watcher.say(f"opening {recipe.data.path}")
    images = open_data(recipe.data.path, recipe.data.layout)
    parts = split(images, recipe.data.validation, recipe.data.test, recipe.seed)
    parts = parts._replace(train=altered(parts.train, recipe.data.fraction, recipe.data.wrong_labels, recipe.seed))
    counts = ", ".join(
        f"{len(part)} images of {len(part.classes)} classes {purpose}"
        for purpose, part in zip(("to train on", "held out to choose the epoch", "to test on"), parts)
        if part is not None
    )
    layout = "" if recipe.data.layout == "auto" else f" (data.layout={recipe.data.layout!r})"
    watcher.say(f"{images.name}{layout}: {counts}")
    for note in images.notes:
        watcher.say(note)
    if recipe.protocol == "papers":
        watcher.say("protocol papers: the test classes are scored at every evaluation and choose the epoch")
    return images, parts


def make_encoder(recipe: Recipe) -> Encoder:
    """Build the encoder of a recipe; a pre-trained or frozen network that averages its last map adds the maximum."""
    encoder = build(**recipe.encoder, size=recipe.view["size"])
    if recipe.encoder["pooling"] == "auto" and (recipe.train.frozen or is_pretrained(recipe.encoder)):
        encoder.add_maximum()
    return encoder


def check_loss(recipe: Recipe) -> None:
    """Refuse wrong values of the table `[loss]`, before any data is opened.

    Raises:
        ValueError: the method does not take these values.
    """
    listed = listed_classes(recipe.method, recipe.loss)
    classes = 2 if listed is None else listed[1]
    width = 2 if recipe.loss["nested"] is None else recipe.loss["nested"][-1]
    make_criterion(recipe, [1] * classes, width)
    if listed is not None and recipe.train.refit and recipe.data.validation:
        raise ValueError(
            f"train.refit: got true with {listed[1]} numbers in loss.{listed[0]}; expected no refit: it trains on more "
            "classes, for which there are no numbers ('frequency' counts them again)"
        )


def images_by_class(images: ImageSet) -> list[int]:
    """The number of images of each class; 1 for a class that lost all its images to wrong labels."""
    counts: list[int] = np.bincount(images.labels, minlength=len(images.classes)).clip(min=1).tolist()
    return counts


def class_counts(recipe: Recipe, images: ImageSet) -> list[int] | None:
    """The numbers of images that the method of a recipe weighs its classes by; None if it does not need them."""
    return images_by_class(images) if uses_frequency(recipe.method, recipe.loss) else None


def make_criterion(recipe: Recipe, counts: list[int], dim: int, shard: tuple[int, int] | None = None) -> Criterion:
    """Build the method of a recipe.

    Args:
        recipe: the checked recipe.
        counts: the number of training images of each class.
        dim: width of the embeddings.
        shard: the number of this process and the number of processes that divide the proxies; None: all are here.
    """
    arguments = with_class_counts(recipe.method, recipe.loss, counts)
    return make_method(recipe.method, classes=len(counts), dim=dim, shard=shard, **arguments)


def make_batches(context: RunContext, labels: np.ndarray) -> Batches:
    """Build the batch sampler of a recipe.

    If the recipe does not set `train.per_class`, each class in a batch has the number of images that the method
    recommends. The batch is then smaller than `train.batch` where the data has too few classes to fill it.

    Args:
        context: what the parts of the run share.
        labels: (N,) the labels of the training images.

    Raises:
        ValueError: the recipe asks for batches that these labels do not allow.
    """
    options, world = context.recipe.train, context.world
    methods = rows(context.recipe.method, context.recipe.loss)
    recommendation = next((row.samples_per_class for row in methods if row.samples_per_class), None)
    per_class, batch = options.per_class or None, options.batch
    if options.per_class is None and recommendation:
        per_class, unit = recommendation, math.lcm(recommendation, world.size)
        limit = min(batch, recommendation * len(np.unique(labels)))
        batch = max(unit, limit - limit % unit)
        if batch != options.batch:
            context.watcher.say(f"batch size {batch}: {context.recipe.method} needs {per_class} images of each class")
    try:
        return Batches(labels, batch, per_class, context.recipe.seed, world.rank, world.size)
    except ValueError as error:
        raise ValueError(f"{error} (--batch, --set train.per_class=...)") from None


def _no_readable_image(images: str) -> str:
    """The error for a set of images that are all unreadable."""
    return f"data: got {images}, none of which can be read; expected images that can be decoded"


class Feed(trainer.Feed, Protocol):
    """The training batches of a run, and views of any training image outside the epochs."""

    @property
    def labels(self) -> np.ndarray:
        """(N,) the labels of the training images."""

    def views(self, rows: np.ndarray, key: int, batch: int = EVAL_BATCH) -> Iterator[Batch]:
        """Training views of the images `rows`, a pure function of `key`."""


class FeatureFeed:
    """Batches of cached features, for `--frozen`.

    Args:
        vectors: (N, F) the features.
        labels: (N,) their labels.
        batches: which rows make up each batch.
        device: where the batches lie.
    """

    advice = ""

    def __init__(self, vectors: Tensor, labels: np.ndarray, batches: Batches, device: torch.device) -> None:
        self.vectors, self.labels, self.batches = vectors.to(device), labels, batches
        self._labels = torch.from_numpy(labels).to(device)

    def __len__(self) -> int:
        return len(self.batches)

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from batch `start` on."""
        yield from map(self._rows, self.batches.epoch(number, start))

    def views(self, rows: np.ndarray, key: int, batch: int = EVAL_BATCH) -> Iterator[Batch]:
        """The features of `rows`; `key` has no effect, because each image has one cached view."""
        yield from (self._rows(rows[i : i + batch]) for i in range(0, len(rows), batch))

    def _rows(self, rows: np.ndarray) -> Batch:
        index = torch.from_numpy(rows).to(self.vectors.device)
        return Batch(self.vectors[index], self._labels[index])


class RefuseUnreadable:
    """A feed that raises an error when no image of a whole epoch can be read.

    Args:
        feed: the feed to watch.
        images: the number of training images, for the message.
    """

    def __init__(self, feed: Feed, images: int) -> None:
        self.feed, self.images, self.labels, self.views = feed, images, feed.labels, feed.views
        self.advice = feed.advice

    def __len__(self) -> int:
        return len(self.feed)

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from batch `start` on."""
        readable = 0
        for count, batch in enumerate(self.feed.epoch(number, start), start + 1):
            readable += len(batch.labels)
            if start == 0 and count == len(self.feed) and not readable:
                raise ValueError(_no_readable_image(f"{self.images} training images"))
            yield batch


def embed_features(context: RunContext, encoder: Encoder, images: ImageSet, name: str) -> EmbeddedSet:
    """Compute the backbone's features of all readable images, or take them from the feature cache.

    The backbone is as it was before training: a trained one has no features in the cache.

    Args:
        context: what the parts of the run share.
        encoder: the encoder whose backbone computes the features.
        images: the images.
        name: what the images are called in the progress bar.
    """
    features = cached_features(
        encoder,
        images,
        EvalView(**eval_view(context.recipe)),
        workers=context.workers(images),
        progress=lambda done, total: context.watcher.work(f"features: {name}", done, total),
        on_read=lambda done, total: context.watcher.work(f"reading: {name}", done, total),
        held=context.features,
    )
    for title, reason in features.bad.items():
        context.on_bad(title, reason)
    return EmbeddedSet(images, features.vectors, features.kept)


def train_feed(context: RunContext, encoder: Encoder, images: ImageSet) -> Feed:
    """Build the feed of the training images."""
    recipe = context.recipe
    if recipe.train.frozen:
        features = embed_features(context, encoder, images, "training images")
        if not len(features.vectors):
            raise ValueError(_no_readable_image(f"{len(images)} training images"))
        labels = features.labels.numpy()
        return FeatureFeed(features.vectors, labels, make_batches(context, labels), context.device)
    feed = TrainFeed(
        images,
        make_batches(context, images.labels),
        train_view(recipe),
        context.cache(images),
        context.device,
        context.workers(images),
        recipe.seed,
        context.on_bad,
        recipe.data.decode,
    )
    # With several processes, one process may meet only unreadable images while the others can still train.
    return RefuseUnreadable(feed, len(images)) if context.world.size == 1 else feed


def make_pool(context: RunContext, encoder: Encoder, feed: Feed) -> Callable[[int, int], tuple[Tensor, Tensor]]:
    """Make a function that embeds random training images with the current encoder.

    Returns:
        `pool(count, step)`: vectors (N, D) and labels (N,) of `count` training views of each class. They depend only on
        the recipe's seed, the step and the encoder, and are the same in every process.
    """
    encode = encoder.head if context.recipe.train.frozen else encoder
    transfer_device = context.device if context.world.size == 1 else torch.device("cpu")

    @torch.no_grad()
    def embed_views(count: int, step: int) -> tuple[Tensor, Tensor]:
        rows = draw_rows(feed.labels, count, context.recipe.seed, step)
        vectors, labels = [], []
        for number, batch in enumerate(feed.views(rows, step, EVAL_BATCH), 1):
            assert batch.images is not None
            if len(batch.labels):
                vectors.append(encode(batch.images).float())
                labels.append(batch.labels)
            context.watcher.work("embedding a pool", min(number * EVAL_BATCH, len(rows)), len(rows))
        if not vectors:
            raise ValueError(_no_readable_image(f"{len(rows)} random training images"))
        return torch.cat(vectors).to(transfer_device), torch.cat(labels).to(transfer_device)

    def pool(count: int, step: int) -> tuple[Tensor, Tensor]:
        training = encoder.training
        encoder.eval()
        try:
            # The first process embeds for all: rounding differs between devices, and all must pick the same proxies.
            with gathered_parameters(encoder):
                vectors, labels = context.world.from_first(lambda: embed_views(count, step))
        finally:
            encoder.train(training)
        return vectors.to(context.device), labels.to(context.device)

    return pool


def embedder(
    context: RunContext, encoder: Encoder, images: ImageSet, name: str, precision: torch.dtype | None = None
) -> Callable[[str], EmbeddedSet]:
    """Make a function that embeds `images` with the current encoder.

    Args:
        context: what the parts of the run share.
        encoder: the encoder that computes the embeddings.
        images: the images.
        name: what the images are called in the progress bar and in errors.
        precision: the type in which the encoder computes under autocast; None: float32.

    Returns:
        A function of "vectors" (the embeddings) or "features" (the input of the head).
    """
    if context.recipe.train.frozen:
        features = embed_features(context, encoder, images, name)
        features = features._replace(vectors=features.vectors.to(context.device))

        @torch.no_grad()
        def from_features(kind: str) -> EmbeddedSet:
            encoder.eval()
            vectors = features.vectors if kind == "features" else encoder.head(features.vectors)
            return features._replace(vectors=vectors.float())

        return from_features

    view = EvalView(**eval_view(context.recipe))
    feed = EvalFeed(
        images, view, EVAL_BATCH, context.cache(images), context.device, context.workers(images), context.on_bad
    )

    @torch.no_grad()
    def from_images(kind: str) -> EmbeddedSet:
        encoder.eval()
        encode = encoder.features if kind == "features" else encoder
        vectors, done = [], 0
        for batch in feed:
            assert batch.images is not None
            with torch.autocast(context.device.type, precision, enabled=precision is not None):
                vectors.append(encode(encoder.place(batch.images)).float())
            done += len(batch.labels)
            context.watcher.work(f"embedding {name}", done, len(images))
        if not vectors:
            raise ValueError(_no_readable_image(f"{len(images)} images of {name}"))
        return EmbeddedSet(images, torch.cat(vectors), feed.kept)

    return from_images


def embed_pixels(images: ImageSet, view: EvalView, on_bad: Callable[[str, str], None]) -> EmbeddedSet:
    """Use the raw pixels of the images as vectors: a baseline for every encoder.

    Args:
        images: the images.
        view: the part of an image that the encoder receives.
        on_bad: receives the title of each image that cannot be read, and the reason.
    """
    feed = EvalFeed(images, view, PIXELS_BATCH, "none", "cpu", 0, on_bad)
    pixels = [batch.images.flatten(1).float() for batch in feed if batch.images is not None]
    if not pixels:
        raise ValueError(_no_readable_image(f"{len(images)} images of the unseen classes"))
    return EmbeddedSet(images, torch.cat(pixels), feed.kept)


def small_pixels(context: RunContext, images: ImageSet) -> EmbeddedSet | None:
    """The raw pixels of a run's images; None if these are too large for a sensible baseline."""
    if context.recipe.view["size"] > MAX_PIXELS_SIDE:
        return None
    return embed_pixels(images, EvalView(**eval_view(context.recipe)), context.on_bad)


def make_learner(context: RunContext, encoder: Encoder, counts: list[int]) -> Learner:
    """Build the learner: encoder and criterion, on the run's device, with proxies sharded where the recipe says so.

    Args:
        context: what the parts of the run share.
        encoder: the encoder.
        counts: the number of training images of each class.
    """
    world = context.world
    shard = (world.rank, world.size) if context.recipe.train.shard and world.size > 1 else None
    criterion = make_criterion(context.recipe, counts, encoder.dim, shard)
    if context.device.type == "cuda":
        # Schemes copy the weights later, and comparing weights with copies in another memory layout is slow.
        encoder.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return Learner(encoder, criterion, context.recipe.train.frozen, world.size).to(context.device)
