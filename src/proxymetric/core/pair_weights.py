"""Weights of pairs as a rule per class: a few numbers for each class instead of a matrix of all pairs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class StepFunction(NamedTuple):
    """A piecewise constant function of a similarity, one per class: level j holds from edge j (inclusive) to the next.

    `edges` (C, E) ascending, `levels` (C, E + 1). Two numbers per class instead of a (B, C) matrix, so that it can be
    evaluated chunk by chunk for very many classes.

    >>> rule = Steps(edges=torch.tensor([[0.2]]), levels=torch.tensor([[0.5, 1.0]]))
    >>> rule(torch.tensor([[0.1], [0.2], [0.9]])).T
    tensor([[0.5000, 1.0000, 1.0000]])
    """

    edges: Tensor
    levels: Tensor

    def __call__(self, similarity: Tensor) -> Tensor:
        """(B, C) similarities -> (B, C) values, without gradient."""
        similarity = similarity.detach()
        value = self.levels[:, 0].expand_as(similarity)
        for edge, level in zip(self.edges.unbind(1), self.levels[:, 1:].unbind(1), strict=True):
            value = torch.where(similarity >= edge, level, value)
        return value

    def of(self, classes: Tensor) -> StepFunction:
        """The rules of these classes, one for each column of a similarity matrix: all of them, a chunk, or a few."""
        return StepFunction(self.edges[classes], self.levels[classes])


class PairWeights(NamedTuple):
    """The weight of every pair as a rule per class: one for its positives, one for its negatives."""

    positive: StepFunction
    negative: StepFunction
