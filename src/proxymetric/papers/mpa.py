"""The multi-proxies anchor family (Saeki, Kawahara & Aman, 2023).

The paper does not state a scale, an initialisation or a weight decay. Here the scale is 32, as in Proxy-Anchor, and the
initialisation is that of SoftTriple, whose proxies the family uses. The paper's K is 10 on CUB and Cars, 2 on SOP.
"""

from __future__ import annotations

from proxymetric.core.pieces import Compare, Objective
from proxymetric.losses import MPA, MPAAP, MPADW, Spread
from proxymetric.ops import Similarity
from proxymetric.papers.about import about
from proxymetric.sources import proxies

PAPER = "Saeki et al. 2023, Multi Proxy Anchor Family Loss for Several Types of Gradients"


@about(
    paper=PAPER,
    choose="when images of a class look very different; on CUB here level with proxy-anchor in R@1, below in MAP@R",
    sums_over="batch",
    grouped=True,
)
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
    """Proxy-Anchor on classes of K proxies, summed for each class. Losses: `MPA`, `Spread`.

    Args:
        classes: number of training classes, C.
        dim: width of the embeddings, D.
        scale: > 0; 32 by analogy with Proxy-Anchor.
        margin: 0.1 by default.
        gamma: > 0; temperature of the soft similarity to the K proxies of a class; 0.1 by default.
        tau: >= 0; weight of the regulariser; 0.2 in the paper.
        per_class: K proxies per class; 10 on CUB and Cars, 2 on SOP.
        similarity: how the K proxies of a class are combined: "soft", "max" or "mean".
        init: initialisation of the proxies, a name of `sources.INITIALISATIONS`.
        touched: which proxies a step compares with and moves: "all", "batch" or a share (`sources.proxies`).
    """
    loss = MPA(scale, margin, Similarity(similarity, gamma))
    return Compare(loss, proxies(classes, dim, per_class, init, touched), regulariser=Spread(tau) if tau else None)


@about(
    paper=PAPER,
    choose="over mpa for small batches, according to its paper: a sample's loss does not depend on the others",
    sums_over="classes",
    grouped=True,
)
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
    """MPA with the sums taken for each sample instead of each class. Losses: `MPADW`, `Spread`.

    Args:
        classes: number of training classes, C.
        dim: width of the embeddings, D.
        scale: > 0; 32 by analogy with Proxy-Anchor.
        margin: 0.1 by default.
        gamma: > 0; temperature of the soft similarity to the K proxies of a class; 0.1 by default.
        tau: >= 0; weight of the regulariser; 0.2 in the paper.
        per_class: K proxies per class; 10 on CUB and Cars, 2 on SOP.
        similarity: how the K proxies of a class are combined: "soft", "max" or "mean".
        init: initialisation of the proxies, a name of `sources.INITIALISATIONS`.
        touched: which proxies a step compares with and moves: "all", "batch" or a share (`sources.proxies`).
    """
    loss = MPADW(scale, margin, Similarity(similarity, gamma))
    return Compare(loss, proxies(classes, dim, per_class, init, touched), regulariser=Spread(tau) if tau else None)


@about(
    paper=PAPER,
    choose="over mpa on Cars in its paper; here level with it",
    sums_over="classes",
    grouped=True,
)
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
    """A sum over the sample's own class and all others in one logarithm. Losses: `MPAAP`, `Spread`.

    Args:
        classes: number of training classes, C.
        dim: width of the embeddings, D.
        scale: > 0; 32 by analogy with Proxy-Anchor.
        margin: 0.1 by default.
        gamma: > 0; temperature of the soft similarity to the K proxies of a class; 0.1 by default.
        tau: >= 0; weight of the regulariser; 0.2 in the paper.
        per_class: K proxies per class; 10 on CUB and Cars, 2 on SOP.
        similarity: how the K proxies of a class are combined: "soft", "max" or "mean".
        init: initialisation of the proxies, a name of `sources.INITIALISATIONS`.
        touched: which proxies a step compares with and moves: "all", "batch" or a share (`sources.proxies`).
    """
    loss = MPAAP(scale, margin, Similarity(similarity, gamma))
    return Compare(loss, proxies(classes, dim, per_class, init, touched), regulariser=Spread(tau) if tau else None)
