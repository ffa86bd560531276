"""From what each column has to sums over all of them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _sum(values, start, stop, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(start, stop, BLOCK):
        at = first + tl.arange(0, BLOCK)
        total += tl.load(values + at, mask=at < stop, other=0.0)
    return tl.sum(total, 0)


@triton.jit
def total_parts(logs, means, parts, more_parts, n, MANY: tl.constexpr, BLOCK: tl.constexpr):
    """Of every MANY columns the summed logarithms and the summed weights."""
    part = tl.program_id(0)
    stop = tl.minimum((part + 1) * MANY, n)
    tl.store(parts + part, _sum(logs, part * MANY, stop, BLOCK))
    tl.store(more_parts + part, _sum(means, part * MANY, stop, BLOCK))


@triton.jit
def total(
    up_logs, up_means, down_logs, down_means, up, down, weights, m, n, least,
    UP: tl.constexpr, DOWN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`up`, `down`: sums of m and of n logarithms, if UP, DOWN over that of their weights; `weights` (2,): these."""
    if tl.program_id(0) == 0:
        log, weight = _sum(up_logs, 0, m, BLOCK), _sum(up_means, 0, m, BLOCK)
        if UP:
            log = tl.div_rn(log, tl.maximum(weight, least))
        tl.store(up, log)
        tl.store(weights, weight)
    else:
        log, weight = _sum(down_logs, 0, n, BLOCK), _sum(down_means, 0, n, BLOCK)
        if DOWN:
            log = tl.div_rn(log, tl.maximum(weight, least))
        tl.store(down, log)
        tl.store(weights + 1, weight)
