"""Sums over the classes: what lies before, between and after the chunks of the negatives, and the positive pairs."""

from __future__ import annotations

import triton
import triton.language as tl

from proxymetric.ops.triton.kernels.batch_classes import end_of_class, few_products, positive_pairs
from proxymetric.ops.triton.kernels.exponents import column_similarities, row_scales, row_slopes
from proxymetric.ops.triton.kernels.rows import lengths_of_rows


@triton.jit
def finish_sums(
    highests, totals, weight_sums, counts, logs, means, parts, B,
    EDGES: tl.constexpr, PART_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The log-sum and the mean weight of each query, from the running sums (parts, B) of `log_sums`."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    weight_sum = tl.zeros([BLOCK], tl.float32)
    count = tl.zeros([BLOCK], tl.float32)
    for start in range(0, parts, PART_BLOCK):
        part = start + tl.arange(0, PART_BLOCK)
        position, is_inside = part[:, None] * B + i[None, :], (part < parts)[:, None] & (i < B)[None, :]
        part_highest = tl.load(highests + position, mask=is_inside, other=float("-inf"))
        part_total = tl.load(totals + position, mask=is_inside, other=0.0)
        higher = tl.maximum(highest, tl.max(part_highest, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(highest - base) + tl.sum(tl.exp(part_highest - base[None, :]) * part_total, 0)
        highest = higher
        if EDGES >= 0:
            weight_sum += tl.sum(tl.load(weight_sums + position, mask=is_inside, other=0.0), 0)
            count += tl.sum(tl.load(counts + position, mask=is_inside, other=0.0), 0)
    mean = tl.where(highest == float("-inf"), 0.0, 1.0)
    if EDGES >= 0:
        mean = weight_sum / tl.maximum(count, 1.0)
    tl.store(logs + i, _log_sum(highest, total), mask=i < B)
    tl.store(means + i, mean, mask=i < B)


@triton.jit
def _log_sum(highest, total):
    """`highest + log(total)`, -inf for an empty sum."""
    is_empty = highest == float("-inf")
    return tl.where(is_empty, float("-inf"), highest + tl.log(tl.where(is_empty, 1.0, total)))


@triton.jit
def scale_queries(queries, logs, grads, scaled, bases, factors, B, D, slope, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Write `factor = slope grad` and `factor query` of each query, 0 for an empty sum; and log-sums, 0 likewise."""
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    log = tl.load(logs + i, mask=i < B, other=0.0)
    is_empty = log == float("-inf")
    factor = tl.where(is_empty, 0.0, slope * tl.load(grads + i, mask=i < B, other=0.0))
    tl.store(bases + i, tl.where(is_empty, 0.0, log), mask=i < B)
    tl.store(factors + i, factor, mask=i < B)
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)
        position, is_inside = i[:, None] * D + d[None, :], (i < B)[:, None] & (d < D)[None, :]
        x = tl.load(queries + position, mask=is_inside, other=0.0).to(tl.float32)
        tl.store(scaled + position, (x * factor[:, None]).to(scaled.dtype.element_ty), mask=is_inside)


@triton.jit
def positive_sums(
    queries, vectors, sorted_labels, order, columns, S, F, logs, means, edges, levels,
    B, D, slope, offset, inverse_gamma, min_length,
    K: tl.constexpr, KIND: tl.constexpr, NORMALISE: tl.constexpr, EDGES: tl.constexpr, COLUMNS: tl.constexpr,
    SEARCH_STEPS: tl.constexpr, PADDED_K: tl.constexpr, QUERY_GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The log-sum of each query over the columns of its own class, and their mean weight; one program for each class.

    The batch is sorted by class, as in `positive_means`. S (B, COLUMNS K) and F (B, COLUMNS) receive the similarities
    of rows and, if these differ, of columns, in the order of the sorted batch; `positive_gradients` reads them.
    """
    j = tl.program_id(0)
    c = tl.load(columns + j)
    label = tl.load(sorted_labels + j)
    end = end_of_class(sorted_labels, label, j, B, SEARCH_STEPS)
    is_first = (j == 0) | (tl.load(sorted_labels + tl.maximum(j - 1, 0)) != label)
    if c < 0:
        if is_first:
            for position in range(j, end):
                i = tl.load(order + position)
                tl.store(logs + i, float("-inf"))
                tl.store(means + i, 0.0)
    else:
        labels = label + tl.zeros([1], label.dtype)
        k = tl.arange(0, PADDED_K)
        is_row = k < K
        for first in range(j, end, QUERY_GROUP):
            position = first + tl.arange(0, QUERY_GROUP)
            is_inside = position < end
            i = tl.load(order + position, mask=is_inside, other=0)
            highest = tl.full([QUERY_GROUP], float("-inf"), tl.float32)
            total = tl.zeros([QUERY_GROUP], tl.float32)
            weight_sum = tl.zeros([QUERY_GROUP], tl.float32)
            for m in range(COLUMNS):
                row = (c * COLUMNS + m) * K + k
                row_scale, _ = row_scales(
                    lengths_of_rows(vectors, row, is_row, D, PADDED_K, BLOCK), min_length, NORMALISE
                )
                s = few_products(queries, vectors, i, is_inside, row, is_row, D, PADDED_K, QUERY_GROUP, BLOCK)
                s = s * row_scale[:, None]
                pair_pointers = S + position[None, :] * (COLUMNS * K) + (m * K + k)[:, None]
                tl.store(pair_pointers, s, mask=is_row[:, None] & is_inside[None, :])
                similarity = column_similarities(s, k, K, KIND, inverse_gamma)
                if K > 1:
                    tl.store(F + (position * COLUMNS + m)[None, :], similarity, mask=is_inside[None, :])
                weight, z = positive_pairs(similarity, labels, is_inside, edges, levels, slope, offset, EDGES)
                if EDGES >= 0:
                    weight_sum += tl.sum(tl.where(is_inside[None, :], weight, 0.0), 0)
                z = tl.max(z, 0)
                higher = tl.maximum(highest, z)
                base = tl.where(higher == float("-inf"), 0.0, higher)
                total = total * tl.exp(highest - base) + tl.exp(z - base)
                highest = higher
            tl.store(logs + i, _log_sum(highest, total), mask=is_inside)
            mean = weight_sum / COLUMNS if EDGES >= 0 else tl.where(is_inside, 1.0, 0.0)
            tl.store(means + i, mean, mask=is_inside)


@triton.jit
def positive_gradients(
    queries, vectors, sorted_labels, order, columns, S, F, W, logs, grads, in_queries, factors, out_queries, in_rows,
    edges, levels, B, D, slope, offset, inverse_gamma, min_length,
    K: tl.constexpr, KIND: tl.constexpr, NORMALISE: tl.constexpr, EDGES: tl.constexpr, COLUMNS: tl.constexpr,
    NEEDS_QUERIES: tl.constexpr, NEEDS_ROWS: tl.constexpr, SEARCH_STEPS: tl.constexpr, PADDED_K: tl.constexpr,
    QUERY_GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the gradients of the positive log-sums to those of the negatives; one program for each class.

    `in_queries` (B, D) times `factors` (B,) is the gradient of the negatives in the queries; `out_queries` receives the
    sum. `in_rows` (R, D) contains the gradient of the negatives in the rows, to which the gradient in the rows of the
    class is added; no two programs share a row. W (B, COLUMNS K) is scratch space.
    """
    j = tl.program_id(0)
    c = tl.load(columns + j)
    label = tl.load(sorted_labels + j)
    end = end_of_class(sorted_labels, label, j, B, SEARCH_STEPS)
    is_first = (j == 0) | (tl.load(sorted_labels + tl.maximum(j - 1, 0)) != label)
    if c < 0:
        if NEEDS_QUERIES and is_first:
            for position in range(j, end):
                i = tl.load(order + position)
                factor = tl.load(factors + i)
                for start in range(0, D, BLOCK):
                    d = start + tl.arange(0, BLOCK)
                    grad = factor * tl.load(in_queries + i * D + d, mask=d < D, other=0.0)
                    tl.store(out_queries + i * D + d, grad.to(out_queries.dtype.element_ty), mask=d < D)
    else:
        labels = label + tl.zeros([1], label.dtype)
        k = tl.arange(0, PADDED_K)
        is_row = k < K
        for m in range(COLUMNS):
            row = (c * COLUMNS + m) * K + k
            row_scale, scale_slope = row_scales(
                lengths_of_rows(vectors, row, is_row, D, PADDED_K, BLOCK), min_length, NORMALISE
            )
            factor = slope * row_scale
            inner = tl.zeros([PADDED_K], tl.float32)
            for first in range(j, end, QUERY_GROUP):
                position = first + tl.arange(0, QUERY_GROUP)
                is_inside = position < end
                i = tl.load(order + position, mask=is_inside, other=0)
                offsets = position[None, :] * (COLUMNS * K) + (m * K + k)[:, None]
                s = tl.load(S + offsets, mask=is_row[:, None] & is_inside[None, :], other=0.0)
                similarity = s
                if K > 1:
                    similarity = tl.load(F + (position * COLUMNS + m)[None, :], mask=is_inside[None, :], other=0.0)
                weight, z = positive_pairs(similarity, labels, is_inside, edges, levels, slope, offset, EDGES)
                log = tl.load(logs + i, mask=is_inside, other=0.0)
                grad = tl.load(grads + i, mask=is_inside, other=0.0)
                slopes = row_slopes(s, similarity, k, K, KIND, inverse_gamma)
                w = tl.exp(z - log[None, :]) * grad[None, :] * weight * slopes * factor[:, None]
                inner += tl.sum(tl.where(is_row[:, None] & is_inside[None, :], w * s, 0.0), 1)
                tl.store(W + offsets, w, mask=is_row[:, None] & is_inside[None, :])
            tl.debug_barrier()  # threads read what other threads wrote
            radial = inner * scale_slope
            for start in range(0, D, BLOCK):
                d = start + tl.arange(0, BLOCK)
                is_value = is_row[:, None] & (d < D)[None, :]
                row_offsets = row[:, None] * D + d[None, :]
                p = tl.load(vectors + row_offsets, mask=is_value, other=0.0).to(tl.float32)
                row_grad = tl.zeros([PADDED_K, BLOCK], tl.float32)
                for first in range(j, end, QUERY_GROUP):
                    position = first + tl.arange(0, QUERY_GROUP)
                    is_inside = position < end
                    i = tl.load(order + position, mask=is_inside, other=0)
                    is_query = is_inside[:, None] & (d < D)[None, :]
                    query_offsets = i[:, None] * D + d[None, :]
                    offsets = position[:, None] * (COLUMNS * K) + (m * K + k)[None, :]
                    w = tl.load(W + offsets, mask=is_inside[:, None] & is_row[None, :], other=0.0)
                    if NEEDS_ROWS:
                        x = tl.load(queries + query_offsets, mask=is_query, other=0.0).to(tl.float32)
                        # As in `positive_means`: sums in another form would become products in tensor cores.
                        row_grad += tl.sum(w[:, :, None] * x[:, None, :], 0)
                    if NEEDS_QUERIES:
                        query_grad = tl.sum(tl.trans(w)[:, :, None] * p[:, None, :], 0)
                        # The sum over the columns is kept in float32 until the last one.
                        previous = tl.load(in_queries + query_offsets, mask=is_query, other=0.0)
                        query_factor = tl.load(factors + i, mask=is_inside & (m == 0), other=1.0)
                        query_grad += query_factor[:, None] * previous
                        if COLUMNS > 1:
                            tl.store(in_queries + query_offsets, query_grad, mask=is_query & (m < COLUMNS - 1))
                        rounded = query_grad.to(out_queries.dtype.element_ty)
                        tl.store(out_queries + query_offsets, rounded, mask=is_query & (m == COLUMNS - 1))
                if NEEDS_ROWS:
                    row_grad += tl.load(in_rows + row_offsets, mask=is_value, other=0.0).to(tl.float32)
                    row_grad -= radial[:, None] * p
                    tl.store(in_rows + row_offsets, row_grad.to(in_rows.dtype.element_ty), mask=is_value)
