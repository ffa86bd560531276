"""The features themselves (Sharif Razavian, Azizpour, Sullivan & Carlsson, 2014)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from proxymetric.closed_forms.head import LinearHead, check_dim
from proxymetric.closed_forms.scatter import Scatter


@dataclass(frozen=True)
class Unchanged:
    """Compare the features of the backbone directly (Sharif Razavian et al. 2014).

    ``z = x``

    Relations: the baseline of everything that is trained or fitted. `Whitening` with shrinkage 1 subtracts the mean.

    Example:
        >>> Unchanged()(Scatter(classes=1, width=2)).weight.tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """

    def most(self, scatter: Scatter) -> int:
        """F: the features themselves."""
        return scatter.width

    def __call__(self, scatter: Scatter, dim: int | None = None) -> LinearHead:
        """The head, which changes nothing; `dim` is F or None."""
        width = scatter.width
        if check_dim(dim, width, "the number of features") < width:
            raise ValueError(f"dim: got {dim}, expected {width}, the number of features, which are kept as they are")
        return LinearHead(torch.eye(width, dtype=torch.float64), torch.zeros(width, dtype=torch.float64))
