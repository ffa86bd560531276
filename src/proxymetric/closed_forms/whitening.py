"""Whitening by the covariance within classes (Hatch, Kajarekar & Stolcke, 2006)."""

from __future__ import annotations

from dataclasses import dataclass

from proxymetric.closed_forms.head import LinearHead, check_dim, check_shrinkage
from proxymetric.closed_forms.scatter import Scatter


@dataclass(frozen=True)
class Whitening:
    """Divide each direction by how much the images of one class differ along it (Hatch et al. 2006).

    ``z = S^{-1/2} P (x - m),
    S = (1 - a) P S_w P^T + a tr(P S_w P^T) I / K``

    x is a feature vector of length 1, m the mean of all of them, and S_w their covariance within classes. The rows of P
    are the K leading principal directions of x: few images say little about the others. a is the shrinkage (Friedman
    1989).

    Relations: `LDA` keeps the directions in which the means of the classes differ, at most C - 1. With shrinkage 1 it
    is a PCA that leaves the lengths as they are. Choose it over a trained head when a class has few images, or when
    there is no time.

    Args:
        shrinkage: a in (0, 1]; larger for few images.
        principal: K; None: all F.

    Example:
        >>> import torch
        >>> features = torch.tensor([[0.0, 0.0], [2.0, 0.1], [0.0, 1.0], [2.0, 1.1]])
        >>> scatter = Scatter(classes=2, width=2)
        >>> scatter.add(features, torch.tensor([0, 0, 1, 1]))
        >>> vectors = Whitening(shrinkage=0.01)(scatter)(features)
        >>> bool((vectors[0] - vectors[2]).norm() > 5 * (vectors[0] - vectors[1]).norm())
        True
    """

    shrinkage: float = 0.3
    principal: int | None = None

    def __post_init__(self) -> None:
        check_shrinkage(self.shrinkage)

    def most(self, scatter: Scatter) -> int:
        """K: every principal direction can be kept."""
        return scatter.width if self.principal is None else self.principal

    def __call__(self, scatter: Scatter, dim: int | None = None) -> LinearHead:
        """The head.

        Args:
            scatter: the sums over the features.
            dim: dimensions that are kept, those along which images of one class differ most; None: all K.
        """
        kept = check_dim(dim, self.most(scatter), "the number of principal directions")
        weight = scatter.whitener(self.shrinkage, self.most(scatter))[:kept]
        return LinearHead(weight, -weight @ scatter.mean)
