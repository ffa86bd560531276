"""Parts that the pair losses share: distances, means, and the refusal of a weighting."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from proxymetric.core.pair_weights import PairWeights
from proxymetric.core.pieces import References
from proxymetric.core.products import scaled_product

MIN_SQUARED_DISTANCE = 1e-12
"""squared distances up to this are rounding: the distance and its gradient are 0"""


def distances(queries: Tensor, refs: References) -> Tensor:
    """Euclidean distances (B, R); a distance of 0 has a gradient of 0.

    Args:
        queries: (B, D), normalised.
        refs: the references.
    """
    rows = refs.normalised(queries)
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return _distances(queries, rows)
    values: Tensor = _Distances.apply(queries, None if rows is queries else rows)
    return values


def _distances(queries: Tensor, rows: Tensor) -> Tensor:
    squared = (queries.square().sum(1, keepdim=True) + rows.square().sum(1) - 2 * (queries @ rows.T)).clamp(min=0)
    is_positive = squared > MIN_SQUARED_DISTANCE
    return squared.where(is_positive, squared.new_ones(())).sqrt() * is_positive


class _Distances(torch.autograd.Function):
    """queries, rows -> distances; the gradient in q_i is `sum_r g_ir (q_i - r) / d_ir`. Rows None: the queries."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, rows: Tensor | None) -> Tensor:
        lengths = queries.square().sum(1)
        row_lengths = lengths if rows is None else rows.square().sum(1)
        others = queries if rows is None else rows
        squared = scaled_product(queries, others, -2.0, lengths[:, None] + row_lengths)
        distances = squared.clamp(min=0).sqrt_().mul_(squared > MIN_SQUARED_DISTANCE)
        ctx.save_for_backward(queries, rows, distances)
        return distances

    @staticmethod
    def backward(ctx: Any, in_distances: Tensor) -> tuple[Tensor | None, Tensor | None]:
        queries, rows, distances = ctx.saved_tensors
        if torch.is_grad_enabled():
            with_graph = _distances(queries, queries if rows is None else rows)
            inputs = [each for each in (queries, rows) if each is not None and each.requires_grad]
            gradients = iter(torch.autograd.grad(with_graph, inputs, in_distances, create_graph=True))
            in_queries, in_rows = (next(gradients) if needed else None for needed in ctx.needs_input_grad)
            return in_queries, in_rows
        weights = in_distances.div(distances).masked_fill_(distances == 0, 0.0)
        if rows is None:  # each query is in a row and in a column of the distances
            weights = weights + weights.T
            return torch.addmm(weights.sum(1, keepdim=True) * queries, weights, queries, alpha=-1), None
        in_queries = in_rows = None
        if ctx.needs_input_grad[0]:
            in_queries = torch.addmm(weights.sum(1, keepdim=True) * queries, weights, rows, alpha=-1)
        if ctx.needs_input_grad[1]:
            in_rows = torch.addmm(weights.sum(0)[:, None] * rows, weights.T, queries, alpha=-1)
        return in_queries, in_rows


def mean_where(values: Tensor, mask: Tensor) -> Tensor:
    """The mean of the values where the mask is true; 0 if it is true nowhere."""
    return (values * mask).sum() / mask.sum().clamp(min=1)


def mean_or_zero(values: Tensor) -> Tensor:
    """The mean of the values; 0 if there are none."""
    return values.mean() if len(values) else values.sum()


NO_EXPONENT = "which has no exponent that a weight could multiply"
NOT_LINEAR = "whose exponent for the query's class is not linear in the similarity"


def refuse_weights(loss: object, weight: PairWeights | None, reason: str = NO_EXPONENT) -> None:
    """Refuse weights of pairs for a loss that cannot apply them.

    Args:
        loss: the loss.
        weight: the weights; None is fine.
        reason: why it cannot, a clause that describes the loss.

    Raises:
        ValueError: there are weights.
    """
    if weight is not None:
        raise ValueError(
            f"weighting: got a weighting for {type(loss).__name__}, {reason}; expected a loss that weights its pairs, "
            "such as proxy-anchor, cosface or multi-similarity"
        )
