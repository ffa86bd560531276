"""The width of classes and the distance between them, as the CCP paper reports them."""

from collections.abc import Iterator

import torch
from torch import Tensor

from proxymetric.arguments.signatures import one_of
from proxymetric.arguments.vectors import Labels, Vectors, as_labels, as_vectors
from proxymetric.metrics.knn.distances import SPACES, Space, check_distance, row_slices
from proxymetric.system.precision import full_precision

MAX_NUMBERS = 2**22
"""maximum number of tensor entries in memory at a time"""
TILE_ROWS = 1024


def covering_radius(
    embeddings: Vectors,
    labels: Labels,
    *,
    distance: str = "cosine",
    device: torch.device | str | None = None,
) -> float:
    """Compute the average covering radius of the classes: how closely a few members cover each class.

        r_k(c) = max over members x of class c of min over k chosen members p of |x - p|
        mean over classes c of 1/n_c sum over k = 1..n_c of r_k(c)

    Finding the best k members is NP-hard. Instead, the first chosen member is the best single one, and each further one
    is the member farthest from those already chosen. The resulting radius is at most twice the optimum.

    Gürbüz et al., Deep Metric Learning with Chance Constraints, section V.

    Args:
        embeddings: (N, D).
        labels: (N,).
        distance: "cosine" measures between unit vectors, "euclidean" between the vectors as given.
        device: where to compute; by default where the embeddings are.

    Example:
        >>> line = torch.tensor([[0.0], [1.0], [2.0], [7.0]])
        >>> covering_radius(line, [0, 0, 0, 1], distance="euclidean")  # radii 1, 1, 0 and 0
        0.3333333333333333
    """
    space, classes = _prepare(embeddings, labels, distance, device)
    radii: list[Tensor] = []
    with full_precision(classes.device.type):
        for distances in _within_classes(space, classes):
            radii.append(_mean_radius(distances))
    return float(torch.cat(radii).mean()) / space.unit_of_rows


def inter_class_distance(
    embeddings: Vectors,
    labels: Labels,
    *,
    of: str = "items",
    distance: str = "cosine",
    device: torch.device | str | None = None,
) -> float:
    """Compute the average distance between classes.

    Args:
        embeddings: (N, D).
        labels: (N,) with at least two classes.
        of: "items" averages over all pairs of items of different classes, as in the CCP paper; "means" over all pairs
            of class means.
        distance: "cosine" measures between unit vectors, "euclidean" between the vectors as given.
        device: where to compute; by default where the embeddings are.

    Example:
        >>> line = torch.tensor([[0.0], [2.0], [7.0]])
        >>> inter_class_distance(line, [0, 0, 1], distance="euclidean")
        6.0
    """
    one_of("of", of, ("items", "means"))
    space, classes = _prepare(embeddings, labels, distance, device)
    count, sizes = len(classes), torch.bincount(classes)
    if len(sizes) < 2:
        raise ValueError("labels: got one class, expected at least two")
    with full_precision(classes.device.type):
        if of == "means":
            means = torch.zeros(len(sizes), space.dim, dtype=torch.float64, device=classes.device)
            for part in row_slices(count, TILE_ROWS):
                means.index_add_(0, classes[part], space.rows(space.items, part))
            means /= sizes[:, None]
            total = sum(float(torch.cdist(means[part], means).sum()) for part in row_slices(len(means), TILE_ROWS))
            return total / (len(means) * (len(means) - 1)) / space.unit_of_rows
        sum_within_classes = sum(float(distances.sum()) for distances in _within_classes(space, classes)) * space.scale
        pairs = count**2 - int(sizes.square().sum())
        return (_all_distances(space) - sum_within_classes) / pairs / (space.scale * space.unit_of_rows)


def _prepare(
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
        starts_of_size = starts[sizes == size]
        for class_starts in starts_of_size.split(max(1, MAX_NUMBERS // (size * max(size, space.dim)))):
            index = members[class_starts[:, None] + torch.arange(size, device=class_starts.device)]
            rows = space.rows(space.items, index.flatten()).view(len(class_starts), size, -1)
            rows = rows - rows.mean(dim=1, keepdim=True)
            distances = torch.cdist(rows, rows)
            distances.diagonal(dim1=1, dim2=2).zero_()
            yield distances


def _mean_radius(distances: Tensor) -> Tensor:
    """The mean over k of the k-centre radius (c,) of classes with distances (c, n, n)."""
    class_rows = torch.arange(len(distances), device=distances.device)
    chosen_members = distances.amax(dim=2).argmin(dim=1)
    nearest = distances[class_rows, chosen_members]
    total = torch.zeros(len(distances), dtype=torch.float64, device=distances.device)
    for _ in range(distances.shape[1]):
        radius, chosen_members = nearest.max(dim=1)
        total += radius
        nearest = torch.minimum(nearest, distances[class_rows, chosen_members])
    return total / distances.shape[1]


def _all_distances(space: Space) -> float:
    """The sum of the distances between all ordered pairs of items, in units of the space's products."""
    count = len(space.items.vectors)
    total = 0.0
    blocks = row_slices(count, TILE_ROWS)
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
