"""A linear head, and what all closed forms share."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from proxymetric.arguments.checks import within
from proxymetric.closed_forms.scatter import Scatter

SHRINKAGE_RANGE = "0 leaves a covariance singular that fewer images than features were counted for"


class LinearHead(NamedTuple):
    """A linear head ``z = W x + b``, float64 on the CPU."""

    weight: Tensor
    """(D, F)"""
    bias: Tensor
    """(D,)"""

    def __call__(self, features: Tensor) -> Tensor:
        """The vectors (N, D) of features (N, F), in the type of the features."""
        return features @ self.weight.to(features).T + self.bias.to(features)

    def scaled(self) -> LinearHead:
        """The head with the length of a new random one, ``||W||^2 = 2 F`` (Kaiming, by fan out); cosines stay the same.

        A learning rate then means the same for both.
        """
        factor = (2 * self.weight.shape[1] / self.weight.square().sum()).sqrt()
        return LinearHead(factor * self.weight, factor * self.bias)

    def widened(self, dim: int) -> LinearHead:
        """The head with rows of zeros up to `dim` dimensions; cosines stay the same."""
        missing = dim - len(self.weight)
        return LinearHead(
            torch.cat([self.weight, self.weight.new_zeros(missing, self.weight.shape[1])]),
            torch.cat([self.bias, self.bias.new_zeros(missing)]),
        )

    def after(self, weight: Tensor, bias: Tensor) -> LinearHead:
        """This head on top of another one, as one head: ``W (U x + c) + b``.

        Args:
            weight: U, (F, E).
            bias: c, (F,).
        """
        return LinearHead(self.weight @ weight.to(self.weight), self.weight @ bias.to(self.weight) + self.bias)


class Form(Protocol):
    """A closed form: a pure function from sums over labelled features to a linear head."""

    def __call__(self, scatter: Scatter, dim: int | None = None) -> LinearHead:
        """The head with its leading `dim` dimensions; None: all that it has."""

    def most(self, scatter: Scatter) -> int:
        """The number of dimensions that it has."""


def check_shrinkage(shrinkage: float) -> None:
    """Refuse a shrinkage outside (0, 1]."""
    if shrinkage == 0:
        raise ValueError(f"shrinkage: got 0, expected a number above 0 and at most 1: {SHRINKAGE_RANGE}")
    within(0, 1, SHRINKAGE_RANGE, shrinkage=shrinkage)


def check_dim(dim: int | None, most: int, reason: str) -> int:
    """The number of dimensions, at most `most`."""
    if dim is not None and dim > most:
        raise ValueError(f"dim: got {dim}, expected at most {most}: {reason}")
    return most if dim is None else dim
