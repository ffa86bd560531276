"""The cross entropy over the classes of a small problem: one kernel between two matrix products."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from proxymetric.core.normalisation import MIN_DIVISORS
from proxymetric.ops import plain
from proxymetric.ops.problem import Arc, Exponent, Line, Problem
from proxymetric.ops.triton.launch import installed, interpreting, launch
from proxymetric.ops.triton.norms import next_power_of_two, tile_shape

NUMBERS_PER_BLOCK = 2048
"""similarities that a program holds at once"""


def fits(queries: Tensor, vectors: Tensor, own_class: Exponent) -> bool:
    """Whether the kernels apply: float32 on a GPU with Triton, and a known exponent."""
    return (
        (queries.is_cuda or (installed() and interpreting()))
        and queries.dtype == torch.float32
        and vectors.is_contiguous()
        and isinstance(own_class, Line | Arc)
        and installed()
    )


def cross_entropy(queries: Tensor, problem: Problem, own_class: Exponent, count: int, unit: float) -> Tensor:
    """See `reductions.cross_entropy`: the sum over the queries, divided by a count.

    Args:
        queries: (B, D).
        problem: labels, references of all classes in order, exponent of the other classes.
        own_class: a `Line` or an `Arc`.
        count: what the sum is divided by.
        unit: similarities are computed in this unit: gamma, if K > 1 and similarities are "soft".
    """
    value: Tensor = _CrossEntropy.apply(queries, problem.refs.rows, problem.labels, problem, own_class, count, unit)
    return value


class _CrossEntropy(torch.autograd.Function):
    """queries, vectors, labels, problem, exponent, count, unit -> a scalar; the forward pass computes the slopes."""

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        vectors: Tensor,
        labels: Tensor,
        problem: Problem,
        own_class: Line | Arc,
        count: int,
        unit: float,
    ) -> Tensor:
        (batch, dim), count_rows, per_class = queries.shape, len(vectors), problem.per_column
        assert problem.refs.normalise is not None
        min_length = MIN_DIVISORS[problem.refs.normalise]
        rows, lengths = torch.empty_like(vectors), vectors.new_empty(count_rows)
        tile, block = tile_shape(dim)
        launch(
            "unit_rows",
            (-(-count_rows // tile),),
            4,
            (vectors, rows, lengths),
            (count_rows, dim, min_length),
            {"TILE": tile, "BLOCK": block},
        )
        slopes = torch.addmm(lengths[:1], queries, rows.T, beta=0, alpha=1 / unit)
        losses, by_product = queries.new_empty(batch), problem.refs.nearest
        nearest = labels if by_product is None or per_class == 1 else torch.empty_like(labels)
        padded = next_power_of_two(per_class)
        launch(
            "cross_entropy",
            (batch,),
            4,
            (slopes, labels, losses, nearest),
            (count_rows // per_class, unit, problem.negative.slope, *_numbers(own_class, problem.negative), 1 / count),
            {
                "K": per_class,
                "KP": padded,
                "KIND": "one" if per_class == 1 or problem.of_class is None else problem.of_class.kind,
                "ARC": isinstance(own_class, Arc),
                "NEAREST": nearest is not labels,
                "BLOCK": max(1, min(NUMBERS_PER_BLOCK // padded, next_power_of_two(count_rows // per_class))),
            },
        )
        if by_product is not None and nearest is not labels:
            by_product.rows = nearest
        ctx.problem, ctx.own_class, ctx.count, ctx.min_length = problem, own_class, count, min_length
        ctx.save_for_backward(queries, vectors, rows, lengths, slopes)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        queries, vectors, rows, lengths, slopes = ctx.saved_tensors
        if torch.is_grad_enabled():
            gradients = plain.cross_entropy_gradients(queries, vectors, ctx.problem, ctx.own_class, ctx.count, grad)
            return *gradients, None, None, None, None, None
        in_queries = (slopes @ rows).mul_(grad) if ctx.needs_input_grad[0] else None
        in_vectors = None
        if ctx.needs_input_grad[1]:
            in_vectors = slopes.T @ queries
            count_rows, dim = vectors.shape
            tile, block = tile_shape(dim)
            launch(
                "unit_gradients",
                (-(-count_rows // tile),),
                4,
                (in_vectors, rows, lengths, grad.contiguous(), in_vectors),
                (count_rows, dim, ctx.min_length),
                {"TILE": tile, "BLOCK": block},
            )
        return in_queries, in_vectors, None, None, None, None, None


def _numbers(own_class: Line | Arc, others: Line) -> tuple[float, ...]:
    """Slope and offset of the query's class, less the offset of the others; scale, cosine and sine of the margin."""
    if isinstance(own_class, Line):
        return own_class.slope, own_class.offset - others.offset, 0.0, 0.0, 0.0
    assert not others.offset
    sine = math.sin(own_class.margin)
    return 0.0, -own_class.margin * sine, own_class.scale, math.cos(own_class.margin), sine
