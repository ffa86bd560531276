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
def _exp(x):
    """`exp(x)` of a finite x, to the last bit or two: what `x log2(e)` loses when rounded, exp2 would multiply by x."""
    y = x * 1.4426950216293335
    lost = tl.fma(x, 1.4426950216293335, -y) + x * 1.925962991126618e-08
    return tl.exp2(y) * (1.0 + lost * 0.6931471805599453)


@triton.jit
def _shrinks(length, least, NORMAL: tl.constexpr):
    """By what rows of a length are multiplied, and the same but 0 where the length does not count."""
    if NORMAL:
        shrink = tl.div_rn(1.0, tl.maximum(length, least))
        bend = tl.where(length >= least, shrink, 0.0)
    else:
        shrink = 0.0 * length + 1.0
        bend = 0.0 * length
    return shrink, bend


@triton.jit
def _shrink(lengths, rows, there, least, NORMAL: tl.constexpr):
    """The same for some of all rows."""
    length = tl.load(lengths + rows, mask=there, other=1.0) if NORMAL else tl.where(there, 1.0, 1.0)
    return _shrinks(length, least, NORMAL)


@triton.jit
def _of_columns(s, k, K: tl.constexpr, KIND: tl.constexpr, steep):
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
                found = tl.div_rn(tl.sum(share * s, 0), tl.sum(share, 0))[None, :]
    return found


@triton.jit
def _of_rows(s, found, k, K: tl.constexpr, KIND: tl.constexpr, steep):
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
    S, shrink, row, real, k, label, of_queries, i, edges, levels, B, slope, offset, steep,
    K: tl.constexpr, KIND: tl.constexpr, EDGES: tl.constexpr, OWN: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """A tile at the queries i: similarities of rows and of columns, which pairs are meant, their weights and exponents.

    Meant are pairs of one class (OWN), or of two; exponents of others are -inf. Without a weighting (EDGES < 0) a
    weight is 1. A label below 0 is no class: it has no rule, and no query is of it. FULL: there are as many queries.

    Similarities of rows are over lengths only where something but the exponent depends on them: see `_over_lengths`.
    """
    if FULL:
        query = tl.load(of_queries + i)
        s = tl.load(S + row[:, None] * B + i[None, :], mask=real[:, None], other=0.0)
    else:
        query = tl.load(of_queries + i, mask=i < B, other=-1)
        s = tl.load(S + row[:, None] * B + i[None, :], mask=real[:, None] & (i < B)[None, :], other=0.0)
    same = label.to(tl.int32)[:, None] == query[None, :]
    there = same if OWN else ~same
    if not FULL:
        there = there & (i < B)[None, :]
    weight = 1.0
    if K == 1 and EDGES < 0:
        found = s
        z = s * (slope * shrink)[:, None] + offset
    else:
        s = s * shrink[:, None]
        found = _of_columns(s, k, K, KIND, steep)
        z = slope * found + offset
        if EDGES >= 0:
            weight = _weights(found, edges, levels, label, label >= 0, EDGES)
            z = z * weight
    return s, found, there, weight, tl.where(there, z, float("-inf"))


@triton.jit
def _over_lengths(inner, shrink, K: tl.constexpr, EDGES: tl.constexpr):
    """A sum that was made of similarities as `_look` gives them."""
    if K == 1 and EDGES < 0:
        inner = inner * shrink
    return inner


@triton.jit
def _write(W, w, s, row, real, i, B, FULL: tl.constexpr):
    """Write shares as their type rounds them; what was written, times the similarity."""
    narrow = w.to(W.dtype.element_ty)
    if FULL:
        tl.store(W + row[:, None] * B + i[None, :], narrow, mask=real[:, None])
    else:
        tl.store(W + row[:, None] * B + i[None, :], narrow, mask=real[:, None] & (i < B)[None, :])
    return narrow.to(tl.float32) * s


@triton.jit
def _leave(factors, inwards, row, real, factor, inner, bend, FOLD: tl.constexpr):
    """Of each row, what its gradient is made of beside W: see `log_means`."""
    if FOLD:
        tl.store(inwards + row, inner * bend, mask=real)
    else:
        tl.store(factors + row, factor, mask=real)
        tl.store(inwards + row, factor * inner * bend, mask=real)


@triton.jit
def _log_mean(highest, total, weighed, count, EDGES: tl.constexpr):
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


@triton.jit(do_not_specialize=["n"])
def log_means(
    S, W, factors, inwards, logs, means, lengths, labels, of_queries, edges, levels,
    n, B, slope, offset, steep, least, times, over,
    K: tl.constexpr, KIND: tl.constexpr, NORMAL: tl.constexpr, EDGES: tl.constexpr, OWN: tl.constexpr,
    STRIDE: tl.constexpr, FOLD: tl.constexpr, WANTED: tl.constexpr, ONE: tl.constexpr, FULL: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """For each column `over log(1 + sum exp z)`, of the queries that are meant, its mean weight, its gradient's parts.

    That in the row r is `(W x)_r - inward p_r`, that in the queries `W^T p`, `times` each. Where the type of W has too
    narrow a range (not FOLD), W are shares of the largest of their column, and to be multiplied by the row's factor and
    by `times`. EDGES < 0: no weighting. ONE: one block is all. FULL: blocks hold nothing but queries.
    """
    column, is_column, row, real, k = _tile(tl.program_id(0), n, K, TILE)
    shrink, bend = _shrink(lengths, row, real, least, NORMAL)
    label = tl.load(labels + column * STRIDE, mask=is_column, other=-1)
    COLUMNS: tl.constexpr = TILE if K == 1 else 1
    highest = tl.full([COLUMNS], float("-inf"), tl.float32)
    total = tl.zeros([COLUMNS], tl.float32)
    count = tl.zeros([COLUMNS], tl.float32)
    weighed = tl.zeros([COLUMNS], tl.float32)
    if ONE:
        j = tl.arange(0, BLOCK)
        s, found, there, weight, z = _look(
            S, shrink, row, real, k, label, of_queries, j, edges, levels, B, slope, offset, steep,
            K, KIND, EDGES, OWN, FULL,
        )  # fmt: skip
        if EDGES >= 0:
            count = tl.sum(tl.where(there, 1.0, 0.0), 1)
            weighed = tl.sum(tl.where(there, weight, 0.0), 1)
        highest = tl.max(z, 1)
        share = tl.exp(z - tl.where(highest == float("-inf"), 0.0, highest)[:, None])
        total = tl.sum(share, 1)
    else:
        for start in range(0, B, BLOCK):
            i = start + tl.arange(0, BLOCK)
            _, _, there_i, weight_i, z_i = _look(
                S, shrink, row, real, k, label, of_queries, i, edges, levels, B, slope, offset, steep,
                K, KIND, EDGES, OWN, FULL,
            )  # fmt: skip
            if EDGES >= 0:
                count += tl.sum(tl.where(there_i, 1.0, 0.0), 1)
                weighed += tl.sum(tl.where(there_i, weight_i, 0.0), 1)
            higher = tl.maximum(highest, tl.max(z_i, 1))
            # Of a column without pairs nothing is subtracted: -inf less -inf is no number.
            base = tl.where(higher == float("-inf"), 0.0, higher)
            total = total * tl.exp(highest - base) + tl.sum(tl.exp(z_i - base[:, None]), 1)
            highest = higher
    log, mean, bottom, part = _log_mean(highest, total, weighed, count, EDGES)
    tl.store(logs + column, over * log, mask=is_column)
    tl.store(means + column, mean, mask=is_column)
    if WANTED:
        factor = shrink * part
        if FOLD:
            factor = times * factor
        if ONE:
            w = share * weight * _of_rows(s, found, k, K, KIND, steep)
            if FOLD:
                w = w * factor[:, None]
            inner = tl.sum(_write(W, w, s, row, real, j, B, FULL), 1)
        else:
            inner = tl.zeros([TILE], tl.float32)
            for start in range(0, B, BLOCK):
                i = start + tl.arange(0, BLOCK)
                s_i, found_i, _, weight_i, z_i = _look(
                    S, shrink, row, real, k, label, of_queries, i, edges, levels, B, slope, offset, steep,
                    K, KIND, EDGES, OWN, FULL,
                )  # fmt: skip
                w_i = tl.exp(z_i - bottom[:, None]) * weight_i * _of_rows(s_i, found_i, k, K, KIND, steep)
                if FOLD:
                    w_i = w_i * factor[:, None]
                inner += tl.sum(_write(W, w_i, s_i, row, real, i, B, FULL), 1)
        _leave(factors, inwards, row, real, factor, _over_lengths(inner, shrink, K, EDGES), bend, FOLD)


@triton.jit(do_not_specialize=["n"])
def log_sums(
    S, highests, totals, weigheds, counts, lengths, labels, of_queries, edges, levels,
    n, B, slope, offset, steep, least,
    K: tl.constexpr, KIND: tl.constexpr, NORMAL: tl.constexpr, EDGES: tl.constexpr, OWN: tl.constexpr,
    STRIDE: tl.constexpr, FULL: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
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
            S, shrink, row, real, k, label, of_queries, i, edges, levels, B, slope, offset, steep,
            K, KIND, EDGES, OWN, FULL,
        )  # fmt: skip
        there = there & is_column[:, None]
        z = tl.where(is_column[:, None], z, float("-inf"))
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
    n, B, slope, offset, steep, least, lift,
    K: tl.constexpr, KIND: tl.constexpr, NORMAL: tl.constexpr, EDGES: tl.constexpr, OWN: tl.constexpr,
    STRIDE: tl.constexpr, FOLD: tl.constexpr, FULL: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
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
            S, shrink, row, real, k, label, of_queries, i, edges, levels, B, slope, offset, steep,
            K, KIND, EDGES, OWN, FULL,
        )  # fmt: skip
        z = tl.where(is_column[:, None], z, float("-inf"))
        w = tl.exp(z - log[None, :]) * lift * weight * _of_rows(s, found, k, K, KIND, steep)
        if FOLD:
            w = w * shrink[:, None]
        inner += tl.sum(_write(W, w, s, row, real, i, B, FULL) * grad[None, :], 1)
    _leave(factors, inwards, row, real, shrink, _over_lengths(inner, shrink, K, EDGES), bend, FOLD)


@triton.jit(do_not_specialize=["n"])
def finish(
    rows, product, factors, inwards, scaled, grads, by, n, D,
    BY: tl.constexpr, FOLD: tl.constexpr, SCALED: tl.constexpr, WANTED: tl.constexpr, NORMAL: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of n rows the gradient `by (product - inward p)`; where not BY that is in both.

    Without FOLD the product is still to be multiplied by a factor, and so is p, for the queries: `scaled`.
    """
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at, there = row[:, None] * D + d[None, :], (row < n)[:, None] & (d < D)[None, :]
    factor = 1.0
    if not FOLD:
        factor = tl.load(factors + row, mask=row < n, other=0.0)[:, None]
    if SCALED or NORMAL:
        p = tl.load(rows + at, mask=there, other=0.0).to(tl.float32)
    if SCALED:
        tl.store(scaled + at, (factor * p).to(scaled.dtype.element_ty), mask=there)
    if WANTED:
        grad = factor * tl.load(product + at, mask=there, other=0.0)
        if NORMAL:
            grad -= tl.load(inwards + row, mask=row < n, other=0.0)[:, None] * p
        if BY:
            grad *= tl.load(by)
        tl.store(grads + at, grad.to(grads.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["n"])
def back_rows(
    W, queries, rows, inwards, grads, by, n, B, D,
    BY: tl.constexpr, NORMAL: tl.constexpr, WIDE: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """`finish` with its product W x in one: for batches so small that writing and reading that takes the time.

    WIDE: make float32 of all first, for the interpreter, which would multiply the bits of narrower numbers.
    """
    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # first: the blocks of the same rows run side by side
    row = tl.program_id(1) * TILE + tl.arange(0, TILE)
    grad = tl.zeros([TILE, BLOCK], tl.float32)
    for start in range(0, B, DEPTH):
        i = start + tl.arange(0, DEPTH)
        w = tl.load(W + row[:, None] * B + i[None, :], mask=(row < n)[:, None] & (i < B)[None, :], other=0.0)
        x = tl.load(queries + i[:, None] * D + d[None, :], mask=(i < B)[:, None] & (d < D)[None, :], other=0.0)
        grad = tl.dot(w.to(tl.float32), x.to(tl.float32), grad) if WIDE else tl.dot(w, x, grad)
    at, there = row[:, None] * D + d[None, :], (row < n)[:, None] & (d < D)[None, :]
    if NORMAL:
        p = tl.load(rows + at, mask=there, other=0.0).to(tl.float32)
        grad -= tl.load(inwards + row, mask=row < n, other=0.0)[:, None] * p
    if BY:
        grad *= tl.load(by)
    tl.store(grads + at, grad.to(grads.dtype.element_ty), mask=there)


@triton.jit
def _product(queries, vectors, i, inside, row, real, D, KP: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Of GROUP queries and KP rows the products, (KP, GROUP); too few for a product of matrices."""
    s = tl.zeros([KP, GROUP], tl.float32)
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)
        x = tl.load(queries + i[:, None] * D + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=0.0)
        p = tl.load(vectors + row[:, None] * D + d[None, :], mask=real[:, None] & (d < D)[None, :], other=0.0)
        s += tl.sum(p.to(tl.float32)[:, None, :] * x.to(tl.float32)[None, :, :], 2)
    return s


@triton.jit
def _pairs(
    s, k, label, inside, edges, levels, slope, offset, steep,
    K: tl.constexpr, KIND: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    """As `_look`, for queries that are all of the column's class."""
    found = _of_columns(s, k, K, KIND, steep)
    z = slope * found + offset
    weight = 1.0
    if EDGES >= 0:
        weight = _weights(found, edges, levels, label, label >= 0, EDGES)
        z = z * weight
    return found, weight, tl.where(inside[None, :], z, float("-inf"))


@triton.jit
def own_means(
    queries, vectors, present, order, columns, S, logs, means, in_queries, in_rows, edges, levels,
    B, D, slope, offset, steep, least, times, over,
    K: tl.constexpr, KIND: tl.constexpr, NORMAL: tl.constexpr, EDGES: tl.constexpr, M: tl.constexpr,
    WANTED: tl.constexpr, STEPS: tl.constexpr, KP: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`log_means` of the pairs of one class, with the gradients in float32: a program for each class in the batch.

    The batch is sorted by class: `order` are its queries, `present` their labels. Of a class that `find` found, M
    columns of K rows each are compared with the few queries of it. S is room for the similarities, (B, M K). Columns of
    what was not found are 0, as are the gradients of its queries; those of its rows are not written.
    """
    j = tl.program_id(0)
    c = tl.load(columns + j)
    label = tl.load(present + j)
    end, high = j, B
    for _ in tl.static_range(STEPS):
        middle = (end + high) // 2
        below = tl.load(present + tl.minimum(middle, B - 1)) <= label
        end, high = tl.where((end < high) & below, middle + 1, end), tl.where((end < high) & ~below, middle, high)
    if c < 0:
        for m in range(M):
            tl.store(logs + j * M + m, 0.0)
            tl.store(means + j * M + m, 0.0)
        is_first = tl.load(present + tl.maximum(j - 1, 0)) != label
        if WANTED and ((j == 0) | is_first):
            for at in range(j, end):
                i = tl.load(order + at)
                for start in range(0, D, BLOCK):
                    d = start + tl.arange(0, BLOCK)
                    tl.store(in_queries + i * D + d, tl.zeros([BLOCK], tl.float32), mask=d < D)
    else:
        labels = label + tl.zeros([1], label.dtype)
        k = tl.arange(0, KP)
        real = k < K
        for m in range(M):
            row = (c * M + m) * K + k
            square = tl.zeros([KP], tl.float32)
            for start in range(0, D, BLOCK):
                d = start + tl.arange(0, BLOCK)
                p = tl.load(vectors + row[:, None] * D + d[None, :], mask=real[:, None] & (d < D)[None, :], other=0.0)
                square += tl.sum(p.to(tl.float32) * p.to(tl.float32), 1)
            shrink, bend = _shrinks(tl.where(real, tl.sqrt_rn(square), 1.0), least, NORMAL)
            highest = tl.full([1], float("-inf"), tl.float32)
            total = tl.zeros([1], tl.float32)
            weighed = tl.zeros([1], tl.float32)
            for first in range(j, end, GROUP):
                at = first + tl.arange(0, GROUP)
                inside = at < end
                i = tl.load(order + at, mask=inside, other=0)
                s = _product(queries, vectors, i, inside, row, real, D, KP, GROUP, BLOCK) * shrink[:, None]
                tl.store(S + at[None, :] * (M * K) + (m * K + k)[:, None], s, mask=real[:, None] & inside[None, :])
                found, weight, z = _pairs(s, k, labels, inside, edges, levels, slope, offset, steep, K, KIND, EDGES)
                weighed += tl.sum(tl.where(inside[None, :], weight, 0.0), 1)
                higher = tl.maximum(highest, tl.max(z, 1))
                total = total * tl.exp(highest - higher) + tl.sum(tl.exp(z - higher[:, None]), 1)
                highest = higher
            count = tl.zeros([1], tl.float32) + (end - j).to(tl.float32)
            log, mean, bottom, part = _log_mean(highest, total, weighed, count, EDGES)
            one = tl.zeros([1], tl.int32) + (j * M + m)
            tl.store(logs + one, over * log)
            tl.store(means + one, mean)
            if WANTED:
                factor = times * shrink * part
                inner = tl.zeros([KP], tl.float32)
                tl.debug_barrier()  # what one thread wrote another reads
                for first in range(j, end, GROUP):
                    at = first + tl.arange(0, GROUP)
                    inside = at < end
                    at_pairs = S + at[None, :] * (M * K) + (m * K + k)[:, None]
                    s = tl.load(at_pairs, mask=real[:, None] & inside[None, :], other=0.0)
                    found, weight, z = _pairs(
                        s, k, labels, inside, edges, levels, slope, offset, steep, K, KIND, EDGES
                    )  # fmt: skip
                    w = tl.exp(z - bottom[:, None]) * weight * _of_rows(s, found, k, K, KIND, steep) * factor[:, None]
                    inner += tl.sum(tl.where(real[:, None] & inside[None, :], w * s, 0.0), 1)
                    tl.debug_barrier()
                    tl.store(at_pairs, w, mask=real[:, None] & inside[None, :])
                tl.debug_barrier()
                inward = inner * bend
                for start in range(0, D, BLOCK):
                    d = start + tl.arange(0, BLOCK)
                    here = real[:, None] & (d < D)[None, :]
                    p = tl.load(vectors + row[:, None] * D + d[None, :], mask=here, other=0.0).to(tl.float32)
                    grad = tl.zeros([KP, BLOCK], tl.float32)
                    for first in range(j, end, GROUP):
                        at = first + tl.arange(0, GROUP)
                        inside = at < end
                        i = tl.load(order + at, mask=inside, other=0)
                        there = inside[:, None] & (d < D)[None, :]
                        x = tl.load(queries + i[:, None] * D + d[None, :], mask=there, other=0.0).to(tl.float32)
                        at_pairs = S + at[:, None] * (M * K) + (m * K + k)[None, :]
                        w = tl.load(at_pairs, mask=inside[:, None] & real[None, :], other=0.0)
                        # Not sum(a[:, :, None] * b[None, :, :], 1): the compiler makes that a product of matrices in
                        # tensor cores, which round float32, and which are wrong for so few pairs.
                        grad += tl.sum(w[:, :, None] * x[:, None, :], 0)
                        into = tl.sum(tl.trans(w)[:, :, None] * p[:, None, :], 0)
                        if M > 1:
                            into += tl.load(in_queries + i[:, None] * D + d[None, :], mask=there & (m > 0), other=0.0)
                        tl.store(in_queries + i[:, None] * D + d[None, :], into, mask=there)
                    at_rows = in_rows + ((j * M + m) * K + k).to(tl.int64)[:, None] * D + d[None, :]
                    tl.store(at_rows, grad - inward[:, None] * p, mask=here)


@triton.jit
def add_own(grads, columns, in_rows, by, R, D, K: tl.constexpr, BLOCK: tl.constexpr):
    """Add `by` times the gradients that `own_means` wrote to those of all rows; of each class there is one."""
    row = tl.program_id(0)
    column = tl.load(columns + row // K)
    if column >= 0:
        factor = tl.load(by).to(tl.float32)
        for start in range(0, D, BLOCK):
            d = start + tl.arange(0, BLOCK)
            at = grads + (column * K + row % K) * D + d
            more = factor * tl.load(in_rows + row.to(tl.int64) * D + d, mask=d < D, other=0.0)
            value = tl.load(at, mask=d < D, other=0.0).to(tl.float32) + more
            tl.store(at, value.to(grads.dtype.element_ty), mask=d < D)


@triton.jit
def mix(a, b, by_a, by_b, out, size, BLOCK: tl.constexpr):
    """`out = by_a a + by_b b`, rounded once."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    one = tl.load(by_a).to(tl.float32) * tl.load(a + at, mask=at < size, other=0.0)
    two = tl.load(by_b).to(tl.float32) * tl.load(b + at, mask=at < size, other=0.0)
    tl.store(out + at, (one + two).to(out.dtype.element_ty), mask=at < size)


@triton.jit
def measure(rows, lengths, R, D, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """The lengths of R rows."""
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    total = tl.zeros([TILE], tl.float32)
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)
        there = (row < R)[:, None] & (d < D)[None, :]
        p = tl.load(rows + row[:, None] * D + d[None, :], mask=there, other=0.0).to(tl.float32)
        total += tl.sum(p * p, 1)
    tl.store(lengths + row, tl.sqrt_rn(total), mask=row < R)


@triton.jit
def place(columns, present, rows, labels, C, B, ABSENT: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    """From what `find` found, the K rows of each of B classes and their labels; of a class that is not there any rows.

    Not the same for all that are missing, or their gradients would queue for one place.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    j, k = at // K, at % K
    column = tl.load(columns + j, mask=j < B, other=-1)
    label = tl.load(present + j, mask=j < B, other=ABSENT)
    tl.store(rows + at, tl.where(column >= 0, column, j % C) * K + k, mask=j < B)
    tl.store(labels + at, tl.where(column >= 0, label, ABSENT), mask=j < B)


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
