"""Images that show the same picture: found among neighbours, confirmed by their pixels, and grouped."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from proxymetric.inspection.pixels import agreement
from proxymetric.metrics import rank

NEIGHBOURS = 10
"""nearest images of each image whose pixels are compared with its own"""
MIN_CORRELATION, MIN_DETAIL = 0.95, 0.88
"""how well grey values, and details, of aligned pictures must correlate to be the same picture. On the training half of
CUB, copies that were compressed, scaled or cut by up to 5 % a side reached 0.952 and 0.882, and two photographs of one
bird 0.925; on Cars196, two cars of one shape on white reached 0.976, but 0.867 in details"""


class Copy(NamedTuple):
    """A pair of images that show the same picture.

    Attributes:
        first: row of an image.
        second: row of another image.
        kind: "same file" (equal bytes), "same picture" or "mirrored".
        similarity: the cosine of their vectors.
        correlation: of their aligned grey values.
    """

    first: int
    second: int
    kind: str
    similarity: float
    correlation: float


class DuplicateGroup(NamedTuple):
    """Images that show the same picture: each is a copy of another one of the group.

    Attributes:
        rows: the images, ascending.
        copies: the pairs that were found.
        two_labels: whether the images have different labels.
    """

    rows: list[int]
    copies: list[Copy]
    two_labels: bool


def nearest_images(vectors: Tensor, digests: Sequence[str]) -> Tensor:
    """The NEIGHBOURS nearest rows (N, k) of each row, nearest first; a file equal to the image's own is left out.

    The search is exact and takes the rows in blocks.

    Args:
        vectors: (N, D).
        digests: N digests of files; of equal files only the first can be a neighbour.

    Example:
        >>> nearest_images(torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.9, 0.1], [0.0, 1.0]]), ["a", "a", "b", "c"])
        tensor([[2, 3],
                [2, 3],
                [0, 3],
                [2, 0]])
    """
    firsts, group = _distinct(digests)
    if len(firsts) < 2:
        return torch.empty(len(vectors), 0, dtype=torch.long)
    distinct = vectors[firsts]
    k = min(NEIGHBOURS, len(firsts) - 1)
    neighbours = rank(distinct, torch.zeros(len(firsts), dtype=torch.long), k=k).neighbours
    return firsts[neighbours][group]


def find_duplicates(
    vectors: Tensor, copies: Tensor, digests: Sequence[str], labels: Tensor, nearest: Tensor
) -> list[DuplicateGroup]:
    """Find the images that show the same picture.

    Args:
        vectors: (N, D) of unit length.
        copies: (N, S, S) grey copies, see `pixels.grey_copy`.
        digests: N digests of the files.
        labels: (N,).
        nearest: (N, k), see `nearest_images`.

    Returns:
        The groups: first those with two labels, then the larger ones, then in the order of the images.

    Example:
        >>> from proxymetric.inspection.pixels import SIDE
        >>> picture = (torch.arange(SIDE**2) % 251).reshape(1, SIDE, SIDE)
        >>> pictures = torch.cat([picture, picture, picture.flip(2), picture.transpose(1, 2)]).byte()
        >>> vectors, digests = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.8, 0.6], [0.6, 0.8]]), ["a", "a", "b", "c"]
        >>> nearest = nearest_images(vectors, digests)
        >>> [group] = find_duplicates(vectors, pictures, digests, torch.tensor([0, 1, 1, 1]), nearest)
        >>> group.rows, group.two_labels, [copy.kind for copy in group.copies]
        ([0, 1, 2], True, ['same file', 'mirrored'])
    """
    firsts, group = _distinct(digests)
    pairs = [
        Copy(int(firsts[group[row]]), row, "same file", 1.0, 1.0)
        for row in range(len(digests))
        if int(firsts[group[row]]) != row
    ]
    first, second = firsts[:, None].expand(-1, nearest.shape[1]).flatten(), nearest[firsts].flatten()
    low, high = torch.minimum(first, second), torch.maximum(first, second)
    if len(low):
        low, high = torch.stack([low, high], dim=1).unique(dim=0).T
    agreements = agreement(copies, low, high)
    is_same = (agreements.correlation >= MIN_CORRELATION) & (agreements.detail >= MIN_DETAIL)
    for i in is_same.nonzero().flatten().tolist():
        a, b = int(low[i]), int(high[i])
        kind = "mirrored" if agreements.mirrored[i] else "same picture"
        pairs.append(Copy(a, b, kind, float(vectors[a] @ vectors[b]), float(agreements.correlation[i])))
    groups = _components(pairs, labels)
    return sorted(groups, key=lambda each: (not each.two_labels, -len(each.rows), each.rows))


def picture_of_rows(count: int, groups: Sequence[DuplicateGroup]) -> Tensor:
    """(count,) the picture that each row shows: the first row of its group, or the row itself.

    Example:
        >>> picture_of_rows(4, [DuplicateGroup([1, 3], [], False)])
        tensor([0, 1, 2, 1])
    """
    pictures = torch.arange(count)
    for group in groups:
        pictures[group.rows] = group.rows[0]
    return pictures


def _distinct(digests: Sequence[str]) -> tuple[Tensor, Tensor]:
    """The first row of each distinct digest, and for every row the number of its digest."""
    numbers: dict[str, int] = {}
    group = [numbers.setdefault(digest, len(numbers)) for digest in digests]
    firsts: dict[int, int] = {}
    for row, number in enumerate(group):
        firsts.setdefault(number, row)
    return torch.tensor(list(firsts.values()), dtype=torch.long), torch.tensor(group, dtype=torch.long)


def _components(pairs: Sequence[Copy], labels: Tensor) -> list[DuplicateGroup]:
    """The connected components of the pairs."""
    parent: dict[int, int] = {}

    def root(row: int) -> int:
        parent.setdefault(row, row)
        while parent[row] != row:
            parent[row] = parent[parent[row]]
            row = parent[row]
        return row

    for pair in pairs:
        low, high = sorted((root(pair.first), root(pair.second)))
        parent[high] = low
    copies_by_root: dict[int, list[Copy]] = defaultdict(list)
    for pair in pairs:
        copies_by_root[root(pair.first)].append(pair)
    groups = []
    for copies in copies_by_root.values():
        rows = sorted({row for pair in copies for row in (pair.first, pair.second)})
        groups.append(DuplicateGroup(rows, copies, len(labels[rows].unique()) > 1))
    return groups
