"""Proxy-NCA and Proxy-NCA++: each sample chooses among the proxies."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from proxymetric.checks import above_zero
from proxymetric.core.pair_weights import PairWeights
from proxymetric.core.pieces import References
from proxymetric.losses.pairs import mean_where
from proxymetric.ops import Line, over_classes


@dataclass(frozen=True)
class ProxyNCA:
    """Nearer to one's own proxy than to the others, which alone stand in the denominator (Movshovitz-Attias 2017).

    ``1/B sum_i [ -scale s_iy + log sum_{c != y} exp(scale s_ic) ]``

    scale: > 0; 12 is common. The loss can go below 0, since the own proxy does not stand in the sum.

    Relations: `ProxyNCAPlusPlus` keeps the positive in the denominator, which bounds it and trains more calmly.

    >>> refs = References(torch.eye(2), torch.arange(2), per_class=1)
    >>> ProxyNCA(scale=1.0)(torch.eye(2), torch.arange(2), refs)
    tensor(-1.)
    """

    scale: float = 12.0

    def __post_init__(self) -> None:
        above_zero(scale=self.scale)

    def __call__(self, queries: Tensor, labels: Tensor, refs: References, weight: PairWeights | None = None) -> Tensor:
        choice = Line(self.scale)
        sums = over_classes(queries, labels, refs, choice, choice, weight=weight)
        have_both = sums.positive.isfinite() & sums.negative.isfinite()
        return mean_where((sums.negative - sums.positive).where(have_both, 0.0), have_both)


@dataclass(frozen=True)
class ProxyNCAPlusPlus:
    """A softmax over all proxies, the own one included, at a low temperature (Teh et al. 2020).

    ``-1/B sum_i log( exp(s_iy/T) / sum_c exp(s_ic/T) )``

    temperature: T > 0, on the cosine. The paper and its code put squared distances over their temperature of 1/9; on
    the unit sphere d = 2 - 2 s, so that is T = 1/18 here (the default). CCP's study writes 0.1.

    Relations: the normalised softmax under another name (scale = 1/T); what the paper adds is its training.

    >>> refs = References(torch.eye(2), torch.arange(2), per_class=1)
    >>> ProxyNCAPlusPlus(temperature=1.0)(torch.eye(2), torch.arange(2), refs)
    tensor(0.3133)
    """

    temperature: float = 1 / 18

    def __post_init__(self) -> None:
        above_zero(temperature=self.temperature)

    def __call__(self, queries: Tensor, labels: Tensor, refs: References, weight: PairWeights | None = None) -> Tensor:
        choice = Line(1 / self.temperature)
        sums = over_classes(queries, labels, refs, choice, choice, weight=weight)
        return cross_entropy(sums.positive, sums.negative)


def cross_entropy(own: Tensor, others: Tensor) -> Tensor:
    """`-log(e^own / (e^own + e^others))`, mean over the queries that have an own reference."""
    have_own = own.isfinite()
    return mean_where(torch.logaddexp(own, others).sub(own).where(have_own, 0.0), have_own)
