"""The input and the output of a reduction: labels, references and exponents in; log-sums and mean weights out."""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from proxymetric.core.pair_weights import PairWeights
from proxymetric.core.pieces import References
from proxymetric.core.similarity import Similarity

NONE = float("-inf")
"""the logarithm of an empty sum"""
MIN_WEIGHT_SUM = 1e-12
"""lower bound of the sum of weights that a total is divided by, so that 0 / 0 becomes 0"""
DEFAULT_BUDGET = 2**30
"""bytes of `Settings.budget` where the free memory is not known"""
Count = float | None
"""the number that a sum over the columns is divided by; None: the sum of the columns' mean weights"""


class Line(NamedTuple):
    """An exponent as a function of the similarity s: `slope * s + offset`."""

    slope: float
    offset: float = 0.0

    def __call__(self, s: Tensor) -> Tensor:
        return (self.slope * s).add_(self.offset)

    def slope_at(self, s: Tensor) -> Tensor | float:
        """The derivative in s."""
        return self.slope


class Exponent(Protocol):
    """The exponent of a query's own class in a cross entropy, as a function of the similarity (`Line`, `Arc`)."""

    def __call__(self, s: Tensor, /) -> Tensor:
        """The exponents."""

    def slope_at(self, s: Tensor, /) -> Tensor | float:
        """Their derivatives in s."""


ROUNDING = 1e-6
"""cosines are held this far from -1 and 1, where the slope of arccos is infinite"""


class Arc(NamedTuple):
    """`scale cos(theta + margin)` as a function of `s = cos theta`; beyond pi `scale (s - margin sin(margin))`.

    Example:
        >>> exponent, s = Arc(scale=1.0, margin=0.5), torch.tensor([0.3, -0.95], requires_grad=True)
        >>> exponent(s)
        tensor([-0.1941, -1.1897], grad_fn=<MulBackward0>)
        >>> torch.autograd.grad(exponent(s).sum(), s)[0], exponent.slope_at(s.detach())
        (tensor([1.0284, 1.0000]), tensor([1.0284, 1.0000]))
    """

    scale: float
    margin: float

    def __call__(self, s: Tensor) -> Tensor:
        with_margin = (s.clamp(-1 + ROUNDING, 1 - ROUNDING).arccos() + self.margin).cos()
        beyond_pi = s - self.margin * math.sin(self.margin)
        return self.scale * with_margin.where(s >= -math.cos(self.margin), beyond_pi)

    def slope_at(self, s: Tensor) -> Tensor:
        """The derivative in s: `scale sin(theta + margin) / sin(theta)`, or `scale` beyond pi.

        It is 0 where the cosine is so near -1 or 1 that it is held fixed.
        """
        cosine = s.clamp(-1 + ROUNDING, 1 - ROUNDING)
        theta = cosine.arccos()
        slope = ((theta + self.margin).sin() / theta.sin()).where(cosine == s, 0.0)
        return self.scale * slope.where(s >= -math.cos(self.margin), 1.0)


class ArcOfQuery(NamedTuple):
    """An `Arc` with a margin for each query.

    Example:
        >>> s = torch.tensor([0.3, -0.95])
        >>> ArcOfQuery(1.0, torch.tensor([0.5, 0.5]))(s), Arc(1.0, 0.5)(s)
        (tensor([-0.1941, -1.1897]), tensor([-0.1941, -1.1897]))
    """

    scale: float
    margins: Tensor
    """(B,)"""

    def __call__(self, s: Tensor) -> Tensor:
        margins = self.margins.view_as(s)
        with_margin = (s.clamp(-1 + ROUNDING, 1 - ROUNDING).arccos() + margins).cos()
        return self.scale * with_margin.where(s >= -margins.cos(), s - margins * margins.sin())

    def slope_at(self, s: Tensor) -> Tensor:
        """The derivative in s, as that of `Arc`."""
        margins, cosine = self.margins.view_as(s), s.clamp(-1 + ROUNDING, 1 - ROUNDING)
        theta = cosine.arccos()
        slope = ((theta + margins).sin() / theta.sin()).where(cosine == s, 0.0)
        return self.scale * slope.where(s >= -margins.cos(), 1.0)


class QueryArc(NamedTuple):
    """`scale (cos(theta + angle_i) - offset_i)` of query i, as a function of `s = cos theta`, with angles in [0, pi].

    Example:
        >>> exponent, s = QueryArc(1.0, torch.tensor([-0.4, 0.4]), torch.tensor([0.8, 0.0])), torch.tensor([0.3, 0.3])
        >>> exponent(s)
        tensor([-0.1522, -0.0952])
        >>> exponent.slope_at(s)
        tensor([0.7986, 1.0435])
    """

    scale: float
    angles: Tensor
    """(B,)"""
    offsets: Tensor
    """(B,)"""

    def __call__(self, s: Tensor) -> Tensor:
        theta = s.clamp(-1 + ROUNDING, 1 - ROUNDING).arccos() + self.angles.view_as(s)
        return self.scale * (theta.clamp(0, math.pi).cos() - self.offsets.view_as(s))

    def slope_at(self, s: Tensor) -> Tensor:
        """The derivative in s: `scale sin(theta + angle) / sin(theta)`; 0 where the angle or the cosine is held."""
        cosine = s.clamp(-1 + ROUNDING, 1 - ROUNDING)
        theta = cosine.arccos()
        moved = theta + self.angles.view_as(s)
        is_free = (cosine == s) & (moved >= 0) & (moved <= math.pi)
        return self.scale * (moved.sin() / theta.sin()).where(is_free, 0.0)


class Problem(NamedTuple):
    """Everything that a reduction depends on except the queries."""

    labels: Tensor
    """(B,)"""
    refs: References
    positive: Line
    """the exponent of pairs of the same class"""
    negative: Line
    """the exponent of pairs of different classes"""
    of_class: Similarity | None = None
    """how the K similarities of a class are combined into one; None: each reference is one column"""
    weight: PairWeights | None = None
    """factors of the exponents; None: all are 1"""

    @property
    def per_column(self) -> int:
        """Reference rows of one column: K with `of_class`, otherwise 1."""
        if self.of_class is None:
            return 1
        if self.refs.per_class is None:
            raise ValueError(
                "references: got single rows, expected K rows for each class: this loss compares queries with classes"
            )
        return self.refs.per_class


class Settings(NamedTuple):
    """How a reduction is computed; `using` changes it."""

    impl: str = "auto"
    """a name in `IMPLS`, or "auto" to choose by size and device"""
    budget: int | None = None
    """bytes of similarities that may be kept from the forward to the backward pass; larger ones are recomputed.
    None: with Triton kernels half of the free memory of the GPU, otherwise `DEFAULT_BUDGET`"""
    rows: int | None = None
    """references in one chunk; None: a number that suits the device"""


class Reduced(NamedTuple):
    """`log sum exp` over the positives and over the negatives, -inf for an empty sum, and the mean weights."""

    positive: Tensor
    negative: Tensor
    positive_weight: Tensor
    """mean weight of the positives: 1 without a weighting, 0 if there are no positives"""
    negative_weight: Tensor
    """mean weight of the negatives: 1 without a weighting, 0 if there are no negatives"""


class Totals(NamedTuple):
    """Sums over the columns: of `log(1 + sum exp)`, divided by a count, and of the columns' mean weights."""

    positive: Tensor
    negative: Tensor
    positive_weight: Tensor | None
    """None: both totals are divided by their weights already, or by a count"""
    negative_weight: Tensor | None

    def over_weights(self, positive: bool, negative: bool) -> Totals:
        """Divide the positive total, the negative total or both by the sum of their weights."""
        totals = self
        if positive:
            assert self.positive_weight is not None
            totals = totals._replace(positive=self.positive / self.positive_weight.clamp(min=MIN_WEIGHT_SUM))
        if negative:
            assert self.negative_weight is not None
            totals = totals._replace(negative=self.negative / self.negative_weight.clamp(min=MIN_WEIGHT_SUM))
        return totals


class Means(NamedTuple):
    """The mean over the columns of `log(1 + sum exp)`: one scalar for the positives and one for the negatives."""

    positive: Tensor
    negative: Tensor


def log1p_exp(z: Tensor) -> Tensor:
    """`log(1 + exp z)` of a log-sum z; where z is -inf, the value and its gradient are 0."""
    return torch.logaddexp(z, z.new_zeros(()))


def at_least_float32(queries: Tensor) -> Tensor:
    """The queries in the type that sums are computed in: float32, or float64 if they are float64."""
    return queries.float() if queries.dtype in (torch.half, torch.bfloat16) else queries


def with_vectors(problem: Problem, vectors: Tensor) -> Problem:
    """The problem with other vectors."""
    return problem._replace(refs=problem.refs._replace(rows=vectors))
