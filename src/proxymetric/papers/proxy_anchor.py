"""Proxy-Anchor (Kim, Kim, Cho & Kwak, CVPR 2020)."""

from __future__ import annotations

from proxymetric.core.pieces import Compare, Objective
from proxymetric.losses import ProxyAnchor
from proxymetric.papers.about import about
from proxymetric.sources import proxies


@about(
    paper="Kim et al. 2020, Proxy Anchor Loss for Deep Metric Learning",
    choose="the one to start with: fast, robust to batch size and sampling",
)
def proxy_anchor(
    classes: int,
    dim: int,
    *,
    scale: float = 32.0,
    margin: float = 0.1,
    positive_norm: str = "present",
    per_class: int = 1,
    init: str = "kaiming",
    touched: str | float = "all",
) -> Objective:
    """Each class's proxy is an anchor that pulls and pushes the whole batch. Loss: `losses.ProxyAnchor`.

    init: how proxies start, a name of `sources.INITIALISATIONS`; "xavier/8" is how VPTSP's free proxies start, and
    those of the baseline that it is compared with (VPT with BitFit).

    The paper's training: AdamW 1e-4, proxies x100, weight decay 1e-4 (also on proxies), clip by value 10, one epoch of
    head warm-up, batch 180.
    """
    return Compare(ProxyAnchor(scale, margin, positive_norm), proxies(classes, dim, per_class, init, touched))
