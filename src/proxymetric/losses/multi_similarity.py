"""Multi-similarity loss with its mining."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from proxymetric.checks import above_zero, at_least_zero, number
from proxymetric.core.pair_weights import PairWeights
from proxymetric.core.pieces import References
from proxymetric.ops import NONE, log1p_exp


@dataclass(frozen=True)
class MultiSimilarity:
    """Soft-weighted hard pairs of each query, after throwing the easy ones away (Wang et al. 2019, Eqs. 13-15).

    ``1/B sum_i [ 1/alpha log(1 + sum_p e^{-alpha (s_ip - base)}) + 1/beta log(1 + sum_n e^{beta (s_in - base)}) ]``

    over the positives with ``s_ip - epsilon < max_n s_in`` and the negatives with ``s_in + epsilon > min_p s_ip``; a
    query that keeps none of either adds 0.

    alpha, beta, base: (2, 40, 0.5) on CUB and SOP, (14.35, 75.83, 0.66) on Cars, (8.49, 57.38, 0.41) on In-Shop in
    CCP's study. epsilon: 0.1, None turns the mining off.

    Relations: `ProxyAnchor` is this structure with proxies in the place of the other samples, turned round.

    >>> refs = References(torch.eye(2), torch.tensor([0, 1]))
    >>> MultiSimilarity()(torch.eye(2)[:1], torch.tensor([1]), refs)
    tensor(1.1566)
    """

    alpha: float = 2.0
    beta: float = 40.0
    base: float = 0.5
    epsilon: float | None = 0.1

    def __post_init__(self) -> None:
        above_zero(alpha=self.alpha, beta=self.beta)
        number(base=self.base)
        if self.epsilon is not None:
            at_least_zero(epsilon=self.epsilon)

    def __call__(self, queries: Tensor, labels: Tensor, refs: References, weight: PairWeights | None = None) -> Tensor:
        s = queries @ refs.normalised(queries).T
        positive, negative = refs.positives(labels)
        if self.epsilon is not None:
            still = s.detach()
            easiest = still.masked_fill(~positive, float("inf")).amin(1, keepdim=True)
            hardest = still.masked_fill(~negative, NONE).amax(1, keepdim=True)
            positive, negative = (
                positive & (still - self.epsilon < hardest),
                negative & (still + self.epsilon > easiest),
            )
            both = positive.any(1, keepdim=True) & negative.any(1, keepdim=True)
            positive, negative = positive & both, negative & both
        pull, push = -self.alpha * (s - self.base), self.beta * (s - self.base)
        if weight is not None:
            pull, push = weight.positive.of(refs.labels)(s) * pull, weight.negative.of(refs.labels)(s) * push
        pulled = log1p_exp(torch.logsumexp(pull.masked_fill(~positive, NONE), 1)) / self.alpha
        pushed = log1p_exp(torch.logsumexp(push.masked_fill(~negative, NONE), 1)) / self.beta
        return (pulled + pushed).mean()
