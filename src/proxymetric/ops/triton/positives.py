"""The positive pairs, computed in one launch: they are few, even with very many classes."""

from __future__ import annotations

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
    weight, line = problem.weight, problem.positive
    rule = None if weight is None else weight.positive
    rules = [chunk_pass.empty] * 2 if rule is None else [numbers.float().contiguous() for numbers in rule]
    per_class, queries = problem.refs.per_class or 1, chunk_pass.queries
    columns = per_class // chunk_pass.K
    size, dim = queries.shape
    means, similarities = aligned_pair(queries, size * columns), chunk_pass.new_float32(size, per_class)
    of_columns = similarities if chunk_pass.K == 1 else chunk_pass.new_float32(size, columns)
    in_queries, in_rows = chunk_pass.empty, chunk_pass.empty
    if chunk_pass.any_needs_grad:
        in_queries, in_rows = chunk_pass.new_float32(size, dim), chunk_pass.new_float32(size * per_class, dim)
    group = max(1, PAIRS_PER_TILE // chunk_pass.padded_K)
    vectors, min_length = chunk_pass.vectors.contiguous(), chunk_pass.min_length or 1.0
    sorted_batch = (batch.labels, batch.order, batch.columns)
    launch(
        "positive_means",
        (size,),
        4,
        (queries, vectors, *sorted_batch, similarities, of_columns, *means, in_queries, in_rows, *rules),
        (size, dim, line.slope, line.offset, chunk_pass.inverse_gamma, min_length, line.slope / count, 1 / count),
        {
            "K": chunk_pass.K,
            "KIND": chunk_pass.constants["KIND"],
            "NORMALISE": chunk_pass.constants["NORMALISE"],
            "EDGES": -1 if rule is None else rule.edges.shape[1],
            "COLUMNS": columns,
            "NEEDS_GRAD": chunk_pass.any_needs_grad,
            "SEARCH_STEPS": size.bit_length(),
            "PADDED_K": chunk_pass.padded_K,
            "QUERY_GROUP": group,
            "BLOCK": min(next_power_of_two(dim), max(16, NUMBERS_PER_PROGRAM // (chunk_pass.padded_K * group))),
        },
    )
    return means, in_queries, in_rows
