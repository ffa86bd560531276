"""Proxy-NCA and Proxy-NCA++: each sample is classified among the proxies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from proxymetric.core.pair_weights import PairWeights
from proxymetric.core.pieces import References
from proxymetric.losses.pairs import mean_where
from proxymetric.losses.ranges import check_scale, check_temperature
from proxymetric.ops import Line, cross_entropy, over_classes


@dataclass(frozen=True)
class ProxyNCA:
    """Bring each sample nearer to the proxy of its class than to all other proxies (Movshovitz-Attias et al. 2017).

    ``1/B sum_i [ -scale s_iy + log sum_{c != y} exp(scale s_ic) ]``

    The sum leaves out the proxy of the sample's own class, so the loss can be negative.

    Relations: `ProxyNCAPlusPlus` keeps that proxy in the sum, which bounds the loss and makes training more stable.

    Args:
        scale: > 0; 12 is common.

    Example:
        >>> import torch
        >>> refs = References(torch.eye(2), torch.arange(2), per_class=1)
        >>> ProxyNCA(scale=1.0)(torch.eye(2), torch.arange(2), refs)
        tensor(-1.)
    """

    scale: float = 12.0
    can_shard: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_scale(scale=self.scale)

    def __call__(self, queries: Tensor, labels: Tensor, refs: References, weight: PairWeights | None = None) -> Tensor:
        exponent = Line(self.scale)
        sums = over_classes(queries, labels, refs, exponent, exponent, weight=weight)
        has_both = sums.positive.isfinite() & sums.negative.isfinite()
        return mean_where((sums.negative - sums.positive).where(has_both, 0.0), has_both)


@dataclass(frozen=True)
class ProxyNCAPlusPlus:
    """Softmax cross entropy over all proxies at a low temperature (Teh et al. 2020).

    ``-1/B sum_i log( exp(s_iy/T) / sum_c exp(s_ic/T) )``

    Relations: the loss equals the normalised softmax (`CosFace` with margin 0 and scale 1/T); the paper adds a training
    recipe.

    Args:
        temperature: T > 0, divides the cosine. The paper and its code divide squared distances by 1/9. On the unit
            sphere a squared distance is 2 - 2 s, so the same temperature is 1/18 here (the default). CCP's study has
            0.1.

    Example:
        >>> import torch
        >>> refs = References(torch.eye(2), torch.arange(2), per_class=1)
        >>> ProxyNCAPlusPlus(temperature=1.0)(torch.eye(2), torch.arange(2), refs)
        tensor(0.3133)
    """

    temperature: float = 1 / 18
    can_shard: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_temperature(temperature=self.temperature)

    def __call__(self, queries: Tensor, labels: Tensor, refs: References, weight: PairWeights | None = None) -> Tensor:
        exponent = Line(1 / self.temperature)
        return cross_entropy(queries, labels, refs, exponent, exponent, weight=weight)
