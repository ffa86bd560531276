"""Momentum contrast (He et al., CVPR 2020) around a proxy method, as in VCPA's comparison (Kim et al. 2022, 4.7)."""

from __future__ import annotations

from proxymetric.core.pieces import Objective
from proxymetric.papers.about import about
from proxymetric.papers.assembled import Builder, assembled
from proxymetric.papers.base import Base, base_objective
from proxymetric.schemes import MomentumQueue


@about(
    paper="He et al. 2020, Momentum Contrast for Unsupervised Visual Representation Learning",
    choose="a comparison for the methods with a memory; not better than its base loss in VCPA's paper",
    needs=("encoder", "images"),
    no_plan="has a copy of the encoder and a queue of embeddings; plan its base, such as proxy-anchor",
)
@assembled(MomentumQueue)
def moco(build: Builder, *, base: Base = "proxy-anchor") -> Objective:
    """A method on the batch and on a queue of embeddings by a momentum encoder. Scheme: `schemes.MomentumQueue`.

    Args:
        base: the method, a name or a table of its name and arguments.
    """
    objective = base_objective(base, build.classes, build.dim)
    if objective.weighting is not None:
        raise ValueError(
            f"base: got {base!r}, whose weighting would count the samples of the queue again at every step; "
            "expected a method without a weighting"
        )
    return build(MomentumQueue, objective)
