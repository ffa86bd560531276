"""Contrastive losses: C1 on cosines (Wang et al., CVPR 2020, XBM) and C2 on distances (Hadsell et al., CVPR 2006)."""

from __future__ import annotations

from proxymetric.core.pieces import Objective
from proxymetric.losses import Contrastive, MarginContrastive
from proxymetric.papers.about import NO_PROXIES, about
from proxymetric.papers.assembled import Builder, assembled
from proxymetric.papers.pairs import in_batch


@about(
    paper="Wang et al. 2020, Cross-Batch Memory for Embedding Learning",
    choose="the pair loss that gains most from a memory in the paper of xbm",
    samples_per_class=4,
    no_plan=NO_PROXIES,
)
@assembled(Contrastive, in_batch)
def contrastive(build: Builder) -> Objective:
    """Pull positive pairs of the batch to 1, push negative pairs above `margin` down. Loss: `losses.Contrastive`."""
    return build(in_batch, build(Contrastive))


@about(
    paper="Hadsell et al. 2006, Dimensionality Reduction by Learning an Invariant Mapping",
    choose="the classic pair loss, with distances; a base loss of CCP",
    samples_per_class=4,
    no_plan=NO_PROXIES,
)
@assembled(MarginContrastive, in_batch)
def margin_contrastive(build: Builder) -> Objective:
    """Hinges on the Euclidean distances of the batch. Loss: `losses.MarginContrastive`."""
    return build(in_batch, build(MarginContrastive))
