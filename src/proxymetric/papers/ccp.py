"""CCP: deep metric learning with chance constraints (Gürbüz, Can & Alatan, 2023).

Where paper and released code differ, the paper is the default and the code an argument: `first_lam=0`, `start="zero"`,
`anchor="best"`, `in_batch=0.1`. Samples are picked by the distances between normalised embeddings, as they are
compared; the released code picks them by those before normalisation.
"""

from __future__ import annotations

from proxymetric.checks import at_least_zero
from proxymetric.core.pieces import Compare, Objective, Sum
from proxymetric.papers.about import about
from proxymetric.papers.base import Base, base_objective, compares_with_rows, named
from proxymetric.schemes import AlternatingProjections
from proxymetric.sources import InBatch, LearnedProxies, Memory


@about(
    paper="Gürbüz et al. 2023, Deep Metric Learning with Chance Constraints",
    choose="over any pair loss when batches must be small, over a proxy loss when classes are wide",
    needs=("encoder", "validation", "pool"),
    samples_per_class=4,
)
def ccp(
    classes: int,
    dim: int,
    *,
    base: Base = "margin-contrastive",
    per_class: int = 8,
    pool: int = 12,
    lam: float = 2e-4,
    first_lam: float | None = None,
    patience: int = 3,
    anchor: str = "last",
    roll_back: bool = False,
    start: str = "random",
    alternate: bool = True,
    in_batch: float = 0.0,
    memory: int = 0,
    memory_start: int = 1000,
    memory_weight: float = 1.0,
    normalise: str = "ball",
) -> Objective:
    """A loss against K proxies a class that are picked anew whenever training on them has converged.

    Scheme: `schemes.AlternatingProjections`. base: any pair or proxy loss, a name or a table of its name and arguments;
    a pair loss is compared with proxies instead of with the batch. per_class: K proxies (CUB, Cars 8; SOP, In-Shop 4);
    a proxy base that takes several gets them too unless its table says otherwise. pool: b samples a class to pick from
    (12; 7). in_batch: weight of the same loss inside the batch (the paper 0, its released code 0.1). memory,
    memory_start, memory_weight: a memory of past embeddings as one more term, as in `xbm`. normalise: "ball" (`v /
    max(|v|, 1)`, the paper) or "l2"; scores and search are by cosine either way. The rest are arguments of the scheme.

    The paper's training: Adam 1e-5, weight decay 1e-4, proxies x1, no warm-up, 8 classes x 4 images, an evaluation
    every 25 steps (SOP, In-Shop: 250), 60 of them without a better one end the run.
    """
    at_least_zero(in_batch=in_batch, memory_weight=memory_weight)
    told = named(base)[1].get("normalise", normalise)
    if told != normalise:
        raise ValueError(f"base: got normalise={told!r} there and {normalise!r} here; expected it here alone")
    first = base_objective(base, classes, dim, per_class=per_class)
    source = LearnedProxies(classes, dim, per_class) if first.source.classes is None else first.source
    if not source.seats:
        raise ValueError(f"base: the proxies of {base!r} cannot be re-picked; expected touched='all'")
    if in_batch or memory:
        compares_with_rows(first.loss, dim)
    parts: dict[str, tuple[float, Objective]] = {
        "proxies": (1.0, Compare(first.loss, source, first.weighting, first.regulariser, normalise))
    }
    if in_batch:
        parts["in_batch"] = (in_batch, Compare(first.loss, InBatch(), normalise=normalise))
    if memory:
        queue = Memory(memory, dim, memory_start, normalise)
        parts["memory"] = (memory_weight, Compare(first.loss, queue, normalise=normalise))
    objective = Sum(**parts) if len(parts) > 1 else parts["proxies"][1]
    return AlternatingProjections(
        objective, lam=lam, first_lam=first_lam, pool=pool, patience=patience, anchor=anchor, roll_back=roll_back,
        start=start, alternate=alternate,
    )  # fmt: skip
