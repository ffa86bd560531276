"""The positive pairs, computed in one launch for each pass: they are few, even with very many classes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from proxymetric.ops.problem import Problem
from proxymetric.ops.triton.batch_classes import SortedBatch
from proxymetric.ops.triton.chunk_pass import ChunkPass
from proxymetric.ops.triton.launch import aligned_pair, launch
from proxymetric.ops.triton.norms import next_power_of_two

PAIRS_PER_TILE = 16
"""queries of a class, times its rows padded to a power of two"""
NUMBERS_PER_PROGRAM = 2**12


def positive_means(
    chunk_pass: ChunkPass, problem: Problem, batch: SortedBatch, count: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The positive total's logarithms, weights and gradients.

    Args:
        chunk_pass: the pass over the negatives, whose queries and vectors are used.
        problem: the problem.
        batch: the sorted batch, with columns.
        count: the number that the positive total is divided by.

    Returns:
        (2, B times the columns per class): `log(1 + sum exp) / count` and the mean weight of each column of the batch's
        classes.
        (B, D): the gradient in the queries. (B K, D): the gradient in the rows of the batch's classes. Both gradients
        are empty if no gradient is needed.
    """
    line, per_class, queries = problem.positive, problem.refs.per_class or 1, chunk_pass.queries
    columns = per_class // chunk_pass.K
    size, dim = queries.shape
    means, similarities = aligned_pair(queries, size * columns), chunk_pass.new_float32(size, per_class)
    of_columns = similarities if chunk_pass.K == 1 else chunk_pass.new_float32(size, columns)
    in_queries, in_rows = chunk_pass.empty, chunk_pass.empty
    if chunk_pass.any_needs_grad:
        in_queries, in_rows = chunk_pass.new_float32(size, dim), chunk_pass.new_float32(size * per_class, dim)
    vectors, min_length = chunk_pass.vectors.contiguous(), chunk_pass.min_length or 1.0
    sorted_batch = (batch.labels, batch.order, batch.columns)
    rules, of_rows, of_tile = _constants(chunk_pass, problem)
    launch(
        "positive_means",
        (size,),
        4,
        (queries, vectors, *sorted_batch, similarities, of_columns, *means, in_queries, in_rows, *rules),
        (size, dim, line.slope, line.offset, chunk_pass.inverse_gamma, min_length, line.slope / count, 1 / count),
        of_rows | {"NEEDS_GRAD": chunk_pass.any_needs_grad} | of_tile,
    )
    return means, in_queries, in_rows


def _constants(chunk_pass: ChunkPass, problem: Problem) -> tuple[list[Tensor], dict[str, Any], dict[str, Any]]:
    """The rule of the positives' weights, the constants that describe a class, and those of a program's tile."""
    rule = None if problem.weight is None else problem.weight.positive
    rules = [chunk_pass.empty] * 2 if rule is None else [numbers.float().contiguous() for numbers in rule]
    padded, group = chunk_pass.padded_K, max(1, PAIRS_PER_TILE // chunk_pass.padded_K)
    of_rows = {
        "K": chunk_pass.K,
        "KIND": chunk_pass.constants["KIND"],
        "NORMALISE": chunk_pass.constants["NORMALISE"],
        "EDGES": -1 if rule is None else rule.edges.shape[1],
        "COLUMNS": (problem.refs.per_class or 1) // chunk_pass.K,
    }
    of_tile = {
        "SEARCH_STEPS": chunk_pass.batch.bit_length(),
        "PADDED_K": padded,
        "QUERY_GROUP": group,
        "BLOCK": min(next_power_of_two(chunk_pass.dim), max(16, NUMBERS_PER_PROGRAM // (padded * group))),
    }
    return rules, of_rows, of_tile


class PositiveSums(NamedTuple):
    """The sums of each query over the columns of its class."""

    logs: Tensor
    """(B,) -inf for an empty sum"""
    means: Tensor
    """(B,) the mean weights"""
    of_rows: Tensor
    """(B, K) similarities of the rows of a query's class, in the order of the sorted batch"""
    of_columns: Tensor
    """the same for the columns; `of_rows` itself if a column is a row"""


def positive_sums(chunk_pass: ChunkPass, problem: Problem, batch: SortedBatch) -> PositiveSums:
    """The positives' log-sums over the classes, from the pass over the negatives and the sorted batch."""
    size, per_class = chunk_pass.batch, problem.refs.per_class or 1
    of_rows = chunk_pass.new_float32(size, per_class)
    of_columns = of_rows if chunk_pass.K == 1 else chunk_pass.new_float32(size, per_class // chunk_pass.K)
    logs, means = aligned_pair(chunk_pass.queries, size)
    sums = PositiveSums(logs, means, of_rows, of_columns)
    rules, row_constants, tile_constants = _constants(chunk_pass, problem)
    launch(
        "positive_sums",
        (size,),
        4,
        (*_inputs(chunk_pass, batch), sums.of_rows, sums.of_columns, sums.logs, sums.means, *rules),
        _numbers(chunk_pass, problem),
        row_constants | tile_constants,
    )
    return sums


def add_positive_gradients(
    chunk_pass: ChunkPass,
    problem: Problem,
    batch: SortedBatch,
    sums: PositiveSums,
    grads: Tensor,
    in_queries: Tensor | None,
    factors: Tensor,
    in_vectors: Tensor | None,
    dtype: torch.dtype,
) -> Tensor | None:
    """Add the gradients of the positives' log-sums to those of the negatives.

    Args:
        chunk_pass: the pass over the negatives.
        problem: the problem.
        batch: the sorted batch, with columns.
        sums: the result of `positive_sums`.
        grads: (B,) the gradient in the log-sums of the positives.
        in_queries: (B, D) times `factors` is the gradient of the negatives in the queries; may be overwritten. None:
            not needed.
        factors: (B,).
        in_vectors: (R, D) the gradient of the negatives in the vectors, to which that of the positives is added; None:
            not needed.
        dtype: the type of the result.

    Returns:
        The gradient in the queries, if it is needed.
    """
    rules, row_constants, tile_constants = _constants(chunk_pass, problem)
    out = None if in_queries is None else torch.empty_like(in_queries, dtype=dtype)
    in_out = (chunk_pass.empty if tensor is None else tensor for tensor in (in_queries, factors, out, in_vectors))
    launch(
        "positive_gradients",
        (chunk_pass.batch,),
        4,
        (
            *_inputs(chunk_pass, batch),
            sums.of_rows,
            sums.of_columns,
            torch.empty_like(sums.of_rows),
            sums.logs,
            grads.contiguous(),
            *in_out,
            *rules,
        ),
        _numbers(chunk_pass, problem),
        row_constants | {"NEEDS_QUERIES": out is not None, "NEEDS_ROWS": in_vectors is not None} | tile_constants,
    )
    return out


def _inputs(chunk_pass: ChunkPass, batch: SortedBatch) -> tuple[Tensor, ...]:
    return chunk_pass.queries, chunk_pass.vectors.contiguous(), batch.labels, batch.order, batch.columns


def _numbers(chunk_pass: ChunkPass, problem: Problem) -> tuple[float, ...]:
    line = problem.positive
    exponent = (line.slope, line.offset, chunk_pass.inverse_gamma)
    return chunk_pass.batch, chunk_pass.dim, *exponent, chunk_pass.min_length or 1.0
