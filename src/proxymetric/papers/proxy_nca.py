"""Proxy-NCA (Movshovitz-Attias et al., ICCV 2017) and Proxy-NCA++ (Teh et al., ECCV 2020)."""

from __future__ import annotations

from proxymetric.core.pieces import Compare, Objective
from proxymetric.losses import ProxyNCA, ProxyNCAPlusPlus
from proxymetric.papers.about import about
from proxymetric.papers.assembled import Builder, assembled
from proxymetric.sources import proxies


@about(
    paper="Movshovitz-Attias et al. 2017, No Fuss Distance Metric Learning using Proxies",
    choose="the first proxy loss, for comparison; proxy-nca++ is its successor",
    sums_over="classes",
)
@assembled(ProxyNCA, proxies)
def proxy_nca(build: Builder) -> Objective:
    """Each sample comes nearer to the proxy of its class than to the other proxies. Loss: `losses.ProxyNCA`."""
    return Compare(build(ProxyNCA), build(proxies))


@about(
    paper="Teh et al. 2020, ProxyNCA++: Revisiting and Revitalizing Proxy Neighborhood Component Analysis",
    choose="a stable softmax over classes, for small batches according to its paper",
    sums_over="classes",
)
@assembled(ProxyNCAPlusPlus, proxies)
def proxy_nca_pp(build: Builder) -> Objective:
    """A softmax over all proxies at a low temperature. Loss: `losses.ProxyNCAPlusPlus`.

    Deviation from the paper: the temperature divides cosines here. The paper divides squared distances by 1/9, which is
    1/18 on cosines.
    """
    return Compare(build(ProxyNCAPlusPlus), build(proxies))
