"""Triplet loss over all violating triplets."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from proxymetric.arguments.checks import above_zero
from proxymetric.core.pair_weights import PairWeights
from proxymetric.core.pieces import References
from proxymetric.losses.pairs import distances, refuse_weights
from proxymetric.losses.ranges import check_distance_margin
from proxymetric.ops import NONE

MAX_TRIPLETS, MAX_TRIPLETS_ON_GPU = 2**18, 2**24
"""triplets that are compared one by one; more are counted in sorted distances, which takes a GPU more launches"""


@dataclass(frozen=True)
class Triplet:
    """Bring every positive nearer than every negative by a margin, mean over violating triplets (Schroff et al. 2015).

    ``mean over (i, p, n) with d_ip + margin > d_in of  d_ip - d_in + margin``

    It is a weighted sum of distances: a pair counts once for every violated triplet that it is part of, a negative pair
    with the opposite sign. Large batches count them in sorted distances, so a query costs R log R and not R^2.

    Relations: `MultiSimilarity` weights the same pairs softly; `ProxyNCA` compares with proxies instead of samples.

    Args:
        margin: > 0 and usually <= 2, on Euclidean distances. CCP's study has 0.0961 on CUB, 0.1190 on Cars, 0.0451 on
            In-Shop and SOP.

    Example:
        >>> refs = References(torch.eye(2), torch.tensor([0, 1]))
        >>> Triplet(margin=0.1)(torch.eye(2)[:1], torch.tensor([1]), refs)
        tensor(1.5142)
    """

    margin: float = 0.0961

    def __post_init__(self) -> None:
        above_zero(margin=self.margin)
        check_distance_margin(margin=self.margin)

    def __call__(self, queries: Tensor, labels: Tensor, refs: References, weight: PairWeights | None = None) -> Tensor:
        refuse_weights(self, weight)
        d = distances(queries, refs)
        with torch.no_grad():
            positive, negative = refs.positives(labels)
            thresholds = (d + self.margin).where(positive, NONE)  # negatives nearer than this violate the triplet
            of_positives, of_negatives = _violated(thresholds, d.where(negative, float("inf")))
            violated = of_positives.sum(dtype=torch.promote_types(d.dtype, torch.float32))
            count = violated.clamp(min=1)
            weights = (of_positives - of_negatives) / count
            margin = violated / count * self.margin  # 0 if no triplet is violated
        return (weights * d).sum() + margin


def _violated(thresholds: Tensor, negatives: Tensor) -> tuple[Tensor, Tensor]:
    """The violated triplets that each pair is part of, as its positive and as its negative: (B, R) each.

    Args:
        thresholds: (B, R) the distances of positives plus the margin; -inf for other pairs.
        negatives: (B, R) the distances of negatives; inf for other pairs.
    """
    batch, rows = negatives.shape
    if batch * rows * rows <= (MAX_TRIPLETS_ON_GPU if negatives.is_cuda else MAX_TRIPLETS):
        is_violated = thresholds.unsqueeze(2) > negatives.unsqueeze(1)
        return is_violated.sum(2), is_violated.sum(1)
    of_positives = torch.searchsorted(negatives.sort(1).values, thresholds)
    return of_positives, rows - torch.searchsorted(thresholds.sort(1).values, negatives, right=True)
