"""How a set of images is scored, the same in training, `evaluate`, MLRC, studies and reports.

Most sets are scored leave-one-out: each image is a query against all other images. A benchmark with two sides (In-Shop)
is scored queries against gallery. Only its test classes have these sides: a set that also holds its training classes is
scored leave-one-out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from proxymetric.data import ImageSet
from proxymetric.metrics import Breakdown, Ranking, breakdown, evaluate, left_out, rank
from proxymetric.metrics.ranking import Search, search


class EmbeddedSet(NamedTuple):
    """The embeddings of the images of a set that could be read.

    Attributes:
        images: the whole set.
        vectors: (N, D) embeddings.
        kept: (N,) the index of each embedding's image in `images`.
    """

    images: ImageSet
    vectors: Tensor
    kept: np.ndarray

    @property
    def labels(self) -> Tensor:
        """(N,) the label of each embedding, on the CPU."""
        return torch.from_numpy(self.images.labels[self.kept])

    @property
    def gallery(self) -> Tensor | None:
        """(N,) bool, the embeddings that are searched; None for leave-one-out."""
        if self.images.gallery is None or self.images.test_classes or self.images.test_images is not None:
            return None
        return torch.from_numpy(self.images.gallery[self.kept])

    def sides(self) -> dict[str, Any]:
        """The arguments of `metrics.evaluate`, `rank` and `breakdown` that say what is compared with what."""
        gallery = self.gallery
        if gallery is None:
            return {"embeddings": self.vectors, "labels": self.labels}
        rows = gallery.to(self.vectors.device)
        return {
            "embeddings": self.vectors[~rows],
            "labels": self.labels[~gallery],
            "gallery": self.vectors[rows],
            "gallery_labels": self.labels[gallery],
        }


def score(embedded: EmbeddedSet, metrics: Sequence[str], distance: str = "cosine") -> dict[str, float]:
    """Compute metrics of an embedded set.

    Args:
        embedded: the set.
        metrics: names, as for `metrics.evaluate`.
        distance: "cosine" or "euclidean".

    Returns:
        The metrics by name, as fractions.

    Example:
        >>> images = ImageSet("dots", np.array([0, 0, 1, 1]), ["a", "b"], arrays=np.zeros((4, 8, 8), np.uint8))
        >>> vectors = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.6, 0.5]])
        >>> score(EmbeddedSet(images, vectors, np.arange(4)), ["R@1"])
        {'R@1': 0.75}
    """
    return evaluate(**embedded.sides(), metrics=metrics, distance=distance)


def search_task(embedded: EmbeddedSet) -> Search:
    """What is compared with what in an embedded set, for metrics of pairs."""
    sides = embedded.sides()
    return search(
        sides["embeddings"], sides["labels"], sides.get("gallery"), sides.get("gallery_labels"), "cosine", None, None
    )


def queries_left_out(embedded: EmbeddedSet) -> int:
    """Count the queries that have nothing of their class to find; no metric includes them."""
    sides = embedded.sides()
    return left_out(sides["labels"], sides.get("gallery_labels"))


def rank_set(embedded: EmbeddedSet, k: int) -> Ranking:
    """Rank an embedded set; queries and neighbours of the result are rows of `embedded.vectors`."""
    ranking = rank(**embedded.sides(), k=k)
    gallery = embedded.gallery
    if gallery is None:
        return ranking
    queries, items = (side.nonzero().flatten() for side in (~gallery, gallery))
    is_result = ranking.neighbours >= 0
    neighbours = torch.where(is_result, items[ranking.neighbours.clamp(min=0)], ranking.neighbours)
    return ranking._replace(queries=queries[ranking.queries], neighbours=neighbours)


def break_down(embedded: EmbeddedSet, worst: int, pairs: int) -> Breakdown:
    """Break the score of an embedded set down; `queries` and `worst[i].query` are rows of `embedded.vectors`.

    Args:
        embedded: the set.
        worst: how many of the worst queries are listed.
        pairs: how many pairs of confused classes are listed.
    """
    parts = breakdown(**embedded.sides(), worst=worst, pairs=pairs)
    gallery = embedded.gallery
    if gallery is None:
        return parts
    queries, items = (side.nonzero().flatten() for side in (~gallery, gallery))
    bad_queries = [
        query._replace(
            query=int(queries[query.query]), neighbours=[int(items[i]) if i >= 0 else i for i in query.neighbours]
        )
        for query in parts.worst
    ]
    return Breakdown(queries[parts.queries], parts.scores, parts.classes, bad_queries, parts.confused)


def describe(embedded: EmbeddedSet) -> str:
    """Say how many images of how many classes are scored, and how."""
    classes = len(np.unique(embedded.images.labels[embedded.kept]))
    gallery = embedded.gallery
    if gallery is None:
        return f"{len(embedded.kept)} images of {classes} classes"
    return f"{int((~gallery).sum())} queries against a gallery of {int(gallery.sum())} images, {classes} classes"


def images_per_class(embedded: EmbeddedSet) -> str:
    """Say how many images the classes of a set have.

    Example:
        >>> images = ImageSet("dots", np.array([0, 0, 1, 1, 1]), ["a", "b"], arrays=np.zeros((5, 8, 8), np.uint8))
        >>> images_per_class(EmbeddedSet(images, torch.zeros(5, 2), np.arange(5)))
        '2 to 3, median 2.5'
    """
    counts = np.unique(embedded.images.labels[embedded.kept], return_counts=True)[1]
    low, high = int(counts.min()), int(counts.max())
    return f"{low}" if low == high else f"{low} to {high}, median {float(np.median(counts)):g}"
