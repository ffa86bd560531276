"""Multi-similarity loss with its mining of pairs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from proxymetric.arguments.checks import within
from proxymetric.core.pair_weights import PairWeights
from proxymetric.core.pieces import References
from proxymetric.losses.pairs import mean_or_zero
from proxymetric.losses.ranges import check_cosine, check_scale
from proxymetric.ops import NONE, log1p_exp


@dataclass(frozen=True)
class MultiSimilarity:
    """Hard pairs of each query, weighted softly after the easy pairs are dropped (Wang et al. 2019, Eqs. 13-15).

    ``1/B sum_i [ 1/alpha log(1 + sum_p e^{-alpha (s_ip - base)}) + 1/beta log(1 + sum_n e^{beta (s_in - base)}) ]``

    over the positives with ``s_ip - epsilon < max_n s_in`` and the negatives with ``s_in + epsilon > min_p s_ip``. A
    query that keeps no positive or no negative adds 0.

    CCP's study has (alpha, beta, base) = (2, 40, 0.5) on CUB and SOP, (14.35, 75.83, 0.66) on Cars, (8.49, 57.38, 0.41)
    on In-Shop.

    Relations: `ProxyAnchor` has the same structure, with proxies as anchors and the samples of the batch as their
    pairs. `Circle` multiplies the two sums instead of adding the two logarithms.

    Args:
        alpha: > 0; scale of the positive pairs.
        beta: > 0; scale of the negative pairs.
        base: in [-1, 1]; the similarity at which both exponents are 0.
        epsilon: in [0, 2]; margin of the mining. None turns the mining off.

    Example:
        >>> refs = References(torch.eye(2), torch.tensor([0, 1]))
        >>> MultiSimilarity()(torch.eye(2)[:1], torch.tensor([1]), refs)
        tensor(1.1566)
    """

    alpha: float = 2.0
    beta: float = 40.0
    base: float = 0.5
    epsilon: float | None = 0.1

    def __post_init__(self) -> None:
        check_scale(alpha=self.alpha, beta=self.beta)
        check_cosine(base=self.base)
        if self.epsilon is not None:
            within(0, 2, "two cosines are at most 2 apart", epsilon=self.epsilon)

    def __call__(self, queries: Tensor, labels: Tensor, refs: References, weight: PairWeights | None = None) -> Tensor:
        s = queries @ refs.normalised(queries).T
        positive, negative = refs.positives(labels)
        if self.epsilon is not None:
            similarity = s.detach()
            farthest_positive = similarity.masked_fill(~positive, float("inf")).amin(1, keepdim=True)
            nearest_negative = similarity.masked_fill(~negative, NONE).amax(1, keepdim=True)
            positive = positive & (similarity - self.epsilon < nearest_negative)
            negative = negative & (similarity + self.epsilon > farthest_positive)
            has_both = positive.any(1, keepdim=True) & negative.any(1, keepdim=True)
            positive, negative = positive & has_both, negative & has_both
        pull, push = -self.alpha * (s - self.base), self.beta * (s - self.base)
        if weight is not None:
            pull, push = weight.positive.of(refs.labels)(s) * pull, weight.negative.of(refs.labels)(s) * push
        pulled = log1p_exp(torch.logsumexp(pull.masked_fill(~positive, NONE), 1)) / self.alpha
        pushed = log1p_exp(torch.logsumexp(push.masked_fill(~negative, NONE), 1)) / self.beta
        return mean_or_zero(pulled + pushed)
