"""Normalised softmax (Zhai & Wu 2019), CosFace (Wang et al. 2018), ArcFace (Deng et al. 2019 and 2020)."""

from __future__ import annotations

from proxymetric.core.pieces import Compare, Objective
from proxymetric.losses import ArcFace, CosFace, SubCentreArcFace
from proxymetric.papers.about import about
from proxymetric.papers.assembled import Builder, assembled
from proxymetric.sources import proxies
from proxymetric.weightings import ClassBalance


@about(
    paper="Zhai & Wu 2019, Classification is a Strong Baseline for Deep Metric Learning",
    choose="plain classification on the sphere: the baseline every other method should beat",
    sums_over="classes",
)
@assembled(CosFace, proxies, ClassBalance, without=("margin", "margins"), scale=20.0)
def norm_softmax(build: Builder) -> Objective:
    """Softmax cross entropy on cosines. Loss: `losses.CosFace` without a margin.

    Args:
        scale: > 0; 20 is the paper's temperature of 0.05.
    """
    return Compare(build(CosFace, margin=0.0), build(proxies), build.unless(ClassBalance, weights=None))


@about(
    paper="Wang et al. 2018, CosFace: Large Margin Cosine Loss for Deep Face Recognition",
    choose="faces and very many classes, when arcface is unstable",
    sums_over="classes",
)
@assembled(CosFace, proxies, ClassBalance)
def cosface(build: Builder) -> Objective:
    """Softmax cross entropy with a margin on the cosine to the sample's own class. Loss: `losses.CosFace`."""
    weighting = build.unless(ClassBalance, weights=None, margins=None)
    return Compare(build(CosFace), build(proxies), weighting)


@about(
    paper="Deng et al. 2019, ArcFace: Additive Angular Margin Loss for Deep Face Recognition",
    choose="faces, very many classes, and wrong labels (on frozen features here)",
    sums_over="classes",
)
@assembled(ArcFace, proxies, ClassBalance, without=("per_class",))
def arcface(build: Builder) -> Objective:
    """Softmax cross entropy with a margin on the angle to the sample's own class. Loss: `losses.ArcFace`."""
    weighting = build.unless(ClassBalance, weights=None, margins=None)
    return Compare(build(ArcFace), build(proxies), weighting)


@about(
    paper="Deng et al. 2020, Sub-center ArcFace: Boosting Face Recognition by Large-Scale Noisy Web Faces",
    choose="lists images that may have wrong labels; here not above arcface",
    sums_over="classes",
    grouped=True,
)
@assembled(SubCentreArcFace, proxies, per_class=3)
def subcentre_arcface(build: Builder) -> Objective:
    """ArcFace on the nearest of K centres of each class. Loss: `losses.SubCentreArcFace`.

    After training, `inspection.sub_centres(embeddings, labels, criterion)` lists the images at minor centres. The paper
    drops those more than 75 degrees from the dominant centre of their class and trains again with one centre.

    Args:
        per_class: K centres per class; 3 in the paper.
    """
    return Compare(build(SubCentreArcFace), build(proxies))
