"""Sums over the columns of what each of them has, in as few launches as can be."""

from __future__ import annotations

from torch import Tensor

from proxymetric.ops.problem import LEAST_WEIGHT
from proxymetric.ops.triton.launch import launch, pair

AT_ONCE = 2**18
"""columns that one program goes over"""
PART = 2**14
"""the same where there are more, and several share the work"""


def totals(up: Tensor, down: Tensor, over_weights: tuple[bool, bool]) -> tuple[Tensor, Tensor, Tensor]:
    """Of the logarithms and weights of columns, (2, m) and (2, n): both summed logarithms, and (2,) the summed weights.

    over_weights: whether the one is to be divided by the other.
    """
    count = down.shape[1]
    if count > AT_ONCE:
        parts = pair(down, -(-count // PART))
        launch("total_parts", (parts.shape[1],), 8, (*down, *parts), (count,), {"MANY": PART, "BLOCK": 4096})
        down = parts
    found = up.new_empty(()), up.new_empty(()), up.new_empty(2)
    launch(
        "total", (2,), 16, (*up, *down, *found), (up.shape[1], down.shape[1], LEAST_WEIGHT),
        {"UP": over_weights[0], "DOWN": over_weights[1], "BLOCK": 8192},
    )  # fmt: skip
    return found
