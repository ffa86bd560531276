"""From similarities to exponents and log-sums: functions that several kernels apply to the numbers they hold."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _log1p(x):
    """`log(1 + x)`, accurate for small x: the rounding error of `1 + x` cancels in `log(u) / (u - 1)`."""
    u = 1.0 + x
    return tl.where(u == 1.0, x, x * tl.log(u) / tl.where(u == 1.0, 1.0, u - 1.0))


@triton.jit
def _exp(x):
    """`exp(x)` for x <= 0, accurate to the last bit.

    The hardware's result may be off by two bits, and a large scale multiplies this error. Here `x = n log(2) + r`, with
    log(2) split into two parts so that n times the first part is exact; a Taylor series in r follows.
    """
    x = tl.maximum(x, -87.0)
    n = tl.floor(x * 1.4426950408889634 + 0.5)
    r = tl.fma(n, 2.1219444e-4, tl.fma(n, -0.693359375, x))
    q = tl.fma(tl.fma(tl.fma(r, 1 / 5040, 1 / 720), r, 1 / 120), r, 1 / 24)
    q = tl.fma(tl.fma(q, r, 1 / 6), r, 0.5)
    return ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True) * (1.0 + tl.fma(r * r, q, r))


@triton.jit
def exp_ftz(x):
    """`exp(x)` of the hardware, with results below 2^-126 as 0: keeping these would double the instructions."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def rounded_product(a, b):
    """`a b`, rounded before anything is added to it.

    A compiler may merge a product and a sum into one instruction with one rounding. Threads that add up each other's
    products would then round every product except their own, and their sums would differ in the last bit; so would the
    forward and the backward pass. A large scale turns that bit into a large error of a share.
    """
    return tl.fma(a, b, 0.0)


@triton.jit
def exponents(similarity, slope, offset):
    """`slope similarity + offset`, rounded once, in the same way in every kernel."""
    return tl.fma(similarity, slope, offset)


@triton.jit
def row_scales(length, min_length, NORMALISE: tl.constexpr):
    """`1 / max(length, min_length)` of each row, and the same but 0 for rows shorter than `min_length`."""
    if NORMALISE:
        row_scale = tl.div_rn(1.0, tl.maximum(length, min_length))
        scale_slope = tl.where(length >= min_length, row_scale, 0.0)
    else:
        row_scale = 0.0 * length + 1.0
        scale_slope = 0.0 * length
    return row_scale, scale_slope


@triton.jit
def load_row_scales(lengths, rows, is_valid, min_length, NORMALISE: tl.constexpr):
    """`row_scales` of the given rows, from the lengths of all rows."""
    length = tl.load(lengths + rows, mask=is_valid, other=1.0) if NORMALISE else tl.where(is_valid, 1.0, 1.0)
    return row_scales(length, min_length, NORMALISE)


@triton.jit
def column_similarities(s, k, K: tl.constexpr, KIND: tl.constexpr, inverse_gamma):
    """Similarities of rows (TILE, BLOCK) -> similarities of columns (COLUMNS, BLOCK)."""
    if K == 1:
        similarity = s
    else:
        is_row = (k < K)[:, None]
        if KIND == 2:
            similarity = tl.sum(tl.where(is_row, s, 0.0), 0)[None, :] / K
        else:
            highest = tl.max(tl.where(is_row, s, float("-inf")), 0)[None, :]
            if KIND == 1:
                similarity = highest
            else:
                share = tl.where(is_row, _exp((s - highest) * inverse_gamma), 0.0)
                similarity = tl.div_rn(tl.sum(rounded_product(share, s), 0), tl.sum(share, 0))[None, :]
    return similarity


@triton.jit
def row_slopes(s, similarity, k, K: tl.constexpr, KIND: tl.constexpr, inverse_gamma):
    """The derivatives (TILE, BLOCK) of the columns' similarities in the similarities of their rows."""
    if K == 1:
        slopes = 1.0
    else:
        is_row = (k < K)[:, None]
        if KIND == 2:
            slopes = tl.where(is_row, 1.0 / K, 0.0 * s)
        else:
            highest = tl.max(tl.where(is_row, s, float("-inf")), 0)[None, :]
            if KIND == 1:
                largest = tl.where(is_row & (s == highest), 1.0, 0.0)
                slopes = largest / tl.sum(largest, 0)[None, :]
            else:
                share = tl.where(is_row, _exp((s - highest) * inverse_gamma), 0.0)
                slopes = share * tl.div_rn(1.0, tl.sum(share, 0))[None, :] * (1.0 + (s - similarity) * inverse_gamma)
    return slopes


@triton.jit
def pair_weights(s, edges, levels, label, is_valid, EDGES: tl.constexpr):
    """The weights (COLUMNS, BLOCK) that the rule of each column's class gives to its similarities."""
    weight = tl.load(levels + label * (EDGES + 1), mask=is_valid, other=0.0)[:, None] + 0.0 * s
    for e in tl.static_range(EDGES):
        edge = tl.load(edges + label * EDGES + e, mask=is_valid, other=0.0)[:, None]
        level = tl.load(levels + label * (EDGES + 1) + e + 1, mask=is_valid, other=0.0)[:, None]
        weight = tl.where(s >= edge, level, weight)
    return weight


@triton.jit
def log1p_and_mean_weight(highest, total, weight_sum, count, EDGES: tl.constexpr):
    """`log(1 + sum exp z)` of a column and its mean weight.

    `highest` is the column's highest exponent and `total = sum exp(z - highest)`. Also returns `bottom` and `part`:
    `exp(z - bottom) part` is the derivative of the first result in an exponent z.
    """
    bottom = tl.where(highest == float("-inf"), 0.0, highest)
    shift = tl.maximum(bottom, 0.0)
    part = tl.exp(bottom - shift)
    whole = total * part + tl.exp(-shift)
    log = tl.where(shift > 0.0, shift + tl.log(whole), _log1p(total * part))
    mean = weight_sum / tl.maximum(count, 1.0) if EDGES >= 0 else tl.where(highest == float("-inf"), 0.0, 1.0)
    return log, mean, bottom, tl.div_rn(part, whole)
