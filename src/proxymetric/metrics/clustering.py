"""k-means for many clusters, and how well its clusters agree with the classes."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from proxymetric.arguments.vectors import Labels, Vectors, as_labels, as_vectors
from proxymetric.metrics.agreement import adjusted_mutual_information, mutual_information
from proxymetric.metrics.knn.distances import SPACES, Space, check_distance, row_slices
from proxymetric.system.precision import full_precision

MEMORY_BYTES = 64 * 2**20
"""memory of the distances that are computed at a time"""
MAX_SEEDING_ROUNDS = 128


class Clusters(NamedTuple):
    """The result of k-means, on the device of the embeddings."""

    assignment: Tensor
    """(N,) the number of each item's cluster"""
    inertia: float
    """mean squared distance of an item from its centre"""
    iterations: int


def kmeans(
    embeddings: Vectors,
    clusters: int,
    *,
    distance: str = "cosine",
    seed: int = 0,
    iterations: int = 25,
    tolerance: float = 1e-4,
    device: torch.device | str | None = None,
) -> Clusters:
    """Cluster embeddings by Lloyd's algorithm on all items, block by block.

    Minimises the sum over items of min over centres c of |x - c|^2. Up to 128 clusters are seeded by greedy k-means++:
    a few items are drawn with probability proportional to their squared distance from the centres so far, and the best
    of them becomes the next centre. More clusters are drawn in 128 rounds, the items of one round independently of each
    other, so that seeding costs at most as much as one iteration. An empty cluster moves to the item farthest from its
    centre. The algorithm stops when an iteration lowers the objective by less than the fraction `tolerance`. It
    computes in float32, sums centres in float64, and holds at most 64 MB of distances.

    Args:
        embeddings: (N, D).
        clusters: from 1 to the number of items.
        distance: "cosine" clusters unit vectors, "euclidean" the vectors as given.
        seed: seed of the random draws.
        iterations: the largest number of iterations, at least 1.
        tolerance: see above.
        device: where to compute; by default where the embeddings are.

    Returns:
        The cluster of each item, the mean squared distance, and the number of iterations.

    Example:
        >>> points = torch.tensor([[0.0, 0.0], [0.0, 1.0], [9.0, 9.0], [9.0, 8.0]])
        >>> cluster = kmeans(points, 2, distance="euclidean").assignment.tolist()
        >>> cluster[0] == cluster[1] != cluster[2] == cluster[3]
        True
    """
    check_distance(distance)
    vectors = as_vectors("embeddings", embeddings, device)
    if not isinstance(clusters, int) or not 1 <= clusters <= len(vectors):
        raise ValueError(f"clusters: got {clusters!r}, expected a whole number from 1 to the {len(vectors)} items")
    if iterations < 1:
        raise ValueError(f"iterations: got {iterations}, expected a number of at least 1")
    with full_precision(vectors.device.type):
        space = SPACES[distance](vectors, vectors)
        # The coarse rows are shifted and scaled, which changes no cluster.
        return _Lloyd(space, torch.Generator().manual_seed(seed)).run(clusters, iterations, tolerance)


class _Lloyd:
    """The state of one k-means run."""

    def __init__(self, space: Space, generator: torch.Generator) -> None:
        self.space, self.generator = space, generator
        self.count = len(space.items.vectors)
        self.device = space.items.vectors.device
        self.squared = torch.cat([self._rows(part).square().sum(dim=1) for part in row_slices(self.count, 512)])

    def run(self, clusters: int, iterations: int, tolerance: float) -> Clusters:
        centres = self._seeds(clusters)
        previous_total = math.inf
        iteration = 0
        while iteration < iterations:
            iteration += 1
            assignment, distances = self._assign(centres)
            total = float(distances.sum(dtype=torch.float64))
            if previous_total - total <= tolerance * previous_total and previous_total < math.inf:
                break
            previous_total = total
            centres = self._centres(assignment, distances, clusters)
        scale = self.space.scale * self.space.unit_of_rows
        return Clusters(assignment, total / self.count / scale**2, iteration)

    def _rows(self, index: slice | Tensor) -> Tensor:
        return self.space.coarse(self.space.items, index)

    def _assign(self, centres: Tensor) -> tuple[Tensor, Tensor]:
        """The nearest centre of each item (N,) and the squared distance from it."""
        assignment = torch.empty(self.count, dtype=torch.long, device=self.device)
        distances = torch.empty(self.count, device=self.device)
        half_squares = centres.square().sum(dim=1) / 2
        for part in row_slices(self.count, max(1, MEMORY_BYTES // (4 * len(centres)))):
            best, assignment[part] = (self._rows(part) @ centres.T).sub_(half_squares).max(dim=1)
            distances[part] = (self.squared[part] - 2 * best).clamp(min=0)
        return assignment, distances

    def _seeds(self, clusters: int) -> Tensor:
        """The rows (clusters, D) that the algorithm starts from."""
        seeds = torch.randint(self.count, (1,), generator=self.generator)
        distances = self._assign(self._rows(seeds.to(self.device)))[1]
        while len(seeds) < clusters:
            weights = distances.cpu().double()
            weights[seeds] = 0
            size = min(-(-clusters // MAX_SEEDING_ROUNDS), clusters - len(seeds))
            if int((weights > 0).sum()) < size:  # fewer distinct items than clusters: draw any others
                weights += 1e-30
                weights[seeds] = 0
            if clusters <= MAX_SEEDING_ROUNDS:
                trials = torch.multinomial(weights, 2 + int(math.log(clusters)), True, generator=self.generator)
                trial_distances = [
                    torch.minimum(distances, self._assign(self._rows(trial.to(self.device)))[1])
                    for trial in trials[:, None]
                ]
                best = min(
                    range(len(trial_distances)), key=lambda i: float(trial_distances[i].sum(dtype=torch.float64))
                )
                new_seeds, distances = trials[best : best + 1], trial_distances[best]
            else:
                new_seeds = torch.multinomial(weights, size, generator=self.generator)
                distances = torch.minimum(distances, self._assign(self._rows(new_seeds.to(self.device)))[1])
            seeds = torch.cat([seeds, new_seeds])
        return self._rows(seeds.to(self.device))

    def _centres(self, assignment: Tensor, distances: Tensor, clusters: int) -> Tensor:
        sums = torch.zeros(clusters, self.space.dim, dtype=torch.float64, device=self.device)
        for part in row_slices(self.count, 512):
            sums.index_add_(0, assignment[part], self._rows(part).double())
        sizes = torch.bincount(assignment, minlength=clusters)
        centres = (sums / sizes.clamp(min=1)[:, None]).float()
        empty_clusters = (sizes == 0).nonzero().flatten()
        if len(empty_clusters):
            centres[empty_clusters] = self._rows(distances.topk(len(empty_clusters)).indices)
        return centres


def nmi(
    embeddings: Vectors,
    labels: Labels,
    *,
    distance: str = "cosine",
    seed: int = 0,
    iterations: int = 25,
    device: torch.device | str | None = None,
) -> float:
    """Compute the normalised mutual information between the classes and an equal number of k-means clusters.

        NMI(U, V) = 2 I(U; V) / (H(U) + H(V))

    The value depends on the seed; report the seed in comparisons.

    Args:
        embeddings: (N, D).
        labels: (N,).
        distance: see `kmeans`.
        seed: see `kmeans`.
        iterations: see `kmeans`.
        device: where to compute; by default where the embeddings are.

    Example:
        >>> nmi(torch.eye(3)[[0, 0, 1, 1, 2, 2]], [0, 0, 1, 1, 2, 2])
        1.0
    """
    return mutual_information(labels, class_clusters(embeddings, labels, distance, seed, iterations, device))


def ami(
    embeddings: Vectors,
    labels: Labels,
    *,
    distance: str = "cosine",
    seed: int = 0,
    iterations: int = 25,
    device: torch.device | str | None = None,
) -> float:
    """Compute the adjusted mutual information between the classes and an equal number of k-means clusters.

        AMI(U, V) = (I(U; V) - E[I]) / ((H(U) + H(V)) / 2 - E[I])

    E[I] is the mean of the mutual information over all ways to draw clusters of the same sizes at random (Vinh et al.
    2010). So clusters drawn at random have an AMI of 0 on average; their NMI grows with the number of clusters.

    Args:
        embeddings: (N, D).
        labels: (N,).
        distance: see `kmeans`.
        seed: see `kmeans`.
        iterations: see `kmeans`.
        device: where to compute; by default where the embeddings are.

    Example:
        >>> ami(torch.eye(3)[[0, 0, 1, 1, 2, 2]], [0, 0, 1, 1, 2, 2])
        1.0
    """
    return adjusted_mutual_information(labels, class_clusters(embeddings, labels, distance, seed, iterations, device))


def class_clusters(
    embeddings: Vectors,
    labels: Labels,
    distance: str = "cosine",
    seed: int = 0,
    iterations: int = 25,
    device: torch.device | str | None = None,
) -> Tensor:
    """The k-means cluster (N,) of each item, with as many clusters as there are classes."""
    vectors = as_vectors("embeddings", embeddings, device)
    classes = as_labels("labels", labels, "embeddings", vectors)
    return kmeans(vectors, len(classes.unique()), distance=distance, seed=seed, iterations=iterations).assignment
