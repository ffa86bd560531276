"""The definition of the reductions, on matrices of all queries by all references.

Tests compare the other implementations with this one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from proxymetric.core.pieces import References
from proxymetric.core.similarity import Similarity
from proxymetric.ops.problem import (
    NONE,
    Count,
    Exponent,
    Line,
    Problem,
    Reduced,
    Settings,
    Totals,
    at_least_float32,
    log1p_exp,
    with_vectors,
)


class Columns(NamedTuple):
    """The similarities of the queries to each column, with the masks of their pairs."""

    similarity: Tensor
    """(B, columns)"""
    positive: Tensor
    """(B, columns) bool: query and column have the same class"""
    negative: Tensor
    """(B, columns) bool: query and column have different classes"""
    labels: Tensor
    """(columns,) the class of each column"""


def similarities(queries: Tensor, labels: Tensor, refs: References, of_class: Similarity | None = None) -> Columns:
    """Compute the similarities (B, columns) with the masks of their positive and negative pairs.

    Args:
        queries: (B, D), of unit length.
        labels: (B,) the classes of the queries.
        refs: the references.
        of_class: combines the K references of a class into one column; None: each reference is a column.

    Returns:
        The similarities, both masks and the class of each column.

    Example:
        >>> refs = References(torch.eye(4)[:, :2], torch.tensor([0, 0, 1, 1]), per_class=2)
        >>> s, positive, negative, _ = similarities(torch.eye(2), torch.tensor([0, 1]), refs, Similarity("max"))
        >>> s
        tensor([[1., 0.],
                [1., 0.]])
        >>> positive
        tensor([[ True, False],
                [False,  True]])
    """
    return _columns(queries, Problem(labels, refs, Line(1.0), Line(1.0), of_class))


def mean_over_batch(
    queries: Tensor, problem: Problem, positive_count: Count, negative_count: Count, settings: Settings
) -> Totals:
    """See `reductions.mean_over_batch`."""
    sums = _reduce(0, at_least_float32(queries), problem)
    positive, negative = log1p_exp(sums.positive).sum(), log1p_exp(sums.negative).sum()
    return Totals(
        positive if positive_count is None else positive / positive_count,
        negative if negative_count is None else negative / negative_count,
        sums.positive_weight.sum(),
        sums.negative_weight.sum(),
    ).over_weights(positive_count is None, negative_count is None)


def over_classes(queries: Tensor, problem: Problem, settings: Settings) -> Reduced:
    """See `reductions.over_classes`."""
    return _reduce(1, at_least_float32(queries), problem)


def cross_entropy_gradients(
    queries: Tensor, vectors: Tensor, problem: Problem, own_class: Exponent, count: int, grad: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of `reductions.cross_entropy` in the queries and vectors, which can be differentiated once more."""

    def compute(x: Tensor, p: Tensor) -> tuple[Tensor, ...]:
        sums = over_classes(x, with_vectors(problem, p)._replace(positive=Line(1.0)), Settings())
        own_exponent = own_class(sums.positive)
        return (torch.logaddexp(own_exponent, sums.negative).sub(own_exponent).sum() / count,)

    return gradients_with_graph(compute, queries, vectors, (grad,))


def gradients_with_graph(
    compute: Callable[[Tensor, Tensor], tuple[Tensor, ...]],
    queries: Tensor,
    vectors: Tensor,
    grads: tuple[Tensor | None, ...],
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients in the queries and in the vectors by autograd, so that they can be differentiated once more.

    Args:
        compute: queries, vectors -> results.
        queries: (B, D).
        vectors: (R, D).
        grads: the gradients in the results; None: 0.
    """
    results = compute(queries, vectors)
    inputs = [each for each in (queries, vectors) if each.requires_grad]
    given = [torch.zeros_like(result) if grad is None else grad for result, grad in zip(results, grads, strict=True)]
    gradients = iter(torch.autograd.grad(results, inputs, given, create_graph=True))
    return next(gradients) if queries.requires_grad else None, next(gradients) if vectors.requires_grad else None


def _columns(queries: Tensor, problem: Problem) -> Columns:
    per_column = problem.per_column
    s = queries @ problem.refs.normalised(queries).T
    if problem.of_class is None:
        return Columns(s, *problem.refs.positives(problem.labels), problem.refs.labels)
    columns = References(s, problem.refs.labels[::per_column])
    s = problem.of_class(s.unflatten(1, (-1, per_column)))
    return Columns(s, *columns.positives(problem.labels), columns.labels)


def _reduce(dim: int, queries: Tensor, problem: Problem) -> Reduced:
    """Sum over the queries of each column (dim 0) or over the columns of each query (dim 1)."""
    s, is_positive, is_negative, classes = _columns(queries, problem)
    positive, negative = problem.positive(s), problem.negative(s)
    if problem.weight is None:
        positive_mean, negative_mean = is_positive.any(dim).to(s), is_negative.any(dim).to(s)
    else:
        # Weights are applied before the mask, because 0 * -inf is not a number.
        positive_weights = problem.weight.positive.of(classes)(s)
        negative_weights = problem.weight.negative.of(classes)(s)
        positive, negative = positive_weights * positive, negative_weights * negative
        positive_mean = _masked_mean(positive_weights, is_positive, dim)
        negative_mean = _masked_mean(negative_weights, is_negative, dim)
    # The gradient of an empty log-sum is NaN; the backward pass of masked_fill replaces it with 0.
    return Reduced(
        torch.logsumexp(positive.masked_fill(~is_positive, NONE), dim),
        torch.logsumexp(negative.masked_fill(~is_negative, NONE), dim),
        positive_mean,
        negative_mean,
    )


def _masked_mean(values: Tensor, mask: Tensor, dim: int) -> Tensor:
    return (values * mask).sum(dim) / mask.sum(dim).clamp(min=1)
