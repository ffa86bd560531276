"""From the similarities of a chunk to sums over the batch or over the classes, and to shares of these sums."""

from __future__ import annotations

import triton
import triton.language as tl

from proxymetric.ops.triton.kernels.exponents import (
    column_similarities,
    exp_ftz,
    exponents,
    load_row_scales,
    log1p_and_mean_weight,
    pair_weights,
    rounded_product,
    row_slopes,
)


@triton.jit
def _tile(tile, n, K: tl.constexpr, TILE: tl.constexpr):
    """The columns and rows of one tile.

    Returns the columns, a mask of those that exist, the rows, a mask of those that exist, and the k of each row.
    """
    if K == 1:
        k = tl.zeros([TILE], tl.int32)
        column = tile * TILE + tl.arange(0, TILE)
        row = column
        is_row = row < n
    else:
        k = tl.arange(0, TILE)
        column = tile + tl.zeros([1], tl.int32)
        row = tile * K + k
        is_row = k < K
    return column, column < n, row, is_row, k


@triton.jit
def _load_pairs(
    S, row_scale, row, is_row, k, label, query_labels, i, edges, levels, B, slope, offset, inverse_gamma,
    K: tl.constexpr, KIND: tl.constexpr, EDGES: tl.constexpr, NO_TAIL: tl.constexpr,
):  # fmt: skip
    """Load a tile at the queries i.

    Returns row similarities, column similarities, the mask of the pairs, their weights and their exponents. Pairs are
    the negatives; other exponents are -inf. Without a weighting (EDGES < 0) all weights are 1. A label below 0 marks a
    column that does not exist. NO_TAIL: B is a multiple of the block, so that no query needs a mask.

    With K = 1 and no weighting, row similarities are not yet divided by the row lengths: see `_times_row_scale`.
    """
    if NO_TAIL:
        query = tl.load(query_labels + i)
        s = tl.load(S + row[:, None] * B + i[None, :], mask=is_row[:, None], other=0.0).to(tl.float32)
    else:
        query = tl.load(query_labels + i, mask=i < B, other=-1)
        is_value = is_row[:, None] & (i < B)[None, :]
        s = tl.load(S + row[:, None] * B + i[None, :], mask=is_value, other=0.0).to(tl.float32)
    is_pair = label.to(tl.int32)[:, None] != query[None, :]
    if not NO_TAIL:
        is_pair = is_pair & (i < B)[None, :]
    weight = 1.0
    if K == 1 and EDGES < 0:
        similarity = s
        z = exponents(s, (slope * row_scale)[:, None], offset)
    else:
        s = rounded_product(s, row_scale[:, None])
        similarity = column_similarities(s, k, K, KIND, inverse_gamma)
        z = exponents(similarity, slope, offset)
        if EDGES >= 0:
            weight = pair_weights(similarity, edges, levels, label, label >= 0, EDGES)
            z = rounded_product(z, weight)
    return s, similarity, is_pair, weight, tl.where(is_pair, z, float("-inf"))


@triton.jit
def _pair_scale(row_scale, SCALED: tl.constexpr):
    """What similarities are multiplied by: the row scale, or 1 if they already contain it."""
    return tl.where(row_scale >= 0.0, 1.0, 1.0) if SCALED else row_scale


@triton.jit
def _times_row_scale(inner, row_scale, K: tl.constexpr, EDGES: tl.constexpr):
    """Apply the row scale to a sum over similarities from `_load_pairs`, if these similarities lack it."""
    if K == 1 and EDGES < 0:
        inner = inner * row_scale
    return inner


@triton.jit
def _store_shares(W, w, s, row, is_row, i, B, NO_TAIL: tl.constexpr):
    """Store shares in the type of W; return the shares times the similarities.

    Not the rounded ones: the compiler rounds two numbers at once only if it need not convert them back.
    """
    rounded = w.to(W.dtype.element_ty)
    if NO_TAIL:
        tl.store(W + row[:, None] * B + i[None, :], rounded, mask=is_row[:, None])
    else:
        tl.store(W + row[:, None] * B + i[None, :], rounded, mask=is_row[:, None] & (i < B)[None, :])
    return w * s


@triton.jit
def _store_row_factors(factors, radials, row, is_row, factor, inner, scale_slope, FOLD: tl.constexpr):
    """Store what the gradient of each row needs besides W: see `log_means`."""
    if FOLD:
        tl.store(radials + row, inner * scale_slope, mask=is_row)
    else:
        tl.store(factors + row, factor, mask=is_row)
        tl.store(radials + row, factor * inner * scale_slope, mask=is_row)


@triton.jit(do_not_specialize=["n"])
def log_means(
    S, W, factors, radials, logs, means, lengths, labels, query_labels, edges, levels,
    n, B, slope, offset, inverse_gamma, min_length, gradient_factor, value_factor,
    K: tl.constexpr, KIND: tl.constexpr, NORMALISE: tl.constexpr, EDGES: tl.constexpr,
    LABEL_STRIDE: tl.constexpr, SCALED: tl.constexpr, FOLD: tl.constexpr, NEEDS_GRAD: tl.constexpr,
    WHOLE_BATCH: tl.constexpr, NO_TAIL: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """For each column: `log(1 + sum exp z)` over its pairs, its mean weight, and the parts of its gradient.

    The logarithm is multiplied by `value_factor`. The gradient is `(W x)_r - radial p_r` in row r and `W^T p` in the
    queries, both including `gradient_factor`. If the range of W's type is too narrow for that (not FOLD), W holds
    shares relative to the largest of their column, and still has to be multiplied by the row's factor and by
    `gradient_factor`. EDGES < 0: no weighting. SCALED: S contains the row
    scales. WHOLE_BATCH: one block holds the whole batch. NO_TAIL: B is a multiple
    of BLOCK.
    """
    column, is_column, row, is_row, k = _tile(tl.program_id(0), n, K, TILE)
    row_scale, scale_slope = load_row_scales(lengths, row, is_row, min_length, NORMALISE)
    pair_scale = _pair_scale(row_scale, SCALED)
    label = tl.load(labels + column * LABEL_STRIDE, mask=is_column, other=-1)
    COLUMNS: tl.constexpr = TILE if K == 1 else 1
    highest = tl.full([COLUMNS], float("-inf"), tl.float32)
    total = tl.zeros([COLUMNS], tl.float32)
    count = tl.zeros([COLUMNS], tl.float32)
    weight_sum = tl.zeros([COLUMNS], tl.float32)
    if WHOLE_BATCH:
        j = tl.arange(0, BLOCK)
        s, similarity, is_pair, weight, z = _load_pairs(
            S,
            pair_scale,
            row,
            is_row,
            k,
            label,
            query_labels,
            j,
            edges,
            levels,
            B,
            slope,
            offset,
            inverse_gamma,
            K,
            KIND,
            EDGES,
            NO_TAIL,
        )
        if EDGES >= 0:
            count = tl.sum(tl.where(is_pair, 1.0, 0.0), 1)
            weight_sum = tl.sum(tl.where(is_pair, weight, 0.0), 1)
        highest = tl.max(z, 1)
        share = exp_ftz(z - tl.where(highest == float("-inf"), 0.0, highest)[:, None])
        total = tl.sum(share, 1)
    else:
        for start in range(0, B, BLOCK):
            i = start + tl.arange(0, BLOCK)
            _, _, is_pair_i, weight_i, z_i = _load_pairs(
                S,
                pair_scale,
                row,
                is_row,
                k,
                label,
                query_labels,
                i,
                edges,
                levels,
                B,
                slope,
                offset,
                inverse_gamma,
                K,
                KIND,
                EDGES,
                NO_TAIL,
            )
            if EDGES >= 0:
                count += tl.sum(tl.where(is_pair_i, 1.0, 0.0), 1)
                weight_sum += tl.sum(tl.where(is_pair_i, weight_i, 0.0), 1)
            higher = tl.maximum(highest, tl.max(z_i, 1))
            # In a column without pairs 0 is subtracted, because -inf minus -inf is NaN.
            base = tl.where(higher == float("-inf"), 0.0, higher)
            total = total * exp_ftz(highest - base) + tl.sum(exp_ftz(z_i - base[:, None]), 1)
            highest = higher
    log, mean, bottom, part = log1p_and_mean_weight(highest, total, weight_sum, count, EDGES)
    tl.store(logs + column, value_factor * log, mask=is_column)
    tl.store(means + column, mean, mask=is_column)
    if NEEDS_GRAD:
        factor = row_scale * part
        if FOLD:
            factor = gradient_factor * factor
        if WHOLE_BATCH:
            w = share * weight * row_slopes(s, similarity, k, K, KIND, inverse_gamma)
            if FOLD:
                w = w * factor[:, None]
            inner = tl.sum(_store_shares(W, w, s, row, is_row, j, B, NO_TAIL), 1)
        else:
            inner = tl.zeros([TILE], tl.float32)
            for start in range(0, B, BLOCK):
                i = start + tl.arange(0, BLOCK)
                s_i, similarity_i, _, weight_i, z_i = _load_pairs(
                    S,
                    pair_scale,
                    row,
                    is_row,
                    k,
                    label,
                    query_labels,
                    i,
                    edges,
                    levels,
                    B,
                    slope,
                    offset,
                    inverse_gamma,
                    K,
                    KIND,
                    EDGES,
                    NO_TAIL,
                )
                slopes_i = row_slopes(s_i, similarity_i, k, K, KIND, inverse_gamma)
                w_i = exp_ftz(z_i - bottom[:, None]) * weight_i * slopes_i
                if FOLD:
                    w_i = w_i * factor[:, None]
                inner += tl.sum(_store_shares(W, w_i, s_i, row, is_row, i, B, NO_TAIL), 1)
        inner = _times_row_scale(inner, pair_scale, K, EDGES)
        _store_row_factors(factors, radials, row, is_row, factor, inner, scale_slope, FOLD)


@triton.jit(do_not_specialize=["n"])
def log_sums(
    S, highests, totals, weight_sums, counts, lengths, labels, query_labels, edges, levels,
    n, B, slope, offset, inverse_gamma, min_length,
    K: tl.constexpr, KIND: tl.constexpr, NORMALISE: tl.constexpr, EDGES: tl.constexpr,
    LABEL_STRIDE: tl.constexpr, SCALED: tl.constexpr, FIRST: tl.constexpr, NO_TAIL: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """For each query, add the pairs of a chunk to running sums: the highest exponent and `sum exp(z - highest)`.

    The programs along the first axis take turns over the tiles of columns; each has its own sums, (parts, B). Each
    place of a tile has a sum of its own until the end: sums over a tile would make threads wait for each other. FIRST:
    the sums are uninitialised, and start here.
    """
    part, parts = tl.program_id(0), tl.num_programs(0)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    position = part * B + i
    COLUMNS: tl.constexpr = TILE if K == 1 else 1
    LOWEST: tl.constexpr = -3.0e38  # instead of -inf, because -inf minus -inf is NaN
    highest = tl.full([COLUMNS, BLOCK], LOWEST, tl.float32)
    total = tl.zeros([COLUMNS, BLOCK], tl.float32)
    weight_sum = tl.zeros([COLUMNS, BLOCK], tl.float32)
    count = tl.zeros([COLUMNS, BLOCK], tl.float32)
    for tile in range(part, tl.cdiv(n, COLUMNS), parts):
        column, is_column, row, is_row, k = _tile(tile, n, K, TILE)
        row_scale, _ = load_row_scales(lengths, row, is_row, min_length, NORMALISE and not SCALED)
        label = tl.load(labels + column * LABEL_STRIDE, mask=is_column, other=-1)
        _, _, is_pair, weight, z = _load_pairs(
            S,
            row_scale,
            row,
            is_row,
            k,
            label,
            query_labels,
            i,
            edges,
            levels,
            B,
            slope,
            offset,
            inverse_gamma,
            K,
            KIND,
            EDGES,
            NO_TAIL,
        )
        is_pair = is_pair & is_column[:, None]
        z = tl.where(is_column[:, None], z, float("-inf"))
        if EDGES >= 0:
            weight_sum += tl.where(is_pair, weight, 0.0)
            count += tl.where(is_pair, 1.0, 0.0)
        # The larger of the old and the new exponent becomes the highest one; the other one is multiplied by `share`.
        higher = z - highest
        share = exp_ftz(-tl.abs(higher))
        total = tl.where(higher > 0.0, tl.fma(total, share, 1.0), total + share)
        highest = tl.maximum(highest, z)
    column_highest = tl.max(highest, 0)
    column_total = tl.sum(total * exp_ftz(highest - column_highest[None, :]), 0)
    if not FIRST:
        earlier = tl.maximum(tl.load(highests + position, mask=i < B, other=LOWEST), LOWEST)
        earlier_total = tl.load(totals + position, mask=i < B, other=0.0)
        later, column_highest = column_highest, tl.maximum(column_highest, earlier)
        column_total = column_total * exp_ftz(later - column_highest)
        column_total += earlier_total * exp_ftz(earlier - column_highest)
    is_empty = column_highest == LOWEST
    tl.store(highests + position, tl.where(is_empty, float("-inf"), column_highest), mask=i < B)
    tl.store(totals + position, column_total, mask=i < B)
    if EDGES >= 0:
        column_weight, column_count = tl.sum(weight_sum, 0), tl.sum(count, 0)
        if not FIRST:
            column_weight += tl.load(weight_sums + position, mask=i < B, other=0.0)
            column_count += tl.load(counts + position, mask=i < B, other=0.0)
        tl.store(weight_sums + position, column_weight, mask=i < B)
        tl.store(counts + position, column_count, mask=i < B)


@triton.jit(do_not_specialize=["n"])
def shares(
    S, W, factors, radials, sums, grads, lengths, labels, query_labels, edges, levels,
    n, B, slope, offset, inverse_gamma, min_length, lift,
    K: tl.constexpr, KIND: tl.constexpr, NORMALISE: tl.constexpr, EDGES: tl.constexpr,
    LABEL_STRIDE: tl.constexpr, SCALED: tl.constexpr, FOLD: tl.constexpr, NO_TAIL: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The derivatives of each query's log-sum, in the same form as in `log_means`, with W multiplied by `lift`.

    The gradient in the log-sums is not in W, only in `radials`: the products use queries multiplied by it.
    """
    column, is_column, row, is_row, k = _tile(tl.program_id(0), n, K, TILE)
    row_scale, scale_slope = load_row_scales(lengths, row, is_row, min_length, NORMALISE)
    pair_scale = _pair_scale(row_scale, SCALED)
    label = tl.load(labels + column * LABEL_STRIDE, mask=is_column, other=-1)
    inner = tl.zeros([TILE], tl.float32)
    for start in range(0, B, BLOCK):
        i = start + tl.arange(0, BLOCK)
        log = tl.load(sums + i, mask=i < B, other=0.0)
        grad = tl.load(grads + i, mask=i < B, other=0.0)
        s, similarity, _, weight, z = _load_pairs(
            S,
            pair_scale,
            row,
            is_row,
            k,
            label,
            query_labels,
            i,
            edges,
            levels,
            B,
            slope,
            offset,
            inverse_gamma,
            K,
            KIND,
            EDGES,
            NO_TAIL,
        )
        z = tl.where(is_column[:, None], z, float("-inf"))
        w = exp_ftz(z - log[None, :]) * lift * weight * row_slopes(s, similarity, k, K, KIND, inverse_gamma)
        if FOLD:
            w = w * row_scale[:, None]
        inner += tl.sum(_store_shares(W, w, s, row, is_row, i, B, NO_TAIL) * grad[None, :], 1)
    inner = _times_row_scale(inner, pair_scale, K, EDGES)
    _store_row_factors(factors, radials, row, is_row, row_scale, inner, scale_slope, FOLD)
