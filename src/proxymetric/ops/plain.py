"""The reductions as their definition says, on matrices of all queries by all references. The oracle of every other."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from proxymetric.core.pieces import References
from proxymetric.ops.problem import NONE, Count, Line, Problem, Reduced, Settings, Totals, lifted, log1p_exp
from proxymetric.ops.similarity import Similarity


class Columns(NamedTuple):
    """What queries were compared with, column by column."""

    similarity: Tensor
    """(B, columns)"""
    positive: Tensor
    """(B, columns) bool: a pair of one class"""
    negative: Tensor
    """(B, columns) bool: a pair of two classes"""
    labels: Tensor
    """(columns,) class of each"""


def similarities(queries: Tensor, labels: Tensor, refs: References, of_class: Similarity | None = None) -> Columns:
    """Similarities (B, columns) with the masks of their positive and negative pairs.

    A column is a reference row, or a class where `of_class` says how its K rows become one similarity.

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
    queries: Tensor, task: Problem, positive_count: Count, negative_count: Count, setting: Settings
) -> Totals:
    sums = over_batch(queries, task, setting)
    up, down = log1p_exp(sums.positive).sum(), log1p_exp(sums.negative).sum()
    return Totals(
        up if positive_count is None else up / positive_count,
        down if negative_count is None else down / negative_count,
        sums.positive_weight.sum(),
        sums.negative_weight.sum(),
    ).over_weights(positive_count is None, negative_count is None)


def over_batch(queries: Tensor, task: Problem, setting: Settings) -> Reduced:
    return _reduce(0, lifted(queries), task)


def over_classes(queries: Tensor, task: Problem, setting: Settings) -> Reduced:
    return _reduce(1, lifted(queries), task)


def _columns(queries: Tensor, task: Problem) -> Columns:
    per_column = task.per_column
    s = queries @ task.refs.normalised(queries).T
    if task.of_class is None:
        return Columns(s, *task.refs.positives(task.labels), task.refs.labels)
    columns = References(s, task.refs.labels[::per_column])
    return Columns(task.of_class(s.unflatten(1, (-1, per_column))), *columns.positives(task.labels), columns.labels)


def _reduce(dim: int, queries: Tensor, task: Problem) -> Reduced:
    s, is_positive, is_negative, classes = _columns(queries, task)
    up, down = task.positive(s), task.negative(s)
    if task.weight is None:
        up_weight, down_weight = is_positive.any(dim).to(s), is_negative.any(dim).to(s)
    else:
        # Weights come before the mask: 0 * -inf is not a number.
        up_each, down_each = task.weight.positive.of(classes)(s), task.weight.negative.of(classes)(s)
        up, down = up_each * up, down_each * down
        up_weight, down_weight = _mean(up_each, is_positive, dim), _mean(down_each, is_negative, dim)
    # An empty sum is -inf and its gradient not a number; masked_fill's own backward puts the zero there.
    return Reduced(
        torch.logsumexp(up.masked_fill(~is_positive, NONE), dim),
        torch.logsumexp(down.masked_fill(~is_negative, NONE), dim),
        up_weight,
        down_weight,
    )


def _mean(values: Tensor, where: Tensor, dim: int) -> Tensor:
    return (values * where).sum(dim) / where.sum(dim).clamp(min=1)
