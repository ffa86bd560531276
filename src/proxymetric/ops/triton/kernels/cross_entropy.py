"""The cross entropy of a query among the classes, with its derivative, from the similarities of all rows."""

from __future__ import annotations

import triton
import triton.language as tl

from proxymetric.ops.triton.kernels.exponents import _exp


@triton.jit
def _of_class(t, is_row, K, KIND: tl.constexpr):
    """The similarity T of each class (n,) from those of its K rows (n, KP), and the derivatives `dT / dt`."""
    if KIND == "one":
        return tl.sum(t, 1), tl.where(is_row, 1.0, 0.0)
    highest = tl.max(tl.where(is_row, t, float("-inf")), 1)
    if KIND == "max":
        slopes = tl.where(is_row & (t == highest[:, None]), 1.0, 0.0)
        return highest, slopes / tl.sum(slopes, 1)[:, None]
    if KIND == "mean":
        return tl.sum(t, 1) / K, tl.where(is_row, 1.0 / K, 0.0)
    shares = tl.where(is_row, _exp(tl.where(is_row, t, highest[:, None]) - highest[:, None]), 0.0)
    shares = shares / tl.sum(shares, 1)[:, None]
    similarity = tl.sum(shares * t, 1)
    return similarity, shares * (1.0 + t - similarity[:, None])


@triton.jit
def _own_exponent(t, unit, slope, offset, scale, cos_margin, sin_margin, ARC: tl.constexpr):
    """The exponent of the query's class and its derivative in s: a line, or the angle with a margin."""
    if not ARC:
        return t * (slope * unit) + offset, 0.0 * t + slope
    s = t * unit
    cosine = tl.minimum(tl.maximum(s, -1.0 + 1e-6), 1.0 - 1e-6)
    sine = tl.sqrt_rn(1.0 - cosine * cosine)
    inside = s >= -cos_margin
    exponent = tl.where(inside, cosine * cos_margin - sine * sin_margin, s + offset)
    derivative = tl.where(inside, tl.where(cosine == s, cos_margin + cosine * sin_margin / sine, 0.0), 1.0)
    return scale * exponent, scale * derivative


@triton.jit(do_not_specialize=["C"])
def cross_entropy(
    similarities, labels, losses, nearest, C, unit, slope, own_slope, own_offset, scale, cos_margin, sin_margin, factor,
    K: tl.constexpr, KP: tl.constexpr, KIND: tl.constexpr, ARC: tl.constexpr, NEAREST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the loss of one query, times the factor, and overwrite its similarities t with the derivatives in s.

    `similarities` (B, C K) are `t = s / unit`. The exponent of another class is `slope s`; that of the query's class is
    `own_slope s + own_offset`, or with ARC the angle with a margin, where `own_offset` is what replaces it beyond pi.
    NEAREST also writes the nearest row of the query's class.
    """
    query = tl.program_id(0).to(tl.int64)
    row_start = query * C * K
    label = tl.load(labels + query)
    k = tl.arange(0, KP)
    own_position = row_start + label * K + k[None, :]
    own_is_row = (k < K)[None, :]
    own_t = tl.load(similarities + own_position, mask=own_is_row, other=0.0)
    own_similarity, own_slopes = _of_class(own_t, own_is_row, K, KIND)
    own_exponent, own_derivative = _own_exponent(
        own_similarity, unit, own_slope, own_offset, scale, cos_margin, sin_margin, ARC
    )  # (1,)
    if NEAREST:
        nearest_row = tl.argmax(tl.where(own_is_row, own_t, float("-inf")), 1)
        tl.store(nearest + query + tl.arange(0, 1), label * K + nearest_row)
    highest = tl.full([BLOCK], -1e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, C, BLOCK):
        c = start + tl.arange(0, BLOCK)
        is_other = (c < C) & (c != label)
        is_row = is_other[:, None] & (k < K)[None, :]
        t = tl.load(similarities + row_start + c[:, None] * K + k[None, :], mask=is_row, other=0.0)
        similarity, _ = _of_class(t, is_row | (k == 0)[None, :], K, KIND)
        z = tl.where(is_other, similarity * (slope * unit), -1e30)
        higher = tl.maximum(highest, z)
        total = total * _exp(highest - higher) + tl.where(is_other, _exp(z - higher), 0.0)
        highest = higher
    top = tl.maximum(tl.max(highest, 0), own_exponent)  # (1,)
    others = tl.sum(total * _exp(highest - tl.sum(top, 0)), 0)
    whole = others + _exp(own_exponent - top)
    tl.store(losses + query + tl.arange(0, 1), factor * (tl.log(whole) + top - own_exponent))
    # The share of the query's class, less 1, is the share of the others: exact also where it is nearly 0.
    own_gradient = own_slopes * (-factor * own_derivative * others / whole)[:, None]
    shift, normaliser = tl.sum(top, 0), tl.sum(slope * factor / whole, 0)
    for start in range(0, C, BLOCK):
        c = start + tl.arange(0, BLOCK)
        is_other = (c < C) & (c != label)
        is_row = is_other[:, None] & (k < K)[None, :]
        position = similarities + row_start + c[:, None] * K + k[None, :]
        t = tl.load(position, mask=is_row, other=0.0)
        similarity, slopes = _of_class(t, is_row | (k == 0)[None, :], K, KIND)
        share = tl.where(is_other, _exp(tl.where(is_other, similarity * (slope * unit) - shift, 0.0)), 0.0)
        tl.store(position, slopes * (share * normaliser)[:, None], mask=is_row)
    tl.store(similarities + own_position, own_gradient, mask=own_is_row)


@triton.jit(do_not_specialize=["R"])
def unit_gradients(
    product, units, lengths, multiplier, gradients, R, D, min_length, TILE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write `multiplier (g - (g . u) u) / max(length, min_length)` for R rows u with the gradients g in `product`.

    A row that is shorter than `min_length` was divided by a constant and has no radial part.
    """
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    is_valid = row < R
    radial = tl.zeros([TILE], tl.float32)
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)
        position, is_inside = row[:, None] * D + d[None, :], is_valid[:, None] & (d < D)[None, :]
        g = tl.load(product + position, mask=is_inside, other=0.0)
        radial += tl.sum(g * tl.load(units + position, mask=is_inside, other=0.0), 1)
    length = tl.load(lengths + row, mask=is_valid, other=1.0)
    radial = tl.where(length >= min_length, radial, 0.0)
    scale = tl.load(multiplier) / tl.maximum(length, min_length)
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)
        position, is_inside = row[:, None] * D + d[None, :], is_valid[:, None] & (d < D)[None, :]
        g = tl.load(product + position, mask=is_inside, other=0.0)
        u = tl.load(units + position, mask=is_inside, other=0.0)
        tl.store(gradients + position, (g - radial[:, None] * u) * scale[:, None], mask=is_inside)
