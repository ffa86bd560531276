"""Contrastive losses: XBM's C1 (Wang et al., CVPR 2020) and C2 with two margins, as CCP's study has them."""

from __future__ import annotations

from proxymetric.core.pieces import Compare, Objective
from proxymetric.losses import Contrastive, MarginContrastive
from proxymetric.papers.about import about
from proxymetric.sources import InBatch


@about(
    paper="Wang et al. 2020, Cross-Batch Memory for Embedding Learning",
    choose="the pair loss that gains most from a memory of past batches",
    samples_per_class=4,
)
def contrastive(classes: int, dim: int, *, margin: float = 0.5, normalise: str = "l2") -> Objective:
    """Positives to 1, negatives above `margin` down, inside the batch. Loss: `losses.Contrastive`."""
    return Compare(Contrastive(margin), InBatch(), normalise=normalise)


@about(
    paper="Hadsell et al. 2006, Dimensionality Reduction by Learning an Invariant Mapping",
    choose="the classic; the base loss that CCP improves most",
    samples_per_class=4,
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
    """Hinges on Euclidean distances inside the batch. Loss: `losses.MarginContrastive`. Margins: CUB's."""
    return Compare(MarginContrastive(margin, positive_margin, averaging), InBatch(), normalise=normalise)
