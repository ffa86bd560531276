"""Lengths of rows, and gradients in rows and queries."""

from __future__ import annotations

import triton
import triton.language as tl

from proxymetric.ops.triton.kernels.exponents import row_scales


@triton.jit
def row_norms(rows, lengths, R, D, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Write the lengths of R rows."""
    row_norms_tile(tl.program_id(0), rows, lengths, R, D, TILE, BLOCK)


@triton.jit
def row_norms_tile(tile, rows, lengths, R, D, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Write the lengths of one tile of rows."""
    row = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
    tl.store(lengths + row, lengths_of_rows(rows, row, row < R, D, TILE, BLOCK), mask=row < R)


@triton.jit
def lengths_of_rows(rows, row, is_valid, D, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """The lengths of the given rows; 1 for rows that are not valid."""
    total = tl.zeros([TILE], tl.float32)
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)
        is_inside = is_valid[:, None] & (d < D)[None, :]
        p = tl.load(rows + row[:, None] * D + d[None, :], mask=is_inside, other=0.0).to(tl.float32)
        total += tl.sum(p * p, 1)
    return tl.where(is_valid, tl.sqrt_rn(total), 1.0)


@triton.jit(do_not_specialize=["n"])
def unit_rows(rows, units, lengths, n, D, min_length, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Write the lengths of n rows, and the rows divided by `max(length, min_length)` in the type of `units`."""
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    length = lengths_of_rows(rows, row, row < n, D, TILE, BLOCK)
    tl.store(lengths + row, length, mask=row < n)
    scale, _ = row_scales(length, min_length, True)
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)
        position, is_inside = row[:, None] * D + d[None, :], (row < n)[:, None] & (d < D)[None, :]
        p = tl.load(rows + position, mask=is_inside, other=0.0).to(tl.float32)
        tl.store(units + position, (p * scale[:, None]).to(units.dtype.element_ty), mask=is_inside)


@triton.jit(do_not_specialize=["n"])
def row_gradients(
    rows, product, factors, radials, scaled, grads, multiplier, n, D,
    MULTIPLY: tl.constexpr, FOLD: tl.constexpr, SCALE_ROWS: tl.constexpr, NEEDS_GRAD: tl.constexpr,
    NORMALISE: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradient `multiplier (product - radial p)` of n rows p.

    Without MULTIPLY, `product` and `radial` already contain the multiplier. Without FOLD, the product still lacks the
    factor of its row. SCALE_ROWS writes `factor p` to `scaled`, which the gradient in the queries needs.
    """
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    position, is_inside = row[:, None] * D + d[None, :], (row < n)[:, None] & (d < D)[None, :]
    factor = 1.0
    if not FOLD:
        factor = tl.load(factors + row, mask=row < n, other=0.0)[:, None]
    if SCALE_ROWS or NORMALISE:
        p = tl.load(rows + position, mask=is_inside, other=0.0).to(tl.float32)
    if SCALE_ROWS:
        tl.store(scaled + position, (factor * p).to(scaled.dtype.element_ty), mask=is_inside)
    if NEEDS_GRAD:
        grad = factor * tl.load(product + position, mask=is_inside, other=0.0)
        if NORMALISE:
            grad -= tl.load(radials + row, mask=row < n, other=0.0)[:, None] * p
        if MULTIPLY:
            grad *= tl.load(multiplier)
        tl.store(grads + position, grad.to(grads.dtype.element_ty), mask=is_inside)


@triton.jit(do_not_specialize=["n"])
def radial_gradients(rows, radials, grads, n, D, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Write `-radial p`, the part of the gradient of n rows p that is not a product."""
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    radial = tl.load(radials + row, mask=row < n, other=0.0)
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)
        position, is_inside = row[:, None] * D + d[None, :], (row < n)[:, None] & (d < D)[None, :]
        p = tl.load(rows + position, mask=is_inside, other=0.0).to(tl.float32)
        tl.store(grads + position, (-radial[:, None] * p).to(grads.dtype.element_ty), mask=is_inside)


@triton.jit(do_not_specialize=["n"])
def fused_row_gradients(
    W, queries, rows, radials, grads, multiplier, n, B, D,
    MULTIPLY: tl.constexpr, NORMALISE: tl.constexpr, IN_FLOAT32: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, QUERY_BLOCK: tl.constexpr,
):  # fmt: skip
    """`row_gradients` together with its product W x.

    It is faster for batches so small that writing and reading the product would take most of the time. IN_FLOAT32
    converts the factors first: Triton's interpreter would multiply the bits of narrower numbers.
    """
    blocks = tl.cdiv(D, BLOCK)  # blocks of the same rows run next to each other
    d = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(0) // blocks * TILE + tl.arange(0, TILE)
    grad = tl.zeros([TILE, BLOCK], tl.float32)
    for start in range(0, B, QUERY_BLOCK):
        i = start + tl.arange(0, QUERY_BLOCK)
        w = tl.load(W + row[:, None] * B + i[None, :], mask=(row < n)[:, None] & (i < B)[None, :], other=0.0)
        x = tl.load(queries + i[:, None] * D + d[None, :], mask=(i < B)[:, None] & (d < D)[None, :], other=0.0)
        grad = tl.dot(w.to(tl.float32), x.to(tl.float32), grad) if IN_FLOAT32 else tl.dot(w, x, grad)
    position, is_inside = row[:, None] * D + d[None, :], (row < n)[:, None] & (d < D)[None, :]
    if NORMALISE:
        p = tl.load(rows + position, mask=is_inside, other=0.0).to(tl.float32)
        grad -= tl.load(radials + row, mask=row < n, other=0.0)[:, None] * p
    if MULTIPLY:
        grad *= tl.load(multiplier)
    tl.store(grads + position, grad.to(grads.dtype.element_ty), mask=is_inside)


@triton.jit
def _factor(multiplier, weights, INDEX: tl.constexpr, min_weight_sum, DIVIDED: tl.constexpr):
    """The incoming gradient; with DIVIDED, divided by the sum of weights that the total was divided by."""
    factor = tl.load(multiplier).to(tl.float32)
    if DIVIDED:
        factor = tl.div_rn(factor, tl.maximum(tl.load(weights + INDEX), min_weight_sum))
    return factor


@triton.jit
def rescale(values, multiplier, weights, size, min_weight_sum, DIVIDED: tl.constexpr, BLOCK: tl.constexpr):
    """Multiply the gradient of the negative total by a factor that lies on the device.

    A factor of 1 writes nothing.
    """
    factor = _factor(multiplier, weights, 1, min_weight_sum, DIVIDED)
    if factor != 1.0:
        start = tl.program_id(0).to(tl.int64) * BLOCK
        step = tl.num_programs(0).to(tl.int64) * BLOCK
        for first in range(start, size, step):
            position = first + tl.arange(0, BLOCK)
            value = tl.load(values + position, mask=position < size, other=0.0).to(tl.float32)
            tl.store(values + position, (value * factor).to(values.dtype.element_ty), mask=position < size)


@triton.jit
def add_gradients(
    in_queries_positive, in_queries_negative, out, grads, columns, in_rows, positive, negative, weights,
    blocks, size, D, min_weight_sum,
    DIVIDE_POSITIVE: tl.constexpr, DIVIDE_NEGATIVE: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the gradients of both totals, times the incoming gradients `positive` and `negative`.

    The first `blocks` programs write the gradients in the queries to `out`. Each further program adds the gradient that
    `positive_means` wrote for one row to that row of `grads`, which already contains the factor `negative`. No two
    programs share a row, because each class of the batch is listed once. DIVIDE_POSITIVE and DIVIDE_NEGATIVE say which
    totals were divided by their weights.
    """
    program = tl.program_id(0)
    positive_factor = _factor(positive, weights, 0, min_weight_sum, DIVIDE_POSITIVE)
    if program < blocks:
        position = program * BLOCK + tl.arange(0, BLOCK)
        positive_part = positive_factor * tl.load(in_queries_positive + position, mask=position < size, other=0.0)
        negative_factor = _factor(negative, weights, 1, min_weight_sum, DIVIDE_NEGATIVE)
        negative_part = negative_factor * tl.load(in_queries_negative + position, mask=position < size, other=0.0)
        tl.store(out + position, (positive_part + negative_part).to(out.dtype.element_ty), mask=position < size)
    else:
        row = program - blocks
        column = tl.load(columns + row // K)
        if column >= 0:
            for start in range(0, D, BLOCK):
                d = start + tl.arange(0, BLOCK)
                position = grads + (column * K + row % K) * D + d
                update = positive_factor * tl.load(in_rows + row.to(tl.int64) * D + d, mask=d < D, other=0.0)
                value = tl.load(position, mask=d < D, other=0.0).to(tl.float32) + update
                tl.store(position, value.to(grads.dtype.element_ty), mask=d < D)
