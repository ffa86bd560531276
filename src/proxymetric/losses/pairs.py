"""Parts that the pair losses share: distances, means, and the refusal of a weighting."""

from __future__ import annotations

from torch import Tensor

from proxymetric.core.pair_weights import PairWeights
from proxymetric.core.pieces import References


def distances(queries: Tensor, refs: References) -> Tensor:
    """Euclidean distances (B, R); a distance of 0 has a gradient of 0."""
    rows = refs.normalised(queries)
    squared = (queries.square().sum(1, keepdim=True) + rows.square().sum(1) - 2 * (queries @ rows.T)).clamp(min=0)
    is_positive = squared > 1e-12
    return squared.where(is_positive, squared.new_ones(())).sqrt() * is_positive


def mean_where(values: Tensor, where: Tensor) -> Tensor:
    """The mean of the chosen values; 0 if none is chosen."""
    return (values * where).sum() / where.sum().clamp(min=1)


def mean_or_zero(values: Tensor) -> Tensor:
    """The mean of the values; 0 where there are none."""
    return values.mean() if len(values) else values.sum()


def refuse_weights(loss: object, weight: PairWeights | None) -> None:
    """Refuse a weighting on behalf of a loss that has no exponent."""
    if weight is not None:
        raise ValueError(
            f"weighting: got one for {type(loss).__name__}, which has no exponent that a weight could multiply; "
            "expected a proxy loss (proxy-anchor, proxy-nca, mpa, soft-triple) or multi-similarity"
        )
