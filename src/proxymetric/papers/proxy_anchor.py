"""Proxy-Anchor (Kim, Kim, Cho & Kwak, CVPR 2020)."""

from __future__ import annotations

from proxymetric.core.pieces import Compare, Objective
from proxymetric.losses import ProxyAnchor
from proxymetric.papers.about import about
from proxymetric.papers.assembled import Builder, assembled
from proxymetric.sources import proxies
from proxymetric.weightings import ClassBalance


@about(
    paper="Kim et al. 2020, Proxy Anchor Loss for Deep Metric Learning",
    choose="the one to start with: fast, hardly ever beaten here if the whole network is trained",
    sums_over="batch",
)
@assembled(ProxyAnchor, proxies, ClassBalance)
def proxy_anchor(build: Builder) -> Objective:
    """The proxy of each class is an anchor that pulls and pushes the whole batch. Loss: `losses.ProxyAnchor`.

    The paper's training: AdamW 1e-4, proxies x100, weight decay 1e-4 (also on proxies), clip by value 10, one epoch of
    head warm-up, batch 180.

    A query may have several labels: labels (B, C) as a mask, or (B, L) whole numbers padded with -1. Several labels,
    weights and margins of classes are computed on the matrix of all pairs: not in chunks, not sharded.

    Args:
        init: initialisation of the proxies, a name of `sources.INITIALISATIONS`. VPTSP uses "xavier/8" for its free
            proxies and for the proxies of its baseline (VPT with BitFit).
    """
    weighting = build.unless(ClassBalance, weights=None, margins=None)
    return Compare(build(ProxyAnchor), build(proxies), weighting)
