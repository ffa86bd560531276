"""The multi-proxies anchor family (Saeki, Kawahara & Aman, 2023).

The paper names no scale (32 here, as in Proxy-Anchor), no initialisation (SoftTriple's here, whose proxies these are)
and no weight decay. Its K: 10 on CUB and Cars, 2 on SOP.
"""

from __future__ import annotations

from proxymetric.core.pieces import Compare, Objective
from proxymetric.losses import MPA, MPAAP, MPADW, Spread
from proxymetric.ops import Similarity
from proxymetric.papers.about import about
from proxymetric.sources import proxies

PAPER = "Saeki et al. 2023, Multi Proxy Anchor Family Loss for Several Types of Gradients"


@about(paper=PAPER, choose="over proxy-anchor when classes have several looks (colours, sides, poses)")
def mpa(
    classes: int,
    dim: int,
    *,
    scale: float = 32.0,
    margin: float = 0.1,
    gamma: float = 0.1,
    tau: float = 0.2,
    per_class: int = 10,
    similarity: str = "soft",
    init: str = "kaiming-uniform",
    touched: str | float = "all",
) -> Objective:
    """Proxy-Anchor on classes of K proxies, class-wise. Losses: `MPA`, `Spread`."""
    loss = MPA(scale, margin, Similarity(similarity, gamma))
    return Compare(loss, proxies(classes, dim, per_class, init, touched), regulariser=Spread(tau))


@about(paper=PAPER, choose="over mpa for small batches: a sample's loss does not depend on the others in the batch")
def mpa_dw(
    classes: int,
    dim: int,
    *,
    scale: float = 32.0,
    margin: float = 0.1,
    gamma: float = 0.1,
    tau: float = 0.2,
    per_class: int = 10,
    similarity: str = "soft",
    init: str = "kaiming-uniform",
    touched: str | float = "all",
) -> Objective:
    """MPA with its sums turned round: per sample. Losses: `MPADW`, `Spread`."""
    loss = MPADW(scale, margin, Similarity(similarity, gamma))
    return Compare(loss, proxies(classes, dim, per_class, init, touched), regulariser=Spread(tau))


@about(paper=PAPER, choose="the family's strongest on fine-grained images; also for small batches")
def mpa_ap(
    classes: int,
    dim: int,
    *,
    scale: float = 32.0,
    margin: float = 0.1,
    gamma: float = 0.1,
    tau: float = 0.2,
    per_class: int = 10,
    similarity: str = "soft",
    init: str = "kaiming-uniform",
    touched: str | float = "all",
) -> Objective:
    """One logarithm per sample over own and other classes together. Losses: `MPAAP`, `Spread`."""
    loss = MPAAP(scale, margin, Similarity(similarity, gamma))
    return Compare(loss, proxies(classes, dim, per_class, init, touched), regulariser=Spread(tau))
