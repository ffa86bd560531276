"""Proxy-ISA: informative sample-aware proxies (Li, Sato, Ishikawa, Kawakami & Yokota, MMAsia 2022).

Where we differ: the published code changes its memory before the optimiser moves, ours after it has, with the proxies
as they were in the loss, so that the result is the same and a skipped step leaves no trace. Its queue overwrites the
last places when it is full; ours is first in, first out, as the paper says.
"""

from __future__ import annotations

import torch

from proxymetric.core.pieces import Compare, Objective, References
from proxymetric.ops import Similarity
from proxymetric.papers.about import about
from proxymetric.papers.base import Base, base_objective
from proxymetric.weightings import InformativeSamples


@about(
    paper="Li et al. 2022, Informative Sample-Aware Proxy for Deep Metric Learning",
    choose="over proxy-anchor when training is long enough to over-fit, or labels and images are noisy",
    needs=("epochs",),
)
def proxy_isa(
    classes: int,
    dim: int,
    *,
    base: Base = "proxy-anchor",
    volume: float = 100.0,
    h: float = 0.15,
    k: float = 0.9,
    lam: float = 0.1,
    tau: float = 1.5,
    memory: int = 55_000,
    memory_epoch: float = 1,
    filter_epoch: float = 2,
    initial_hardness: float = 1.0,
    positive: str = "sigma",
    negative: str = "1/E",
) -> Objective:
    """A proxy method whose pairs are weighted by how informative they are. Weighting: `weightings.InformativeSamples`.

    base: the method that is weighted, a name or a table of its name and arguments: `{method = "mpa", per_class = 4}`;
    any with an exponent and proxies: proxy-anchor, proxy-nca, proxy-nca++, norm-softmax, cosface, soft-triple, mpa,
    mpa-dw, mpa-ap. The rest are arguments of the weighting.

    The paper's training: Adam 1e-4, proxies x100, batch 128, average pooling, no warm-up (CUB, Cars); AdamW 6e-4 and
    one epoch of warm-up (SOP, In-Shop).
    """
    first = base_objective(base, classes, dim)
    if first.source.classes is None:
        raise ValueError(f"base: got {base!r}, which has no proxies; expected a proxy method, such as 'proxy-anchor'")
    if first.weighting is not None:
        raise ValueError(f"base: got {base!r}, whose pairs are weighted already; expected a method without a weighting")
    weighting = InformativeSamples(
        classes,
        dim,
        volume=volume,
        h=h,
        k=k,
        lam=lam,
        tau=tau,
        memory=memory,
        memory_epoch=memory_epoch,
        filter_epoch=filter_epoch,
        initial_hardness=initial_hardness,
        positive=positive,
        negative=negative,
        of_class=getattr(first.loss, "of_class", Similarity("max")),
    )
    # A loss whose exponent cannot be weighted says so now, not at the first step.
    one, label = torch.zeros(1, dim), torch.zeros(1, dtype=torch.int64)
    first.loss(one, label, References(one, label, per_class=1), weighting.rule(filtering=True))
    return Compare(first.loss, first.source, weighting, first.regulariser, first.normalise)
