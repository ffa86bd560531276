"""Normalised softmax (Zhai & Wu, BMVC 2019), CosFace (Wang et al., CVPR 2018), ArcFace (Deng et al., CVPR 2019)."""

from __future__ import annotations

from proxymetric.core.pieces import Compare, Objective
from proxymetric.losses import ArcFace, CosFace
from proxymetric.papers.about import about
from proxymetric.sources import proxies


@about(
    paper="Zhai & Wu 2019, Classification is a Strong Baseline for Deep Metric Learning",
    choose="plain classification on the sphere: the baseline every other method should beat",
)
def norm_softmax(
    classes: int,
    dim: int,
    *,
    scale: float = 20.0,
    per_class: int = 1,
    init: str = "kaiming",
    touched: str | float = "all",
) -> Objective:
    """Softmax cross entropy on cosines: `losses.CosFace` without a margin. Scale 20 is the paper's temperature 0.05."""
    return Compare(CosFace(scale, 0.0), proxies(classes, dim, per_class, init, touched))


@about(
    paper="Wang et al. 2018, CosFace: Large Margin Cosine Loss for Deep Face Recognition",
    choose="faces and very many classes, when arcface is unstable",
)
def cosface(
    classes: int,
    dim: int,
    *,
    scale: float = 64.0,
    margin: float = 0.35,
    per_class: int = 1,
    init: str = "kaiming",
    touched: str | float = "all",
) -> Objective:
    """Softmax with a margin on the own cosine. Loss: `losses.CosFace`."""
    return Compare(CosFace(scale, margin), proxies(classes, dim, per_class, init, touched))


@about(
    paper="Deng et al. 2019, ArcFace: Additive Angular Margin Loss for Deep Face Recognition",
    choose="faces and very many classes with clean labels",
)
def arcface(
    classes: int,
    dim: int,
    *,
    scale: float = 64.0,
    margin: float = 0.5,
    init: str = "kaiming",
    touched: str | float = "all",
) -> Objective:
    """Softmax with a margin (radians) on the own angle. Loss: `losses.ArcFace`."""
    return Compare(ArcFace(scale, margin), proxies(classes, dim, 1, init, touched))
