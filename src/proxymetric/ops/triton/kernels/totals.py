"""Sums of the logarithms and of the mean weights over all columns."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _sum(values, start, stop, BLOCK: tl.constexpr):
    """The sum of `values` from `start` to `stop`."""
    totals = tl.zeros([BLOCK], tl.float32)
    for first in range(start, stop, BLOCK):
        position = first + tl.arange(0, BLOCK)
        totals += tl.load(values + position, mask=position < stop, other=0.0)
    return tl.sum(totals, 0)


@triton.jit
def partial_totals(logs, means, log_parts, mean_parts, n, PART: tl.constexpr, BLOCK: tl.constexpr):
    """Sum the logarithms and the mean weights of every PART columns."""
    part = tl.program_id(0)
    stop = tl.minimum((part + 1) * PART, n)
    tl.store(log_parts + part, _sum(logs, part * PART, stop, BLOCK))
    tl.store(mean_parts + part, _sum(means, part * PART, stop, BLOCK))


@triton.jit
def totals(
    positive_logs, positive_means, negative_logs, negative_means, positive, negative, weights, m, n, min_weight_sum,
    DIVIDE_POSITIVE: tl.constexpr, DIVIDE_NEGATIVE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the total of m positive columns (program 0) and the total of n negative columns (program 1).

    `positive` and `negative` receive the sums of the logarithms, `weights` (2,) the sums of the mean weights. With
    DIVIDE_POSITIVE or DIVIDE_NEGATIVE the sum of the logarithms is divided by the sum of the weights.
    """
    if tl.program_id(0) == 0:
        log, weight = _sum(positive_logs, 0, m, BLOCK), _sum(positive_means, 0, m, BLOCK)
        if DIVIDE_POSITIVE:
            log = tl.div_rn(log, tl.maximum(weight, min_weight_sum))
        tl.store(positive, log)
        tl.store(weights, weight)
    else:
        log, weight = _sum(negative_logs, 0, n, BLOCK), _sum(negative_means, 0, n, BLOCK)
        if DIVIDE_NEGATIVE:
            log = tl.div_rn(log, tl.maximum(weight, min_weight_sum))
        tl.store(negative, log)
        tl.store(weights + 1, weight)
