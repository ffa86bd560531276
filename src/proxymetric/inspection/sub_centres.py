"""Images at minor centres of their class, after training with several centres a class (sub-centre ArcFace)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from proxymetric.core.batch_inputs import as_class_numbers, check_embeddings
from proxymetric.core.capabilities import ClassProxies, HasClassProxies
from proxymetric.core.normalisation import unit

ROWS = 1024
"""images compared with their centres at a time"""


class SubCentres(NamedTuple):
    """The centres of N images of C classes with K centres each.

    Attributes:
        nearest: (N,) the nearest centre of each image's class, from 0 to K - 1.
        dominant: (C,) the centre of each class that is nearest to most of its images, the first of equal ones; -1 for
            a class without images.
        degrees: (N,) the angle between each image and the dominant centre of its class.
        labels: (N,) the class of each image.
    """

    nearest: Tensor
    dominant: Tensor
    degrees: Tensor
    labels: Tensor

    @property
    def minor(self) -> Tensor:
        """The images whose nearest centre is not the dominant one, those farthest from the dominant one first."""
        return self._farthest_first(self.nearest != self.dominant[self.labels])

    def beyond(self, degrees: float = 75.0) -> Tensor:
        """The images farther than this angle from the dominant centre of their class, farthest first.

        Args:
            degrees: 75 in the paper (Deng et al. 2020, Section 3.3), which drops these images and trains again.
        """
        return self._farthest_first(self.degrees > degrees)

    def _farthest_first(self, is_listed: Tensor) -> Tensor:
        rows = is_listed.nonzero().flatten()
        return rows[self.degrees[rows].argsort(descending=True, stable=True)]


@torch.no_grad()
def sub_centres(embeddings: Tensor, labels: Tensor | np.ndarray | Sequence[int], criterion: nn.Module) -> SubCentres:
    """Assign each training image to a centre of its class, and find the dominant centre of each class.

    Args:
        embeddings: (N, D) of the training images, from the trained encoder; they need not have unit length.
        labels: (N,) class numbers, as in training; a tensor, an array or a list.
        criterion: the trained criterion; any method with several proxies a class.

    Returns:
        The nearest and the dominant centres; `minor` and `beyond` list the outliers.

    Raises:
        ValueError: the method has no proxies or a single one for each class, or the vectors do not fit them.

    Example:
        >>> import proxymetric as pm
        >>> criterion = pm.method("subcentre-arcface", classes=1, dim=2, per_class=2)
        >>> _ = criterion.objective.source.vectors.data.copy_(torch.eye(2))
        >>> centres = sub_centres(torch.tensor([[1.0, 0.1], [1.0, 0.0], [0.1, 1.0]]), torch.zeros(3).long(), criterion)
        >>> centres.minor, centres.degrees.round()
        (tensor([2]), tensor([ 6.,  0., 84.]))
    """
    centres, classes, per_class = _centres(criterion)
    check_embeddings(embeddings, centres.shape[1])
    labels = as_class_numbers(labels, embeddings).to(embeddings.device)
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise ValueError(f"labels: got {int(labels.min())} to {int(labels.max())}, expected 0 to {classes - 1}")
    by_class = unit(centres.to(embeddings)).view(classes, per_class, -1)
    parts = zip(embeddings.split(ROWS), labels.split(ROWS), strict=True)
    parts_of_cosines = [torch.einsum("nd,nkd->nk", unit(rows), by_class[part_labels]) for rows, part_labels in parts]
    cosines = torch.cat(parts_of_cosines) if parts_of_cosines else embeddings.new_empty(0, per_class)
    nearest = cosines.argmax(dim=1)
    counts = torch.bincount(labels * per_class + nearest, minlength=classes * per_class).view(classes, per_class)
    dominant = counts.argmax(dim=1).where(counts.sum(dim=1) > 0, -1)
    to_dominant = cosines.gather(1, dominant[labels, None]).squeeze(1)
    return SubCentres(nearest, dominant, to_dominant.clamp(-1, 1).arccos().rad2deg(), labels)


def _centres(criterion: nn.Module) -> tuple[Tensor, int, int]:
    """The centres (C K, D), C and K."""
    proxies: list[ClassProxies] = [
        module.class_proxies() for module in criterion.modules() if isinstance(module, HasClassProxies)
    ]
    if len(proxies) != 1:
        raise ValueError(f"criterion: got {len(proxies)} sets of proxies, expected a method with proxies")
    classes = int(proxies[0].labels.max()) + 1
    per_class = len(proxies[0].labels) // classes
    if per_class < 2:
        raise ValueError(
            "criterion: got one proxy for each class, expected several: per_class=3 of subcentre-arcface, soft-triple "
            "or mpa"
        )
    return proxies[0].vectors, classes, per_class
