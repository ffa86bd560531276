"""The mean cosine of two training images: near 1, the embeddings of all images have nearly the same direction."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from proxymetric.core.normalisation import unit
from proxymetric.data import EvalFeed, EvalView, ImageSet
from proxymetric.encoders import Encoder
from proxymetric.runs.assemble import FeatureFeed, RunContext, eval_view
from proxymetric.training.trainer import Feed

SAMPLE_IMAGES = 128
"""training images whose embeddings are compared"""
SAMPLE_BATCH = 16
"""images that are embedded at once: fewer than in a training step, so that they fit into the memory of the device"""


def mean_cosine(embeddings: Tensor) -> float | None:
    """The mean cosine over all pairs of different rows; None if there are fewer than two, or if it is not finite.

    With the rows x_1 .. x_N, each divided by its length: ``(|sum_i x_i|^2 - sum_i |x_i|^2) / (N (N - 1))``

    Args:
        embeddings: (N, D); they need not be normalised.

    Example:
        >>> mean_cosine(torch.tensor([[1.0, 0.0], [0.0, 3.0], [2.0, 0.0]]))  # cosines 0, 1 and 0
        0.3333333333333333
    """
    count = len(embeddings)
    if count < 2:
        return None
    rows = unit(embeddings.cpu().double())
    value = float(rows.sum(dim=0).square().sum() - rows.square().sum()) / (count * (count - 1))
    return value if math.isfinite(value) else None


def cosine_meter(context: RunContext, encoder: Encoder, images: ImageSet, feed: Feed) -> Callable[[], float | None]:
    """Make a function that returns the mean cosine of a sample of the training images under the current encoder.

    The sample depends only on the seed of the recipe, and its pixels or features are read once: a call costs a forward
    pass of 128 images. The encoder is in evaluation mode, where BatchNorm does not depend on the batch, so the figures
    before and during the training can be compared. Unreadable images are left out; the training reports them.

    Args:
        context: what the parts of the run share.
        encoder: the encoder that is trained.
        images: the training images.
        feed: the training batches; a frozen encoder takes the cached features from them.
    """
    seed = context.recipe.seed
    if isinstance(feed, FeatureFeed):
        features = feed.vectors[torch.from_numpy(_sample(len(feed.vectors), seed)).to(feed.vectors.device)]
        return _in_evaluation_mode(encoder, lambda: encoder.head(features))
    part = images.subset(_sample(len(images), seed))
    workers = min(context.workers(images), len(part) // SAMPLE_BATCH)
    sample = EvalFeed(part, EvalView(**eval_view(context.recipe)), SAMPLE_BATCH, "memory", context.device, workers)

    def embed() -> Tensor:
        vectors = [encoder(encoder.place(batch.images)).float() for batch in sample if batch.images is not None]
        return torch.cat(vectors) if vectors else torch.empty(0, encoder.dim)

    return _in_evaluation_mode(encoder, embed)


def _sample(count: int, seed: int) -> np.ndarray:
    """The sorted indices of a random sample of `count` images."""
    return np.sort(np.random.default_rng(seed).permutation(count)[:SAMPLE_IMAGES])


def _in_evaluation_mode(encoder: Encoder, embed: Callable[[], Tensor]) -> Callable[[], float | None]:
    """Make a function that embeds in evaluation mode, without gradient, and returns the mean cosine."""

    @torch.no_grad()
    def measure() -> float | None:
        training = encoder.training
        encoder.eval()
        try:
            return mean_cosine(embed())
        finally:
            encoder.train(training)

    return measure
