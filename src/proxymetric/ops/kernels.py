"""Triton kernels between the products of `fused`: from the similarities of a chunk to sums, shares and gradients.

A chunk is n columns of K rows each against B queries; its similarities S lie row after row, (n K, B), as the product
of rows and queries gave them: lengths are folded in here. A program sees a tile of `TILE` rows: several columns where a
column is one row, else the K rows of one column, padded to a power of two. All numbers are float32 but the shares,
which are of the products' type. This module imports triton: only `runs` imports it, when it is about to launch. Triton
reads annotations as code, so there are none but its own.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _log1p(x):
    """`log(1 + x)`, also of an x that 1 + x does not show: `1 + x` was rounded, and so is what it is divided by."""
    u = 1.0 + x
    return tl.where(u == 1.0, x, x * tl.log(u) / tl.where(u == 1.0, 1.0, u - 1.0))


@triton.jit
def _shrink(lengths, rows, there, least, NORMAL: tl.constexpr):
    """By what rows are multiplied, and the same but 0 where the length does not count."""
    if NORMAL:
        length = tl.load(lengths + rows, mask=there, other=1.0)
        shrink = 1.0 / tl.maximum(length, least)
        bend = tl.where(length >= least, shrink, 0.0)
    else:
        shrink = tl.where(there, 1.0, 1.0)
        bend = tl.where(there, 0.0, 0.0)
    return shrink, bend


@triton.jit
def _of_columns(s, k, K: tl.constexpr, KIND: tl.constexpr, gamma):
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
                share = tl.where(real, tl.exp((s - highest) / gamma), 0.0)
                found = (tl.sum(share * s, 0) / tl.sum(share, 0))[None, :]
    return found


@triton.jit
def _of_rows(s, found, k, K: tl.constexpr, KIND: tl.constexpr, gamma):
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
                share = tl.where(real, tl.exp((s - highest) / gamma), 0.0)
                slopes = share / tl.sum(share, 0)[None, :] * (1.0 + (s - found) / gamma)
    return slopes


@triton.jit
def _weights(s, edges, levels, label, there, EDGES: tl.constexpr):
    """The rule of each column's class (COLUMNS,) at its similarities (COLUMNS, BLOCK)."""
    weight = tl.load(levels + label * (EDGES + 1), mask=there, other=0.0)[:, None] + 0.0 * s
    for e in tl.static_range(EDGES):
        edge = tl.load(edges + label * EDGES + e, mask=there, other=0.0)[:, None]
        level = tl.load(levels + label * (EDGES + 1) + e + 1, mask=there, other=0.0)[:, None]
        weight = tl.where(s >= edge, level, weight)
    return weight


@triton.jit
def _tile(tile, n, K: tl.constexpr, TILE: tl.constexpr):
    """Of the tile'th tile: its columns, which of them there are, its rows, which of them there are, and their k."""
    if K == 1:
        k = tl.zeros([TILE], tl.int32)
        column = tile * TILE + tl.arange(0, TILE)
        row = column
        real = row < n
    else:
        k = tl.arange(0, TILE)
        column = tile + tl.zeros([1], tl.int32)
        row = tile * K + k
        real = k < K
    return column, column < n, row, real, k


@triton.jit
def _look(
    S, shrink, row, real, k, label, is_column, of_queries, i, edges,
    levels, B, slope, offset, gamma,
    K: tl.constexpr, KIND: tl.constexpr, EDGES: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """A tile at the queries i: similarities of rows and of columns, which pairs are meant, their weights and exponents.

    Meant are pairs of one class (OWN), or of two; exponents of others are -inf. Without a weighting (EDGES < 0) a
    weight is 1. A label below 0 is no class: it has no rule, and no query is of it.
    """
    query = tl.load(of_queries + i, mask=i < B, other=-1)
    s = tl.load(S + row[:, None] * B + i[None, :], mask=real[:, None] & (i < B)[None, :], other=0.0) * shrink[:, None]
    found = _of_columns(s, k, K, KIND, gamma)
    if OWN:
        there = (label.to(tl.int32)[:, None] == query[None, :]) & (i < B)[None, :] & is_column[:, None]
    else:
        there = (label.to(tl.int32)[:, None] != query[None, :]) & (i < B)[None, :] & is_column[:, None]
    z = slope * found + offset
    if EDGES >= 0:
        weight = _weights(found, edges, levels, label, is_column & (label >= 0), EDGES)
        z = z * weight
    else:
        weight = 1.0
    return s, found, there, weight, tl.where(there, z, float("-inf"))


@triton.jit
def _write(W, w, s, row, real, i, B):
    """Write shares as their type rounds them; what was written, times the similarity."""
    narrow = w.to(W.dtype.element_ty)
    tl.store(W + row[:, None] * B + i[None, :], narrow, mask=real[:, None] & (i < B)[None, :])
    return narrow.to(tl.float32) * s


@triton.jit(do_not_specialize=["n"])
def log_means(
    S, W, factors, inwards, logs, means, lengths, labels, of_queries, edges, levels, n, B, slope, offset, gamma, least,
    K: tl.constexpr, KIND: tl.constexpr, NORMAL: tl.constexpr, EDGES: tl.constexpr, OWN: tl.constexpr,
    STRIDE: tl.constexpr, WANTED: tl.constexpr, ONE: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """For each column `log(1 + sum exp z)` over the queries that are meant, its mean weight, its gradient's parts.

    That in the row r is `slope (factor (W x)_r - inward p_r)`, that in the queries `slope W^T (factor p)`. W are shares
    of the largest of their column, so that a narrow type holds them. EDGES < 0: no weighting. ONE: one block is all.
    """
    column, is_column, row, real, k = _tile(tl.program_id(0), n, K, TILE)
    shrink, bend = _shrink(lengths, row, real, least, NORMAL)
    label = tl.load(labels + column * STRIDE, mask=is_column, other=-1)
    COLUMNS: tl.constexpr = TILE if K == 1 else 1
    if ONE:
        j = tl.arange(0, BLOCK)
        s, found, there, weight, z = _look(
            S, shrink, row, real, k, label, is_column, of_queries, j, edges, levels, B, slope, offset, gamma,
            K, KIND, EDGES, OWN,
        )  # fmt: skip
        count = tl.sum(tl.where(there, 1.0, 0.0), 1)
        weighed = tl.sum(tl.where(there, weight, 0.0), 1)
        highest = tl.max(z, 1)
        share = tl.exp(z - tl.where(highest == float("-inf"), 0.0, highest)[:, None])
        total = tl.sum(share, 1)
    else:
        highest = tl.full([COLUMNS], float("-inf"), tl.float32)
        total = tl.zeros([COLUMNS], tl.float32)
        count = tl.zeros([COLUMNS], tl.float32)
        weighed = tl.zeros([COLUMNS], tl.float32)
        for start in range(0, B, BLOCK):
            i = start + tl.arange(0, BLOCK)
            _, _, there_i, weight_i, z_i = _look(
                S, shrink, row, real, k, label, is_column, of_queries, i, edges, levels, B, slope, offset, gamma,
                K, KIND, EDGES, OWN,
            )  # fmt: skip
            count += tl.sum(tl.where(there_i, 1.0, 0.0), 1)
            weighed += tl.sum(tl.where(there_i, weight_i, 0.0), 1)
            higher = tl.maximum(highest, tl.max(z_i, 1))
            # Of a column without pairs nothing is subtracted: -inf less -inf is no number.
            base = tl.where(higher == float("-inf"), 0.0, higher)
            total = total * tl.exp(highest - base) + tl.sum(tl.exp(z_i - base[:, None]), 1)
            highest = higher
    bottom = tl.where(highest == float("-inf"), 0.0, highest)
    above = tl.maximum(bottom, 0.0)
    part = tl.exp(bottom - above)
    whole = total * part + tl.exp(-above)
    tl.store(logs + column, tl.where(above > 0.0, above + tl.log(whole), _log1p(total * part)), mask=is_column)
    tl.store(means + column, weighed / tl.maximum(count, 1.0), mask=is_column)
    if WANTED:
        factor = shrink * (part / whole)
        if ONE:
            w = share * weight * _of_rows(s, found, k, K, KIND, gamma)
            inner = tl.sum(_write(W, w, s, row, real, j, B), 1)
        else:
            inner = tl.zeros([TILE], tl.float32)
            for start in range(0, B, BLOCK):
                i = start + tl.arange(0, BLOCK)
                s_i, found_i, _, weight_i, z_i = _look(
                    S, shrink, row, real, k, label, is_column, of_queries, i, edges, levels, B, slope, offset, gamma,
                    K, KIND, EDGES, OWN,
                )  # fmt: skip
                w_i = tl.exp(z_i - bottom[:, None]) * weight_i * _of_rows(s_i, found_i, k, K, KIND, gamma)
                inner += tl.sum(_write(W, w_i, s_i, row, real, i, B), 1)
        tl.store(factors + row, factor, mask=real)
        tl.store(inwards + row, factor * inner * bend, mask=real)


@triton.jit(do_not_specialize=["n"])
def log_sums(
    S, highests, totals, weigheds, counts, lengths, labels, of_queries, edges, levels,
    n, B, slope, offset, gamma, least,
    K: tl.constexpr, KIND: tl.constexpr, NORMAL: tl.constexpr, EDGES: tl.constexpr, OWN: tl.constexpr,
    STRIDE: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """For each query, add the columns that are meant to running sums: the highest exponent, `sum exp(z - highest)`.

    Programs along the first axis take the tiles of columns in turns, and each has sums of its own, (parts, B).
    """
    part, parts = tl.program_id(0), tl.num_programs(0)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = part * B + i
    highest = tl.load(highests + place, mask=i < B, other=float("-inf"))
    total = tl.load(totals + place, mask=i < B, other=0.0)
    if EDGES >= 0:
        weighed = tl.load(weigheds + place, mask=i < B, other=0.0)
        count = tl.load(counts + place, mask=i < B, other=0.0)
    COLUMNS: tl.constexpr = TILE if K == 1 else 1
    for tile in range(part, tl.cdiv(n, COLUMNS), parts):
        column, is_column, row, real, k = _tile(tile, n, K, TILE)
        shrink, _ = _shrink(lengths, row, real, least, NORMAL)
        label = tl.load(labels + column * STRIDE, mask=is_column, other=-1)
        _, _, there, weight, z = _look(
            S, shrink, row, real, k, label, is_column, of_queries, i, edges, levels, B, slope, offset, gamma,
            K, KIND, EDGES, OWN,
        )  # fmt: skip
        if EDGES >= 0:
            weighed += tl.sum(tl.where(there, weight, 0.0), 0)
            count += tl.sum(tl.where(there, 1.0, 0.0), 0)
        higher = tl.maximum(highest, tl.max(z, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(highest - base) + tl.sum(tl.exp(z - base[None, :]), 0)
        highest = higher
    tl.store(highests + place, highest, mask=i < B)
    tl.store(totals + place, total, mask=i < B)
    if EDGES >= 0:
        tl.store(weigheds + place, weighed, mask=i < B)
        tl.store(counts + place, count, mask=i < B)


@triton.jit(do_not_specialize=["n"])
def shares(
    S, W, factors, inwards, sums, grads, lengths, labels, of_queries, edges, levels,
    n, B, slope, offset, gamma, least, lift,
    K: tl.constexpr, KIND: tl.constexpr, NORMAL: tl.constexpr, EDGES: tl.constexpr, OWN: tl.constexpr,
    STRIDE: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The slopes of each query's log-sum, in the form that `log_means` has; `lift` times too large in W.

    The gradient in the log-sums is left to the products, whose queries are multiplied with it; only `inwards` have it.
    """
    column, is_column, row, real, k = _tile(tl.program_id(0), n, K, TILE)
    shrink, bend = _shrink(lengths, row, real, least, NORMAL)
    label = tl.load(labels + column * STRIDE, mask=is_column, other=-1)
    inner = tl.zeros([TILE], tl.float32)
    for start in range(0, B, BLOCK):
        i = start + tl.arange(0, BLOCK)
        log = tl.load(sums + i, mask=i < B, other=0.0)
        grad = tl.load(grads + i, mask=i < B, other=0.0)
        s, found, _, weight, z = _look(
            S, shrink, row, real, k, label, is_column, of_queries, i, edges, levels, B, slope, offset, gamma,
            K, KIND, EDGES, OWN,
        )  # fmt: skip
        w = tl.exp(z - log[None, :]) * lift * weight * _of_rows(s, found, k, K, KIND, gamma)
        inner += tl.sum(_write(W, w, s, row, real, i, B) * grad[None, :], 1)
    tl.store(factors + row, shrink, mask=real)
    tl.store(inwards + row, shrink * inner * bend, mask=real)


@triton.jit(do_not_specialize=["n"])
def finish(
    rows, product, factors, inwards, scaled, grads, by, n, D,
    SCALED: tl.constexpr, WANTED: tl.constexpr, NORMAL: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of n rows: `scaled = factor p`, and the gradient `by (factor product - inward p)`."""
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at, there = row[:, None] * D + d[None, :], (row < n)[:, None] & (d < D)[None, :]
    factor = tl.load(factors + row, mask=row < n, other=0.0)[:, None]
    if SCALED or NORMAL:
        p = tl.load(rows + at, mask=there, other=0.0).to(tl.float32)
    if SCALED:
        tl.store(scaled + at, (factor * p).to(scaled.dtype.element_ty), mask=there)
    if WANTED:
        grad = factor * tl.load(product + at, mask=there, other=0.0)
        if NORMAL:
            grad -= tl.load(inwards + row, mask=row < n, other=0.0)[:, None] * p
        tl.store(grads + at, (tl.load(by) * grad).to(grads.dtype.element_ty), mask=there)


@triton.jit
def find(classes, present, columns, C, B, STRIDE: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """`columns[j] = c` where the j'th of the sorted labels `present` (B,) is the first of class c; others are left."""
    c = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    label = tl.load(classes + c * STRIDE, mask=c < C, other=0).to(tl.int64)
    low = tl.zeros([BLOCK], tl.int32)
    high = low + B
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        open_ = (low < high) & (c < C)
        there = tl.load(present + middle, mask=open_, other=0)
        low = tl.where(open_ & (there < label), middle + 1, low)
        high = tl.where(open_ & (there >= label), middle, high)
    inside = (low < B) & (c < C)
    there = tl.load(present + low, mask=inside, other=0)
    tl.store(columns + low, c, mask=inside & (there == label))


@triton.jit
def rescale(values, by, size, BLOCK: tl.constexpr):
    """Multiply all values by one that lies on the device; nothing is touched where that is 1."""
    factor = tl.load(by).to(tl.float32)
    if factor != 1.0:
        start = tl.program_id(0).to(tl.int64) * BLOCK
        step = tl.num_programs(0).to(tl.int64) * BLOCK
        for first in range(start, size, step):
            at = first + tl.arange(0, BLOCK)
            value = tl.load(values + at, mask=at < size, other=0.0).to(tl.float32)
            tl.store(values + at, (value * factor).to(values.dtype.element_ty), mask=at < size)
