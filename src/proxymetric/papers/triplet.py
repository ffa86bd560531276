"""Triplet loss (Schroff, Kalenichenko & Philbin, CVPR 2015)."""

from __future__ import annotations

from proxymetric.core.pieces import Compare, Objective
from proxymetric.losses import Triplet
from proxymetric.papers.about import about
from proxymetric.sources import InBatch


@about(
    paper="Schroff et al. 2015, FaceNet: A Unified Embedding for Face Recognition and Clustering",
    choose="the classic of ranking; needs several images of a class in each batch",
    samples_per_class=4,
)
def triplet(classes: int, dim: int, *, margin: float = 0.0961, normalise: str = "l2") -> Objective:
    """All violating triplets of the batch, mean over them. Loss: `losses.Triplet`. Margin: CUB's in CCP's study."""
    return Compare(Triplet(margin), InBatch(), normalise=normalise)
