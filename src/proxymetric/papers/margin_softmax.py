"""Normalised softmax (Zhai & Wu 2019), CosFace (Wang et al. 2018), ArcFace (Deng et al. 2019 and 2020)."""

from __future__ import annotations

from collections.abc import Sequence

from proxymetric.core.pieces import Compare, Objective
from proxymetric.losses import ArcFace, CosFace, SubCentreArcFace
from proxymetric.papers.about import about
from proxymetric.sources import proxies
from proxymetric.weightings.class_balance import PerClass, balance


@about(
    paper="Zhai & Wu 2019, Classification is a Strong Baseline for Deep Metric Learning",
    choose="plain classification on the sphere: the baseline every other method should beat",
    sums_over="classes",
)
def norm_softmax(
    classes: int,
    dim: int,
    *,
    scale: float = 20.0,
    per_class: int = 1,
    init: str = "kaiming",
    touched: str | float = "all",
    weights: PerClass = None,
    counts: Sequence[int] | None = None,
) -> Objective:
    """Softmax cross entropy on cosines. Loss: `losses.CosFace` without a margin.

    Args:
        classes: number of training classes, C.
        dim: width of the embeddings, D.
        scale: > 0; 20 is the paper's temperature of 0.05.
        per_class: K proxies per class.
        init: initialisation of the proxies, a name of `sources.INITIALISATIONS`.
        touched: which proxies a step compares with and moves: "all", "batch" or a share (`sources.proxies`).
        weights: how much a class counts in the mean: a number for each class, "frequency" (inverse, 1 on average), or
            None: all the same (`weightings.ClassBalance`).
        counts: the number of training images of each class, for "frequency"; `proxymetric train` counts them.
    """
    return Compare(
        CosFace(scale, 0.0), proxies(classes, dim, per_class, init, touched), balance(classes, weights, counts=counts)
    )


@about(
    paper="Wang et al. 2018, CosFace: Large Margin Cosine Loss for Deep Face Recognition",
    choose="faces and very many classes, when arcface is unstable",
    sums_over="classes",
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
    weights: PerClass = None,
    margins: PerClass = None,
    counts: Sequence[int] | None = None,
) -> Objective:
    """Softmax cross entropy with a margin on the cosine to the sample's own class. Loss: `losses.CosFace`.

    Args:
        classes: number of training classes, C.
        dim: width of the embeddings, D.
        scale: > 0; 64 for faces.
        margin: >= 0; 0.35 in the paper.
        per_class: K proxies per class.
        init: initialisation of the proxies, a name of `sources.INITIALISATIONS`.
        touched: which proxies a step compares with and moves: "all", "batch" or a share (`sources.proxies`).
        weights: how much a class counts in the mean: a number for each class, "frequency" (inverse, 1 on average), or
            None: all the same (`weightings.ClassBalance`).
        margins: a margin for each class, "frequency" (LDAM: `margin` for the rarest class, falling with the fourth root
            of the number of images), or None: `margin` for all.
        counts: the number of training images of each class, for "frequency"; `proxymetric train` counts them.
    """
    return Compare(
        CosFace(scale, margin),
        proxies(classes, dim, per_class, init, touched),
        balance(classes, weights, margins, counts, margin),
    )


@about(
    paper="Deng et al. 2019, ArcFace: Additive Angular Margin Loss for Deep Face Recognition",
    choose="faces, very many classes, and wrong labels (on frozen features here)",
    sums_over="classes",
)
def arcface(
    classes: int,
    dim: int,
    *,
    scale: float = 64.0,
    margin: float = 0.5,
    init: str = "kaiming",
    touched: str | float = "all",
    weights: PerClass = None,
    margins: PerClass = None,
    counts: Sequence[int] | None = None,
) -> Objective:
    """Softmax cross entropy with a margin on the angle to the sample's own class. Loss: `losses.ArcFace`.

    Args:
        classes: number of training classes, C.
        dim: width of the embeddings, D.
        scale: > 0; 64 for faces.
        margin: radians in [0, pi); 0.5 in the paper.
        init: initialisation of the proxies, a name of `sources.INITIALISATIONS`.
        touched: which proxies a step compares with and moves: "all", "batch" or a share (`sources.proxies`).
        weights: how much a class counts in the mean: a number for each class, "frequency" (inverse, 1 on average), or
            None: all the same (`weightings.ClassBalance`).
        margins: a margin for each class, "frequency" (LDAM: `margin` for the rarest class, falling with the fourth root
            of the number of images), or None: `margin` for all.
        counts: the number of training images of each class, for "frequency"; `proxymetric train` counts them.
    """
    return Compare(
        ArcFace(scale, margin),
        proxies(classes, dim, 1, init, touched),
        balance(classes, weights, margins, counts, margin),
    )


@about(
    paper="Deng et al. 2020, Sub-center ArcFace: Boosting Face Recognition by Large-Scale Noisy Web Faces",
    choose="lists images that may have wrong labels; here not above arcface",
    sums_over="classes",
    grouped=True,
)
def subcentre_arcface(
    classes: int,
    dim: int,
    *,
    scale: float = 64.0,
    margin: float = 0.5,
    per_class: int = 3,
    init: str = "kaiming",
    touched: str | float = "all",
) -> Objective:
    """ArcFace on the nearest of K centres of each class. Loss: `losses.SubCentreArcFace`.

    After training, `inspection.sub_centres(embeddings, labels, criterion)` lists the images at minor centres. The paper
    drops those more than 75 degrees from the dominant centre of their class and trains again with one centre.

    Args:
        classes: number of training classes, C.
        dim: width of the embeddings, D.
        scale: > 0; 64 for faces.
        margin: radians in [0, pi); 0.5 in the paper.
        per_class: K centres per class; 3 in the paper.
        init: initialisation of the centres, a name of `sources.INITIALISATIONS`.
        touched: which centres a step compares with and moves: "all", "batch" or a share (`sources.proxies`).
    """
    return Compare(SubCentreArcFace(scale, margin), proxies(classes, dim, per_class, init, touched))
