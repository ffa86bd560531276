"""Multi-similarity loss (Wang, Han, Huang, Dong & Scott, CVPR 2019)."""

from __future__ import annotations

from proxymetric.core.pieces import Objective
from proxymetric.losses import MultiSimilarity
from proxymetric.papers.about import NO_PROXIES, about
from proxymetric.papers.assembled import Builder, assembled
from proxymetric.papers.pairs import in_batch


@about(
    paper="Wang et al. 2019, Multi-Similarity Loss with General Pair Weighting for Deep Metric Learning",
    choose="a pair loss that mines and weights pairs",
    samples_per_class=4,
    no_plan=NO_PROXIES,
)
@assembled(MultiSimilarity, in_batch)
def multi_similarity(build: Builder) -> Objective:
    """Mined pairs of the batch, weighted softly. Loss: `losses.MultiSimilarity`."""
    return build(in_batch, build(MultiSimilarity))
