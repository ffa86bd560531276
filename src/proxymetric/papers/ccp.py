"""CCP: deep metric learning with chance constraints (Gürbüz, Can & Alatan, 2023).

Where paper and released code differ, the paper is the default and the code is an argument: `first_lam=0`,
`start="zero"`, `anchor="best"`, `in_batch=0.1`. Samples are picked by the distances between normalised embeddings,
which are the vectors that the loss compares. The released code picks them by distances before normalisation.
"""

from __future__ import annotations

from proxymetric.arguments.checks import at_least_zero
from proxymetric.core.pieces import Compare, Objective, Sum
from proxymetric.papers.about import about
from proxymetric.papers.assembled import Builder, assembled
from proxymetric.papers.base import Base, base_objective, check_compares_with_rows, split_base
from proxymetric.schemes import AlternatingProjections
from proxymetric.sources import InBatch, LearnedProxies, Memory


@about(
    paper="Gürbüz et al. 2023, Deep Metric Learning with Chance Constraints",
    choose="around a pair loss with small batches; on CUB here above contrastive with batches of 16, level with 32",
    needs=("encoder", "validation", "pool"),
    samples_per_class=4,
    no_plan="has a copy of the encoder and a pool of embeddings in addition to its proxies; plan its base loss",
)
@assembled(AlternatingProjections)
def ccp(
    build: Builder,
    *,
    base: Base = "margin-contrastive",
    per_class: int = 8,
    in_batch: float = 0.0,
    memory: int = 0,
    memory_start: int = 1000,
    memory_weight: float = 1.0,
    normalise: str = "ball",
) -> Objective:
    """A loss against K proxies per class, which are picked again whenever training on them has converged.

    Scheme: `schemes.AlternatingProjections`.

    The paper's training: Adam 1e-5, weight decay 1e-4, proxies x1, no warm-up, 8 classes x 4 images, an evaluation
    every 25 steps (SOP, In-Shop: 250); 60 evaluations without a better score end the run.

    Args:
        base: any pair or proxy loss, a name or a table of its name and arguments. A pair loss is compared with proxies
            instead of with the batch.
        per_class: K proxies per class; CUB and Cars 8, SOP and In-Shop 4. A proxy base that takes several proxies gets
            K too, unless its table sets another number.
        in_batch: weight of the same loss inside the batch; 0 in the paper, 0.1 in its released code.
        memory: number of past embeddings in a memory, which adds a term as in `xbm`; 0: no memory.
        memory_start: steps before the memory is used.
        memory_weight: weight of the term with the memory.
        normalise: "ball" (`v / max(|v|, 1)`, the paper) or "l2". Scores and search use cosines in both cases.
    """
    at_least_zero(in_batch=in_batch, memory_weight=memory_weight)
    classes, dim = build.classes, build.dim
    base_normalise = split_base(base)[1].get("normalise", normalise)
    if base_normalise != normalise:
        raise ValueError(
            f"base: got normalise={base_normalise!r} in its table and {normalise!r} as an argument of ccp, expected "
            "normalise as an argument of ccp only"
        )
    compare = base_objective(base, classes, dim, per_class=per_class)
    source = LearnedProxies(classes, dim, per_class) if compare.source.classes is None else compare.source
    if not source.seats:
        raise ValueError(
            f"base: got {base!r}, whose proxies ({type(source).__name__}) cannot be re-picked; "
            "expected touched='all', or another method with learned proxies"
        )
    if in_batch or memory:
        check_compares_with_rows(compare.loss, dim)
    parts: dict[str, tuple[float, Objective]] = {
        "proxies": (1.0, Compare(compare.loss, source, compare.weighting, compare.regulariser, normalise))
    }
    if in_batch:
        parts["in_batch"] = (in_batch, Compare(compare.loss, InBatch(), normalise=normalise))
    if memory:
        queue = Memory(memory, dim, memory_start, normalise)
        parts["memory"] = (memory_weight, Compare(compare.loss, queue, normalise=normalise))
    objective = Sum(**parts) if len(parts) > 1 else parts["proxies"][1]
    return build(AlternatingProjections, objective)
