"""Images that are far from every other image.

The similarities of all images with their nearest other picture have a median and a spread. An image is lonely if it
lies so far below the median that, among this many images, fewer than half an image would be expected there if the
similarities were normally distributed (Chauvenet's criterion). The spread is that of the lower half: the upper half is
wide where a set has many similar pictures, which says nothing about lonely ones.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

EXPECTED_BY_CHANCE = 0.5
"""how many images may be expected beyond the limit by chance (Chauvenet 1863)"""
MIN_IMAGES = 10
"""with fewer images a spread says too little, and none is lonely"""


class LonelyImage(NamedTuple):
    """An image far from every other.

    Attributes:
        row: the image.
        similarity: the cosine with the nearest other picture.
        nearest: that picture.
        similarity_of_label: the cosine with the nearest other picture of its label; NaN if there is none.
        nearest_of_label: that picture; -1 if there is none.
    """

    row: int
    similarity: float
    nearest: int
    similarity_of_label: float
    nearest_of_label: int


class LonelyImages(NamedTuple):
    """The list, loneliest first, and the similarity below which an image is lonely (NaN: too few images)."""

    listed: list[LonelyImage]
    limit: float


def find_lonely(vectors: Tensor, labels: Tensor, pictures: Tensor, nearest: Tensor) -> LonelyImages:
    """Find the images that are far from every other.

    Args:
        vectors: (N, D) of unit length.
        labels: (N,).
        pictures: (N,) the picture that each image shows; a copy is no company.
        nearest: (N, k) the nearest rows of each row, nearest first. An image of which all these are copies is not
            judged.

    Example:
        >>> angles, rows = torch.linspace(0.0, 1.0, 50).square(), torch.arange(50)
        >>> angles[7] = 3.0
        >>> vectors = torch.stack([angles.cos(), angles.sin()], dim=1)
        >>> nearest = (vectors @ vectors.T).fill_diagonal_(-1).argmax(dim=1, keepdim=True)
        >>> lonely = find_lonely(vectors, rows % 2, rows, nearest)
        >>> [each.row for each in lonely.listed]
        [7]
    """
    is_other = pictures[nearest] != pictures[:, None] if nearest.shape[1] else torch.zeros(len(labels), 0).bool()
    rows = is_other.any(dim=1).nonzero().flatten()
    if len(rows) < MIN_IMAGES:
        return LonelyImages([], float("nan"))
    companions = nearest[rows, is_other[rows].int().argmax(dim=1)]
    similarities = (vectors[rows] * vectors[companions]).sum(dim=1).double()
    limit = chauvenet_limit(similarities)
    order = similarities.argsort(stable=True)
    listed = []
    for place in order[similarities[order] < limit].tolist():
        row = int(rows[place])
        of_label = ((labels == labels[row]) & (pictures != pictures[row])).nonzero().flatten()
        cosines = vectors[of_label] @ vectors[row]
        best = int(cosines.argmax()) if len(of_label) else -1
        listed.append(
            LonelyImage(
                row,
                float(similarities[place]),
                int(companions[place]),
                float(cosines[best]) if len(of_label) else float("nan"),
                int(of_label[best]) if len(of_label) else -1,
            )
        )
    return LonelyImages(listed, limit)


def chauvenet_limit(values: Tensor) -> float:
    """The value below which fewer than half a value is expected, by the median and the spread of the lower half.

    Example:
        >>> round(chauvenet_limit(torch.randn(10_000, generator=torch.Generator().manual_seed(0))), 1)
        -3.9
    """
    median, low = torch.quantile(values.double(), torch.tensor([0.5, 0.158655], dtype=torch.float64)).tolist()
    deviations = torch.special.ndtri(torch.tensor(EXPECTED_BY_CHANCE / len(values), dtype=torch.float64))
    return median + float(deviations) * (median - low)
