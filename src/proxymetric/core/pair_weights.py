"""Weights of pairs as a rule per class: a few numbers for each class instead of a matrix of all pairs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class StepFunction(NamedTuple):
    """A piecewise constant function of a similarity for each class; level j holds from edge j - 1, inclusive.

    A few numbers per class replace a (B, C) matrix, so that the function can be evaluated chunk by chunk for very many
    classes.

    Example:
        >>> rule = StepFunction(edges=torch.tensor([[0.2]]), levels=torch.tensor([[0.5, 1.0]]))
        >>> rule(torch.tensor([[0.1], [0.2], [0.9]])).T
        tensor([[0.5000, 1.0000, 1.0000]])
    """

    edges: Tensor
    """(C, E) similarities, ascending"""
    levels: Tensor
    """(C, E + 1) values; the first one holds below the first edge"""

    def __call__(self, similarity: Tensor) -> Tensor:
        """The values (B, C) of similarities (B, C), without gradient."""
        similarity = similarity.detach()
        value = self.levels[:, 0].expand_as(similarity)
        for edge, level in zip(self.edges.unbind(1), self.levels[:, 1:].unbind(1), strict=True):
            value = torch.where(similarity >= edge, level, value)
        return value

    def of(self, classes: Tensor) -> StepFunction:
        """The functions of some classes, one for each column of a similarity matrix.

        Args:
            classes: (n,) class numbers; a class may occur several times.
        """
        return StepFunction(self.edges[classes], self.levels[classes])


class PairWeights(NamedTuple):
    """The weight of every pair, as a function of its similarity for each class, and what a loss may know of a query."""

    positive: StepFunction
    """for pairs of a reference with queries of its class"""
    negative: StepFunction
    """for pairs of a reference with queries of other classes"""
    length_scores: Tensor | None = None
    """(B,) in [-1, 1]: how long each embedding was before its normalisation, compared with others, for a loss whose
    margin depends on it (AdaFace); None: no such score"""
    class_weights: Tensor | None = None
    """(C,) how much each class counts in the mean; None: all the same"""
    class_margins: Tensor | None = None
    """(C,) the margin of each class, in place of that of the loss; None: that of the loss"""
    are_equal: bool = False
    """whether both functions are `equal_pairs`"""

    @property
    def of_pairs(self) -> PairWeights | None:
        """These weights; None if all pairs count the same, and only the numbers of queries or classes matter."""
        return None if self.are_equal else self

    @property
    def has_class_numbers(self) -> bool:
        """Whether the classes have weights or margins of their own."""
        return self.class_weights is not None or self.class_margins is not None


def equal_pairs(classes: int, like: Tensor) -> StepFunction:
    """The function that is 1 for every similarity of every class, without memory for each class.

    Args:
        classes: C.
        like: a tensor of the right device and type.

    Example:
        >>> equal_pairs(3, torch.zeros(1)).levels.T
        tensor([[1., 1., 1.]])
    """
    one = like.new_ones(1, 1).expand(classes, 1)
    return StepFunction(one[:, :0], one)
