"""Circle loss (Sun, Cheng, Zhang, Zhang, Zheng, Wang & Wei, CVPR 2020)."""

from __future__ import annotations

from proxymetric.core.pieces import Objective
from proxymetric.losses import Circle
from proxymetric.papers.about import NO_PROXIES, about
from proxymetric.papers.assembled import Builder, assembled
from proxymetric.papers.pairs import in_batch


@about(
    paper="Sun et al. 2020, Circle Loss: A Unified Perspective of Pair Similarity Optimization",
    choose="a pair loss that weights each pair by its distance from the optimum",
    samples_per_class=4,
    surrogate_gradient=True,
    no_plan=NO_PROXIES,
)
@assembled(Circle, in_batch)
def circle(build: Builder) -> Objective:
    """Pairs of the batch, each weighted by the distance of its similarity from the optimum. Loss: `losses.Circle`."""
    return build(in_batch, build(Circle))
