"""The sums over labelled features that every closed form needs, and the covariances that follow from them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import torch
from torch import Tensor

BLOCK_ROWS = 4096
"""features that are converted to float64 at once"""


def check_finite(features: Tensor, start: int = 0) -> None:
    """Refuse features (N, F) that are not finite numbers.

    Args:
        features: a block of them.
        start: the row of the first one.

    Raises:
        ValueError: a feature is not finite.
    """
    broken = (~features.isfinite().all(1)).nonzero().flatten()
    if len(broken):
        raise ValueError(
            f"features: got NaN or infinity, first in row {start + int(broken[0])}, expected finite numbers; the "
            "weights of the backbone are damaged, or it overflows"
        )


class Scatter:
    """Sums over labelled features x_i, (F,), in float64: one pass, blocks in any order.

    ``n_c = sum_i[y_i = c] 1,  s_c = sum_i[y_i = c] x_i,  X = sum_i x_i x_i^T``

    The sums take F^2 + C F numbers, whatever the number of images is.

    Args:
        classes: number of classes, C.
        width: number of features, F.

    Attributes:
        counts: (C,) images of each class.
        sums: (C, F) sum of the features of each class.
        products: (F, F) sum of the outer products.

    Example:
        >>> scatter = Scatter(classes=2, width=1)
        >>> scatter.add(torch.tensor([[0.0], [2.0], [5.0], [5.0]]), torch.tensor([0, 0, 1, 1]))
        >>> round(scatter.within.item(), 6), scatter.mean.item()
        (1.0, 3.0)
    """

    def __init__(self, classes: int, width: int) -> None:
        self.counts = torch.zeros(classes, dtype=torch.float64)
        self.sums = torch.zeros(classes, width, dtype=torch.float64)
        self.products = torch.zeros(width, width, dtype=torch.float64)
        self._spectra: dict[int, tuple[Tensor, Tensor]] = {}
        """by number of principal directions: the variances within classes along them, and their axes (D, F)"""

    def add(self, features: Tensor, labels: Tensor) -> None:
        """Add a block of features.

        Args:
            features: (N, F), any floating type and device.
            labels: (N,) their classes, in [0, C).

        Raises:
            ValueError: a feature is not finite.
        """
        self._spectra.clear()
        for name in ("within", "principal"):
            self.__dict__.pop(name, None)  # made from earlier sums
        for start in range(0, len(features), BLOCK_ROWS):
            rows = features[start : start + BLOCK_ROWS].detach().double().cpu()
            check_finite(rows, start)
            classes = labels[start : start + BLOCK_ROWS].long().cpu()
            self.counts += torch.bincount(classes, minlength=len(self.counts))
            self.sums.index_add_(0, classes, rows)
            self.products.addmm_(rows.T, rows)

    @classmethod
    def total(cls, parts: Iterable[Scatter]) -> Scatter:
        """The sums of several parts, which number their classes alike.

        Example:
            >>> scatter = Scatter(classes=1, width=1)
            >>> scatter.add(torch.ones(3, 1), torch.zeros(3))
            >>> Scatter.total([scatter, scatter]).counts
            tensor([6.], dtype=torch.float64)
        """
        first, *others = parts
        result = cls(*first.sums.shape)
        for part in (first, *others):
            result.counts += part.counts
            result.sums += part.sums
            result.products += part.products
        return result

    @property
    def width(self) -> int:
        """F, the number of features."""
        return len(self.products)

    @property
    def images(self) -> int:
        """N, the number of images."""
        return int(self.counts.sum())

    @property
    def classes(self) -> int:
        """The number of classes with an image."""
        return int((self.counts > 0).sum())

    @property
    def single(self) -> int:
        """The number of classes with one image: they add nothing to the covariance within classes."""
        return int((self.counts == 1).sum())

    @property
    def mean(self) -> Tensor:
        """(F,) the mean m of all features."""
        return self.sums.sum(0) / self.counts.sum()

    @property
    def class_means(self) -> Tensor:
        """The mean of each class that has images, (classes, F)."""
        present = self.counts > 0
        return self.sums[present] / self.counts[present, None]

    @property
    def total_covariance(self) -> Tensor:
        """(F, F) the covariance ``X / N - m m^T``."""
        return self.products / self.counts.sum() - torch.outer(self.mean, self.mean)

    @cached_property
    def within(self) -> Tensor:
        """(F, F) the covariance within classes ``(X - sum_c s_c s_c^T / n_c) / (N - C)``.

        Raises:
            ValueError: no class has two images, or all images of each class have the same features.
        """
        freedom = self.images - self.classes
        if freedom < 1:
            raise ValueError(
                f"images: got {self.classes} classes of one image each, expected at least one class with two images: "
                "a closed form learns from how images of one class differ"
            )
        scaled = self.sums / self.counts.clamp(min=1).sqrt()[:, None]
        covariance = (self.products - scaled.T @ scaled) / freedom
        # Rounding leaves about 1e-16 of the sums where the images of each class are copies of each other.
        if not covariance.trace() > 1e-12 * self.products.trace() / self.images:
            raise ValueError(
                "features: got the same features for all images of each class, expected images of a class that differ"
            )
        return covariance

    @cached_property
    def principal(self) -> Tensor:
        """(F, F) the eigenvectors of the covariance, one in each row, that of the largest variance first."""
        return eigenvectors(self.total_covariance)[1]

    def whitener(self, shrinkage: float, dim: int) -> Tensor:
        """The matrix A P (D, F): the leading principal directions, then the root that makes S the identity.

        ``S = (1 - a) P S_w P^T + a tr(P S_w P^T) I / D,
        A = S^{-1/2} up to a rotation``

        With a > 0, S is regular also if S_w is singular (D > N - C). All a and D share one decomposition (F, F).

        Args:
            shrinkage: a, in (0, 1].
            dim: D, number of principal directions, the rows of P, at most F.
        """
        if not 1 <= dim <= self.width:
            raise ValueError(
                f"principal: got {dim}, expected at least 1 and at most {self.width}, the number of features"
            )
        if dim not in self._spectra:
            directions = self.principal[:dim]
            values, vectors = eigenvectors(directions @ self.within @ directions.T)
            self._spectra[dim] = values.clamp(min=0), vectors @ directions
        values, axes = self._spectra[dim]
        return ((1 - shrinkage) * values + shrinkage * values.mean()).rsqrt()[:, None] * axes


def eigenvectors(covariance: Tensor) -> tuple[Tensor, Tensor]:
    """The eigenvalues (F,) of a covariance, descending, and its eigenvectors, one in each row.

    The entry of the largest size in each is positive, so that every machine returns the same ones.

    Example:
        >>> eigenvectors(torch.diag(torch.tensor([1.0, 3.0])))
        (tensor([3., 1.]), tensor([[0., 1.],
                [1., 0.]]))
    """
    values, columns = torch.linalg.eigh(covariance)
    rows = columns.T.flip(0)
    largest = rows.gather(1, rows.abs().argmax(1, keepdim=True))
    return values.flip(0), rows * largest.sign()
