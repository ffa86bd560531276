"""SoftTriple (Qian et al., ICCV 2019)."""

from __future__ import annotations

from proxymetric.core.pieces import Compare, Objective
from proxymetric.losses import SoftTriple, Spread
from proxymetric.ops import Similarity
from proxymetric.papers.about import about
from proxymetric.sources import proxies


@about(
    paper="Qian et al. 2019, SoftTriple Loss: Deep Metric Learning Without Triplet Sampling",
    choose="when images of a class look very different",
    sums_over="classes",
    grouped=True,
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

    The defaults of (scale, gamma, tau, margin) are the paper's for CUB. CCP's study has (17.69, 19.18, 0.0669, 0.3588)
    on Cars and (100, 47.9, 0.2, 0.3145) on SOP.

    Args:
        classes: number of training classes, C.
        dim: width of the embeddings, D.
        scale: > 0; lambda in the paper.
        gamma: > 0; temperature of the soft similarity to the K centres of a class.
        tau: >= 0; weight of the regulariser.
        margin: subtracted from the similarity to the sample's own class.
        per_class: K centres per class; 10 on CUB and Cars.
        reduction: "mean" over the batch, or "sum" as in the paper.
        similarity: how the K centres of a class are combined: "soft" (the paper), "max" or "mean".
        init: initialisation of the centres, a name of `sources.INITIALISATIONS`; "kaiming-uniform" in the released
            code.
        touched: which centres a step compares with and moves: "all", "batch" or a share (`sources.proxies`).
    """
    loss = SoftTriple(scale, margin, Similarity(similarity, gamma), reduction)
    return Compare(loss, proxies(classes, dim, per_class, init, touched), regulariser=Spread(tau) if tau else None)
