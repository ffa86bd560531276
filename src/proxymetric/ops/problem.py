"""What a reduction is asked: the pairs of a batch and its references, the exponent of each kind, and the answers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from proxymetric.core.pair_weights import PairWeights
from proxymetric.core.pieces import References
from proxymetric.ops.similarity import Similarity

NONE = float("-inf")
"""the logarithm of an empty sum"""


class Line(NamedTuple):
    """An exponent as a function of the similarity: `slope * s + offset`."""

    slope: float
    offset: float = 0.0

    def __call__(self, s: Tensor) -> Tensor:
        return (self.slope * s).add_(self.offset)


class Problem(NamedTuple):
    """All that a reduction is about but the queries; the arguments of `over_batch` in their order."""

    labels: Tensor
    """(B,)"""
    refs: References
    positive: Line
    negative: Line
    of_class: Similarity | None = None
    weight: PairWeights | None = None

    @property
    def per_column(self) -> int:
        """Rows that make one column: K where `of_class` says how, else 1."""
        if self.of_class is None:
            return 1
        if self.refs.per_class is None:
            raise ValueError(
                "base: this loss compares with classes of K references each; loose rows have no such structure"
            )
        return self.refs.per_class


class Settings(NamedTuple):
    """How a reduction is computed: what `using` sets."""

    impl: str = "auto"
    """a name of `IMPLS`, or "auto": by size"""
    budget: int = 2**30
    """bytes that similarities may take from a forward pass to its backward; beyond that they are computed again"""
    rows: int | None = None
    """references of one chunk; None: as many as suit the processor"""


class Reduced(NamedTuple):
    """`log sum exp` over the positives and over the negatives, -inf where there are none; and the mean weights."""

    positive: Tensor
    negative: Tensor
    positive_weight: Tensor
    """mean weight of the positives: 1 without a weighting, 0 where there are no positives"""
    negative_weight: Tensor
    """the same for the negatives"""


LEAST_WEIGHT = 1e-12
"""that a sum is divided by: that of no pairs is 0"""


class Totals(NamedTuple):
    """Sums over the columns: of `log(1 + sum exp)`, divided by what was asked for, and of mean weights."""

    positive: Tensor
    negative: Tensor
    positive_weight: Tensor
    negative_weight: Tensor

    def over_weights(self, positive: bool, negative: bool) -> Totals:
        """Divide these sums by the summed weights."""
        found = self
        if positive:
            found = found._replace(positive=self.positive / self.positive_weight.clamp(min=LEAST_WEIGHT))
        if negative:
            found = found._replace(negative=self.negative / self.negative_weight.clamp(min=LEAST_WEIGHT))
        return found


class Means(NamedTuple):
    """The mean over the columns of `log(1 + sum exp)`, a scalar for the positives and one for the negatives."""

    positive: Tensor
    negative: Tensor


Count = float | None
"""what a sum over the columns is divided by; None: by the summed mean weights of the columns"""


def log1p_exp(z: Tensor) -> Tensor:
    """`log(1 + exp z)` for a log-sum z: 0 with a zero gradient where z is -inf, z itself where it is large."""
    return torch.logaddexp(z, z.new_zeros(()))


def lifted(queries: Tensor) -> Tensor:
    """Queries in the type of the sums, float32 or better; references follow, row by row where that can be."""
    return queries.float() if queries.dtype in (torch.half, torch.bfloat16) else queries
