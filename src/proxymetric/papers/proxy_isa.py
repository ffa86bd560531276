"""Proxy-ISA: informative sample-aware proxies (Li, Sato, Ishikawa, Kawakami & Yokota, MMAsia 2022).

Deviations from the published code: the code updates its memory before the optimiser step. Here the memory is updated
after the step, with the proxies that the loss was computed with; the result is the same, and a skipped step leaves no
trace. The queue of the code overwrites its last places when it is full. Here the queue is first in, first out, as in
the paper.
"""

from __future__ import annotations

import torch

from proxymetric.core.capabilities import traits
from proxymetric.core.pair_weights import PairWeights, StepFunction
from proxymetric.core.pieces import Compare, Objective, References
from proxymetric.ops import Similarity
from proxymetric.papers.about import about
from proxymetric.papers.assembled import Builder, assembled
from proxymetric.papers.base import Base, base_objective
from proxymetric.weightings import InformativeSamples


@about(
    paper="Li et al. 2022, Informative Sample-Aware Proxy for Deep Metric Learning",
    choose="for noisy labels according to its paper; here seldom above proxy-anchor",
    needs=("epochs",),
    no_plan="has a memory of embeddings in addition to its proxies; plan its base, such as proxy-anchor",
)
@assembled(InformativeSamples)
def proxy_isa(build: Builder, *, base: Base = "proxy-anchor") -> Objective:
    """A proxy method whose pairs are weighted by how informative they are. Weighting: `weightings.InformativeSamples`.

    The paper's training: Adam 1e-4, proxies x100, batch 128, average pooling, no warm-up (CUB, Cars); AdamW 6e-4 and
    one epoch of warm-up (SOP, In-Shop).

    Args:
        base: the method that is weighted, a name or a table of its name and arguments: `{method = "mpa", per_class =
            4}`. Any method with learned proxies and a weighted exponent: proxy-anchor, proxy-nca, proxy-nca++,
            norm-softmax, cosface, soft-triple, mpa, mpa-dw, mpa-ap.
    """
    compare = base_objective(base, build.classes, build.dim)
    if compare.source.classes is None:
        raise ValueError(f"base: got {base!r}, which has no proxies; expected a proxy method, such as 'proxy-anchor'")
    if compare.weighting is not None:
        raise ValueError(f"base: got {base!r}, whose pairs are weighted already; expected a method without a weighting")
    weighting = build(InformativeSamples, of_class=traits(compare.loss).of_class or Similarity("max"))
    # A loss whose exponent cannot be weighted raises its error here, not at the first step.
    queries, labels = torch.eye(2), torch.arange(2)
    references = References(torch.tensor([[0.6, 0.8], [0.8, 0.6]]), labels, per_class=1)
    half = StepFunction(torch.zeros(2, 0), torch.full((2, 1), 0.5))
    weighted = compare.loss(queries, labels, references, PairWeights(half, half))
    if torch.equal(weighted, compare.loss(queries, labels, references)):
        raise ValueError(
            f"base: got {base!r}, whose loss ({type(compare.loss).__name__}) makes no use of the weights of pairs; "
            "expected a loss that multiplies its exponents by `weight`"
        )
    return Compare(compare.loss, compare.source, weighting, compare.regulariser, compare.normalise)
