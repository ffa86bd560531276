"""Cross-batch memory (Wang, Zhang, Huang & Scott, CVPR 2020)."""

from __future__ import annotations

from proxymetric.core.pieces import Compare, Objective, Sum
from proxymetric.papers.about import NO_PROXIES, about
from proxymetric.papers.base import Base, base_objective, check_compares_with_rows
from proxymetric.sources import Memory


@about(
    paper="Wang et al. 2020, Cross-Batch Memory for Embedding Learning",
    choose="for small batches and many classes, according to its paper",
    samples_per_class=4,
    no_plan=NO_PROXIES,
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
    """A base method, plus its loss against a memory of past embeddings. Source: `sources.Memory`.

    Args:
        classes: number of training classes, C.
        dim: width of the embeddings, D.
        base: a name, or a table of its name and arguments: `{method = "triplet", margin = 0.1}`. Any pair or proxy loss
            that accepts references without a fixed number per class.
        memory: embeddings in the memory. CCP's study has 3 or 25 batches on CUB and Cars, 100 or 400 on In-Shop, 400 or
            1,400 on SOP.
        start: steps with the base loss only, before the memory is used.
        weight: weight of the term with the memory.
    """
    in_batch = base_objective(base, classes, dim)
    check_compares_with_rows(in_batch.loss, dim)
    source = Memory(memory, dim, start, in_batch.normalise)
    with_memory = Compare(in_batch.loss, source, normalise=in_batch.normalise)
    return Sum(base=(1.0, in_batch), memory=(weight, with_memory))
