"""How wide classes are and how far apart: the geometry that the CCP paper reports beside MAP@R."""

from collections.abc import Iterator

import torch
from torch import Tensor

from proxymetric.metrics.inputs import Labels, Vectors, as_labels, as_vectors
from proxymetric.metrics.knn.distances import SPACES, Space, check_distance, parts
from proxymetric.precision import full_precision

NUMBERS = 2**22  # held at once
TILE = 1024


def covering_radius(
    embeddings: Vectors,
    labels: Labels,
    *,
    distance: str = "cosine",
    device: torch.device | str | None = None,
) -> float:
    """Average covering radius of the classes: how tightly few of its members cover a class.

        r_k(c) = max over members x of class c of min over k chosen members p of |x - p|
        mean over classes c of 1/n_c sum over k = 1..n_c of r_k(c)

    The best k members are not searched for (that is NP-hard): the first is the best single one, each further one is the
    member farthest from those chosen, which is at most twice as far as the optimum.

    Gürbüz et al., Deep Metric Learning with Chance Constraints, section V.

    Args:
        distance: "cosine": between unit vectors; "euclidean": between the vectors as they are.

    >>> line = torch.tensor([[0.0], [1.0], [2.0], [7.0]])
    >>> covering_radius(line, [0, 0, 0, 1], distance="euclidean")  # radii 1, 1, 0 and 0
    0.3333333333333333
    """
    space, classes = _prepared(embeddings, labels, distance, device)
    radii: list[Tensor] = []
    with full_precision(classes.device.type):
        for apart in _within_classes(space, classes):
            radii.append(_mean_radius(apart))
    return float(torch.cat(radii).mean()) / space.unit_of_rows


def inter_class_distance(
    embeddings: Vectors,
    labels: Labels,
    *,
    of: str = "items",
    distance: str = "cosine",
    device: torch.device | str | None = None,
) -> float:
    """Average distance between classes: over all pairs of items of different classes, or over pairs of class means.

    Args:
        of: "items" (the pairwise distances of the CCP paper) or "means".
        distance: "cosine": between unit vectors; "euclidean": between the vectors as they are.

    >>> line = torch.tensor([[0.0], [2.0], [7.0]])
    >>> inter_class_distance(line, [0, 0, 1], distance="euclidean")
    6.0
    """
    if of not in ("items", "means"):
        raise ValueError(f"of: got {of!r}, expected 'items' or 'means'")
    space, classes = _prepared(embeddings, labels, distance, device)
    count, sizes = len(classes), torch.bincount(classes)
    if len(sizes) < 2:
        raise ValueError("labels: got one class, expected at least two to measure between")
    with full_precision(classes.device.type):
        if of == "means":
            means = torch.zeros(len(sizes), space.dim, dtype=torch.float64, device=classes.device)
            for part in parts(count, TILE):
                means.index_add_(0, classes[part], space.rows(space.items, part))
            means /= sizes[:, None]
            total = sum(float(torch.cdist(means[part], means).sum()) for part in parts(len(means), TILE))
            return total / (len(means) * (len(means) - 1)) / space.unit_of_rows
        within = sum(float(apart.sum()) for apart in _within_classes(space, classes)) * space.scale
        pairs = count**2 - int(sizes.square().sum())
        return (_all_distances(space) - within) / pairs / (space.scale * space.unit_of_rows)


def _prepared(
    embeddings: Vectors, labels: Labels, distance: str, device: torch.device | str | None
) -> tuple[Space, Tensor]:
    check_distance(distance)
    vectors = as_vectors("embeddings", embeddings, device)
    classes = as_labels("labels", labels, "embeddings", vectors)
    with full_precision(vectors.device.type):
        return SPACES[distance](vectors, vectors), classes.unique(return_inverse=True)[1]


def _within_classes(space: Space, classes: Tensor) -> Iterator[Tensor]:
    """Distances (c, n, n) between the members of classes, c classes of one size n at a time."""
    sizes = torch.bincount(classes)
    members = classes.argsort(stable=True)
    starts = sizes.cumsum(dim=0) - sizes
    for size in sizes.unique().tolist():
        first = starts[sizes == size]
        for some in first.split(max(1, NUMBERS // (size * max(size, space.dim)))):
            index = members[some[:, None] + torch.arange(size, device=some.device)]
            rows = space.rows(space.items, index.flatten()).view(len(some), size, -1)
            rows = rows - rows.mean(dim=1, keepdim=True)
            apart = torch.cdist(rows, rows)
            apart.diagonal(dim1=1, dim2=2).zero_()
            yield apart


def _mean_radius(apart: Tensor) -> Tensor:
    """Mean over k of the k-center radius (c,) of classes with distances (c, n, n)."""
    each = torch.arange(len(apart), device=apart.device)
    chosen = apart.amax(dim=2).argmin(dim=1)
    nearest = apart[each, chosen]
    total = torch.zeros(len(apart), dtype=torch.float64, device=apart.device)
    for _ in range(apart.shape[1]):
        radius, chosen = nearest.max(dim=1)
        total += radius
        nearest = torch.minimum(nearest, apart[each, chosen])
    return total / apart.shape[1]


def _all_distances(space: Space) -> float:
    """Sum of the distances between all ordered pairs of items, in units of the space's products."""
    count = len(space.items.vectors)
    total = 0.0
    blocks = parts(count, TILE)
    for i, rows in enumerate(blocks):
        left = space.coarse(space.items, rows)
        for j, columns in enumerate(blocks[i:], start=i):
            right = left if i == j else space.coarse(space.items, columns)
            squared = left.square().sum(dim=1)[:, None] + right.square().sum(dim=1) - 2 * (left @ right.T)
            if i == j:
                squared.fill_diagonal_(0)
            part = squared.clamp_(min=0).sqrt_().sum(dtype=torch.float64)
            total += float(part) * (1 if i == j else 2)
    return total
