"""SoftTriple (Qian et al., ICCV 2019)."""

from __future__ import annotations

from proxymetric.core.pieces import Compare, Objective
from proxymetric.losses import SoftTriple, Spread
from proxymetric.ops import Similarity
from proxymetric.papers.about import about
from proxymetric.sources import proxies


@about(
    paper="Qian et al. 2019, SoftTriple Loss: Deep Metric Learning Without Triplet Sampling",
    choose="classes with several looks each; mpa-ap keeps a gradient where this one loses it",
)
def soft_triple(
    classes: int,
    dim: int,
    *,
    scale: float = 20.0,
    gamma: float = 0.1,
    tau: float = 0.2,
    margin: float = 0.01,
    per_class: int = 10,
    reduction: str = "mean",
    similarity: str = "soft",
    init: str = "kaiming-uniform",
    touched: str | float = "all",
) -> Objective:
    """A softmax over classes of K centres, which a regulariser draws together. Losses: `SoftTriple`, `Spread`.

    (scale, gamma, tau, margin) are the paper's for CUB; Cars in CCP's study: (17.69, 19.18, 0.0669, 0.3588), SOP: (100,
    47.9, 0.2, 0.3145). per_class: 10 on CUB and Cars. The paper sums over the batch: `reduction="sum"`.
    """
    loss = SoftTriple(scale, margin, Similarity(similarity, gamma), reduction)
    return Compare(loss, proxies(classes, dim, per_class, init, touched), regulariser=Spread(tau))
