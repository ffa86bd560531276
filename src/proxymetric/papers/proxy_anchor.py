"""Proxy-Anchor (Kim, Kim, Cho & Kwak, CVPR 2020)."""

from __future__ import annotations

from collections.abc import Sequence

from proxymetric.core.pieces import Compare, Objective
from proxymetric.losses import ProxyAnchor
from proxymetric.papers.about import about
from proxymetric.sources import proxies
from proxymetric.weightings.class_balance import PerClass, balance


@about(
    paper="Kim et al. 2020, Proxy Anchor Loss for Deep Metric Learning",
    choose="the one to start with: fast, hardly ever beaten here if the whole network is trained",
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
    weights: PerClass = None,
    margins: PerClass = None,
    counts: Sequence[int] | None = None,
) -> Objective:
    """The proxy of each class is an anchor that pulls and pushes the whole batch. Loss: `losses.ProxyAnchor`.

    The paper's training: AdamW 1e-4, proxies x100, weight decay 1e-4 (also on proxies), clip by value 10, one epoch of
    head warm-up, batch 180.

    A query may have several labels: labels (B, C) as a mask, or (B, L) whole numbers padded with -1. Several labels,
    weights and margins of classes are computed on the matrix of all pairs: not in chunks, not sharded.

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
        weights: how much a class counts in the means: a number for each class, "frequency" (inverse, 1 on average), or
            None: all the same (`weightings.ClassBalance`).
        margins: a margin for each class, "frequency" (LDAM: `margin` for the rarest class, falling with the fourth root
            of the number of images), or None: `margin` for all.
        counts: the number of training images of each class, for "frequency"; `proxymetric train` counts them.
    """
    loss, weighting = ProxyAnchor(scale, margin, positive_norm), balance(classes, weights, margins, counts, margin)
    return Compare(loss, proxies(classes, dim, per_class, init, touched), weighting)
