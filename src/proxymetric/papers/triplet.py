"""Triplet loss (Schroff, Kalenichenko & Philbin, CVPR 2015)."""

from __future__ import annotations

from proxymetric.core.pieces import Objective
from proxymetric.losses import Triplet
from proxymetric.papers.about import NO_PROXIES, about
from proxymetric.papers.assembled import Builder, assembled
from proxymetric.papers.pairs import in_batch


@about(
    paper="Schroff et al. 2015, FaceNet: A Unified Embedding for Face Recognition and Clustering",
    choose="the classic ranking loss; needs several images of a class in each batch",
    samples_per_class=4,
    no_plan=NO_PROXIES,
)
@assembled(Triplet, in_batch)
def triplet(build: Builder) -> Objective:
    """The mean over all violating triplets of the batch. Loss: `losses.Triplet`."""
    return build(in_batch, build(Triplet))
