"""Contrastive losses: C1 on cosines (Wang et al., CVPR 2020, XBM) and C2 on distances (Hadsell et al., CVPR 2006)."""

from __future__ import annotations

from proxymetric.core.pieces import Compare, Objective
from proxymetric.losses import Contrastive, MarginContrastive
from proxymetric.papers.about import NO_PROXIES, about
from proxymetric.sources import InBatch


@about(
    paper="Wang et al. 2020, Cross-Batch Memory for Embedding Learning",
    choose="the pair loss that gains most from a memory in the paper of xbm",
    samples_per_class=4,
    no_plan=NO_PROXIES,
)
def contrastive(classes: int, dim: int, *, margin: float = 0.5, normalise: str = "l2") -> Objective:
    """Pull every positive pair of the batch to 1, push negative pairs above `margin` down. Loss: `losses.Contrastive`.

    Args:
        classes: number of training classes; the loss has no proxies and ignores it.
        dim: width of the embeddings; ignored as well.
        margin: in [-1, 1]; 0.5 in the paper.
        normalise: "l2" or "ball", a key of `NORMALISATIONS`.
    """
    return Compare(Contrastive(margin), InBatch(), normalise=normalise)


@about(
    paper="Hadsell et al. 2006, Dimensionality Reduction by Learning an Invariant Mapping",
    choose="the classic pair loss, with distances; a base loss of CCP",
    samples_per_class=4,
    no_plan=NO_PROXIES,
)
def margin_contrastive(
    classes: int,
    dim: int,
    *,
    margin: float = 0.3841,
    positive_margin: float = 0.0,
    averaging: str = "nonzero",
    normalise: str = "l2",
) -> Objective:
    """Hinges on the Euclidean distances of the batch. Loss: `losses.MarginContrastive`.

    Args:
        classes: number of training classes; the loss has no proxies and ignores it.
        dim: width of the embeddings; ignored as well.
        margin: > 0; distance that negatives should have. 0.3841 is CCP's study on CUB.
        positive_margin: >= 0; distance that positives may have. 0 is CCP's study on CUB.
        averaging: "nonzero" or "all", see the loss.
        normalise: "l2" or "ball", a key of `NORMALISATIONS`.
    """
    return Compare(MarginContrastive(margin, positive_margin, averaging), InBatch(), normalise=normalise)
