"""From a recipe to the parts of a run: data, feeds, encoder, criterion."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from proxymetric.core.pieces import Batch, Pool
from proxymetric.core.watcher import Watcher
from proxymetric.criterion import Criterion
from proxymetric.data import Batches, EvalFeed, EvalView, ImageSet, Split, TrainFeed, TrainView, open_data, split
from proxymetric.data.feeds import draw_rows
from proxymetric.data.splits import altered
from proxymetric.data.views import named_view
from proxymetric.encoders import Encoder, build, cached_features
from proxymetric.metrics import evaluate
from proxymetric.papers import lookup
from proxymetric.papers import method as make_method
from proxymetric.recipe import Recipe
from proxymetric.training import trainer
from proxymetric.training.learner import Learner
from proxymetric.training.parallel import gathered_parameters
from proxymetric.training.process_group import ProcessGroup

Embedded = tuple[Tensor, Tensor, np.ndarray]
"""vectors, labels, and the indices of the images that could be read"""


@dataclass
class RunContext:
    """What every part of a run shares."""

    recipe: Recipe
    device: torch.device
    world: ProcessGroup
    watcher: Watcher
    bad: dict[str, str]
    """images that could not be read, with the reason"""

    def on_bad(self, title: str, reason: str) -> None:
        if title not in self.bad:
            self.bad[title] = reason
            self.watcher.say(f"left out, cannot be read: {title} ({reason})")

    def cache(self, images: ImageSet) -> str:
        asked = self.recipe.data.cache
        if asked != "auto":
            return asked
        return "none" if images.arrays is None else "device"

    def workers(self, images: ImageSet) -> int:
        asked = self.recipe.data.workers
        if asked >= 0:
            return asked
        if images.arrays is not None:
            return 0
        cores = os.cpu_count() or 1
        return min(8, cores - 1) if self.device.type == "cuda" else min(1, cores - 1)


def eval_view(recipe: Recipe) -> dict[str, Any]:
    """The arguments of the `EvalView` that goes with the recipe's training view."""
    size, resize = recipe.view["size"], recipe.view["resize"]
    if recipe.view["name"] is not None:
        return named_view(recipe.view["name"], size)["eval"]
    return {
        "size": size,
        "resize": resize if resize is not None and resize >= size else None,
        "interpolation": recipe.view["interpolation"],
    }


def scored_on(recipe: Recipe) -> str:
    """The classes that an evaluation during training is on, in words."""
    return "test classes" if recipe.protocol == "papers" else "held-out classes"


def train_view(recipe: Recipe) -> TrainView:
    return TrainView(**{key: value for key, value in recipe.view.items() if key != "name"})


def open_split(recipe: Recipe, watcher: Watcher) -> tuple[ImageSet, Split]:
    """The images of the recipe, and which classes are for what."""
    if not recipe.data.path:
        raise ValueError("data: say where the images are: --data FOLDER (or a CSV, or glyphs, or digits)")
    watcher.say(f"opening {recipe.data.path}")
    images = open_data(recipe.data.path, recipe.data.layout)
    parts = split(images, recipe.data.validation, recipe.data.test, recipe.seed)
    parts = parts._replace(train=altered(parts.train, recipe.data.fraction, recipe.data.wrong_labels, recipe.seed))
    said = ", ".join(
        f"{len(part)} images of {len(part.classes)} classes {what}"
        for what, part in zip(("to train on", "held out to choose the epoch", "to test on"), parts)
        if part is not None
    )
    how = "" if recipe.data.layout == "auto" else f" (data.layout={recipe.data.layout!r})"
    watcher.say(f"{images.name}{how}: {said}")
    if recipe.protocol == "papers":
        watcher.say("protocol papers: the test classes are scored at every evaluation and choose the epoch")
    return images, parts


def make_encoder(recipe: Recipe) -> Encoder:
    return build(**recipe.encoder, size=recipe.view["size"])


def make_criterion(recipe: Recipe, classes: int, dim: int) -> Criterion:
    return make_method(recipe.method, classes=classes, dim=dim, **recipe.loss)


def make_batches(desk: RunContext, labels: np.ndarray) -> Batches:
    """The batches that the recipe asks for; images per class that are only advised give way to the data."""
    options, world = desk.recipe.train, desk.world
    advised = lookup(desk.recipe.method).about.samples_per_class
    per_class, batch = options.per_class or None, options.batch
    if options.per_class is None and advised:
        per_class, unit = advised, math.lcm(advised, world.size)
        most = min(batch, advised * len(np.unique(labels)))
        batch = max(unit, most - most % unit)
        if batch != options.batch:
            desk.watcher.say(f"batches of {batch}: {desk.recipe.method} wants {advised} images of a class in each")
    try:
        return Batches(labels, batch, per_class, desk.recipe.seed, world.rank, world.size)
    except ValueError as error:
        raise ValueError(f"{error} (--batch, --set train.per_class=...)") from None


class Feed(trainer.Feed, Protocol):
    """What a run trains on; it also shows any of its images beside the epochs."""

    @property
    def labels(self) -> np.ndarray: ...

    def views(self, rows: np.ndarray, key: int, batch: int = 256) -> Iterator[Batch]: ...


class FeatureFeed:
    """Batches of cached features: what `--frozen` trains on."""

    def __init__(self, vectors: Tensor, labels: np.ndarray, batches: Batches, device: torch.device) -> None:
        self.vectors, self.labels, self.batches = vectors.to(device), labels, batches
        self._labels = torch.from_numpy(labels).to(device)

    def __len__(self) -> int:
        return len(self.batches)

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        yield from map(self._rows, self.batches.epoch(number, start))

    def views(self, rows: np.ndarray, key: int, batch: int = 256) -> Iterator[Batch]:
        """The features of `rows`: they were made of one view, whatever the key."""
        yield from (self._rows(rows[i : i + batch]) for i in range(0, len(rows), batch))

    def _rows(self, rows: np.ndarray) -> Batch:
        index = torch.from_numpy(rows).to(self.vectors.device)
        return Batch(self.vectors[index], self._labels[index])


class RefuseUnreadable:
    """A feed that ends a run on images of which not one can be read, instead of training on nothing."""

    def __init__(self, feed: Feed, images: int) -> None:
        self.feed, self.images, self.labels, self.views = feed, images, feed.labels, feed.views

    def __len__(self) -> int:
        return len(self.feed)

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        found = 0
        for place, batch in enumerate(self.feed.epoch(number, start), start + 1):
            found += len(batch.labels)
            if start == 0 and place == len(self.feed) and not found:
                raise ValueError(f"data: not one of the {self.images} training images can be read")
            yield batch


def features_of(desk: RunContext, encoder: Encoder, images: ImageSet, what: str) -> Embedded:
    """The backbone's features of all readable images, from the cache where they are known."""
    found = cached_features(
        encoder,
        images,
        EvalView(**eval_view(desk.recipe)),
        workers=desk.workers(images),
        progress=lambda done, total: desk.watcher.work(f"features: {what}", done, total),
    )
    for title, reason in found.bad.items():
        desk.on_bad(title, reason)
    return found.vectors, torch.from_numpy(images.labels[found.kept]), found.kept


def train_feed(desk: RunContext, encoder: Encoder, images: ImageSet) -> Feed:
    """The feed that a run trains on."""
    recipe = desk.recipe
    if recipe.train.frozen:
        vectors, labels, _ = features_of(desk, encoder, images, "training images")
        if not len(vectors):
            raise ValueError(f"data: not one of the {len(images)} training images can be read")
        return FeatureFeed(vectors, labels.numpy(), make_batches(desk, labels.numpy()), desk.device)
    feed = TrainFeed(
        images,
        make_batches(desk, images.labels),
        train_view(recipe),
        desk.cache(images),
        desk.device,
        desk.workers(images),
        recipe.seed,
        desk.on_bad,
    )
    # Of several processes one alone may have met nothing but bad images: the others go on.
    return RefuseUnreadable(feed, len(images)) if desk.world.size == 1 else feed


def make_pool(desk: RunContext, encoder: Encoder, feed: Feed, step: Callable[[], int]) -> Pool:
    """Embeddings of random training images as training sees them, by the encoder as it is now.

    A pure function of the recipe's seed, the step and the encoder; the same in every process.
    """
    encode = encoder.head if desk.recipe.train.frozen else encoder
    between = desk.device if desk.world.size == 1 else torch.device("cpu")

    @torch.no_grad()
    def embedded(count: int) -> tuple[Tensor, Tensor]:
        rows = draw_rows(feed.labels, count, desk.recipe.seed, step())
        vectors, labels, size = [], [], 256
        for number, batch in enumerate(feed.views(rows, step(), size), 1):
            assert batch.images is not None
            if len(batch.labels):
                vectors.append(encode(batch.images).float())
                labels.append(batch.labels)
            desk.watcher.work("embedding a pool", min(number * size, len(rows)), len(rows))
        if not vectors:
            raise ValueError(f"data: not one of {len(rows)} random training images can be read")
        return torch.cat(vectors).to(between), torch.cat(labels).to(between)

    def pool(count: int) -> tuple[Tensor, Tensor]:
        training = encoder.training
        encoder.eval()
        try:
            # Rounding differs from device to device, and all processes must pick the same.
            with gathered_parameters(encoder):
                vectors, labels = desk.world.from_first(lambda: embedded(count))
        finally:
            encoder.train(training)
        return vectors.to(desk.device), labels.to(desk.device)

    return pool


def embedder(desk: RunContext, encoder: Encoder, images: ImageSet, what: str) -> Callable[[str], Embedded]:
    """A function that embeds `images` with the encoder as it is now: "vectors", or "features" before the head."""
    if desk.recipe.train.frozen:
        vectors, labels, kept = features_of(desk, encoder, images, what)
        vectors = vectors.to(desk.device)

        @torch.no_grad()
        def from_features(kind: str) -> Embedded:
            encoder.eval()
            return (vectors if kind == "features" else encoder.head(vectors)).float(), labels, kept

        return from_features

    view = EvalView(**eval_view(desk.recipe))
    feed = EvalFeed(images, view, 256, desk.cache(images), desk.device, desk.workers(images), desk.on_bad)

    @torch.no_grad()
    def from_images(kind: str) -> Embedded:
        encoder.eval()
        run = encoder.features if kind == "features" else encoder
        vectors, labels, done = [], [], 0
        for batch in feed:
            assert batch.images is not None
            vectors.append(run(batch.images).float())
            labels.append(batch.labels.cpu())
            done += len(batch.labels)
            desk.watcher.work(f"embedding {what}", done, len(images))
        if not vectors:
            raise ValueError(f"data: not one of the {len(images)} images of {what} can be read")
        return torch.cat(vectors), torch.cat(labels), feed.kept

    return from_images


def scored(images: ImageSet, embedded: Embedded, metrics: Sequence[str]) -> dict[str, float]:
    """The metrics of embedded images: each against all others, or queries against the gallery where the set has one."""
    vectors, labels, kept = embedded
    if images.gallery is None:
        return evaluate(vectors, labels, metrics)
    stored = torch.from_numpy(images.gallery[kept])
    there = stored.to(vectors.device)
    return evaluate(vectors[~there], labels[~stored], metrics, gallery=vectors[there], gallery_labels=labels[stored])


def pixels_of(desk: RunContext, images: ImageSet) -> Embedded:
    """The images themselves as vectors: the baseline under every encoder."""
    feed = EvalFeed(images, EvalView(**eval_view(desk.recipe)), 1024, "none", "cpu", 0, desk.on_bad)
    parts = [(batch.images.flatten(1).float(), batch.labels) for batch in feed if batch.images is not None]
    if not parts:
        raise ValueError(f"data: not one of the {len(images)} images of the unseen classes can be read")
    return torch.cat([v for v, _ in parts]), torch.cat([labels for _, labels in parts]), feed.kept


def make_learner(desk: RunContext, encoder: Encoder, classes: int) -> Learner:
    criterion = make_criterion(desk.recipe, classes, encoder.dim)
    if desk.recipe.train.shard and desk.world.size > 1:
        criterion.shard(desk.world.rank, desk.world.size)
    if desk.device.type == "cuda":
        # Before a scheme copies the weights: copies laid out otherwise are slow to compare with.
        encoder.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return Learner(encoder, criterion, desk.recipe.train.frozen, desk.world.size).to(desk.device)
