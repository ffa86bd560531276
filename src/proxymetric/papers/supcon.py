"""Supervised contrastive loss (Khosla, Teterwak, Wang, Sarna, Tian, Isola, Maschinot, Liu & Krishnan, NeurIPS 2020)."""

from __future__ import annotations

from proxymetric.core.pieces import Compare, Objective
from proxymetric.losses import SupCon
from proxymetric.papers.about import NO_PROXIES, about
from proxymetric.sources import InBatch


@about(
    paper="Khosla et al. 2020, Supervised Contrastive Learning",
    choose="a softmax over the pairs of large batches",
    samples_per_class=4,
    no_plan=NO_PROXIES,
)
def supcon(classes: int, dim: int, *, temperature: float = 0.1, normalise: str = "l2") -> Objective:
    """A softmax over all other samples of the batch, averaged over the positives. Loss: `losses.SupCon`.

    Args:
        classes: number of training classes; the loss has no proxies and ignores it.
        dim: width of the embeddings; ignored as well.
        temperature: > 0; 0.1 in the paper.
        normalise: "l2" or "ball", a key of `NORMALISATIONS`.
    """
    return Compare(SupCon(temperature), InBatch(), normalise=normalise)
