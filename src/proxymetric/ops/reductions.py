"""`score -> log-sum-exp`, over the batch for each column or over the columns for each query. This is the definition."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from proxymetric.ops.similarity import Similarity, similarities
from proxymetric.seam import References, Weight

NONE = float("-inf")
"""the logarithm of an empty sum"""


class Line(NamedTuple):
    """An exponent as a function of the similarity: `slope * s + offset`."""

    slope: float
    offset: float = 0.0

    def __call__(self, s: Tensor) -> Tensor:
        return self.slope * s + self.offset


class Reduced(NamedTuple):
    """`log sum exp` over the positives and over the negatives, -inf where there are none; and the mean weights."""

    positive: Tensor
    negative: Tensor
    positive_weight: Tensor
    """mean weight of the positives: 1 without a weighting, 0 where there are no positives"""
    negative_weight: Tensor
    """the same for the negatives"""


def over_batch(
    queries: Tensor,
    labels: Tensor,
    refs: References,
    positive: Line,
    negative: Line,
    of_class: Similarity | None = None,
    weight: Weight | None = None,
) -> Reduced:
    """For each column c: `log sum_i exp(w z(s_ic))` over the queries i of its class, and over the others."""
    return _reduce(0, queries, labels, refs, positive, negative, of_class, weight)


def over_classes(
    queries: Tensor,
    labels: Tensor,
    refs: References,
    positive: Line,
    negative: Line,
    of_class: Similarity | None = None,
    weight: Weight | None = None,
) -> Reduced:
    """For each query i: `log sum_c exp(w z(s_ic))` over the columns c of its class, and over the others."""
    return _reduce(1, queries, labels, refs, positive, negative, of_class, weight)


def _reduce(
    dim: int,
    queries: Tensor,
    labels: Tensor,
    refs: References,
    positive: Line,
    negative: Line,
    of_class: Similarity | None,
    weight: Weight | None,
) -> Reduced:
    s, is_positive, is_negative, classes = similarities(queries, labels, refs, of_class)
    up, down = positive(s), negative(s)
    if weight is None:
        up_weight, down_weight = is_positive.any(dim).to(s), is_negative.any(dim).to(s)
    else:
        # Weights come before the mask: 0 * -inf is not a number.
        up_each, down_each = weight.positive.of(classes)(s), weight.negative.of(classes)(s)
        up, down = up_each * up, down_each * down
        up_weight, down_weight = _mean(up_each, is_positive, dim), _mean(down_each, is_negative, dim)
    # An empty sum is -inf and its gradient not a number; masked_fill's own backward puts the zero there.
    return Reduced(
        torch.logsumexp(up.masked_fill(~is_positive, NONE), dim),
        torch.logsumexp(down.masked_fill(~is_negative, NONE), dim),
        up_weight,
        down_weight,
    )


def _mean(values: Tensor, where: Tensor, dim: int) -> Tensor:
    return (values * where).sum(dim) / where.sum(dim).clamp(min=1)


def log1p_exp(z: Tensor) -> Tensor:
    """`log(1 + exp z)` for a log-sum z: 0 with a zero gradient where z is -inf, z itself where it is large."""
    return torch.logaddexp(z, z.new_zeros(()))
