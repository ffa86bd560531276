"""Circle loss: a similarity that is far from its optimum has a large gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from proxymetric.core.pair_weights import PairWeights
from proxymetric.core.pieces import References
from proxymetric.core.surrogate import held
from proxymetric.losses.pairs import mean_or_zero
from proxymetric.losses.ranges import check_cosine, check_scale
from proxymetric.ops import NONE, log1p_exp


@dataclass(frozen=True)
class Circle:
    """Compare positives with negatives, each weighted by its distance from its optimum (Sun et al. 2020, Eq. 6).

    ``1/B sum_i log(1 + sum_n e^{scale a_n (s_in - margin)} sum_p e^{-scale a_p (s_ip - 1 + margin)})``

    with ``a_p = [1 + margin - s_ip]_+`` and ``a_n = [s_in + margin]_+`` (Eq. 5). A query without a positive or without
    a negative adds 0. The weights a_p and a_n count as constants in the gradient (Eq. 10), so the gradient is not that
    of the value: it is that of the value with a_p and a_n frozen.

    Relations: `MultiSimilarity` adds one logarithm for positives and one for negatives, and mines pairs. Here the two
    sums are multiplied: a query whose negatives are all far away also has a small gradient from its positives. The
    decision boundary is a circle in (s_n, s_p); that of `Triplet` and `ProxyNCA` is a line.

    Args:
        scale: > 0; gamma in the paper. 80 for fine-grained retrieval, 256 for faces.
        margin: in [-1, 1]; m in the paper. 0.4 for fine-grained retrieval, 0.25 for faces.

    Example:
        >>> refs = References(torch.eye(2), torch.tensor([0, 1]))
        >>> Circle(scale=1.0)(torch.eye(2)[:1], torch.tensor([1]), refs)
        tensor(1.8509)
    """

    scale: float = 80.0
    margin: float = 0.4

    def __post_init__(self) -> None:
        check_scale(scale=self.scale)
        check_cosine(margin=self.margin)

    def __call__(self, queries: Tensor, labels: Tensor, refs: References, weight: PairWeights | None = None) -> Tensor:
        s = queries @ refs.normalised(queries).T
        positive, negative = refs.positives(labels)
        pull = -self.scale * held((1 + self.margin - s).clamp(min=0)) * (s - (1 - self.margin))
        push = self.scale * held((s + self.margin).clamp(min=0)) * (s - self.margin)
        if weight is not None:
            pull, push = weight.positive.of(refs.labels)(s) * pull, weight.negative.of(refs.labels)(s) * push
        pulled = torch.logsumexp(pull.masked_fill(~positive, NONE), 1)
        pushed = torch.logsumexp(push.masked_fill(~negative, NONE), 1)
        return mean_or_zero(log1p_exp(pulled + pushed))
