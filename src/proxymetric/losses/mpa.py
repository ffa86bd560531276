"""The multi-proxies anchor family: MPA, MPA-DW and MPA-AP (Saeki et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from proxymetric.checks import above_zero, number
from proxymetric.core.pair_weights import PairWeights
from proxymetric.core.pieces import References
from proxymetric.losses.pairs import mean_where
from proxymetric.ops import Line, Similarity, log1p_exp, mean_over_batch, over_classes


@dataclass(frozen=True)
class MPA:
    """Proxy-Anchor on classes of K proxies: class-wise (Eq. 6).

    ``1/|C+| sum_{c in C+} log(1 + sum_{i in c} exp(-scale (S_ic - margin)))
    + 1/|C-| sum_{c in C-} log(1 + sum_{i not in c} exp(scale (S_ic + margin)))``

    S is the class similarity (`Similarity`), C+ the classes with a sample in the batch, C- those with a sample of
    another class in it. of_class: how K proxies make one similarity. scale: 32 by analogy with Proxy-Anchor (the paper
    names none). margin: 0.1.

    Relations: with K = 1 it is `ProxyAnchor`, unless the whole batch is of one class. `MPADW` and `MPAAP` sum per
    sample.

    >>> refs = References(torch.eye(2), torch.arange(2), per_class=1)
    >>> MPA(scale=1.0, margin=0.0)(torch.eye(2), torch.arange(2), refs)
    tensor(1.0064)
    """

    scale: float = 32.0
    margin: float = 0.1
    of_class: Similarity = field(default_factory=Similarity)

    def __post_init__(self) -> None:
        self.of_class.check()
        above_zero(scale=self.scale)
        number(margin=self.margin)

    def __call__(self, queries: Tensor, labels: Tensor, refs: References, weight: PairWeights | None = None) -> Tensor:
        pull, push = anchors(self.scale, self.margin)
        pulled, pushed = mean_over_batch(queries, labels, refs, pull, push, self.of_class, weight)
        return pulled + pushed


@dataclass(frozen=True)
class MPADW:
    """MPA with the sums turned round: data-wise, so that other samples of the batch do not matter (Eq. 12).

    ``1/B sum_i [ log(1 + exp(-scale (S_iy - margin))) + log(1 + sum_{c != y} exp(scale (S_ic + margin))) ]``

    of_class: how K proxies make one similarity. scale: 32. margin: 0.1.

    Relations: choose it over `MPA` for small batches, where few samples share a class.

    >>> refs = References(torch.eye(2), torch.arange(2), per_class=1)
    >>> MPADW(scale=1.0, margin=0.0)(torch.eye(2), torch.arange(2), refs)
    tensor(1.0064)
    """

    scale: float = 32.0
    margin: float = 0.1
    of_class: Similarity = field(default_factory=Similarity)

    def __post_init__(self) -> None:
        self.of_class.check()
        above_zero(scale=self.scale)
        number(margin=self.margin)

    def __call__(self, queries: Tensor, labels: Tensor, refs: References, weight: PairWeights | None = None) -> Tensor:
        pull, push = anchors(self.scale, self.margin)
        sums = over_classes(queries, labels, refs, pull, push, self.of_class, weight)
        return (log1p_exp(sums.positive) + log1p_exp(sums.negative)).mean()


@dataclass(frozen=True)
class MPAAP:
    """One logarithm per sample over all classes, own and others together: data-wise, all-paired (Eqs. 15, 16).

    ``1/B sum_i log(1 + exp(scale (margin - S_iy)) + sum_{c != y} exp(scale (S_ic + margin)))``

    of_class: how K proxies make one similarity. scale: 32. margin: 0.1.

    Relations: `MPADW` keeps the two logarithms apart; here a sample's hardest pair, whichever kind it is, takes most of
    the gradient.

    >>> refs = References(torch.eye(2), torch.arange(2), per_class=1)
    >>> MPAAP(scale=1.0, margin=0.0)(torch.eye(2), torch.arange(2), refs)
    tensor(0.8620)
    """

    scale: float = 32.0
    margin: float = 0.1
    of_class: Similarity = field(default_factory=Similarity)

    def __post_init__(self) -> None:
        self.of_class.check()
        above_zero(scale=self.scale)
        number(margin=self.margin)

    def __call__(self, queries: Tensor, labels: Tensor, refs: References, weight: PairWeights | None = None) -> Tensor:
        pull, push = anchors(self.scale, self.margin)
        sums = over_classes(queries, labels, refs, pull, push, self.of_class, weight)
        paired = sums.positive.isfinite()
        return mean_where(log1p_exp(torch.logaddexp(sums.positive, sums.negative)).where(paired, 0.0), paired)


def anchors(scale: float, margin: float) -> tuple[Line, Line]:
    """The exponents of a pulled and of a pushed pair: `scale (margin - s)` and `scale (s + margin)`."""
    return Line(-scale, scale * margin), Line(scale, scale * margin)
