"""The reductions that every proxy loss uses, and the choice of their implementation.

========================  =====================================================================  ===================
reduction                 result                                                                 used by
========================  =====================================================================  ===================
`mean_over_batch`         mean over the columns c of `log(1 + sum_i exp(w z(s_ic)))`             Proxy-Anchor, MPA
`over_classes`            for each query i `log sum_c exp(w z(s_ic))`                            MPA-AP, MPA-DW
`cross_entropy`           mean over the queries of `-log` of the share of its class in that sum  the softmax family
========================  =====================================================================  ===================

The first two are computed once for the pairs of the same class (positives) and once for the pairs of different classes
(negatives). s_ic is the similarity of query i and column c, z the exponent (`Line`) and w the weight of the pair. A
column is a reference row, or a class if `of_class` combines the K rows of a class. Sums are computed in float32 or
float64, for every type of the queries and references.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from proxymetric.arguments.signatures import one_of
from proxymetric.core.class_shards import all_reduce_logsumexp, all_reduce_sum, grad_all_reduce
from proxymetric.core.pair_weights import PairWeights
from proxymetric.core.pieces import References
from proxymetric.core.products import HAS_MKL
from proxymetric.core.similarity import Similarity
from proxymetric.ops import chunked, dense, plain
from proxymetric.ops.problem import (
    MIN_WEIGHT_SUM,
    NONE,
    Count,
    Exponent,
    Line,
    Means,
    Problem,
    Reduced,
    Settings,
    Totals,
)
from proxymetric.ops.triton import reductions as triton
from proxymetric.ops.triton.launch import installed


class Implementation(NamedTuple):
    """One way to compute both reductions; every implementation must agree with `plain`."""

    mean_over_batch: Callable[[Tensor, Problem, Count, Count, Settings], Totals]
    over_classes: Callable[[Tensor, Problem, Settings], Reduced]


IMPLS: dict[str, Implementation] = {
    "plain": Implementation(plain.mean_over_batch, plain.over_classes),
    "dense": Implementation(dense.mean_over_batch, dense.over_classes),
    "chunked": Implementation(chunked.mean_over_batch, chunked.over_classes),
    "triton": Implementation(triton.mean_over_batch, triton.over_classes),
}
"""the implementations by name"""

_ON_CPU = 2**20 if HAS_MKL else 2**24  # chunked computes one product more, and without MKL products take longer
MAX_DENSE_PAIRS = {"cpu": _ON_CPU, "cuda": 2**24}
"""pairs up to which "auto" chooses dense, by device, where dense applies; measured by benchmarks/crossover.py"""
MAX_DENSE_MEAN_PAIRS = {"cpu": _ON_CPU, "cuda": 2**18}
"""the same for `mean_over_batch`, whose fused kernels have fewer launches"""
LINEAR_FROM = 50.0
"""`log(1 + e^x)` is x above this number, to the last bit of a float64"""
MAX_PLAIN_PAIRS = 2**16
"""pairs up to which "auto" chooses plain"""
MAX_PLAIN_PAIRS_WITHOUT_TRITON = 2**26
"""the same on a GPU without Triton, where many small launches cost more than one large matrix"""


_settings: ContextVar[Settings] = ContextVar("settings", default=Settings())  # noqa: B039 - a tuple


_traced = Settings()
"""the settings of the last `using` block that began or ended: torch.compile cannot trace a context variable"""


def current_settings() -> Settings:
    """The settings of the innermost `using` block."""
    return _traced if torch.compiler.is_compiling() else _settings.get()


@contextmanager
def using(impl: str | None = None, *, budget: int | None = None, rows: int | None = None) -> Iterator[Settings]:
    """Choose how losses inside the `with` block are computed; only time and memory change, not values and gradients.

    Args:
        impl: "plain" is the definition, on matrices of all queries by all references. "dense" has the same matrices,
            and gradients in closed form; it applies to the proxies of all classes in float32 or float64 without a
            weighting, and is plain otherwise. "chunked" computes chunk by chunk. "triton" does so with fused GPU
            kernels, and multiplies in the type of the queries and references. "auto" (the default) chooses by size and
            device.
        budget: bytes, at least 0, of similarities that one loss may keep from its forward to its backward pass. By
            default it is half of the GPU's free memory with Triton, and 1 GiB otherwise. Keeping them saves one matrix
            product.
        rows: references in one chunk, at least 1; by default a number that suits the device.

    An argument that is None leaves the surrounding setting unchanged.

    Yields:
        The settings inside the block.

    Raises:
        ValueError: an argument is out of range, or Triton is not installed.

    Example:
        >>> with using("chunked", budget=0) as settings:
        ...     settings.impl, settings.budget
        ('chunked', 0)
    """
    if impl is not None:
        one_of("impl", impl, (*IMPLS, "auto"))
    if impl == "triton" and not installed():
        raise ValueError(
            f"impl: got 'triton', expected one of {', '.join(name for name in (*IMPLS, 'auto') if name != 'triton')}: "
            "triton is not installed (pip install 'proxymetric[triton]')"
        )
    for name, value, minimum in (("budget", budget, 0), ("rows", rows, 1)):
        if value is not None and (not isinstance(value, int) or value < minimum):
            raise ValueError(f"{name}: got {value!r}, expected a whole number of at least {minimum}")
    changes: dict[str, Any] = {"impl": impl, "budget": budget, "rows": rows}
    settings = _settings.get()._replace(**{name: value for name, value in changes.items() if value is not None})
    global _traced
    token, _traced = _settings.set(settings), settings
    try:
        yield settings
    finally:
        _settings.reset(token)
        _traced = _settings.get()


def chosen(
    queries: Tensor, refs: References, dense_fits: bool = False, max_dense_pairs: Mapping[str, int] = MAX_DENSE_PAIRS
) -> str:
    """The name of the implementation that the current settings choose for these queries and references.

    Args:
        queries: (B, D).
        refs: the references.
        dense_fits: whether the closed forms of "dense" apply.
        max_dense_pairs: pairs up to which "auto" chooses dense, by device.
    """
    name, pairs = current_settings().impl, len(queries) * len(refs.labels)
    if not pairs:
        return "plain"
    if name != "auto" and name != "triton":
        return name
    compiling = torch.compiler.is_compiling()  # torch.compile cannot trace launches of Triton kernels
    if name == "triton":
        return "chunked" if compiling else name
    device = queries.device.type
    if dense_fits and not compiling and pairs <= max_dense_pairs.get(device, 0):
        return "dense"
    can_launch = device == "cuda" and not compiling and installed()
    max_pairs = MAX_PLAIN_PAIRS if device == "cpu" or can_launch else MAX_PLAIN_PAIRS_WITHOUT_TRITON
    return "plain" if pairs <= max_pairs else "triton" if can_launch else "chunked"


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
    """`1/N sum_c log(1 + sum_i exp(w z(s_ic)))`: once with i in the class of column c, once with i in other classes.

    N is the given count. Without a count, N is the sum of the columns' mean weights, which is the number of columns
    that have such a pair if there is no weighting. The results are two scalars, so an implementation can compute the
    whole gradient while it holds the similarities of a column.

    Args:
        queries: (B, D), of unit length.
        labels: (B,) the classes of the queries.
        refs: the references.
        positive: the exponent of pairs of the same class.
        negative: the exponent of pairs of different classes.
        of_class: combines the K references of a class into one column; None: each reference is a column.
        weight: factors of the exponents; None: all are 1.
        positive_count: N of the positives.
        negative_count: N of the negatives.

    Returns:
        The mean of the positives and the mean of the negatives.

    Example:
        >>> refs = References(torch.eye(2), torch.arange(2), per_class=1)
        >>> mean_over_batch(torch.eye(2), torch.arange(2), refs, Line(-1.0), Line(1.0))
        Means(positive=tensor(0.3133), negative=tensor(0.6931))
    """
    problem = Problem(labels, _here(refs), positive, negative, of_class, weight)
    with _full_precision(queries):
        fits = dense.fits(queries, problem) and dense.bounded(problem)
        compute = IMPLS[chosen(queries, refs, fits, MAX_DENSE_MEAN_PAIRS)].mean_over_batch
        if refs.shard is None:
            totals = compute(queries, problem, positive_count, negative_count, current_settings())
        else:
            # Totals are divided by the weights after the sum over processes: no process has the weights of all columns.
            counts = positive_count or 1.0, negative_count or 1.0
            of_shard = compute(_shared_queries(queries, refs), problem, *counts, current_settings())
            summed = all_reduce_sum(torch.stack([part for part in of_shard if part is not None]), refs.shard)
            totals = Totals(summed[0], summed[1], summed[2], summed[3])
            totals = totals.over_weights(positive_count is None, negative_count is None)
        return Means(totals.positive, totals.negative)


def over_classes(
    queries: Tensor,
    labels: Tensor,
    refs: References,
    positive: Line,
    negative: Line,
    of_class: Similarity | None = None,
    weight: PairWeights | None = None,
) -> Reduced:
    """For each query i `log sum_c exp(w z(s_ic))`: once over the columns c of its class, once over the other columns.

    Args:
        queries: (B, D), of unit length.
        labels: (B,) the classes of the queries.
        refs: the references.
        positive: the exponent of pairs of the same class.
        negative: the exponent of pairs of different classes.
        of_class: combines the K references of a class into one column; None: each reference is a column.
        weight: factors of the exponents; None: all are 1. With sharded references it must be None.

    Returns:
        Log-sums and mean weights, (B,) each.

    Raises:
        ValueError: there is a weighting and the references are sharded.

    Example:
        >>> refs = References(torch.eye(2), torch.arange(2), per_class=1)
        >>> over_classes(torch.eye(2), torch.arange(2), refs, Line(1.0), Line(1.0)).negative
        tensor([0., 0.])
    """
    problem = Problem(labels, _here(refs), positive, negative, of_class, weight)
    with _full_precision(queries):
        compute = IMPLS[chosen(queries, refs, dense.fits(queries, problem))].over_classes
        reduced = compute(_shared_queries(queries, refs), problem, current_settings())
        if refs.shard is None:
            return reduced
        if weight is not None:
            raise ValueError(
                "weighting: got a weighting with sharded proxies and a loss over the classes, expected no weighting or "
                "a loss over the batch"
            )
        logs = [all_reduce_logsumexp(log, refs.shard) for log in (reduced.positive, reduced.negative)]
        return Reduced(logs[0], logs[1], *((log != NONE).to(log) for log in logs))


def cross_entropy(
    queries: Tensor,
    labels: Tensor,
    refs: References,
    own_class: Exponent,
    others: Line,
    of_class: Similarity | None = None,
    weight: PairWeights | None = None,
    *,
    reduction: str = "mean",
    own_offsets: Tensor | None = None,
    query_weights: Tensor | None = None,
) -> Tensor:
    """`-log( e^{z(s_iy)} / (e^{z(s_iy)} + sum_{c != y} e^{w z(s_ic)}) )`, the mean over the queries or their sum.

    Queries whose class has no reference are left out.

    Args:
        queries: (B, D), of unit length.
        labels: (B,) the classes of the queries.
        refs: the references.
        own_class: the exponent of the query's class y. An exponent that is not a `Line` needs one column per class, and
            no weighting.
        others: the exponent of the other classes.
        of_class: combines the K references of a class into one column; None: each reference is a column.
        weight: factors of the exponents; None: all are 1.
        reduction: "mean" or "sum".
        own_offsets: (B,) added to the exponent of each query's class; None: 0.
        query_weights: (B,) above 0; the mean is the weighted one. None: 1.

    Returns:
        A scalar.

    Example:
        >>> refs = References(torch.eye(2), torch.arange(2), per_class=1)
        >>> cross_entropy(torch.eye(2), torch.arange(2), refs, Line(1.0), Line(1.0))
        tensor(0.3133)
    """
    exponent = own_class if isinstance(own_class, Line) else Line(1.0)
    problem = Problem(labels, _here(refs), exponent, others, of_class, weight)
    is_plain = own_offsets is None and query_weights is None
    if is_plain and dense.fits(queries, problem) and chosen(queries, refs, dense_fits=True) == "dense":
        with _full_precision(queries):
            return dense.cross_entropy(queries, problem, own_class, len(queries) if reduction == "mean" else 1)
    sums = over_classes(queries, labels, refs, exponent, others, of_class, weight)
    exponents = sums.positive if isinstance(own_class, Line) else own_class(sums.positive)
    if own_offsets is not None:
        exponents = exponents + own_offsets
    # -log(e^z / (e^z + e^n)) = log(1 + e^(n - z)): few operators, also in the backward pass.
    differences = sums.negative - exponents
    if refs.all_classes and query_weights is None:  # every query has a positive
        losses = softplus(differences, threshold=LINEAR_FROM)
        return losses.mean() if reduction == "mean" else losses.sum()
    has_positive = sums.positive.isfinite()
    losses = softplus(differences.where(has_positive, NONE), threshold=LINEAR_FROM)
    weights = has_positive if query_weights is None else query_weights * has_positive
    total = (losses if query_weights is None else losses * weights).sum()
    if reduction == "sum":
        return total
    return total / weights.sum().clamp(min=1 if query_weights is None else MIN_WEIGHT_SUM)


def _here(refs: References) -> References:
    """The references as an implementation sees them: those of this process, with a mask of pairs that are none."""
    if refs.are_queries and refs.same is None:
        refs = refs._replace(same=torch.eye(len(refs.labels), dtype=torch.bool, device=refs.labels.device))
    return refs if refs.shard is None else refs._replace(shard=None)


def _full_precision(queries: Tensor) -> AbstractContextManager[Any]:
    """A context without autocast; nothing if there is none."""
    device = queries.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def _shared_queries(queries: Tensor, refs: References) -> Tensor:
    """The queries; if references are sharded, the backward pass sums their gradient over the processes."""
    return queries if refs.shard is None else grad_all_reduce(queries, refs.shard)
