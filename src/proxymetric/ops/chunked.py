"""The reductions over chunks of columns, without a matrix of all queries by all references.

Only `over_classes` keeps such a matrix for its backward pass, if it fits into the budget.
Values and gradients equal those of the plain definition; there is no second derivative.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from proxymetric.ops.chunks import NEGATIVE, POSITIVE, Chunks, PairExponents
from proxymetric.ops.problem import (
    DEFAULT_BUDGET,
    NONE,
    Count,
    Problem,
    Reduced,
    Settings,
    Totals,
    at_least_float32,
    log1p_exp,
)

NUMBERS_PER_CPU_CHUNK = 2**20
"""numbers of one chunk on a CPU, so that they stay in its cache: n rows of D numbers and three (n, B) matrices"""
PAIRS_PER_GPU_CHUNK = 2**26
"""pairs of one chunk on a GPU, which needs large products"""
MIN_ROWS_PER_CHUNK = 256


class ChunkPlan(NamedTuple):
    """A problem without its reference vectors, and how it is computed in chunks."""

    problem: Problem
    """its `refs.rows` are empty: autograd saves the vectors, so that it notices if they change"""
    rows: int
    """rows of one chunk"""
    needs_grad: tuple[bool, bool]
    """whether the queries and the vectors need a gradient"""
    keep_similarities: bool
    """whether all similarities are kept for the backward pass"""
    counts: tuple[float, float] = (1.0, 1.0)
    """the numbers that the positive and the negative total are divided by"""
    over_weights: tuple[bool, bool] = (False, False)
    """whether the positive and the negative total are also divided by the sum of their weights"""


def mean_over_batch(
    queries: Tensor, problem: Problem, positive_count: Count, negative_count: Count, settings: Settings
) -> Totals:
    """See `reductions.mean_over_batch`.

    The part of the means that belongs to a chunk's columns depends on that chunk only, so the forward pass also
    computes the gradient. A count that is given divides this gradient at once. Without a count, the backward pass
    multiplies the gradient by the remaining factor.
    """
    queries = at_least_float32(queries)
    plan = _plan(queries, problem, settings)._replace(counts=(positive_count or 1, negative_count or 1))
    totals = Totals(*MeanOverBatch.apply(queries, problem.refs.rows, plan, _totals))
    return totals.over_weights(positive_count is None, negative_count is None)


def over_classes(queries: Tensor, problem: Problem, settings: Settings) -> Reduced:
    """See `reductions.over_classes`."""
    queries = at_least_float32(queries)
    return Reduced(*_OverClasses.apply(queries, problem.refs.rows, _plan(queries, problem, settings)))


def _plan(queries: Tensor, problem: Problem, settings: Settings) -> ChunkPlan:
    batch, dim = queries.shape
    on_cpu = queries.device.type == "cpu"
    rows = NUMBERS_PER_CPU_CHUNK // (dim + 3 * batch) if on_cpu else PAIRS_PER_GPU_CHUNK // batch
    budget = DEFAULT_BUDGET if settings.budget is None else settings.budget
    return chunk_plan(queries, problem, settings.rows or max(MIN_ROWS_PER_CHUNK, rows), budget)


def chunk_plan(queries: Tensor, problem: Problem, rows: int, budget: int) -> ChunkPlan:
    """The plan of a problem in chunks of `rows` rows; similarities are kept if they fit into `budget` bytes."""
    vectors = problem.refs.rows
    needs_grad = (queries.requires_grad, vectors.requires_grad) if torch.is_grad_enabled() else (False, False)
    # Similarities are float32 or wider, also for 16-bit queries.
    fits = len(queries) * len(vectors) * max(4, queries.element_size()) <= budget
    problem = problem._replace(refs=problem.refs._replace(rows=vectors[:0].detach()))
    return ChunkPlan(problem, rows, needs_grad, keep_similarities=any(needs_grad) and fits)


class TotalsGradients(Protocol):
    """The gradients of the positive and of the negative total, computed in the forward pass."""

    def combined(self, positive: Tensor, negative: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of `positive * positive total + negative * negative total` in the queries and the vectors.

        An entry is None if that gradient is not needed. The stored gradients may be overwritten.
        """


ComputeTotals = Callable[[Tensor, Tensor, ChunkPlan], tuple[tuple[Tensor, ...], tuple[Tensor, ...], TotalsGradients]]
"""queries, vectors, plan -> the positive and the negative total, the sums of their weights, the totals' gradients"""


class MeanOverBatch(torch.autograd.Function):
    """queries, vectors, plan, function -> both totals of `log(1 + sum exp)` and both sums of the mean weights.

    The function computes the totals, the sums and the gradients of the totals.
    """

    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, vectors: Tensor, plan: ChunkPlan, compute: ComputeTotals
    ) -> tuple[Tensor, ...]:
        totals, weights, ctx.gradients = compute(queries, vectors, plan)
        ctx.plan, ctx.compute = plan, compute
        ctx.save_for_backward(queries, vectors)
        ctx.mark_non_differentiable(*weights)
        ctx.set_materialize_grads(False)
        return *totals, *weights

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None]:
        refuse_second_derivative()
        queries, vectors = ctx.saved_tensors
        # The first backward pass returns the large gradient without a copy; a second one computes it again.
        gradients = ctx.gradients or ctx.compute(queries, vectors, ctx.plan)[-1]
        ctx.gradients = None
        positive, negative = (vectors.new_zeros(()) if grad is None else grad for grad in grads[:2])
        in_queries, in_vectors = gradients.combined(positive, negative)
        return (
            None if in_queries is None else in_queries.to(queries.dtype),
            None if in_vectors is None else in_vectors.to(vectors.dtype),
            None,
            None,
        )


class ChunkedGradients(NamedTuple):
    """The `TotalsGradients` of the chunked implementation."""

    in_queries: tuple[Tensor, Tensor] | None
    """(B, D) each: the gradient of the positive and of the negative total"""
    in_vectors: Tensor | None
    """(R, D) the gradient of the negative total"""
    batch_rows: Tensor
    """(u,) the rows of the batch's classes: only these have a gradient of the positive total"""
    in_batch_rows: Tensor
    """(u, D) that gradient"""

    def combined(self, positive: Tensor, negative: Tensor) -> tuple[Tensor | None, Tensor | None]:
        in_queries, in_vectors = None, self.in_vectors
        if self.in_queries is not None:
            in_queries = positive * self.in_queries[0] + negative * self.in_queries[1]
        if in_vectors is not None:
            if negative.device.type != "cpu" or float(negative) != 1:
                in_vectors.mul_(negative)
            in_vectors.index_add_(0, self.batch_rows, (positive * self.in_batch_rows).to(in_vectors))
        return in_queries, in_vectors


def _totals(
    queries: Tensor, vectors: Tensor, plan: ChunkPlan
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], ChunkedGradients]:
    """The `ComputeTotals` of the chunked implementation."""
    chunks = Chunks(queries, vectors, plan.problem, plan.rows)
    in_queries = (torch.zeros_like(queries), torch.zeros_like(queries)) if plan.needs_grad[0] else None
    # A loss scale is applied only in the backward pass: until then float16 would round small gradients to 0.
    dtype = torch.float32 if vectors.dtype == torch.float16 else vectors.dtype
    in_vectors = torch.empty_like(vectors, dtype=dtype) if plan.needs_grad[1] else None
    # Allocated before the loop: small tensors that outlive a chunk would fragment the memory of its large ones.
    logs, weights = queries.new_zeros(2, len(chunks.labels)), queries.new_zeros(2, len(chunks.labels))
    batch_rows, in_batch_rows = [chunks.batch_columns[:0]], [queries[:0]]
    for chunk in chunks:
        similarities = chunks.similarities(chunk)
        for sign, pairs in chunks.exponents(chunk, similarities):
            logs[sign, pairs.columns], weights[sign, pairs.columns], slopes = _log1p(pairs, plan.counts[sign])
            if not any(plan.needs_grad):
                continue
            if sign == POSITIVE:
                rows, pair_similarities = chunks.of_batch_columns(chunk, similarities)
                in_rows = torch.empty_like(pair_similarities.rows) if plan.needs_grad[1] else None
                batch_rows.append(rows)
                in_batch_rows.append(pair_similarities.rows if in_rows is None else in_rows)
            else:
                pair_similarities, in_rows = similarities, None if in_vectors is None else in_vectors[chunk.rows]
            chunks.backward(pair_similarities, slopes, in_queries and in_queries[sign], in_rows)
    totals = logs[POSITIVE].sum() / plan.counts[POSITIVE], logs[NEGATIVE].sum() / plan.counts[NEGATIVE]
    weight_sums = weights[POSITIVE].sum(), weights[NEGATIVE].sum()
    gradients = ChunkedGradients(in_queries, in_vectors, torch.cat(batch_rows), torch.cat(in_batch_rows))
    return totals, weight_sums, gradients


def _log1p(pairs: PairExponents, count: float) -> tuple[Tensor, Tensor, Tensor]:
    """For each column: `log(1 + sum over the batch of exp)`, its mean weight, and its slopes divided by `count`.

    The slope in an exponent z is `exp(z - log(1 + sum))`. The exponents are overwritten.
    """
    weight = None if pairs.weights is None else _mean(*pairs.summed_weights(1))
    log, shares, highest = _log_sum(pairs.exponents, 1)
    if weight is None:
        weight = (log != NONE).to(log)
    log = log1p_exp(log)
    return log, weight, pairs.slopes(shares, (highest - log[:, None]).exp_() / count)


def _log_sum(z: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """`log sum exp z`, the terms `exp(z - highest)`, which overwrite z, and the highest z, or 0 if it is infinite."""
    highest = z.amax(dim, keepdim=True)
    highest.masked_fill_(highest.isinf(), 0.0)
    shares = z.sub_(highest).exp_()
    return shares.sum(dim).log_().add_(highest.squeeze(dim)), shares, highest


class _OverClasses(torch.autograd.Function):
    """queries, vectors, plan -> the four fields of `Reduced`."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, vectors: Tensor, plan: ChunkPlan) -> tuple[Tensor, ...]:
        chunks = Chunks(queries, vectors, plan.problem, plan.rows)
        ctx.cache = queries.new_empty(len(vectors), len(queries)) if plan.keep_similarities else None
        sums = _LogSums(queries), _LogSums(queries)
        for chunk in chunks:
            similarities = chunks.similarities(chunk, ctx.cache)
            for sign, pairs in chunks.exponents(chunk, similarities):
                sums[sign].add(pairs)
        (positive, positive_weight), (negative, negative_weight) = (log_sums.result() for log_sums in sums)
        ctx.plan = plan
        ctx.save_for_backward(queries, vectors, positive, negative)
        ctx.mark_non_differentiable(positive_weight, negative_weight)
        return positive, negative, positive_weight, negative_weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        refuse_second_derivative()
        queries, vectors, *logs = ctx.saved_tensors
        plan: ChunkPlan = ctx.plan
        logs = [log.where(log != NONE, 0.0) for log in logs]
        chunks = Chunks(queries, vectors, plan.problem, plan.rows)
        in_queries = torch.zeros_like(queries) if plan.needs_grad[0] else None
        in_vectors = torch.empty_like(vectors) if plan.needs_grad[1] else None
        for chunk in chunks:
            similarities = chunks.similarities(chunk, ctx.cache, cached=plan.keep_similarities)
            slopes = []
            for sign, pairs in chunks.exponents(chunk, similarities):
                slopes.append(pairs.slopes(pairs.exponents.sub_(logs[sign]).exp_(), grads[sign]))
            if len(slopes) == 2:
                slopes[NEGATIVE][chunk.batch_columns] += slopes[POSITIVE]
            in_rows = None if in_vectors is None else in_vectors[chunk.rows]
            chunks.backward(similarities, slopes[-1], in_queries, in_rows)
        return in_queries, in_vectors, None


class _LogSums:
    """The log-sums of each query over the positives, or over the negatives, of the chunks added so far."""

    def __init__(self, queries: Tensor) -> None:
        empty = queries.new_full((len(queries),), NONE)
        self.logs = [empty]
        self.weight_sum, self.pair_count = torch.zeros_like(empty), torch.zeros_like(empty)
        self.weighted = False

    def add(self, pairs: PairExponents) -> None:
        """Add the pairs of a chunk; overwrites their exponents."""
        if pairs.weights is not None:
            self.weighted = True
            weight_sum, pair_count = pairs.summed_weights(0)
            self.weight_sum += weight_sum
            self.pair_count += pair_count
        self.logs.append(_log_sum(pairs.exponents, 0)[0])

    def result(self) -> tuple[Tensor, Tensor]:
        """The log-sums and the mean weights."""
        logs = torch.logsumexp(torch.stack(self.logs), 0)
        return logs, _mean(self.weight_sum, self.pair_count) if self.weighted else (logs != NONE).to(logs)


def _mean(total: Tensor, count: Tensor) -> Tensor:
    return total / count.clamp(min=1)


def refuse_second_derivative() -> None:
    """Raise in a backward pass that is itself being differentiated."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "create_graph: got True, expected False: the chunked and triton reductions have no second derivative; "
            "compute the loss inside `with proxymetric.ops.using('plain'):`"
        )
