"""The pairs of one class: few, whatever the number of classes, and done by one launch."""

from __future__ import annotations

from torch import Tensor

from proxymetric.ops.problem import Problem
from proxymetric.ops.triton.batch_classes import Present
from proxymetric.ops.triton.chunk_pass import Run
from proxymetric.ops.triton.launch import launch, pair
from proxymetric.ops.triton.norms import power

PAIRS = 16
"""of a tile: queries of a class, times its rows padded to a power of two"""
NUMBERS = 2**12
"""that a program holds"""


def few(run: Run, task: Problem, at: Present, count: float) -> tuple[Tensor, Tensor, Tensor]:
    """`log(1 + sum exp)` over `count` and the weight of each of the batch's columns, and the gradients of their sum.

    Those in the queries, and in the B K rows of the batch's classes, where `at` has any.
    """
    weight, line = task.weight, task.positive
    rule = None if weight is None else weight.positive
    rules = [run.none] * 2 if rule is None else [each.float().contiguous() for each in rule]
    per_class = task.refs.per_class or 1
    columns = per_class // run.K
    found, similarities = pair(run.queries, run.batch * columns), run.numbers(run.batch, per_class)
    of_columns = similarities if run.K == 1 else run.numbers(run.batch, columns)
    in_queries, in_rows = run.none, run.none
    if run.wanted:
        in_queries, in_rows = run.numbers(run.batch, run.dim), run.numbers(run.batch * per_class, run.dim)
    group = max(1, PAIRS // run.padded)
    launch(
        "own_means", (run.batch,), 4,
        (run.queries, run.vectors.contiguous(), *at[:3], similarities, of_columns, *found, in_queries, in_rows, *rules),
        (run.batch, run.dim, line.slope, line.offset, run.exponent[2], run.least or 1.0, line.slope / count, 1 / count),
        {"K": run.K, "KIND": run.how["KIND"], "NORMAL": run.how["NORMAL"],
         "EDGES": -1 if rule is None else rule.edges.shape[1], "M": columns, "WANTED": run.wanted,
         "STEPS": run.batch.bit_length(), "KP": run.padded, "GROUP": group,
         "BLOCK": min(power(run.dim), max(16, NUMBERS // (run.padded * group)))},
    )  # fmt: skip
    return found, in_queries, in_rows
