"""The multi-proxies anchor family: MPA, MPA-DW and MPA-AP (Saeki et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from proxymetric.core.pair_weights import PairWeights
from proxymetric.core.pieces import References
from proxymetric.losses.pairs import mean_or_zero, mean_where
from proxymetric.losses.proxy_anchor import anchor_exponents
from proxymetric.losses.ranges import check_cosine_margin, check_scale
from proxymetric.ops import Similarity, log1p_exp, mean_over_batch, over_classes


@dataclass(frozen=True)
class AnchorOfGroups:
    """The numbers of the family; the classes below explain them."""

    scale: float = 32.0
    margin: float = 0.1
    of_class: Similarity = field(default_factory=Similarity)
    can_shard: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.of_class.check()
        check_scale(scale=self.scale)
        check_cosine_margin(margin=self.margin)


@dataclass(frozen=True)
class MPA(AnchorOfGroups):
    """Proxy-Anchor on classes of K proxies, summed for each class (Saeki et al. 2023, Eq. 6).

    ``1/|C+| sum_{c in C+} log(1 + sum_{i in c} exp(-scale (S_ic - margin)))
    + 1/|C-| sum_{c in C-} log(1 + sum_{i not in c} exp(scale (S_ic + margin)))``

    S is the similarity to a class (`Similarity`). C+ are the classes with a sample in the batch, C- the classes for
    which the batch has a sample of another class.

    Relations: with K = 1 the loss equals `ProxyAnchor`, unless all samples of the batch have one class. `MPADW` and
    `MPAAP` sum for each sample.

    Args:
        scale: > 0; 32 by analogy with Proxy-Anchor (the paper does not state one).
        margin: in [-1, 1]. A negative margin gets a warning.
        of_class: how the K proxies of a class are combined into one similarity.

    Example:
        >>> refs = References(torch.eye(2), torch.arange(2), per_class=1)
        >>> MPA(scale=1.0, margin=0.0)(torch.eye(2), torch.arange(2), refs)
        tensor(1.0064)
    """

    def __call__(self, queries: Tensor, labels: Tensor, refs: References, weight: PairWeights | None = None) -> Tensor:
        pull, push = anchor_exponents(self.scale, self.margin)
        pulled, pushed = mean_over_batch(queries, labels, refs, pull, push, self.of_class, weight)
        return pulled + pushed


@dataclass(frozen=True)
class MPADW(AnchorOfGroups):
    """MPA with the sums taken for each sample, which makes the samples of a batch independent (Saeki et al., Eq. 12).

    ``1/B sum_i [ log(1 + exp(-scale (S_iy - margin))) + log(1 + sum_{c != y} exp(scale (S_ic + margin))) ]``

    Relations: choose it over `MPA` for small batches, where few samples share a class.

    Args:
        scale: > 0; 32 by analogy with Proxy-Anchor (the paper does not state one).
        margin: in [-1, 1]. A negative margin gets a warning.
        of_class: how the K proxies of a class are combined into one similarity.

    Example:
        >>> refs = References(torch.eye(2), torch.arange(2), per_class=1)
        >>> MPADW(scale=1.0, margin=0.0)(torch.eye(2), torch.arange(2), refs)
        tensor(1.0064)
    """

    def __call__(self, queries: Tensor, labels: Tensor, refs: References, weight: PairWeights | None = None) -> Tensor:
        pull, push = anchor_exponents(self.scale, self.margin)
        sums = over_classes(queries, labels, refs, pull, push, self.of_class, weight)
        return mean_or_zero(log1p_exp(sums.positive) + log1p_exp(sums.negative))


@dataclass(frozen=True)
class MPAAP(AnchorOfGroups):
    """Sum over the sample's own class and all others in one logarithm (Saeki et al. 2023, Eqs. 15 and 16).

    ``1/B sum_i log(1 + exp(scale (margin - S_iy)) + sum_{c != y} exp(scale (S_ic + margin)))``

    Relations: `MPADW` has one logarithm for the sample's own class and one for the other classes. Here the hardest pair
    of a sample, positive or negative, takes most of the gradient.

    Args:
        scale: > 0; 32 by analogy with Proxy-Anchor (the paper does not state one).
        margin: in [-1, 1]. A negative margin gets a warning.
        of_class: how the K proxies of a class are combined into one similarity.

    Example:
        >>> refs = References(torch.eye(2), torch.arange(2), per_class=1)
        >>> MPAAP(scale=1.0, margin=0.0)(torch.eye(2), torch.arange(2), refs)
        tensor(0.8620)
    """

    def __call__(self, queries: Tensor, labels: Tensor, refs: References, weight: PairWeights | None = None) -> Tensor:
        pull, push = anchor_exponents(self.scale, self.margin)
        sums = over_classes(queries, labels, refs, pull, push, self.of_class, weight)
        has_positive = sums.positive.isfinite()
        sample_losses = log1p_exp(torch.logaddexp(sums.positive, sums.negative))
        return mean_where(sample_losses.where(has_positive, 0.0), has_positive)
