"""The reductions on a GPU: library matrix products, with Triton kernels between them.

Products have the common type of queries and references, 16-bit types included, and are summed in float32. The shares
that the gradient is made of have the same type; everything else is float32. Values and gradients equal those of the
plain definition up to the rounding of the shares; there is no second derivative.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from proxymetric.ops import chunked
from proxymetric.ops.chunked import ChunkPlan
from proxymetric.ops.problem import MIN_WEIGHT_SUM, Count, Problem, Reduced, Settings, Totals
from proxymetric.ops.triton.batch_classes import SortedBatch, find_columns, row_norms_and_columns, sort_batch
from proxymetric.ops.triton.chunk_pass import ChunkPass, rows_per_chunk
from proxymetric.ops.triton.half_width import fits_half
from proxymetric.ops.triton.launch import aligned_pair, interpreting, launch
from proxymetric.ops.triton.memory import default_budget
from proxymetric.ops.triton.norms import tile_shape
from proxymetric.ops.triton.positives import PositiveSums, add_positive_gradients, positive_means, positive_sums
from proxymetric.ops.triton.totals import compute_totals

LIFT = 2.0**12
"""factor of float16 shares over the classes, without which small shares would be rounded to 0"""
NUMBERS_PER_ADD = 1024
"""numbers of a gradient that a program adds at once"""
NUMBERS_PER_RESCALE = 4096
MAX_RESCALE_PROGRAMS = 2048


def is_supported(queries: Tensor, problem: Problem) -> bool:
    """Whether the kernels can reduce this problem; if not, the chunked implementation does.

    The kernels need references ordered by class, none of which is a query itself, and float32 or 16-bit types.
    """
    types = {queries.dtype, problem.refs.rows.dtype}
    return (
        problem.refs.per_class is not None
        and problem.refs.same is None
        and types <= {torch.float32, torch.bfloat16, torch.float16}
    )


def mean_over_batch(
    queries: Tensor, problem: Problem, positive_count: Count, negative_count: Count, settings: Settings
) -> Totals:
    """See `reductions.mean_over_batch`.

    As in the chunked implementation, the forward pass computes the gradient of each chunk. Positive pairs are handled
    separately from the chunks.
    """
    _check_devices(queries, problem)
    if not is_supported(queries, problem):
        return chunked.mean_over_batch(queries, problem, positive_count, negative_count, settings)
    plan = _plan(queries, problem, settings)._replace(
        counts=(positive_count or 1, negative_count or 1),
        over_weights=(positive_count is None, negative_count is None),
    )
    with torch.cuda.device_of(queries):
        return Totals(*chunked.MeanOverBatch.apply(queries, problem.refs.rows, plan, _totals))


def over_classes(queries: Tensor, problem: Problem, settings: Settings) -> Reduced:
    """See `reductions.over_classes`."""
    _check_devices(queries, problem)
    if not is_supported(queries, problem):
        return chunked.over_classes(queries, problem, settings)
    plan, vectors = _plan(queries, problem, settings), problem.refs.rows
    if any(plan.needs_grad):
        size = len(queries) * len(vectors) * (2 if fits_half(queries, vectors, problem) else 4)
        budget = default_budget(queries.device, size) if settings.budget is None else settings.budget
        plan = plan._replace(keep_similarities=size <= budget)
    with torch.cuda.device_of(queries):
        return Reduced(*_OverClasses.apply(queries, vectors, plan))


def _check_devices(queries: Tensor, problem: Problem) -> None:
    """Raise an error for tensors on other devices: kernels get addresses, and a wrong one can end the process."""
    if not queries.is_cuda and not interpreting():
        raise ValueError(f"impl: got 'triton' for tensors on {queries.device}, expected 'chunked', or tensors on cuda")
    rules = () if problem.weight is None else (*problem.weight.positive, *problem.weight.negative)
    for tensor in (problem.labels, problem.refs.labels, problem.refs.rows, *rules):
        if tensor.device != queries.device:
            raise ValueError(
                f"device: got queries on {queries.device} and labels, references or weights on {tensor.device}, "
                "expected all on one device"
            )


def _plan(queries: Tensor, problem: Problem, settings: Settings) -> ChunkPlan:
    (batch, dim), half = queries.shape, fits_half(queries, problem.refs.rows, problem)
    return chunked.chunk_plan(queries, problem, rows_per_chunk(batch, dim, settings.rows, half), budget=0)


class TritonGradients(NamedTuple):
    """The `TotalsGradients` of the Triton implementation."""

    in_queries: tuple[Tensor, Tensor] | None
    """(B, D) each: the gradient of the positive and of the negative total"""
    in_vectors: Tensor | None
    """(R, D) the gradient of the negative total"""
    columns: Tensor
    """(B,) the classes whose rows have a gradient of the positive total; -1: none"""
    in_batch_rows: Tensor
    """(B K, D) that gradient"""
    weights: Tensor
    """(2,) the sums of the weights"""
    over_weights: tuple[bool, bool]
    """which totals were divided by their weights; the gradients here were not"""
    type: torch.dtype
    """the type of the queries"""

    def combined(self, positive: Tensor, negative: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """See `TotalsGradients.combined`; two launches."""
        batch_rows, in_vectors = self.in_batch_rows, self.in_vectors
        queries_positive, queries_negative = self.in_queries or (batch_rows, batch_rows)
        in_queries = None if self.in_queries is None else torch.empty_like(queries_positive, dtype=self.type)
        size, blocks, (row_count, dim) = 0, 0, batch_rows.shape
        positive, negative = positive.contiguous(), negative.contiguous()
        if in_queries is not None:
            size = in_queries.numel()
            blocks = -(-size // NUMBERS_PER_ADD)
        if in_vectors is not None:
            numbers = in_vectors.numel()
            launch(
                "rescale",
                (min(-(-numbers // NUMBERS_PER_RESCALE), MAX_RESCALE_PROGRAMS),),
                4,
                (in_vectors, negative, self.weights),
                (numbers, MIN_WEIGHT_SUM),
                {"DIVIDED": self.over_weights[1], "BLOCK": NUMBERS_PER_RESCALE},
            )
        outputs = (batch_rows if in_queries is None else in_queries, batch_rows if in_vectors is None else in_vectors)
        launch(
            "add_gradients",
            (blocks + (0 if in_vectors is None else row_count),),
            4,
            (queries_positive, queries_negative, *outputs, self.columns, batch_rows, positive, negative, self.weights),
            (blocks, size, dim, MIN_WEIGHT_SUM),
            {
                "DIVIDE_POSITIVE": self.over_weights[0],
                "DIVIDE_NEGATIVE": self.over_weights[1],
                "K": row_count // len(self.columns),
                "BLOCK": NUMBERS_PER_ADD,
            },
        )
        return in_queries, in_vectors


def _totals(
    queries: Tensor, vectors: Tensor, plan: ChunkPlan
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], TritonGradients]:
    """The `ComputeTotals` of the Triton implementation."""
    batch, chunk_pass = _pass_over_negatives(queries, vectors, plan)
    # The negatives come first: while the GPU works on their many rows, the host prepares the few positives.
    negative, negative_queries, in_vectors = _negative_means(chunk_pass, plan.counts[1])
    positive, positive_queries, in_batch_rows = positive_means(chunk_pass, plan.problem, batch, plan.counts[0])
    in_queries = None if negative_queries is None else (positive_queries, negative_queries)
    *totals, weights = compute_totals(positive, negative, plan.over_weights)
    gradients = TritonGradients(
        in_queries, in_vectors, batch.columns, in_batch_rows, weights, plan.over_weights, queries.dtype
    )
    return tuple(totals), weights.unbind(), gradients


def _negative_means(chunk_pass: ChunkPass, count: float) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The logarithms and mean weights of the negatives' columns, and the gradients in the queries and the vectors."""
    means, factor = aligned_pair(chunk_pass.queries, chunk_pass.columns), chunk_pass.line.slope / count
    in_queries = chunk_pass.new_float32(*chunk_pass.queries.shape) if chunk_pass.needs_grad[0] else None
    # A loss scale is applied only in the backward pass: until then float16 would round small gradients to 0.
    dtype = torch.float32 if chunk_pass.vectors.dtype == torch.float16 else chunk_pass.vectors.dtype
    in_vectors = _empty_like(chunk_pass.vectors, dtype) if chunk_pass.needs_grad[1] else None
    multiplier = None if chunk_pass.fold else chunk_pass.new_float32(1).fill_(factor)
    for chunk in chunk_pass:
        chunk_pass.compute_similarities(chunk)
        chunk_pass.log_means(chunk, means, factor, 1.0 / count)
        chunk_pass.backward(chunk, chunk_pass.queries, in_queries, in_vectors, multiplier)
    if in_queries is not None and multiplier is not None:
        in_queries.mul_(multiplier)
    return means, in_queries, in_vectors


def _empty_like(vectors: Tensor, dtype: torch.dtype) -> Tensor:
    """A contiguous uninitialised tensor in the shape of `vectors`, which may have other strides."""
    return vectors.new_empty(vectors.shape, dtype=dtype)


class _OverClasses(torch.autograd.Function):
    """queries, vectors, plan -> the four fields of `Reduced`."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, vectors: Tensor, plan: ChunkPlan) -> tuple[Tensor, ...]:
        batch, negatives = _pass_over_negatives(queries, vectors, plan)
        ctx.cache = negatives.new_cache(len(vectors)) if plan.keep_similarities else None
        # The negatives come first, as in `_totals`.
        sums = negatives.new_running_sums()
        for chunk in negatives:
            negatives.compute_similarities(chunk, ctx.cache)
            negatives.log_sums(chunk, sums)
        negative, negative_weight = negatives.finish_sums(sums)
        positive, positive_weight, *similarities = positive_sums(negatives, plan.problem, batch)
        ctx.plan = plan
        ctx.save_for_backward(queries, vectors, positive, negative, negatives.norms, *similarities, *batch)
        ctx.mark_non_differentiable(positive_weight, negative_weight)
        ctx.set_materialize_grads(False)
        return positive, negative, positive_weight, negative_weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        chunked.refuse_second_derivative()
        queries, vectors, positive, negative, norms, of_rows, of_columns, *sorted_batch = ctx.saved_tensors
        plan, batch = ctx.plan, SortedBatch(*sorted_batch)
        grad_positive, grad_negative = (torch.zeros_like(positive) if grad is None else grad for grad in grads[:2])
        half = fits_half(queries, vectors, plan.problem)
        negatives = ChunkPass(queries, vectors, plan, batch.labels32, norms=norms, half=half)
        in_queries, factors, in_vectors = _negative_gradients(negatives, negative, grad_negative, ctx.cache)
        sums = PositiveSums(positive, positive, of_rows, of_columns)
        in_queries = add_positive_gradients(
            negatives, plan.problem, batch, sums, grad_positive, in_queries, factors, in_vectors, queries.dtype
        )
        return in_queries, in_vectors, None


def _pass_over_negatives(queries: Tensor, vectors: Tensor, plan: ChunkPlan) -> tuple[SortedBatch, ChunkPass]:
    """The sorted batch, with columns, and the pass over the negatives of a problem."""
    batch, norms, half = sort_batch(plan.problem.labels), None, fits_half(queries, vectors, plan.problem)
    if half or plan.problem.refs.normalise is None:
        find_columns(plan.problem, batch)
    else:
        norms = row_norms_and_columns(vectors, plan.problem, batch)
    return batch, ChunkPass(queries, vectors, plan, batch.labels32, norms=norms, half=half)


def _negative_gradients(
    chunk_pass: ChunkPass, logs: Tensor, grads: Tensor, cache: Tensor | None
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """The gradients of the negatives' log-sums.

    Returns:
        (B, D) the gradient in the queries and (B,) the factors that it still has to be multiplied by; (R, D) the
        gradient in the rows. A gradient that is not needed is None.
    """
    scaled_queries, finite_logs, factors = _scale_queries(chunk_pass, logs, grads)
    multiplier, lift, query_factors = None, 1.0, factors
    if chunk_pass.type == torch.float16:
        # A mean over the batch makes all factors too small for float16, so they are divided by the largest factor.
        lift, largest = LIFT, factors.abs().amax()
        largest = largest.where(largest > 0, 1.0)
        factors, multiplier = factors / largest, (largest / LIFT).view(1)
        scaled_queries, query_factors = (chunk_pass.queries * factors[:, None]).to(torch.float16), factors * multiplier
    in_queries = chunk_pass.new_float32(*chunk_pass.queries.shape) if chunk_pass.needs_grad[0] else None
    in_vectors = _empty_like(chunk_pass.vectors, chunk_pass.vectors.dtype) if chunk_pass.needs_grad[1] else None
    for chunk in chunk_pass:
        chunk_pass.compute_similarities(chunk, cache, cached=cache is not None)
        chunk_pass.shares(chunk, finite_logs, factors, lift)
        chunk_pass.backward(chunk, scaled_queries, in_queries, in_vectors, multiplier)
    return in_queries, query_factors, in_vectors


def _scale_queries(chunk_pass: ChunkPass, logs: Tensor, grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The queries times their factors; the log-sums, 0 for an empty sum; and the factors: slope times gradient."""
    scaled, (finite_logs, factors) = torch.empty_like(chunk_pass.queries), aligned_pair(logs, len(logs))
    tile, block = tile_shape(chunk_pass.dim)
    launch(
        "scale_queries",
        (-(-chunk_pass.batch // tile),),
        4,
        (chunk_pass.queries, logs, grads.contiguous(), scaled, finite_logs, factors),
        (chunk_pass.batch, chunk_pass.dim, chunk_pass.line.slope),
        {"TILE": tile, "BLOCK": block},
    )
    return scaled, finite_logs, factors
