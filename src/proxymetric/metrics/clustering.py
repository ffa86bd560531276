"""k-means that copes with many clusters, and how well clusters agree with classes."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from proxymetric.metrics.inputs import Labels, Vectors, as_labels, as_vectors
from proxymetric.metrics.knn.distances import SPACES, Space, check_distance, parts
from proxymetric.precision import full_precision

MEMORY = 64 * 2**20  # bytes of distances held at once
ROUNDS = 128  # of seeding


class Clusters(NamedTuple):
    """What k-means ended with, on the device of the embeddings."""

    assignment: Tensor  # (N,) number of each item's cluster
    inertia: float  # mean squared distance of an item from its centre
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
    """Lloyd's algorithm on all items (no mini-batches), blocks of items at a time.

    Minimises the sum over items of min over centres c of |x - c|^2. Up to 128 clusters are seeded by greedy k-means++:
    a few items are drawn with probability proportional to their squared distance from the centres so far, and the best
    becomes the next centre. More are drawn in 128 rounds, those of one round without regard to each other, so that
    seeding costs no more than one iteration. An empty cluster is put on the item farthest from its centre. Stops when
    an iteration lowers the objective by less than `tolerance` of it. Float32, centres summed in float64; 64 MB of
    distances at a time.

    Args:
        clusters: from 1 to the number of items.
        distance: "cosine": of unit vectors; "euclidean".
        iterations: at most so many.

    >>> points = torch.tensor([[0.0, 0.0], [0.0, 1.0], [9.0, 9.0], [9.0, 8.0]])
    >>> found = kmeans(points, 2, distance="euclidean").assignment.tolist()
    >>> found[0] == found[1] != found[2] == found[3]
    True
    """
    check_distance(distance)
    vectors = as_vectors("embeddings", embeddings, device)
    if not isinstance(clusters, int) or not 1 <= clusters <= len(vectors):
        raise ValueError(f"clusters: got {clusters!r}, expected from 1 to the {len(vectors)} items")
    if iterations < 1:
        raise ValueError(f"iterations: got {iterations}, expected from 1")
    with full_precision(vectors.device.type):
        space = SPACES[distance](vectors, vectors)
        # Up to a shift and a scale, which change no cluster.
        return _Lloyd(space, torch.Generator().manual_seed(seed)).run(clusters, iterations, tolerance)


class _Lloyd:
    def __init__(self, space: Space, generator: torch.Generator) -> None:
        self.space, self.generator = space, generator
        self.count = len(space.items.vectors)
        self.device = space.items.vectors.device
        self.squared = torch.cat([self._rows(part).square().sum(dim=1) for part in parts(self.count, 512)])

    def run(self, clusters: int, iterations: int, tolerance: float) -> Clusters:
        centres = self._seeds(clusters)
        before = math.inf
        number = 0
        while number < iterations:
            number += 1
            assignment, apart = self._assign(centres)
            total = float(apart.sum(dtype=torch.float64))
            if before - total <= tolerance * before and before < math.inf:
                break
            before = total
            centres = self._centres(assignment, apart, clusters)
        scale = self.space.scale * self.space.unit_of_rows
        return Clusters(assignment, total / self.count / scale**2, number)

    def _rows(self, index: slice | Tensor) -> Tensor:
        return self.space.coarse(self.space.items, index)

    def _assign(self, centres: Tensor) -> tuple[Tensor, Tensor]:
        """The nearest centre of each item (N,) and the squared distance from it."""
        assignment = torch.empty(self.count, dtype=torch.long, device=self.device)
        apart = torch.empty(self.count, device=self.device)
        half = centres.square().sum(dim=1) / 2
        for part in parts(self.count, max(1, MEMORY // (4 * len(centres)))):
            best, assignment[part] = (self._rows(part) @ centres.T).sub_(half).max(dim=1)
            apart[part] = (self.squared[part] - 2 * best).clamp(min=0)
        return assignment, apart

    def _seeds(self, clusters: int) -> Tensor:
        """Rows (clusters, D) to start from."""
        chosen = torch.randint(self.count, (1,), generator=self.generator)
        apart = self._assign(self._rows(chosen.to(self.device)))[1]
        while len(chosen) < clusters:
            weights = apart.cpu().double()
            weights[chosen] = 0
            size = min(-(-clusters // ROUNDS), clusters - len(chosen))
            if int((weights > 0).sum()) < size:  # fewer distinct items than clusters: any others will do
                weights += 1e-30
                weights[chosen] = 0
            if clusters <= ROUNDS:
                trials = torch.multinomial(weights, 2 + int(math.log(clusters)), True, generator=self.generator)
                after = [
                    torch.minimum(apart, self._assign(self._rows(each.to(self.device)))[1]) for each in trials[:, None]
                ]
                best = min(range(len(after)), key=lambda i: float(after[i].sum(dtype=torch.float64)))
                new, apart = trials[best : best + 1], after[best]
            else:
                new = torch.multinomial(weights, size, generator=self.generator)
                apart = torch.minimum(apart, self._assign(self._rows(new.to(self.device)))[1])
            chosen = torch.cat([chosen, new])
        return self._rows(chosen.to(self.device))

    def _centres(self, assignment: Tensor, apart: Tensor, clusters: int) -> Tensor:
        sums = torch.zeros(clusters, self.space.dim, dtype=torch.float64, device=self.device)
        for part in parts(self.count, 512):
            sums.index_add_(0, assignment[part], self._rows(part).double())
        sizes = torch.bincount(assignment, minlength=clusters)
        centres = (sums / sizes.clamp(min=1)[:, None]).float()
        empty = (sizes == 0).nonzero().flatten()
        if len(empty):
            centres[empty] = self._rows(apart.topk(len(empty)).indices)
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
    """Normalised mutual information between classes and as many clusters, found by `kmeans`.

        NMI(U, V) = 2 I(U; V) / (H(U) + H(V))

    It depends on the seed; say which when comparing.

    >>> nmi(torch.eye(3)[[0, 0, 1, 1, 2, 2]], [0, 0, 1, 1, 2, 2])
    1.0
    """
    vectors = as_vectors("embeddings", embeddings, device)
    classes = as_labels("labels", labels, "embeddings", vectors)
    found = kmeans(vectors, len(classes.unique()), distance=distance, seed=seed, iterations=iterations)
    return mutual_information(classes, found.assignment)


def mutual_information(a: Labels, b: Labels) -> float:
    """Normalised mutual information 2 I(a; b) / (H(a) + H(b)) of two labellings (N,); 1 where both have one label.

    >>> mutual_information([0, 0, 1, 1], [5, 5, 7, 7])
    1.0
    >>> round(mutual_information([0, 0, 1, 1], [0, 1, 0, 1]), 6)
    0.0
    """
    first, second = as_labels("a", a), as_labels("b", b)
    if len(first) != len(second):
        raise ValueError(f"b: got {len(second)} labels, expected the {len(first)} of a")
    one, other = (each.unique(return_inverse=True)[1] for each in (first, second.to(first.device)))
    both = (one * (int(other.max()) + 1) + other).unique(return_counts=True)[1]
    parts_of = (torch.bincount(one), torch.bincount(other), both)
    h_one, h_other, h_both = (_entropy(counts.double() / len(one)) for counts in parts_of)
    if h_one + h_other == 0:
        return 1.0
    return min(1.0, max(0.0, 2 * (h_one + h_other - h_both) / (h_one + h_other)))


def _entropy(shares: Tensor) -> float:
    return float(-(shares * shares.log()).sum()) + 0.0
