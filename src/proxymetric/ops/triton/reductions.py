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
from proxymetric.ops.problem import MIN_WEIGHT_SUM, NONE, Count, Problem, Reduced, Settings, Totals
from proxymetric.ops.triton.batch_classes import (
    BatchRows,
    find_columns,
    row_norms_and_columns,
    rows_of_batch,
    sort_batch,
)
from proxymetric.ops.triton.chunk_pass import ChunkPass, fits_half, rows_per_chunk
from proxymetric.ops.triton.launch import aligned_pair, interpreting, launch
from proxymetric.ops.triton.memory import default_budget
from proxymetric.ops.triton.positives import positive_means
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
    types = {queries.dtype, problem.refs.vectors.dtype}
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
        return Totals(*chunked.MeanOverBatch.apply(queries, problem.refs.vectors, plan, _totals))


def over_classes(queries: Tensor, problem: Problem, settings: Settings) -> Reduced:
    """See `reductions.over_classes`."""
    _check_devices(queries, problem)
    if not is_supported(queries, problem):
        return chunked.over_classes(queries, problem, settings)
    plan, vectors = _plan(queries, problem, settings), problem.refs.vectors
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
    for tensor in (problem.labels, problem.refs.labels, problem.refs.vectors, *rules):
        if tensor.device != queries.device:
            raise ValueError(
                f"device: got queries on {queries.device} and labels, references or weights on {tensor.device}, "
                "expected all on one device"
            )


def _plan(queries: Tensor, problem: Problem, settings: Settings) -> ChunkPlan:
    batch, dim = queries.shape
    return chunked.chunk_plan(queries, problem, rows_per_chunk(batch, dim, settings.rows), budget=0)


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
    batch, norms, half = sort_batch(plan.problem.labels), None, fits_half(queries, vectors, plan.problem)
    if half or plan.problem.refs.normalise is None:
        find_columns(plan.problem, batch)
    else:
        norms = row_norms_and_columns(vectors, plan.problem, batch)
    chunk_pass = ChunkPass(queries, vectors, plan, batch.labels32, norms=norms, half=half)
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
        batch = sort_batch(plan.problem.labels)
        negatives = ChunkPass(queries, vectors, plan, batch.labels32, half=fits_half(queries, vectors, plan.problem))
        ctx.cache = negatives.new_cache(len(vectors)) if plan.keep_similarities else None
        # The negatives come first, as in `_totals`.
        negative, negative_weight = _log_sums(negatives, ctx.cache)
        batch_rows = rows_of_batch(plan.problem, batch)
        positives = ChunkPass(queries, vectors.detach()[batch_rows.rows], plan, batch.labels32, batch_rows)
        positive, positive_weight = _log_sums(positives, None)
        ctx.plan = plan
        ctx.save_for_backward(queries, vectors, positive, negative, batch.labels32, negatives.norms, *batch_rows)
        ctx.mark_non_differentiable(positive_weight, negative_weight)
        return positive, negative, positive_weight, negative_weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        chunked.refuse_second_derivative()
        queries, vectors, positive, negative, labels, norms, *rows = ctx.saved_tensors
        plan, batch_rows = ctx.plan, BatchRows(*rows)
        negatives = ChunkPass(queries, vectors, plan, labels, norms=norms, half=fits_half(queries, vectors, plan.problem))
        in_queries, in_vectors = _gradients(negatives, negative, grads[1], ctx.cache)
        positives = ChunkPass(queries, vectors[batch_rows.rows], plan, labels, batch_rows)
        positive_queries, in_batch_rows = _gradients(positives, positive, grads[0], None)
        if in_queries is not None:
            assert positive_queries is not None
            in_queries = in_queries.add_(positive_queries).to(queries.dtype)
        if in_vectors is not None:
            assert in_batch_rows is not None
            in_vectors.index_add_(0, batch_rows.rows, in_batch_rows.to(in_vectors))
        return in_queries, in_vectors, None


def _log_sums(chunk_pass: ChunkPass, cache: Tensor | None) -> tuple[Tensor, Tensor]:
    """The log-sum of each query over the columns, and the mean weight of its pairs."""
    sums = chunk_pass.new_running_sums()
    for chunk in chunk_pass:
        chunk_pass.compute_similarities(chunk, cache)
        chunk_pass.log_sums(chunk, sums)
    highest = sums[0].amax(0)
    highest.masked_fill_(highest == NONE, 0.0)
    logs = highest + ((sums[0] - highest).exp() * sums[1]).sum(0).log()
    if chunk_pass.constants["EDGES"] < 0:
        return logs, (logs != NONE).to(logs)
    return logs, sums[2].sum(0) / sums[3].sum(0).clamp(min=1)


def _gradients(
    chunk_pass: ChunkPass, logs: Tensor, grads: Tensor, cache: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients in the queries and in the rows, from the gradient in the log-sums."""
    is_empty = logs == NONE
    factors, multiplier, lift = grads.masked_fill(is_empty, 0.0).mul_(chunk_pass.line.slope), None, 1.0
    if chunk_pass.type == torch.float16:
        # A mean over the batch makes all factors too small for float16, so they are divided by the largest factor.
        lift, largest = LIFT, factors.abs().amax()
        largest = largest.where(largest > 0, 1.0)
        factors, multiplier = factors / largest, (largest / LIFT).view(1)
    scaled_queries = (chunk_pass.queries * factors[:, None]).to(chunk_pass.type)
    in_queries = chunk_pass.new_float32(*chunk_pass.queries.shape) if chunk_pass.needs_grad[0] else None
    dtype = torch.float32 if chunk_pass.constants["POSITIVE"] else chunk_pass.vectors.dtype
    in_vectors = _empty_like(chunk_pass.vectors, dtype) if chunk_pass.needs_grad[1] else None
    logs = logs.masked_fill(is_empty, 0.0)
    for chunk in chunk_pass:
        chunk_pass.compute_similarities(chunk, cache, cached=cache is not None)
        chunk_pass.shares(chunk, logs, factors, lift)
        chunk_pass.backward(chunk, scaled_queries, in_queries, in_vectors, multiplier)
    if in_queries is not None:
        in_queries.mul_(factors[:, None] if multiplier is None else factors[:, None] * multiplier)
    return in_queries, in_vectors
