"""Proxy methods with a momentum encoder and a queue, as VCPA compares with (Kim et al. 2022, section 4.7)."""

from __future__ import annotations

from proxymetric.core.pieces import Objective
from proxymetric.papers.about import about
from proxymetric.papers.base import Base, base_objective
from proxymetric.schemes import MomentumQueue


@about(
    paper="He et al. 2020, Momentum Contrast for Unsupervised Visual Representation Learning",
    choose="a comparison for the methods with a memory; it did not beat its base in VCPA's study",
    needs=("encoder", "images"),
)
def moco(
    classes: int,
    dim: int,
    *,
    base: Base = "proxy-anchor",
    memory: int = 900,
    momentum: float = 0.999,
) -> Objective:
    """A method that sees the batch and a queue of a momentum encoder's embeddings. Scheme: `MomentumQueue`.

    base: a method's name, or a table of its name and arguments. memory: embeddings kept. momentum: of the encoder.
    """
    objective = base_objective(base, classes, dim)
    if objective.weighting is not None:
        raise ValueError(
            f"base: got {base!r}, which would count the queue's samples anew at every step; "
            "expected a method without a weighting"
        )
    return MomentumQueue(objective, dim, memory, momentum)
