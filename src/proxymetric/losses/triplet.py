"""Triplet loss over all violating triplets."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from proxymetric.checks import above_zero
from proxymetric.core.pair_weights import PairWeights
from proxymetric.core.pieces import References
from proxymetric.losses.pairs import distances, refuse_weights
from proxymetric.losses.ranges import check_distance


@dataclass(frozen=True)
class Triplet:
    """Bring every positive nearer than every negative by a margin, mean over violating triplets (Schroff et al. 2015).

    ``mean over (i, p, n) with d_ip + margin > d_in of  d_ip - d_in + margin``

    The sum over n comes from sorted distances and their running sums, so a query costs R log R and not R^2.

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
        check_distance(margin=self.margin)

    def __call__(self, queries: Tensor, labels: Tensor, refs: References, weight: PairWeights | None = None) -> Tensor:
        refuse_weights(self, weight)
        d = distances(queries, refs)
        positive, negative = refs.positives(labels)
        sorted_negatives = d.masked_fill(~negative, float("inf")).sort(1).values
        threshold = d + self.margin  # negatives nearer than this violate the triplet
        count = torch.searchsorted(sorted_negatives.detach(), threshold.detach())
        # Sums behind the last negative are infinite; no count reaches them.
        running_sums = functional.pad(sorted_negatives.cumsum(1), (1, 0))
        violation = (count * threshold - running_sums.gather(1, count)) * positive
        return violation.sum() / (count * positive).sum().clamp(min=1)
