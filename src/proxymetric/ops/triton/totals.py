"""Sums over the columns, in one or two launches."""

from __future__ import annotations

from torch import Tensor

from proxymetric.ops.problem import MIN_WEIGHT_SUM
from proxymetric.ops.triton.launch import aligned_pair, launch

MAX_COLUMNS_PER_PROGRAM = 2**18
"""columns up to which one program sums all of them"""
COLUMNS_PER_PART = 2**14
"""columns that each program sums if there are more"""


def compute_totals(
    positive: Tensor, negative: Tensor, over_weights: tuple[bool, bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum the logarithms and the mean weights of all columns.

    Args:
        positive: (2, m) the logarithms and the mean weights of the positives.
        negative: (2, n) the same for the negatives.
        over_weights: whether to divide the positive and the negative total by the sum of its weights.

    Returns:
        The positive total, the negative total, and (2,) the sums of their weights.
    """
    count = negative.shape[1]
    if count > MAX_COLUMNS_PER_PROGRAM:
        parts = aligned_pair(negative, -(-count // COLUMNS_PER_PART))
        constants = {"PART": COLUMNS_PER_PART, "BLOCK": 4096}
        launch("partial_totals", (parts.shape[1],), 8, (*negative, *parts), (count,), constants)
        negative = parts
    totals = positive.new_empty(()), positive.new_empty(()), positive.new_empty(2)
    launch(
        "totals",
        (2,),
        16,
        (*positive, *negative, *totals),
        (positive.shape[1], negative.shape[1], MIN_WEIGHT_SUM),
        {"DIVIDE_POSITIVE": over_weights[0], "DIVIDE_NEGATIVE": over_weights[1], "BLOCK": 8192},
    )
    return totals
