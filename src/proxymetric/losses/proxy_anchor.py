"""Proxy-Anchor: each proxy is an anchor that is compared with the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from proxymetric.arguments.signatures import one_of
from proxymetric.core.pair_weights import PairWeights
from proxymetric.core.pieces import References
from proxymetric.losses.ranges import check_cosine_margin, check_scale
from proxymetric.ops import NONE, Line, log1p_exp, mean_over_batch
from proxymetric.ops.problem import MIN_WEIGHT_SUM


@dataclass(frozen=True)
class ProxyAnchor:
    """Pull the samples of a class to its proxy and push all others away, hard samples most (Kim et al. 2020, Eq. 4).

    ``1/|C+| sum_{c in C+} log(1 + sum_{i in c} exp(-scale (s_ic - margin)))
    + 1/C sum_c log(1 + sum_{i not in c} exp(scale (s_ic + margin)))``

    C+ are the classes present in the batch. With a weighting, w multiplies the exponents, and each sum is divided by
    the sum over classes of their mean weight instead of by the number of classes (Proxy-ISA, Eqs. 12 and 13).

    With a `ClassBalance`, each class has its own margin, and both means over classes are weighted. A query may have
    several labels: it is then a positive of each of these classes, and a negative of the others. Both are computed on
    the matrix of all pairs, not in chunks and not sharded.

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
        if labels.ndim > 1 or of_classes(weight):
            return self._on_all_pairs(queries, labels, refs, weight)
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

    def _on_all_pairs(self, queries: Tensor, labels: Tensor, refs: References, weight: PairWeights | None) -> Tensor:
        """The loss with numbers for each class, or for several labels a query: (B, C) bool."""
        if weight is not None and weight.of_pairs is not None:
            raise ValueError(
                "weighting: got weights of pairs beside several labels of a query or numbers of classes, expected only "
                "one of them"
            )
        queries = queries.float() if queries.dtype in (torch.half, torch.bfloat16) else queries
        s = queries @ refs.normalised(queries).T
        positive, negative = refs.positives(labels) if labels.ndim == 1 else _several(labels, refs)
        given = (None, None) if weight is None else (weight.class_weights, weight.class_margins)
        weights = s.new_ones(s.shape[1]) if given[0] is None else given[0].to(s)[refs.labels]
        margins = s.new_full((), self.margin) if given[1] is None else given[1].to(s)[refs.labels]
        pulled = torch.logsumexp((self.scale * (margins - s)).masked_fill(~positive, NONE), 0)
        pushed = torch.logsumexp((self.scale * (s + margins)).masked_fill(~negative, NONE), 0)
        present = weights if self.positive_norm == "all" else weights * positive.any(0)
        attraction = (weights * log1p_exp(pulled)).sum() / present.sum().clamp(min=MIN_WEIGHT_SUM)
        return attraction + (weights * log1p_exp(pushed)).sum() / weights.sum()

    def closed_forms(
        self, queries: Tensor, labels: Tensor, refs: References
    ) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """Gradient and diagonal of the Hessian in the vectors, in closed form (VCPA, Eqs. 24 and 25).

        The similarities are linear in the vectors. The gradient of a logarithm of summed exponentials is the mean of
        the gradients of the exponents, and its curvature is their variance; the softmax of the exponents gives the
        shares for both. One more query of zeros stands for the 1 in the logarithm.

        Args:
            queries: (B, D), normalised.
            labels: (B,).
            refs: the references; their rows are not used.

        Returns:
            A function of normalised vectors (R, D) that returns the gradient and the diagonal, (R, D) each.
            Everything that does not depend on the vectors is computed here, once for the batch.
        """
        is_pair = torch.stack(refs.positives(labels))
        offset = queries.new_full((), self.scale * self.margin).where(is_pair, queries.new_full((), NONE))
        offset = functional.pad(offset, (0, 0, 0, 1))
        padded = functional.pad(queries, (0, 0, 0, 1))
        slope = torch.stack([-self.scale * padded, self.scale * padded])
        moments = torch.cat([padded, padded.square()], 1).expand(2, -1, -1)
        count = queries.new_full((), len(refs.labels))
        positive_count = count if self.positive_norm == "all" else is_pair[0].any(0).sum().clamp(min=1).to(queries)
        gradient_factor = self.scale / torch.stack([-positive_count, count])[:, None, None]
        curvature_factor = self.scale * gradient_factor.abs()

        def gradient_and_curvature(vectors: Tensor) -> tuple[Tensor, Tensor]:
            shares = torch.softmax(torch.baddbmm(offset, slope, vectors.T.expand(2, -1, -1)), 1)
            mean, square = torch.bmm(shares.mT, moments).chunk(2, 2)
            variance = torch.addcmul(square, mean, mean, value=-1).clamp(min=0)
            return (gradient_factor * mean).sum(0), (curvature_factor * variance).sum(0)

        return gradient_and_curvature


def of_classes(weight: PairWeights | None) -> bool:
    """Whether a weighting told numbers for each class."""
    return weight is not None and not (weight.class_weights is None and weight.class_margins is None)


def _several(labels: Tensor, refs: References) -> tuple[Tensor, Tensor]:
    """The masks (B, R) of positive and negative pairs of queries with several labels (B, C)."""
    positive = labels[:, refs.labels]
    return positive, ~positive


def anchor_exponents(scale: float, margin: float) -> tuple[Line, Line]:
    """The exponents of a positive and of a negative pair: `scale (margin - s)` and `scale (s + margin)`."""
    return Line(-scale, scale * margin), Line(scale, scale * margin)
