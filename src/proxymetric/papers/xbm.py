"""Cross-batch memory (Wang, Zhang, Huang & Scott, CVPR 2020)."""

from __future__ import annotations

from proxymetric.core.pieces import Compare, Objective, Sum
from proxymetric.papers.about import about
from proxymetric.papers.base import Base, base_objective, compares_with_rows
from proxymetric.sources.memory import Memory


@about(
    paper="Wang et al. 2020, Cross-Batch Memory for Embedding Learning",
    choose="over its base loss when batches are small beside the number of classes",
    samples_per_class=4,
)
def xbm(
    classes: int,
    dim: int,
    *,
    base: Base = "contrastive",
    memory: int = 4096,
    start: int = 1000,
    weight: float = 1.0,
) -> Objective:
    """A base method, and the same loss once more against a memory of past embeddings: `sources.Memory`.

    base: a method's name, or a table of its name and arguments: `{method = "triplet", margin = 0.1}`; any pair or proxy
    loss that can be compared with loose rows. memory: embeddings kept; CCP's study has 3 or 25 batches on CUB and Cars,
    100 or 400 on In-Shop, 400 or 1,400 on SOP. start: steps of the base loss alone before that. weight: of the term.
    """
    first = base_objective(base, classes, dim)
    compares_with_rows(first.loss, dim)
    again = Compare(first.loss, Memory(memory, dim, start, first.normalise), normalise=first.normalise)
    return Sum(base=(1.0, first), memory=(weight, again))
