"""Proxy-NCA (Movshovitz-Attias et al., ICCV 2017) and Proxy-NCA++ (Teh et al., ECCV 2020)."""

from __future__ import annotations

from proxymetric.core.pieces import Compare, Objective
from proxymetric.losses import ProxyNCA, ProxyNCAPlusPlus
from proxymetric.papers.about import about
from proxymetric.sources import proxies


@about(
    paper="Movshovitz-Attias et al. 2017, No Fuss Distance Metric Learning using Proxies",
    choose="the first proxy loss, for comparison; proxy-nca++ is its successor",
    sums_over="classes",
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
    """Each sample comes nearer to the proxy of its class than to the other proxies. Loss: `losses.ProxyNCA`.

    Args:
        classes: number of training classes, C.
        dim: width of the embeddings, D.
        scale: > 0; 12 is common.
        per_class: K proxies per class.
        init: initialisation of the proxies, a name of `sources.INITIALISATIONS`.
        touched: which proxies a step compares with and moves: "all", "batch" or a share (`sources.proxies`).
    """
    return Compare(ProxyNCA(scale), proxies(classes, dim, per_class, init, touched))


@about(
    paper="Teh et al. 2020, ProxyNCA++: Revisiting and Revitalizing Proxy Neighborhood Component Analysis",
    choose="a stable softmax over classes, for small batches according to its paper",
    sums_over="classes",
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

    Deviation from the paper: the temperature divides cosines here. The paper divides squared distances by 1/9, which is
    1/18 on cosines.

    Args:
        classes: number of training classes, C.
        dim: width of the embeddings, D.
        temperature: > 0, divides the cosines.
        per_class: K proxies per class.
        init: initialisation of the proxies, a name of `sources.INITIALISATIONS`.
        touched: which proxies a step compares with and moves: "all", "batch" or a share (`sources.proxies`).
    """
    return Compare(ProxyNCAPlusPlus(temperature), proxies(classes, dim, per_class, init, touched))
