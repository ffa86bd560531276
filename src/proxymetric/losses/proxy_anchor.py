"""Proxy-Anchor: each proxy is an anchor that is compared with the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from proxymetric.arguments.signatures import one_of
from proxymetric.core.pair_weights import PairWeights
from proxymetric.core.pieces import References
from proxymetric.losses.proxy_anchor_balanced import on_all_pairs
from proxymetric.losses.proxy_anchor_curvature import closed_forms
from proxymetric.losses.ranges import check_cosine_margin, check_scale
from proxymetric.ops import Line, mean_over_batch


@dataclass(frozen=True)
class ProxyAnchor:
    """Pull the samples of a class to its proxy and push all others away, hard samples most (Kim et al. 2020, Eq. 4).

    ``1/|C+| sum_{c in C+} log(1 + sum_{i in c} exp(-scale (s_ic - margin)))
    + 1/C sum_c log(1 + sum_{i not in c} exp(scale (s_ic + margin)))``

    C+ are the classes present in the batch. With a weighting, w multiplies the exponents, and each sum is divided by
    the sum over classes of their mean weight instead of by the number of classes (Proxy-ISA, Eqs. 12 and 13).

    With a `ClassBalance`, and if queries have several labels, the loss is that of `proxy_anchor_balanced`.

    Relations: `MPA` with one proxy per class equals this loss for every batch of two classes or more; `ProxyNCA` sums
    over the classes for each sample instead.

    Args:
        scale: > 0; 32 in the paper.
        margin: in [-1, 1]; 0.1 in the paper. A negative margin gets a warning.
        positive_norm: "present" divides the first sum by |C+| (the paper). "all" divides it by C, weighted or not
            (VCPA's Eq. 4, VPTSP's code).

    Example:
        >>> import torch
        >>> refs = References(torch.eye(2), torch.arange(2), per_class=1)
        >>> ProxyAnchor(scale=1.0, margin=0.0)(torch.eye(2), torch.arange(2), refs)
        tensor(1.0064)
    """

    scale: float = 32.0
    margin: float = 0.1
    positive_norm: str = "present"
    has_class_balance: ClassVar[bool] = True
    has_several_labels: ClassVar[bool] = True
    can_shard: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_scale(scale=self.scale)
        check_cosine_margin(margin=self.margin)
        one_of("positive_norm", self.positive_norm, ("present", "all"))

    def __call__(self, queries: Tensor, labels: Tensor, refs: References, weight: PairWeights | None = None) -> Tensor:
        if labels.ndim > 1 or (weight is not None and weight.has_class_numbers):
            return on_all_pairs(queries, labels, refs, weight, self.scale, self.margin, self.positive_norm)
        weight = weight and weight.of_pairs
        pull, push = anchor_exponents(self.scale, self.margin)
        pulled, pushed = mean_over_batch(
            queries,
            labels,
            refs,
            pull,
            push,
            weight=weight,
            positive_count=refs.all_rows if self.positive_norm == "all" else None,
            negative_count=refs.all_rows if weight is None else None,
        )
        return pulled + pushed

    def closed_forms(
        self, queries: Tensor, labels: Tensor, refs: References
    ) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """Gradient and diagonal of the Hessian in the vectors (`proxy_anchor_curvature`)."""
        return closed_forms(queries, labels, refs, self.scale, self.margin, self.positive_norm)


def anchor_exponents(scale: float, margin: float) -> tuple[Line, Line]:
    """The exponents of a positive and of a negative pair: `scale (margin - s)` and `scale (s + margin)`."""
    return Line(-scale, scale * margin), Line(scale, scale * margin)
