"""Triplet loss (Schroff, Kalenichenko & Philbin, CVPR 2015)."""

from __future__ import annotations

from proxymetric.core.pieces import Compare, Objective
from proxymetric.losses import Triplet
from proxymetric.papers.about import NO_PROXIES, about
from proxymetric.sources import InBatch


@about(
    paper="Schroff et al. 2015, FaceNet: A Unified Embedding for Face Recognition and Clustering",
    choose="the classic ranking loss; needs several images of a class in each batch",
    samples_per_class=4,
    no_plan=NO_PROXIES,
)
def triplet(classes: int, dim: int, *, margin: float = 0.0961, normalise: str = "l2") -> Objective:
    """The mean over all violating triplets of the batch. Loss: `losses.Triplet`.

    Args:
        classes: number of training classes; the loss has no proxies and ignores it.
        dim: width of the embeddings; ignored as well.
        margin: > 0; 0.0961 is CCP's study on CUB.
        normalise: "l2" or "ball", a key of `NORMALISATIONS`.
    """
    return Compare(Triplet(margin), InBatch(), normalise=normalise)
