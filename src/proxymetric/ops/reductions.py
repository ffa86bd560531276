"""The reductions that every proxy loss is written on: exponents of similarities, summed, over the batch or the classes.

========================  =====================================================================  ===================
reduction                 gives                                                                  for
========================  =====================================================================  ===================
`mean_over_batch`         mean over the columns c of `log(1 + sum_i exp(w z(s_ic)))`             Proxy-Anchor, MPA
`over_batch`              for each column c `log sum_i exp(w z(s_ic))`                           anything of these
`over_classes`            for each query i `log sum_c exp(w z(s_ic))`                            the softmax family
========================  =====================================================================  ===================

Each for the pairs of one class and for those of two. A column is a reference row, or a class where `of_class` says how
its K rows make one similarity. Sums are made in float32 or better, whatever type queries and references have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from proxymetric.core.class_shards import all_reduce_logsumexp, all_reduce_sum, grad_all_reduce
from proxymetric.core.pair_weights import PairWeights
from proxymetric.core.pieces import References
from proxymetric.ops import chunked, plain
from proxymetric.ops.problem import NONE, Count, Line, Means, Problem, Reduced, Settings, Totals
from proxymetric.ops.similarity import Similarity
from proxymetric.ops.triton import reductions
from proxymetric.ops.triton.launch import installed


class Implementation(NamedTuple):
    """One way to compute all three; `plain` is what the others must equal."""

    mean_over_batch: Callable[[Tensor, Problem, Count, Count, Settings], Totals]
    over_batch: Callable[[Tensor, Problem, Settings], Reduced]
    over_classes: Callable[[Tensor, Problem, Settings], Reduced]


IMPLS: dict[str, Implementation] = {
    "plain": Implementation(plain.mean_over_batch, plain.over_batch, plain.over_classes),
    "chunked": Implementation(chunked.mean_over_batch, chunked.over_batch, chunked.over_classes),
    "triton": Implementation(reductions.mean_over_batch, reductions.over_batch, reductions.over_classes),
}
"""name -> implementation: the one list of them"""

SMALL = 2**16
"""pairs up to which "auto" is plain"""
SMALL_UNFUSED = 2**26
"""the same on accelerators without fused kernels, where launching many small ones is what small sizes cost"""


_setting: ContextVar[Settings] = ContextVar("setting", default=Settings())  # noqa: B039 - a tuple


@contextmanager
def using(impl: str | None = None, *, budget: int | None = None, rows: int | None = None) -> Iterator[Settings]:
    """Compute the losses inside in another way: the same values and gradients, in other time and memory.

    impl: "plain" is the definition, on matrices of all queries by all references; "chunked" makes none, or one that
    spares a product where the budget allows it; "triton" is that on a GPU, its products in the type of queries and
    references and fused kernels between them; "auto" (the default) is one of these, by size and device.
    budget: bytes from 0 that the similarities of one loss may take between its forward and its backward pass (1 GiB).
    rows: references of one chunk, from 1; by default as many as suit the processor.
    What is None stays as it is outside.

    >>> with using("chunked", budget=0) as now:
    ...     now.impl, now.budget
    ('chunked', 0)
    """
    if impl is not None and impl not in (*IMPLS, "auto"):
        raise ValueError(f"impl: got {impl!r}, expected one of {', '.join(IMPLS)}, auto")
    if impl == "triton" and not installed():
        raise ValueError("impl: got 'triton', which wants the package of that name: pip install 'proxymetric[triton]'")
    for name, value, least in (("budget", budget, 0), ("rows", rows, 1)):
        if value is not None and (not isinstance(value, int) or value < least):
            raise ValueError(f"{name}: got {value!r}, expected a whole number of at least {least}")
    told: dict[str, Any] = {"impl": impl, "budget": budget, "rows": rows}
    now = _setting.get()._replace(**{name: value for name, value in told.items() if value is not None})
    token = _setting.set(now)
    try:
        yield now
    finally:
        _setting.reset(token)


def chosen(queries: Tensor, refs: References) -> str:
    """The name of the implementation that compares these, by the setting."""
    name, pairs = _setting.get().impl, len(queries) * len(refs.labels)
    compiling = torch.compiler.is_compiling()  # which reads torch, not kernels that are launched
    if name == "auto":
        kind = queries.device.type
        fast = kind == "cuda" and installed() and not compiling
        small = SMALL if kind == "cpu" or fast else SMALL_UNFUSED
        name = "plain" if pairs <= small else "triton" if fast else "chunked"
    if name == "triton" and compiling:
        name = "chunked"
    return name if pairs else "plain"


def mean_over_batch(
    queries: Tensor,
    labels: Tensor,
    refs: References,
    positive: Line,
    negative: Line,
    of_class: Similarity | None = None,
    weight: PairWeights | None = None,
    *,
    positive_count: Count = None,
    negative_count: Count = None,
) -> Means:
    """`1/N sum_c log(1 + sum_i exp(w z(s_ic)))`, i the queries of column c's class, and the same over the others.

    N is the given count, or without one the summed mean weights of the columns: how many columns have such a pair, if
    there is no weighting. Two scalars, so that an implementation can make the whole gradient while it has a column's
    similarities at hand; `over_batch`, whose result may go anywhere, must wait for what comes of it.

    >>> refs = References(torch.eye(2), torch.arange(2), per_class=1)
    >>> mean_over_batch(torch.eye(2), torch.arange(2), refs, Line(-1.0), Line(1.0))
    Means(positive=tensor(0.3133), negative=tensor(0.6931))
    """
    task = Problem(labels, refs._replace(shard=None), positive, negative, of_class, weight)
    with torch.autocast(queries.device.type, enabled=False):
        do = IMPLS[chosen(queries, refs)].mean_over_batch
        if refs.shard is None:
            found = do(queries, task, positive_count, negative_count, _setting.get())
        else:
            # No process knows the weights of all columns.
            parts = do(_felt(queries, refs), task, positive_count or 1.0, negative_count or 1.0, _setting.get())
            found = Totals(*all_reduce_sum(torch.stack(parts), refs.shard))
            found = found.over_weights(positive_count is None, negative_count is None)
        return Means(found.positive, found.negative)


def over_batch(
    queries: Tensor,
    labels: Tensor,
    refs: References,
    positive: Line,
    negative: Line,
    of_class: Similarity | None = None,
    weight: PairWeights | None = None,
) -> Reduced:
    """For each column c: `log sum_i exp(w z(s_ic))` over the queries i of its class, and over the others.

    Where references are divided among processes, each has its own columns.
    """
    task = Problem(labels, refs._replace(shard=None), positive, negative, of_class, weight)
    with torch.autocast(queries.device.type, enabled=False):
        return IMPLS[chosen(queries, refs)].over_batch(_felt(queries, refs), task, _setting.get())


def over_classes(
    queries: Tensor,
    labels: Tensor,
    refs: References,
    positive: Line,
    negative: Line,
    of_class: Similarity | None = None,
    weight: PairWeights | None = None,
) -> Reduced:
    """For each query i: `log sum_c exp(w z(s_ic))` over the columns c of its class, and over the others."""
    task = Problem(labels, refs._replace(shard=None), positive, negative, of_class, weight)
    with torch.autocast(queries.device.type, enabled=False):
        found = IMPLS[chosen(queries, refs)].over_classes(_felt(queries, refs), task, _setting.get())
        if refs.shard is None:
            return found
        if weight is not None:
            raise ValueError("weighting: with proxies divided among processes it wants a loss over the batch")
        logs = [all_reduce_logsumexp(each, refs.shard) for each in (found.positive, found.negative)]
        return Reduced(logs[0], logs[1], *((each != NONE).to(each) for each in logs))


def _felt(queries: Tensor, refs: References) -> Tensor:
    return queries if refs.shard is None else grad_all_reduce(queries, refs.shard)
