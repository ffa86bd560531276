"""Proxy-Anchor: each proxy is an anchor that the whole batch is compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from proxymetric.checks import above_zero, number
from proxymetric.core.pair_weights import PairWeights
from proxymetric.core.pieces import References
from proxymetric.ops import NONE, Line, mean_over_batch


@dataclass(frozen=True)
class ProxyAnchor:
    """Pull the batch's samples of a class to its proxy, push all others off, the hardest most (Kim et al. 2020, Eq. 4).

    ``1/|C+| sum_{c in C+} log(1 + sum_{i in c} exp(-scale (s_ic - margin)))
    + 1/C sum_c log(1 + sum_{i not in c} exp(scale (s_ic + margin)))``

    C+ are the classes present in the batch. With a weighting, w multiplies the exponents and the sums are divided by
    the summed mean weights of the classes instead of their number (Proxy-ISA, Eqs. 12 and 13).

    scale: > 0, 32 in the paper. margin: 0.1 in the paper.
    positive_norm: "present" divides the first sum by |C+|; "all" by C, weighted or not (VCPA's Eq. 4, VPTSP's code).

    Relations: `MPA` with one proxy per class is this loss for any batch of two classes or more; `ProxyNCA` sums over
    classes per sample instead.

    >>> import torch
    >>> refs = References(torch.eye(2), torch.arange(2), per_class=1)
    >>> ProxyAnchor(scale=1.0, margin=0.0)(torch.eye(2), torch.arange(2), refs)
    tensor(1.0064)
    """

    scale: float = 32.0
    margin: float = 0.1
    positive_norm: str = "present"

    def __post_init__(self) -> None:
        above_zero(scale=self.scale)
        number(margin=self.margin)
        if self.positive_norm not in ("present", "all"):
            raise ValueError(f"positive_norm: got {self.positive_norm!r}, expected 'present' or 'all'")

    def __call__(self, queries: Tensor, labels: Tensor, refs: References, weight: PairWeights | None = None) -> Tensor:
        pull = Line(-self.scale, self.scale * self.margin)
        push = Line(self.scale, self.scale * self.margin)
        everyone = refs.all_rows
        pulled, pushed = mean_over_batch(
            queries, labels, refs, pull, push, weight=weight,
            positive_count=everyone if self.positive_norm == "all" else None,
            negative_count=everyone if weight is None else None,
        )  # fmt: skip
        return pulled + pushed

    def closed_forms(
        self, queries: Tensor, labels: Tensor, refs: References
    ) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """Gradient and diagonal of the Hessian, (R, D) each, as a function of the vectors (VCPA, Eqs. 24 and 25).

        The similarities are linear in the vectors. A logarithm of summed exponentials has as its gradient the mean of
        its exponents' gradients, and as its curvature their variance, both over the shares of the sum. What does not
        depend on the vectors is made once for the batch: one more query of zeros stands for the 1 in the logarithm.
        """
        is_pair = torch.stack(refs.positives(labels))
        offset = queries.new_full((), self.scale * self.margin).where(is_pair, queries.new_full((), NONE))
        offset = functional.pad(offset, (0, 0, 0, 1))
        padded = functional.pad(queries, (0, 0, 0, 1))
        slope = torch.stack([-self.scale * padded, self.scale * padded])
        moments = torch.cat([padded, padded.square()], 1).expand(2, -1, -1)
        count = queries.new_full((), len(refs.labels))
        present = count if self.positive_norm == "all" else is_pair[0].any(0).sum().clamp(min=1).to(queries)
        share = self.scale / torch.stack([-present, count])[:, None, None]
        bend = self.scale * share.abs()

        def at(vectors: Tensor) -> tuple[Tensor, Tensor]:
            shares = torch.softmax(torch.baddbmm(offset, slope, vectors.T.expand(2, -1, -1)), 1)
            mean, square = torch.bmm(shares.mT, moments).chunk(2, 2)
            variance = torch.addcmul(square, mean, mean, value=-1).clamp(min=0)
            return (share * mean).sum(0), (bend * variance).sum(0)

        return at
