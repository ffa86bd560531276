"""The columns of the batch's classes, and the positive pairs."""

from __future__ import annotations

import triton
import triton.language as tl

from proxymetric.ops.triton.kernels.exponents import (
    column_similarities,
    exponents,
    log1p_and_mean_weight,
    pair_weights,
    rounded_product,
    row_scales,
    row_slopes,
)
from proxymetric.ops.triton.kernels.rows import row_norms_tile


@triton.jit
def sort_labels(labels, labels32, sorted_labels, order, columns, B, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Sort B labels stably: the rank of a label is the number of labels that precede it.

    `sorted_labels` receives the labels, `order` the query of each, and `labels32` the unsorted labels in 32 bits.
    `columns` receives -1 everywhere, which `find_columns` overwrites.
    """
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tile_labels = tl.load(labels + i, mask=i < B, other=0).to(tl.int64)
    rank = tl.zeros([TILE], tl.int32)
    for start in range(0, B, BLOCK):
        j = start + tl.arange(0, BLOCK)
        other = tl.load(labels + j, mask=j < B, other=0).to(tl.int64)
        earlier = (other[None, :] == tile_labels[:, None]) & (j[None, :] < i[:, None])
        precedes = ((other[None, :] < tile_labels[:, None]) | earlier) & (j < B)[None, :]
        rank += tl.sum(precedes.to(tl.int32), 1)
    tl.store(labels32 + i, tile_labels.to(tl.int32), mask=i < B)
    tl.store(sorted_labels + rank, tile_labels, mask=i < B)
    tl.store(order + rank, i.to(tl.int64), mask=i < B)
    tl.store(columns + i, -1, mask=i < B)


@triton.jit
def find_columns(
    classes, sorted_labels, columns, C, B,
    LABEL_STRIDE: tl.constexpr, SEARCH_STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`columns[j] = c` where the j-th of the sorted labels (B,) is the first one of class c."""
    _find_columns_block(tl.program_id(0), classes, sorted_labels, columns, C, B, LABEL_STRIDE, SEARCH_STEPS, BLOCK)


@triton.jit
def norms_and_columns(
    rows, lengths, classes, sorted_labels, columns, R, D, C, B, tiles,
    LABEL_STRIDE: tl.constexpr, SEARCH_STEPS: tl.constexpr, TILE: tl.constexpr, DIM_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """`row_norms` in the first `tiles` programs and `find_columns` in the others, in one launch."""
    program = tl.program_id(0)
    if program < tiles:
        row_norms_tile(program, rows, lengths, R, D, TILE, DIM_BLOCK)
    else:
        _find_columns_block(program - tiles, classes, sorted_labels, columns, C, B, LABEL_STRIDE, SEARCH_STEPS, BLOCK)


@triton.jit
def _find_columns_block(
    block, classes, sorted_labels, columns, C, B,
    LABEL_STRIDE: tl.constexpr, SEARCH_STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Search one block of classes in the sorted labels."""
    c = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    label = tl.load(classes + c * LABEL_STRIDE, mask=c < C, other=0).to(tl.int64)
    low = tl.zeros([BLOCK], tl.int32)
    high = low + B
    for _ in tl.static_range(SEARCH_STEPS):
        middle = (low + high) // 2
        is_open = (low < high) & (c < C)
        value = tl.load(sorted_labels + middle, mask=is_open, other=0)
        low = tl.where(is_open & (value < label), middle + 1, low)
        high = tl.where(is_open & (value >= label), middle, high)
    is_inside = (low < B) & (c < C)
    value = tl.load(sorted_labels + low, mask=is_inside, other=0)
    tl.store(columns + low, c, mask=is_inside & (value == label))


@triton.jit
def end_of_class(sorted_labels, label, start, B, SEARCH_STEPS: tl.constexpr):
    """The position after the last of the sorted labels that equals `label`, which is at `start`."""
    end, high = start, B
    for _ in tl.static_range(SEARCH_STEPS):
        middle = (end + high) // 2
        is_below = tl.load(sorted_labels + tl.minimum(middle, B - 1)) <= label
        end, high = tl.where((end < high) & is_below, middle + 1, end), tl.where((end < high) & ~is_below, middle, high)
    return end


@triton.jit
def few_products(
    queries, vectors, i, is_inside, row, is_row, D,
    PADDED_K: tl.constexpr, QUERY_GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Products (PADDED_K, QUERY_GROUP) of a few rows and queries: too few for a matrix product."""
    s = tl.zeros([PADDED_K, QUERY_GROUP], tl.float32)
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)
        x = tl.load(queries + i[:, None] * D + d[None, :], mask=is_inside[:, None] & (d < D)[None, :], other=0.0)
        p = tl.load(vectors + row[:, None] * D + d[None, :], mask=is_row[:, None] & (d < D)[None, :], other=0.0)
        s += tl.sum(p.to(tl.float32)[:, None, :] * x.to(tl.float32)[None, :, :], 2)
    return s


@triton.jit
def positive_pairs(similarity, label, is_inside, edges, levels, slope, offset, EDGES: tl.constexpr):
    """Weights and exponents as in `_load_pairs`, for queries that all have the column's class."""
    z = exponents(similarity, slope, offset)
    weight = 1.0
    if EDGES >= 0:
        weight = pair_weights(similarity, edges, levels, label, label >= 0, EDGES)
        z = rounded_product(z, weight)
    return weight, tl.where(is_inside[None, :], z, float("-inf"))


@triton.jit
def positive_means(
    queries, vectors, sorted_labels, order, columns, S, F, logs, means, in_queries, in_rows, edges, levels,
    B, D, slope, offset, inverse_gamma, min_length, gradient_factor, value_factor,
    K: tl.constexpr, KIND: tl.constexpr, NORMALISE: tl.constexpr, EDGES: tl.constexpr, COLUMNS: tl.constexpr,
    NEEDS_GRAD: tl.constexpr, SEARCH_STEPS: tl.constexpr, PADDED_K: tl.constexpr, QUERY_GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """`log_means` of the positive pairs, with gradients in float32; one program for each class in the batch.

    The batch is sorted by class: `order` holds its queries, `sorted_labels` their labels. A class that `find_columns`
    found has COLUMNS columns of K rows, which are compared with the few queries of that class. S (B, COLUMNS K) is
    scratch space for row similarities; F (B, COLUMNS) for column similarities, if these differ. For a class that was
    not found, the columns and the gradients of its queries are 0, and the gradients of its rows are not written.
    """
    j = tl.program_id(0)
    c = tl.load(columns + j)
    label = tl.load(sorted_labels + j)
    end = end_of_class(sorted_labels, label, j, B, SEARCH_STEPS)
    if c < 0:
        for m in range(COLUMNS):
            tl.store(logs + j * COLUMNS + m, 0.0)
            tl.store(means + j * COLUMNS + m, 0.0)
        is_first = tl.load(sorted_labels + tl.maximum(j - 1, 0)) != label
        if NEEDS_GRAD and ((j == 0) | is_first):
            for position in range(j, end):
                i = tl.load(order + position)
                for start in range(0, D, BLOCK):
                    d = start + tl.arange(0, BLOCK)
                    tl.store(in_queries + i * D + d, tl.zeros([BLOCK], tl.float32), mask=d < D)
    else:
        labels = label + tl.zeros([1], label.dtype)
        k = tl.arange(0, PADDED_K)
        is_row = k < K
        for m in range(COLUMNS):
            row = (c * COLUMNS + m) * K + k
            square = tl.zeros([PADDED_K], tl.float32)
            for start in range(0, D, BLOCK):
                d = start + tl.arange(0, BLOCK)
                p = tl.load(vectors + row[:, None] * D + d[None, :], mask=is_row[:, None] & (d < D)[None, :], other=0.0)
                square += tl.sum(p.to(tl.float32) * p.to(tl.float32), 1)
            row_scale, scale_slope = row_scales(tl.where(is_row, tl.sqrt_rn(square), 1.0), min_length, NORMALISE)
            highest = tl.full([1], float("-inf"), tl.float32)
            total = tl.zeros([1], tl.float32)
            weight_sum = tl.zeros([1], tl.float32)
            for first in range(j, end, QUERY_GROUP):
                position = first + tl.arange(0, QUERY_GROUP)
                is_inside = position < end
                i = tl.load(order + position, mask=is_inside, other=0)
                s = (
                    few_products(queries, vectors, i, is_inside, row, is_row, D, PADDED_K, QUERY_GROUP, BLOCK)
                    * row_scale[:, None]
                )
                tl.store(
                    S + position[None, :] * (COLUMNS * K) + (m * K + k)[:, None],
                    s,
                    mask=is_row[:, None] & is_inside[None, :],
                )
            tl.debug_barrier()  # threads read what other threads wrote
            # The passes below read the same stored similarities. If each pass recomputed them, the compiler could sum
            # in another order, and a large scale would turn a difference in the last bit into a large error of a share.
            for first in range(j, end, QUERY_GROUP):
                position = first + tl.arange(0, QUERY_GROUP)
                is_inside = position < end
                pair_pointers = S + position[None, :] * (COLUMNS * K) + (m * K + k)[:, None]
                s = tl.load(pair_pointers, mask=is_row[:, None] & is_inside[None, :], other=0.0)
                similarity = column_similarities(s, k, K, KIND, inverse_gamma)
                if K > 1:
                    tl.store(F + (position * COLUMNS + m)[None, :], similarity, mask=is_inside[None, :])
                weight, z = positive_pairs(similarity, labels, is_inside, edges, levels, slope, offset, EDGES)
                weight_sum += tl.sum(tl.where(is_inside[None, :], weight, 0.0), 1)
                higher = tl.maximum(highest, tl.max(z, 1))
                total = total * tl.exp(highest - higher) + tl.sum(tl.exp(z - higher[:, None]), 1)
                highest = higher
            tl.debug_barrier()
            count = tl.zeros([1], tl.float32) + (end - j).to(tl.float32)
            log, mean, bottom, part = log1p_and_mean_weight(highest, total, weight_sum, count, EDGES)
            column_index = tl.zeros([1], tl.int32) + (j * COLUMNS + m)
            tl.store(logs + column_index, value_factor * log)
            tl.store(means + column_index, mean)
            if NEEDS_GRAD:
                factor = gradient_factor * row_scale * part
                inner = tl.zeros([PADDED_K], tl.float32)
                for first in range(j, end, QUERY_GROUP):
                    position = first + tl.arange(0, QUERY_GROUP)
                    is_inside = position < end
                    pair_pointers = S + position[None, :] * (COLUMNS * K) + (m * K + k)[:, None]
                    s = tl.load(pair_pointers, mask=is_row[:, None] & is_inside[None, :], other=0.0)
                    similarity = s
                    if K > 1:
                        similarity = tl.load(F + (position * COLUMNS + m)[None, :], mask=is_inside[None, :], other=0.0)
                    weight, z = positive_pairs(similarity, labels, is_inside, edges, levels, slope, offset, EDGES)
                    slopes = row_slopes(s, similarity, k, K, KIND, inverse_gamma)
                    w = tl.exp(z - bottom[:, None]) * weight * slopes * factor[:, None]
                    inner += tl.sum(tl.where(is_row[:, None] & is_inside[None, :], w * s, 0.0), 1)
                    tl.debug_barrier()
                    tl.store(pair_pointers, w, mask=is_row[:, None] & is_inside[None, :])
                tl.debug_barrier()
                radial = inner * scale_slope
                for start in range(0, D, BLOCK):
                    d = start + tl.arange(0, BLOCK)
                    is_value = is_row[:, None] & (d < D)[None, :]
                    p = tl.load(vectors + row[:, None] * D + d[None, :], mask=is_value, other=0.0).to(tl.float32)
                    grad = tl.zeros([PADDED_K, BLOCK], tl.float32)
                    for first in range(j, end, QUERY_GROUP):
                        position = first + tl.arange(0, QUERY_GROUP)
                        is_inside = position < end
                        i = tl.load(order + position, mask=is_inside, other=0)
                        is_query = is_inside[:, None] & (d < D)[None, :]
                        x = tl.load(queries + i[:, None] * D + d[None, :], mask=is_query, other=0.0).to(tl.float32)
                        pair_pointers = S + position[:, None] * (COLUMNS * K) + (m * K + k)[None, :]
                        w = tl.load(pair_pointers, mask=is_inside[:, None] & is_row[None, :], other=0.0)
                        # Not sum(a[:, :, None] * b[None, :, :], 1): the compiler turns that into a matrix product in
                        # tensor cores, which round float32 and give wrong results for so few pairs.
                        grad += tl.sum(w[:, :, None] * x[:, None, :], 0)
                        query_grad = tl.sum(tl.trans(w)[:, :, None] * p[:, None, :], 0)
                        if COLUMNS > 1:
                            query_grad += tl.load(
                                in_queries + i[:, None] * D + d[None, :], mask=is_query & (m > 0), other=0.0
                            )
                        tl.store(in_queries + i[:, None] * D + d[None, :], query_grad, mask=is_query)
                    row_pointers = in_rows + ((j * COLUMNS + m) * K + k).to(tl.int64)[:, None] * D + d[None, :]
                    tl.store(row_pointers, grad - radial[:, None] * p, mask=is_value)
