"""From the similarities of a chunk to sums over the batch or the classes, and to shares of them."""

from __future__ import annotations

import triton
import triton.language as tl

from proxymetric.ops.triton.kernels.exponents import (
    exponents,
    log_mean,
    of_columns,
    of_rows,
    rounded,
    shrink_of,
    weights_at,
)


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
        z = exponents(s, (slope * shrink)[:, None], offset)
    else:
        s = rounded(s, shrink[:, None])
        found = of_columns(s, k, K, KIND, steep)
        z = exponents(found, slope, offset)
        if EDGES >= 0:
            weight = weights_at(found, edges, levels, label, label >= 0, EDGES)
            z = rounded(z, weight)
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
    shrink, bend = shrink_of(lengths, row, real, least, NORMAL)
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
    log, mean, bottom, part = log_mean(highest, total, weighed, count, EDGES)
    tl.store(logs + column, over * log, mask=is_column)
    tl.store(means + column, mean, mask=is_column)
    if WANTED:
        factor = shrink * part
        if FOLD:
            factor = times * factor
        if ONE:
            w = share * weight * of_rows(s, found, k, K, KIND, steep)
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
                w_i = tl.exp(z_i - bottom[:, None]) * weight_i * of_rows(s_i, found_i, k, K, KIND, steep)
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
        shrink, _ = shrink_of(lengths, row, real, least, NORMAL)
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
    shrink, bend = shrink_of(lengths, row, real, least, NORMAL)
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
        w = tl.exp(z - log[None, :]) * lift * weight * of_rows(s, found, k, K, KIND, steep)
        if FOLD:
            w = w * shrink[:, None]
        inner += tl.sum(_write(W, w, s, row, real, i, B, FULL) * grad[None, :], 1)
    _leave(factors, inwards, row, real, shrink, _over_lengths(inner, shrink, K, EDGES), bend, FOLD)
