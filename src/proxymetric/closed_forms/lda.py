"""Linear discriminant analysis (Fisher, 1936; for several classes Rao, 1948)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from proxymetric.closed_forms.head import LinearHead, check_dim, check_shrinkage
from proxymetric.closed_forms.scatter import Scatter, eigenvectors


@dataclass(frozen=True)
class LDA:
    """Keep the directions in which classes differ most, compared with the images of one class (Fisher 1936).

    ``z = V S^{-1/2} P (x - m),
    S = (1 - a) P S_w P^T + a tr(P S_w P^T) I / K``

    x is a feature vector of length 1, m the mean of all of them, S_w their covariance within classes, and P holds its K
    leading principal directions. a is the shrinkage (Friedman 1989). The rows of V are the leading eigenvectors of the
    covariance of the class means m_c, whitened: ``sum_c n_c/N S^{-1/2} P (m_c - m)(m_c - m)^T P^T S^{-1/2}``. Its rank
    is at most C - 1.

    Relations: `Whitening`, and then a choice of directions. LDA drops every direction in which the known classes do not
    differ, which new classes may need if few are known. Its vectors are short.

    Args:
        shrinkage: a in (0, 1]; larger for few images.
        principal: K; None: all F.

    Example:
        >>> features = torch.tensor([[0.0, 0.0], [2.0, 0.1], [0.0, 1.0], [2.0, 1.1]])
        >>> scatter = Scatter(classes=2, width=2)
        >>> scatter.add(features, torch.tensor([0, 0, 1, 1]))
        >>> vectors = LDA(shrinkage=0.01)(scatter)(features)
        >>> vectors.shape, bool((vectors[0] - vectors[2]).norm() > 5 * (vectors[0] - vectors[1]).norm())
        (torch.Size([4, 1]), True)
    """

    shrinkage: float = 0.3
    principal: int | None = None

    def __post_init__(self) -> None:
        check_shrinkage(self.shrinkage)

    def most(self, scatter: Scatter) -> int:
        """The rank of the covariance of the class means: C - 1, or K if that is less."""
        return min(scatter.classes - 1, scatter.width if self.principal is None else self.principal)

    def __call__(self, scatter: Scatter, dim: int | None = None) -> LinearHead:
        """The head.

        Args:
            scatter: the sums over the features.
            dim: leading dimensions that are kept; None: C - 1, or K if that is less.
        """
        if scatter.classes < 2:
            raise ValueError(f"classes: got {scatter.classes}, expected at least 2: LDA compares classes")
        kept = check_dim(dim, self.most(scatter), "one less than the number of classes, or the number of features")
        whitener = scatter.whitener(self.shrinkage, self.principal or scatter.width)
        shares = scatter.counts[scatter.counts > 0] / scatter.images
        means = shares.sqrt()[:, None] * ((scatter.class_means - scatter.mean) @ whitener.T)
        if len(means) < means.shape[1]:
            # The Gram matrix of few means has the same eigenvalues, and is smaller.
            directions = torch.nn.functional.normalize(eigenvectors(means @ means.T)[1][:kept] @ means)
        else:
            directions = eigenvectors(means.T @ means)[1][:kept]
        weight = directions @ whitener
        return LinearHead(weight, -weight @ scatter.mean)
