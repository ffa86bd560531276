"""Multi-similarity loss (Wang, Han, Huang, Dong & Scott, CVPR 2019)."""

from __future__ import annotations

from proxymetric.core.pieces import Compare, Objective
from proxymetric.losses import MultiSimilarity
from proxymetric.papers.about import NO_PROXIES, about
from proxymetric.sources import InBatch


@about(
    paper="Wang et al. 2019, Multi-Similarity Loss with General Pair Weighting for Deep Metric Learning",
    choose="a pair loss that mines and weights pairs",
    samples_per_class=4,
    no_plan=NO_PROXIES,
)
def multi_similarity(
    classes: int,
    dim: int,
    *,
    alpha: float = 2.0,
    beta: float = 40.0,
    base: float = 0.5,
    epsilon: float | None = 0.1,
    normalise: str = "l2",
) -> Objective:
    """Mined pairs of the batch, weighted softly. Loss: `losses.MultiSimilarity`.

    Args:
        classes: number of training classes; the loss has no proxies and ignores it.
        dim: width of the embeddings; ignored as well.
        alpha: > 0; scale of the positive pairs. 2 in CCP's study on CUB and SOP.
        beta: > 0; scale of the negative pairs. 40 in CCP's study on CUB and SOP.
        base: the similarity at which both exponents are 0. 0.5 in CCP's study on CUB and SOP.
        epsilon: >= 0; margin of the mining, 0.1 by default. None turns the mining off.
        normalise: "l2" or "ball", a key of `NORMALISATIONS`.
    """
    return Compare(MultiSimilarity(alpha, beta, base, epsilon), InBatch(), normalise=normalise)
