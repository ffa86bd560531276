"""Lengths of rows, and gradients in rows and queries."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def measure(rows, lengths, R, D, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """The lengths of R rows."""
    measure_tile(tl.program_id(0), rows, lengths, R, D, TILE, BLOCK)


@triton.jit
def measure_tile(tile, rows, lengths, R, D, TILE: tl.constexpr, BLOCK: tl.constexpr):
    row = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
    total = tl.zeros([TILE], tl.float32)
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)
        there = (row < R)[:, None] & (d < D)[None, :]
        p = tl.load(rows + row[:, None] * D + d[None, :], mask=there, other=0.0).to(tl.float32)
        total += tl.sum(p * p, 1)
    tl.store(lengths + row, tl.sqrt_rn(total), mask=row < R)


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
    blocks = tl.cdiv(D, BLOCK)  # those of the same rows run side by side
    d = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(0) // blocks * TILE + tl.arange(0, TILE)
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
def _factor(by, weights, AT: tl.constexpr, least, DIVIDED: tl.constexpr):
    """What gradients are multiplied with: what comes from above, over the weights that the total was divided by."""
    factor = tl.load(by).to(tl.float32)
    if DIVIDED:
        factor = tl.div_rn(factor, tl.maximum(tl.load(weights + AT), least))
    return factor


@triton.jit
def rescale(values, by, weights, size, least, DIVIDED: tl.constexpr, BLOCK: tl.constexpr):
    """Multiply all values, of the negatives' total, by one that lies on the device; none is touched where that is 1."""
    factor = _factor(by, weights, 1, least, DIVIDED)
    if factor != 1.0:
        start = tl.program_id(0).to(tl.int64) * BLOCK
        step = tl.num_programs(0).to(tl.int64) * BLOCK
        for first in range(start, size, step):
            at = first + tl.arange(0, BLOCK)
            value = tl.load(values + at, mask=at < size, other=0.0).to(tl.float32)
            tl.store(values + at, (value * factor).to(values.dtype.element_ty), mask=at < size)


@triton.jit
def add(
    ups, downs, out, grads, columns, in_rows, up, down, weights,
    blocks, size, D, least,
    UP: tl.constexpr, DOWN: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the gradients of both totals, times `up` and `down`: programs up to `blocks` those in the queries, in `out`.

    Each further one adds to a row of `grads`, which are times `down` already, what `own_means` wrote for it; a class
    is one of the batch's once at most. UP, DOWN: that total was divided by the weights.
    """
    program = tl.program_id(0)
    by_up = _factor(up, weights, 0, least, UP)
    if program < blocks:
        at = program * BLOCK + tl.arange(0, BLOCK)
        one = by_up * tl.load(ups + at, mask=at < size, other=0.0)
        two = _factor(down, weights, 1, least, DOWN) * tl.load(downs + at, mask=at < size, other=0.0)
        tl.store(out + at, (one + two).to(out.dtype.element_ty), mask=at < size)
    else:
        row = program - blocks
        column = tl.load(columns + row // K)
        if column >= 0:
            for start in range(0, D, BLOCK):
                d = start + tl.arange(0, BLOCK)
                at = grads + (column * K + row % K) * D + d
                more = by_up * tl.load(in_rows + row.to(tl.int64) * D + d, mask=d < D, other=0.0)
                value = tl.load(at, mask=d < D, other=0.0).to(tl.float32) + more
                tl.store(at, value.to(grads.dtype.element_ty), mask=d < D)
