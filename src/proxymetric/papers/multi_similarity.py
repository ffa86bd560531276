"""Multi-similarity loss (Wang, Han, Huang, Dong & Scott, CVPR 2019)."""

from __future__ import annotations

from proxymetric.core.pieces import Compare, Objective
from proxymetric.losses import MultiSimilarity
from proxymetric.papers.about import about
from proxymetric.sources import InBatch


@about(
    paper="Wang et al. 2019, Multi-Similarity Loss with General Pair Weighting for Deep Metric Learning",
    choose="the strongest pair loss without a memory",
    samples_per_class=4,
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
    """Mined pairs, softly weighted, inside the batch. Loss: `losses.MultiSimilarity`."""
    return Compare(MultiSimilarity(alpha, beta, base, epsilon), InBatch(), normalise=normalise)
