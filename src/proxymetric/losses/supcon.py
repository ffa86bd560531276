"""Supervised contrastive loss: a softmax over all other samples, averaged over the positives."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from proxymetric.core.pair_weights import PairWeights
from proxymetric.core.pieces import References
from proxymetric.losses.ranges import check_temperature
from proxymetric.ops import NONE


@dataclass(frozen=True)
class SupCon:
    """Cross entropy of each positive among all references, averaged for each query (Khosla et al. 2020, Eq. 2).

    ``1/|I| sum_{i in I} 1/|P(i)| sum_{p in P(i)} [ log sum_{a != i} e^{s_ia / temperature} - s_ip / temperature ]``

    where I are the queries that have a positive, and a are all references but the query itself, positives included.
    The mean over the positives is outside of the logarithm (L_out of the paper).

    Relations: with one positive for each query this is NT-Xent, the loss of SimCLR. With one proxy of each class as the
    references it is `CosFace` without a margin, which is "norm-softmax". `MultiSimilarity` has one logarithm for
    positives and one for negatives; here positives compete with each other.

    Args:
        temperature: > 0; 0.1 in the paper.

    Example:
        >>> refs = References(torch.eye(2), torch.tensor([0, 1]))
        >>> SupCon(temperature=1.0)(torch.eye(2)[:1], torch.tensor([1]), refs)
        tensor(1.3133)
    """

    temperature: float = 0.1

    def __post_init__(self) -> None:
        check_temperature(temperature=self.temperature)

    def __call__(self, queries: Tensor, labels: Tensor, refs: References, weight: PairWeights | None = None) -> Tensor:
        s = queries @ refs.normalised(queries).T
        positive, negative = refs.positives(labels)
        logits = s / self.temperature
        if weight is not None:
            of_positives, of_negatives = weight.positive.of(refs.labels)(s), weight.negative.of(refs.labels)(s)
            logits = torch.where(positive, of_positives, of_negatives) * logits
        log_sums = torch.logsumexp(logits.masked_fill(~(positive | negative), NONE), 1)
        counts = positive.sum(1)
        means = torch.where(positive, logits, 0.0).sum(1) / counts.clamp(min=1)
        return torch.where(counts > 0, log_sums - means, 0.0).sum() / counts.count_nonzero().clamp(min=1)
