"""How a set of images is scored, the same in training, `evaluate`, MLRC, studies and reports.

Most sets are scored leave-one-out: each image is a query against all other images. A benchmark with two sides (In-Shop)
is scored queries against gallery. Only its test classes have these sides: a set that also holds its training classes is
scored leave-one-out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from proxymetric.arguments.signatures import did_you_mean
from proxymetric.core.normalisation import cut
from proxymetric.core.quantisation import KINDS, bytes_per_vector, rounded
from proxymetric.data import ImageSet
from proxymetric.metrics import Breakdown, Ranking, breakdown, evaluate, left_out, rank
from proxymetric.metrics.names import parse
from proxymetric.metrics.ranking import Search, search
from proxymetric.metrics.verification import too_few_pairs


class EmbeddedSet(NamedTuple):
    """The embeddings of the images of a set that could be read.

    Attributes:
        images: the whole set.
        vectors: (N, D) embeddings.
        kept: (N,) the index of each embedding's image in `images`.
        differs: a column of `images` whose value must differ between a query and its results; None: none.
    """

    images: ImageSet
    vectors: Tensor
    kept: np.ndarray
    differs: str | None = None

    @property
    def labels(self) -> Tensor:
        """(N,) the label of each embedding, on the CPU."""
        return torch.from_numpy(self.images.labels[self.kept])

    @property
    def gallery(self) -> Tensor | None:
        """(N,) bool, the embeddings that are searched; None for leave-one-out."""
        if self.images.gallery is None or self.is_divided:
            return None
        return torch.from_numpy(self.images.gallery[self.kept])

    @property
    def is_divided(self) -> bool:
        """Whether the set still holds training images, and with them classes that are not only for the test."""
        return bool(self.images.test_classes) or self.images.test_images is not None

    @property
    def distractors(self) -> Tensor | None:
        """(N,) bool, the embeddings that are found but are never queries; None: every embedding is a query."""
        if self.images.distractors is None or self.is_divided or self.gallery is not None:
            return None
        mask = torch.from_numpy(self.images.distractors[self.kept])
        return mask if mask.any() else None

    @property
    def has_sides(self) -> bool:
        """Whether some images are only queries or only found, or some results of a query do not count."""
        return self.gallery is not None or self.distractors is not None or self.differs is not None

    @property
    def query_rows(self) -> Tensor:
        """The rows of `vectors` that are queries."""
        gallery, distractors = self.gallery, self.distractors
        mask = gallery if gallery is not None else distractors
        return torch.arange(len(self.kept)) if mask is None else (~mask).nonzero().flatten()

    @property
    def item_rows(self) -> Tensor:
        """The rows of `vectors` that are searched."""
        gallery = self.gallery
        return torch.arange(len(self.kept)) if gallery is None else gallery.nonzero().flatten()

    def sides(self) -> dict[str, Any]:
        """The arguments of `metrics.evaluate`, `rank` and `breakdown` that say what is compared with what."""
        if self.gallery is None and self.distractors is None:
            return self.whole()
        numbers = self._numbers()
        queries, items, device = self.query_rows, self.item_rows, self.vectors.device
        sides = {
            "embeddings": self.vectors[queries.to(device)],
            "labels": self.labels[queries],
            "gallery": self.vectors[items.to(device)],
            "gallery_labels": self.labels[items],
        }
        if self.differs is None and self.gallery is not None:
            return sides
        return {**sides, "differs": numbers[queries], "gallery_differs": numbers[items]}

    def whole(self) -> dict[str, Any]:
        """Arguments of `metrics.evaluate` that compare every embedding with all others, distractors too."""
        differs = {} if self.differs is None else {"differs": self._numbers()}
        return {"embeddings": self.vectors, "labels": self.labels, **differs}

    def _numbers(self) -> Tensor:
        """(N,) equal numbers for embeddings that may not find each other: themselves, and those of one value.

        An image without a value differs from all others.
        """
        row_numbers = torch.arange(len(self.kept))
        if self.differs is None:
            return row_numbers
        known = self.images.columns
        if self.differs not in known:
            what = f"the columns {', '.join(known)}" if known else "no columns"
            raise ValueError(
                f"differs: got {self.differs!r}, but {self.images.name} has {what}; expected a column of a CSV file"
                f"{did_you_mean(self.differs, known)}"
            )
        values = known[self.differs][self.kept]
        numbers = torch.from_numpy(np.unique(values, return_inverse=True)[1].reshape(-1))
        return torch.where(torch.from_numpy(values == ""), len(values) + row_numbers, numbers)


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
    if embedded.distractors is None:
        return evaluate(**embedded.sides(), metrics=metrics, distance=distance)
    # Queries are in their own gallery: metrics of the whole set must not count them twice.
    whole = [name for name in metrics if parse(name).whole]
    of_queries = [name for name in metrics if name not in whole]
    values = evaluate(**embedded.sides(), metrics=of_queries, distance=distance) if of_queries else {}
    if whole:
        values |= evaluate(**embedded.whole(), metrics=whole, distance=distance)
    return {name: values[name] for name in metrics if name in values}


def score_sizes(
    embedded: EmbeddedSet, sizes: Sequence[int], metrics: Sequence[str], normalise: str, distance: str = "cosine"
) -> list[dict[str, Any]]:
    """Compute metrics of an embedded set whose vectors are cut to several sizes and stored as floats, bytes and bits.

    Args:
        embedded: the set with its normalised vectors.
        sizes: the dimensions.
        metrics: names, as for `metrics.evaluate`.
        normalise: how the cut vectors are normalised, a key of `core.normalisation.NORMALISATIONS`.
        distance: "cosine" or "euclidean".

    Returns:
        Records of `dim`, `vectors` (a kind of `search.quantisation`), `bytes` of a vector, and `scores`. Bits are
        scored alone, without re-ranking.

    Example:
        >>> images = ImageSet("dots", np.array([0, 0, 1, 1]), ["a", "b"], arrays=np.zeros((4, 8, 8), np.uint8))
        >>> vectors = torch.tensor([[0.1, 1.0, 0.0], [0.1, 0.9, 0.1], [0.1, 0.0, 1.0], [0.2, 0.6, 0.9]])
        >>> records = score_sizes(EmbeddedSet(images, vectors, np.arange(4)), [1, 3], ["R@1"], "l2")
        >>> [(each["dim"], each["vectors"], each["scores"]["R@1"]) for each in records][::3]
        [(1, 'float32', 0.5), (3, 'float32', 1.0)]
    """
    records = []
    for size in sizes:
        vectors = cut(embedded.vectors, size, normalise)
        for kind in KINDS:
            scores = score(embedded._replace(vectors=rounded(vectors, kind)), metrics, distance)
            records.append({"dim": size, "vectors": kind, "bytes": bytes_per_vector(kind, size), "scores": scores})
    return records


def size_rows(records: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """The records of `score_sizes` as rows of a table.

    Example:
        >>> size_rows([{"dim": 64, "vectors": "int8", "bytes": 64, "scores": {"R@1": 0.5}}])
        {'64 dimensions, int8, 64 bytes': {'R@1': 0.5}}
    """
    return {f"{each['dim']} dimensions, {each['vectors']}, {each['bytes']} bytes": each["scores"] for each in records}


def search_task(embedded: EmbeddedSet) -> Search:
    """What is compared with what in an embedded set, for metrics of pairs."""
    sides = embedded.sides() if embedded.distractors is None else embedded.whole()
    given = {"gallery": None, "gallery_labels": None, **sides}
    return search(**given, distance="cosine", block=None, device=None)


def queries_left_out(embedded: EmbeddedSet) -> int:
    """Count the queries that have nothing of their class to find; no metric includes them."""
    sides = embedded.sides()
    return left_out(sides["labels"], sides.get("gallery_labels"), sides.get("differs"), sides.get("gallery_differs"))


def equal_to_other_classes(embedded: EmbeddedSet) -> int:
    """Count the images whose vector is exactly that of an image of another class; their order decides what is nearest.

    Example:
        >>> from proxymetric.data import digits
        >>> images = digits()
        >>> images.labels[:4]
        array([0, 1, 2, 3])
        >>> vectors = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.6, 0.8]])
        >>> equal_to_other_classes(EmbeddedSet(images, vectors, np.arange(4)))
        2
    """
    vectors = np.ascontiguousarray(embedded.vectors.cpu().numpy())
    as_bytes = vectors.view(np.dtype((np.void, vectors.itemsize * vectors.shape[1]))).reshape(-1)
    groups = np.unique(as_bytes, return_inverse=True)[1].reshape(-1)
    labels = embedded.labels.numpy()
    pairs = np.unique(np.stack([groups, labels]), axis=1)
    classes_of_group = np.bincount(pairs[0], minlength=groups.max(initial=-1) + 1)
    return int((classes_of_group[groups] > 1).sum())


def rates_below_one_pair(embedded: EmbeddedSet, metrics: Sequence[str]) -> dict[str, str]:
    """A sentence for each FNMR@FMR=F that the set has too few pairs for, by metric; such a figure is left out."""
    rates = [parsed for name in metrics if (parsed := parse(name)).fmr]
    return too_few_pairs(search_task(embedded), rates) if rates else {}


def rank_set(embedded: EmbeddedSet, k: int) -> Ranking:
    """Rank an embedded set; queries and neighbours of the result are rows of `embedded.vectors`."""
    ranking = rank(**embedded.sides(), k=k)
    queries, items = embedded.query_rows, embedded.item_rows
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
    queries, items = embedded.query_rows, embedded.item_rows
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
    other = "" if embedded.differs is None else f", results of another {embedded.differs}"
    queries, items = len(embedded.query_rows), len(embedded.item_rows)
    if embedded.gallery is not None:
        return f"{queries} queries against a gallery of {items} images, {classes} classes{other}"
    if embedded.distractors is not None:
        return f"{queries} queries among {items} images, {classes} classes{other}"
    return f"{len(embedded.kept)} images of {classes} classes{other}"


def name_classes(kind: str, counts: Mapping[str, Any]) -> str:
    """Name classes with their numbers.

    Example:
        >>> name_classes("held-out", {"classes": 8, "images": 120})
        '8 held-out classes (120 images)'
    """
    return f"{counts['classes']} {kind} classes ({counts['images']} images)"


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
