"""Proxy-NCA (Movshovitz-Attias et al., ICCV 2017) and Proxy-NCA++ (Teh et al., ECCV 2020)."""

from __future__ import annotations

from proxymetric.core.pieces import Compare, Objective
from proxymetric.losses import ProxyNCA, ProxyNCAPlusPlus
from proxymetric.papers.about import about
from proxymetric.sources import proxies


@about(
    paper="Movshovitz-Attias et al. 2017, No Fuss Distance Metric Learning using Proxies",
    choose="the first proxy loss, for comparison; proxy-nca++ trains better",
)
def proxy_nca(
    classes: int,
    dim: int,
    *,
    scale: float = 12.0,
    per_class: int = 1,
    init: str = "kaiming",
    touched: str | float = "all",
) -> Objective:
    """Each sample nearer to its own proxy than to the others. Loss: `losses.ProxyNCA`."""
    return Compare(ProxyNCA(scale), proxies(classes, dim, per_class, init, touched))


@about(
    paper="Teh et al. 2020, ProxyNCA++: Revisiting and Revitalizing Proxy Neighborhood Component Analysis",
    choose="a calm softmax over classes; for small batches or few images per class",
)
def proxy_nca_pp(
    classes: int,
    dim: int,
    *,
    temperature: float = 1 / 18,
    per_class: int = 1,
    init: str = "kaiming",
    touched: str | float = "all",
) -> Objective:
    """A softmax over all proxies at a low temperature. Loss: `losses.ProxyNCAPlusPlus`.

    Where we differ: the temperature stands under cosines; the paper's 1/9 under squared distances is 1/18 here.
    """
    return Compare(ProxyNCAPlusPlus(temperature), proxies(classes, dim, per_class, init, touched))
