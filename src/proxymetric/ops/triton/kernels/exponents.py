"""From similarities to exponents and sums of them: what several kernels do with the numbers they hold."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _log1p(x):
    """`log(1 + x)`, also of an x that 1 + x does not show: `1 + x` was rounded, and so is what it is divided by."""
    u = 1.0 + x
    return tl.where(u == 1.0, x, x * tl.log(u) / tl.where(u == 1.0, 1.0, u - 1.0))


@triton.jit
def _exp(x):
    """`exp(x)` of an x up to 0, to the last bit: the hardware's may be two off, and a large scale multiplies that.

    `x = n log(2) + r`, the logarithm in two parts, of which the first times n is exact; then Taylor's series of r.
    """
    x = tl.maximum(x, -87.0)
    n = tl.floor(x * 1.4426950408889634 + 0.5)
    r = tl.fma(n, 2.1219444e-4, tl.fma(n, -0.693359375, x))
    q = tl.fma(tl.fma(tl.fma(r, 1 / 5040, 1 / 720), r, 1 / 120), r, 1 / 24)
    q = tl.fma(tl.fma(q, r, 1 / 6), r, 0.5)
    return ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True) * (1.0 + tl.fma(r * r, q, r))


@triton.jit
def rounded(a, b):
    """`a b`, rounded before anything is added to it.

    A compiler may round a product and a sum once, in one instruction. Threads that add up each other's products would
    then have sums that differ in the last bit, each having rounded all products but its own; and so would the way there
    and the way back. Where a large scale multiplies that bit, it is much of a share.
    """
    return tl.fma(a, b, 0.0)


@triton.jit
def exponents(found, slope, offset):
    """`slope found + offset`, rounded once wherever it is made."""
    return tl.fma(found, slope, offset)


@triton.jit
def shrinks(length, least, NORMAL: tl.constexpr):
    """By what rows of a length are multiplied, and the same but 0 where the length does not count."""
    if NORMAL:
        shrink = tl.div_rn(1.0, tl.maximum(length, least))
        bend = tl.where(length >= least, shrink, 0.0)
    else:
        shrink = 0.0 * length + 1.0
        bend = 0.0 * length
    return shrink, bend


@triton.jit
def shrink_of(lengths, rows, there, least, NORMAL: tl.constexpr):
    """The same for some of all rows."""
    length = tl.load(lengths + rows, mask=there, other=1.0) if NORMAL else tl.where(there, 1.0, 1.0)
    return shrinks(length, least, NORMAL)


@triton.jit
def of_columns(s, k, K: tl.constexpr, KIND: tl.constexpr, steep):
    """Similarities of rows (TILE, BLOCK) -> of columns (COLUMNS, BLOCK)."""
    if K == 1:
        found = s
    else:
        real = (k < K)[:, None]
        if KIND == 2:
            found = tl.sum(tl.where(real, s, 0.0), 0)[None, :] / K
        else:
            highest = tl.max(tl.where(real, s, float("-inf")), 0)[None, :]
            if KIND == 1:
                found = highest
            else:
                share = tl.where(real, _exp((s - highest) * steep), 0.0)
                found = tl.div_rn(tl.sum(rounded(share, s), 0), tl.sum(share, 0))[None, :]
    return found


@triton.jit
def of_rows(s, found, k, K: tl.constexpr, KIND: tl.constexpr, steep):
    """The slopes of the columns' similarities in those of their rows, (TILE, BLOCK)."""
    if K == 1:
        slopes = 1.0
    else:
        real = (k < K)[:, None]
        if KIND == 2:
            slopes = tl.where(real, 1.0 / K, 0.0 * s)
        else:
            highest = tl.max(tl.where(real, s, float("-inf")), 0)[None, :]
            if KIND == 1:
                largest = tl.where(real & (s == highest), 1.0, 0.0)
                slopes = largest / tl.sum(largest, 0)[None, :]
            else:
                share = tl.where(real, _exp((s - highest) * steep), 0.0)
                slopes = share * tl.div_rn(1.0, tl.sum(share, 0))[None, :] * (1.0 + (s - found) * steep)
    return slopes


@triton.jit
def weights_at(s, edges, levels, label, there, EDGES: tl.constexpr):
    """The rule of each column's class (COLUMNS,) at its similarities (COLUMNS, BLOCK)."""
    weight = tl.load(levels + label * (EDGES + 1), mask=there, other=0.0)[:, None] + 0.0 * s
    for e in tl.static_range(EDGES):
        edge = tl.load(edges + label * EDGES + e, mask=there, other=0.0)[:, None]
        level = tl.load(levels + label * (EDGES + 1) + e + 1, mask=there, other=0.0)[:, None]
        weight = tl.where(s >= edge, level, weight)
    return weight


@triton.jit
def log_mean(highest, total, weighed, count, EDGES: tl.constexpr):
    """From a column's highest exponent and `total = sum exp(z - highest)`: `log(1 + sum exp z)`, and its mean weight.

    And what to make shares with: `exp(z - bottom) part` is the slope of the first in an exponent z.
    """
    bottom = tl.where(highest == float("-inf"), 0.0, highest)
    above = tl.maximum(bottom, 0.0)
    part = tl.exp(bottom - above)
    whole = total * part + tl.exp(-above)
    log = tl.where(above > 0.0, above + tl.log(whole), _log1p(total * part))
    mean = weighed / tl.maximum(count, 1.0) if EDGES >= 0 else tl.where(highest == float("-inf"), 0.0, 1.0)
    return log, mean, bottom, tl.div_rn(part, whole)
