"""Proxy-Anchor (Kim, Kim, Cho & Kwak, CVPR 2020)."""

from __future__ import annotations

from proxymetric.core.pieces import Compare, Objective
from proxymetric.losses import ProxyAnchor
from proxymetric.papers.about import about
from proxymetric.sources import proxies


@about(
    paper="Kim et al. 2020, Proxy Anchor Loss for Deep Metric Learning",
    choose="the one to start with: fast, robust to batch size and sampling",
    sums_over="batch",
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
    """The proxy of each class is an anchor that pulls and pushes the whole batch. Loss: `losses.ProxyAnchor`.

    The paper's training: AdamW 1e-4, proxies x100, weight decay 1e-4 (also on proxies), clip by value 10, one epoch of
    head warm-up, batch 180.

    Args:
        classes: number of training classes, C.
        dim: width of the embeddings, D.
        scale: > 0; 32 in the paper.
        margin: 0.1 in the paper.
        positive_norm: what the sum over positives is divided by: "present" classes (the paper) or "all".
        per_class: K proxies per class.
        init: initialisation of the proxies, a name of `sources.INITIALISATIONS`. VPTSP uses "xavier/8" for its free
            proxies and for the proxies of its baseline (VPT with BitFit).
        touched: which proxies a step compares with and moves: "all", "batch" or a share (`sources.proxies`).
    """
    return Compare(ProxyAnchor(scale, margin, positive_norm), proxies(classes, dim, per_class, init, touched))
