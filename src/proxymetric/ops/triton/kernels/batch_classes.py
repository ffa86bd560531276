"""The batch's classes among all, and the pairs of one class."""

from __future__ import annotations

import triton
import triton.language as tl

from proxymetric.ops.triton.kernels.exponents import (
    exponents,
    log_mean,
    of_columns,
    of_rows,
    rounded,
    shrinks,
    weights_at,
)
from proxymetric.ops.triton.kernels.rows import measure_tile


@triton.jit
def arrange(labels, narrow, present, order, columns, B, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Sort B labels, each of which counts those before it: `present` are they, `order` whose they are.

    Equal ones stay in their order. `narrow` are the labels as they came, in 32 bits; `columns` are -1, for `find`.
    """
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    own = tl.load(labels + i, mask=i < B, other=0).to(tl.int64)
    rank = tl.zeros([TILE], tl.int32)
    for start in range(0, B, BLOCK):
        j = start + tl.arange(0, BLOCK)
        other = tl.load(labels + j, mask=j < B, other=0).to(tl.int64)
        earlier = (other[None, :] == own[:, None]) & (j[None, :] < i[:, None])
        before = ((other[None, :] < own[:, None]) | earlier) & (j < B)[None, :]
        rank += tl.sum(before.to(tl.int32), 1)
    tl.store(narrow + i, own.to(tl.int32), mask=i < B)
    tl.store(present + rank, own, mask=i < B)
    tl.store(order + rank, i.to(tl.int64), mask=i < B)
    tl.store(columns + i, -1, mask=i < B)


@triton.jit
def find(classes, present, columns, C, B, STRIDE: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """`columns[j] = c` where the j'th of the sorted labels `present` (B,) is the first of class c; others are left."""
    _find_block(tl.program_id(0), classes, present, columns, C, B, STRIDE, STEPS, BLOCK)


@triton.jit
def measure_and_find(
    rows, lengths, classes, present, columns, R, D, C, B, tiles,
    STRIDE: tl.constexpr, STEPS: tl.constexpr, TILE: tl.constexpr, DIMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`measure` by the first programs, one for each of so many tiles, and `find` by the others: in one launch."""
    program = tl.program_id(0)
    if program < tiles:
        measure_tile(program, rows, lengths, R, D, TILE, DIMS)
    else:
        _find_block(program - tiles, classes, present, columns, C, B, STRIDE, STEPS, BLOCK)


@triton.jit
def _find_block(block, classes, present, columns, C, B, STRIDE: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    c = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
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
def _pairs(found, label, inside, edges, levels, slope, offset, EDGES: tl.constexpr):
    """Weights and exponents as of `_look`, for queries that are all of the column's class."""
    z = exponents(found, slope, offset)
    weight = 1.0
    if EDGES >= 0:
        weight = weights_at(found, edges, levels, label, label >= 0, EDGES)
        z = rounded(z, weight)
    return weight, tl.where(inside[None, :], z, float("-inf"))


@triton.jit
def own_means(
    queries, vectors, present, order, columns, S, F, logs, means, in_queries, in_rows, edges, levels,
    B, D, slope, offset, steep, least, times, over,
    K: tl.constexpr, KIND: tl.constexpr, NORMAL: tl.constexpr, EDGES: tl.constexpr, M: tl.constexpr,
    WANTED: tl.constexpr, STEPS: tl.constexpr, KP: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`log_means` of the pairs of one class, with the gradients in float32: a program for each class in the batch.

    The batch is sorted by class: `order` are its queries, `present` their labels. Of a class that `find` found, M
    columns of K rows each are compared with the few queries of it. S is room for the similarities of rows, (B, M K), F
    for those of columns, (B, M), if these are others. Columns of what was not found are 0, as are the gradients of its
    queries; those of its rows are not written.
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
            shrink, bend = shrinks(tl.where(real, tl.sqrt_rn(square), 1.0), least, NORMAL)
            highest = tl.full([1], float("-inf"), tl.float32)
            total = tl.zeros([1], tl.float32)
            weighed = tl.zeros([1], tl.float32)
            for first in range(j, end, GROUP):
                at = first + tl.arange(0, GROUP)
                inside = at < end
                i = tl.load(order + at, mask=inside, other=0)
                s = _product(queries, vectors, i, inside, row, real, D, KP, GROUP, BLOCK) * shrink[:, None]
                tl.store(S + at[None, :] * (M * K) + (m * K + k)[:, None], s, mask=real[:, None] & inside[None, :])
            tl.debug_barrier()  # what one thread wrote another reads
            # Both passes read them, and what was made of them: a last bit of an exponent that they do not have in
            # common is much of a share, and which of the threads add up what is the compiler's choice for each pass.
            for first in range(j, end, GROUP):
                at = first + tl.arange(0, GROUP)
                inside = at < end
                at_pairs = S + at[None, :] * (M * K) + (m * K + k)[:, None]
                s = tl.load(at_pairs, mask=real[:, None] & inside[None, :], other=0.0)
                found = of_columns(s, k, K, KIND, steep)
                if K > 1:
                    tl.store(F + (at * M + m)[None, :], found, mask=inside[None, :])
                weight, z = _pairs(found, labels, inside, edges, levels, slope, offset, EDGES)
                weighed += tl.sum(tl.where(inside[None, :], weight, 0.0), 1)
                higher = tl.maximum(highest, tl.max(z, 1))
                total = total * tl.exp(highest - higher) + tl.sum(tl.exp(z - higher[:, None]), 1)
                highest = higher
            tl.debug_barrier()
            count = tl.zeros([1], tl.float32) + (end - j).to(tl.float32)
            log, mean, bottom, part = log_mean(highest, total, weighed, count, EDGES)
            one = tl.zeros([1], tl.int32) + (j * M + m)
            tl.store(logs + one, over * log)
            tl.store(means + one, mean)
            if WANTED:
                factor = times * shrink * part
                inner = tl.zeros([KP], tl.float32)
                for first in range(j, end, GROUP):
                    at = first + tl.arange(0, GROUP)
                    inside = at < end
                    at_pairs = S + at[None, :] * (M * K) + (m * K + k)[:, None]
                    s = tl.load(at_pairs, mask=real[:, None] & inside[None, :], other=0.0)
                    found = s
                    if K > 1:
                        found = tl.load(F + (at * M + m)[None, :], mask=inside[None, :], other=0.0)
                    weight, z = _pairs(found, labels, inside, edges, levels, slope, offset, EDGES)
                    w = tl.exp(z - bottom[:, None]) * weight * of_rows(s, found, k, K, KIND, steep) * factor[:, None]
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
