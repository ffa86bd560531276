"""Supervised contrastive loss (Khosla, Teterwak, Wang, Sarna, Tian, Isola, Maschinot, Liu & Krishnan, NeurIPS 2020)."""

from __future__ import annotations

from proxymetric.core.pieces import Objective
from proxymetric.losses import SupCon
from proxymetric.papers.about import NO_PROXIES, about
from proxymetric.papers.assembled import Builder, assembled
from proxymetric.papers.pairs import in_batch


@about(
    paper="Khosla et al. 2020, Supervised Contrastive Learning",
    choose="a softmax over the pairs of large batches",
    samples_per_class=4,
    no_plan=NO_PROXIES,
)
@assembled(SupCon, in_batch)
def supcon(build: Builder) -> Objective:
    """A softmax over all other samples of the batch, averaged over the positives. Loss: `losses.SupCon`."""
    return build(in_batch, build(SupCon))
