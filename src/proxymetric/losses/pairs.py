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


def mean_where(values: Tensor, mask: Tensor) -> Tensor:
    """The mean of the values where the mask is true; 0 if it is true nowhere."""
    return (values * mask).sum() / mask.sum().clamp(min=1)


def mean_or_zero(values: Tensor) -> Tensor:
    """The mean of the values; 0 if there are none."""
    return values.mean() if len(values) else values.sum()


def refuse_weights(loss: object, weight: PairWeights | None) -> None:
    """Refuse a weighting for a loss that has no exponent."""
    if weight is not None:
        raise ValueError(
            f"weighting: got a weighting for {type(loss).__name__}, which has no exponent that a weight could "
            "multiply; expected a proxy loss (proxy-anchor, proxy-nca, mpa, soft-triple) or multi-similarity"
        )
