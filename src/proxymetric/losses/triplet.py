"""Triplet loss over all violating triplets."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from proxymetric.checks import above_zero
from proxymetric.core.pair_weights import PairWeights
from proxymetric.core.pieces import References
from proxymetric.losses.pairs import distances, unweighted


@dataclass(frozen=True)
class Triplet:
    """Every positive nearer than every negative by a margin (Schroff et al. 2015), mean over the violating triplets.

    ``mean over (i, p, n) with d_ip + margin > d_in of  d_ip - d_in + margin``

    The sum over n is taken from sorted distances and their running sums, so that a query costs R log R and not R^2.

    margin: > 0 on Euclidean distances; CUB 0.0961, Cars 0.1190, In-Shop and SOP 0.0451 in CCP's study.

    Relations: `MultiSimilarity` weighs the same pairs softly; `ProxyNCA` replaces the samples compared with by proxies.

    >>> refs = References(torch.eye(2), torch.tensor([0, 1]))
    >>> Triplet(margin=0.1)(torch.eye(2)[:1], torch.tensor([1]), refs)
    tensor(1.5142)
    """

    margin: float = 0.0961

    def __post_init__(self) -> None:
        above_zero(margin=self.margin)

    def __call__(self, queries: Tensor, labels: Tensor, refs: References, weight: PairWeights | None = None) -> Tensor:
        unweighted(self, weight)
        d = distances(queries, refs)
        positive, negative = refs.positives(labels)
        far = d.masked_fill(~negative, float("inf")).sort(1).values
        bar = d + self.margin
        count = torch.searchsorted(far.detach(), bar.detach())
        near = torch.cat([far.new_zeros(len(far), 1), far.where(far.isfinite(), 0.0).cumsum(1)], 1)
        violation = (count * bar - near.gather(1, count)) * positive
        return violation.sum() / (count * positive).sum().clamp(min=1)
