"""Rank a gallery for every query: exactly, and in bounded memory."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from proxymetric.metrics.inputs import Labels, Vectors, as_labels, as_vectors, count_relevant
from proxymetric.metrics.knn.distances import SPACES, check_distance
from proxymetric.metrics.knn.duplicates import copies_before, distinct
from proxymetric.metrics.knn.search import Best, Searcher
from proxymetric.metrics.knn.ties import Settler
from proxymetric.precision import full_precision

CELLS = 2**22  # results put in a table at once


class Ranking(NamedTuple):
    """The first k results of Q queries, on the CPU. Queries without a relevant item are not in it."""

    hits: Tensor  # (Q, k) bool: this result is of the query's class
    relevant: Tensor  # (Q,) how many items of the query's class could be found
    neighbours: Tensor  # (Q, k) indices into the gallery, -1 where it has fewer than k items
    queries: Tensor  # (Q,) indices of the queries, ascending
    left_out: int  # queries without a relevant item


class Found(NamedTuple):
    """Results of some queries, on the device of the search."""

    queries: Tensor  # (n,)
    hits: Tensor  # (n, k)
    neighbours: Tensor  # (n, k), -1 beyond what was wanted
    relevant: Tensor  # (n,)


@dataclass(frozen=True)
class Search:
    """Checked inputs of a ranking."""

    vectors: Tensor  # (N, D)
    items: Tensor  # (G, D), the same tensor where nothing but the query itself is left out
    labels: Tensor  # (N,)
    item_labels: Tensor  # (G,)
    relevant: Tensor  # (N,)
    leave_one_out: bool
    distance: str
    block: int | None

    @property
    def candidates(self) -> int:
        """Items that can be found for a query."""
        return len(self.item_labels) - self.leave_one_out

    def run(self, wanted: Tensor, *, only_hits: bool = False) -> Iterator[Found]:
        """The first `expected` (N,) results of each query that has something to find, similar numbers together.

        only_hits: the hits are exact, but neighbours that are all hits or all misses may stand in another order.
        """
        wanted = torch.where(self.relevant > 0, wanted.clamp(max=self.candidates), 0)
        if not wanted.any():
            return
        with full_precision(self.vectors.device.type):
            steps = self._searcher(int(wanted.max()), only_hits).run(wanted)
        while True:
            # Not around the loop: between two results the precision is the caller's.
            with full_precision(self.vectors.device.type):
                best = next(steps, None)
            if best is None:
                return
            yield from self._tables(best)

    def _searcher(self, deepest: int, only_hits: bool = False) -> Searcher:
        groups = self._groups()
        space = SPACES[self.distance](self.vectors, self.items)
        listed = torch.arange(len(self.items), device=self.items.device)
        if groups is not None:
            # Of equal items only the first ones can be among the results; one more, as one may be the query itself.
            listed = listed[copies_before(groups[1]) <= deepest]
        itself = None
        if self.leave_one_out:
            itself = torch.full_like(self.labels, -1)
            itself[listed] = torch.arange(len(listed), device=listed.device)
        labels = (self.labels, self.item_labels) if only_hits else None
        return Searcher(space, Settler(space, groups, labels), listed, itself, self.block)

    def _groups(self) -> tuple[Tensor, Tensor] | None:
        """Numbers of the distinct rows of queries and items; None where all rows of each differ."""
        of_items = distinct(self.items)
        if self.leave_one_out:
            return None if of_items is None else (of_items, of_items)
        of_queries = distinct(self.vectors)
        if of_items is None and of_queries is None:
            return None
        of_all = (torch.arange(len(side), device=side.device) for side in (self.vectors, self.items))
        queries, items = (group if group is not None else each for group, each in zip((of_queries, of_items), of_all))
        return queries, items

    def _tables(self, best: Best) -> Iterator[Found]:
        """Results as tables, one for each power of two of their number."""
        width = int(best.counts.max()) if len(best.counts) else 0
        if 0 < width * len(best.counts) == len(best.items):
            neighbours = best.items.view(-1, width)
            hits = self.item_labels[neighbours] == self.labels[best.queries, None]
            yield Found(best.queries, hits, neighbours, self.relevant[best.queries])
            return
        ends = best.counts.cumsum(dim=0)
        power = torch.ceil(torch.log2(best.counts.double())).long()
        for each in power.unique().tolist():
            rows = (power == each).nonzero().flatten()
            width = int(best.counts[rows].max())
            place = torch.arange(width, device=rows.device)
            for some in rows.split(max(1, CELLS // width)):
                counts = best.counts[some, None]
                inside = place < counts
                flat = torch.where(inside, ends[some, None] - counts + place, 0)
                neighbours = torch.where(inside, best.items[flat], -1)
                queries = best.queries[some]
                hits = inside & (self.item_labels[neighbours] == self.labels[queries, None])
                yield Found(queries, hits, neighbours, self.relevant[queries])


def search(
    embeddings: Vectors,
    labels: Labels,
    gallery: Vectors | None,
    gallery_labels: Labels | None,
    distance: str,
    block: int | None,
    device: torch.device | str | None,
) -> Search:
    """Check the arguments of `rank` and `evaluate`."""
    check_distance(distance)
    if block is not None and (not isinstance(block, int) or block < 1):
        raise ValueError(f"block: got {block!r}, expected a number of queries from 1, or None to choose it")
    if (gallery is None) != (gallery_labels is None):
        missing = "gallery_labels" if gallery_labels is None else "gallery"
        raise ValueError(f"{missing}: got None, expected both gallery and gallery_labels, or neither")
    vectors = as_vectors("embeddings", embeddings, device)
    query_labels = as_labels("labels", labels, "embeddings", vectors)
    if gallery is None or gallery_labels is None:
        relevant = count_relevant(query_labels, query_labels) - 1
        return Search(vectors, vectors, query_labels, query_labels, relevant, True, distance, block)
    items = as_vectors("gallery", gallery, vectors.device)
    item_labels = as_labels("gallery_labels", gallery_labels, "gallery", items)
    if items.shape[1] != vectors.shape[1]:
        raise ValueError(f"gallery: got {items.shape[1]} dimensions, expected the {vectors.shape[1]} of the embeddings")
    relevant = count_relevant(query_labels, item_labels)
    return Search(vectors, items, query_labels, item_labels, relevant, False, distance, block)


def rank(
    embeddings: Vectors,
    labels: Labels,
    k: int | None = None,
    *,
    gallery: Vectors | None = None,
    gallery_labels: Labels | None = None,
    distance: str = "cosine",
    block: int | None = None,
    device: torch.device | str | None = None,
) -> Ranking:
    """The k nearest items of every query, nearest first; equal ones in the gallery's order.

    Without a gallery each embedding is a query against all the others (itself left out, by its index). With one, the
    embeddings are the queries and nothing is left out.

    The ranks are exact: those of the similarity of the numbers as they were given, computed without rounding and
    rounded once to float64; results equal then are ties. Float32 only screens, with a proven bound of its error.

    Args:
        embeddings: (N, D), any float or integer type; need not have unit length.
        labels: (N,) whole numbers.
        k: results expected, from 1; by default as many as the largest class can fill, which P@R and MAP@R need.
        gallery: (G, D), in the same space.
        gallery_labels: (G,).
        distance: "cosine" or "euclidean".
        block: queries ranked at once, for less memory and more time; by default chosen. It never changes the result.
        device: where to compute; by default where the embeddings are.

    >>> vectors = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.5, 0.5]])
    >>> ranking = rank(vectors, [0, 0, 1, 2], k=2)
    >>> ranking.neighbours
    tensor([[1, 3], [0, 3]])
    >>> ranking.queries.tolist(), ranking.left_out
    ([0, 1], 2)
    """
    if k is not None and (not isinstance(k, int) or k < 1):
        raise ValueError(f"k: got {k!r}, expected a number of results from 1, or None for the largest class")
    task = search(embeddings, labels, gallery, gallery_labels, distance, block, device)
    queries = (task.relevant > 0).nonzero().flatten().cpu()
    width = k or max(1, int(task.relevant.max()))
    neighbours = torch.full((len(queries), width), -1)
    hits = torch.zeros(len(queries), width, dtype=torch.bool)
    for found in task.run(torch.full_like(task.relevant, width)):
        rows = torch.searchsorted(queries, found.queries.cpu())
        neighbours[rows, : found.neighbours.shape[1]] = found.neighbours.cpu()
        hits[rows, : found.hits.shape[1]] = found.hits.cpu()
    left = len(task.labels) - len(queries)
    return Ranking(hits, task.relevant.cpu()[queries], neighbours, queries, left)


def left_out(labels: Labels, gallery_labels: Labels | None = None) -> int:
    """How many queries have no relevant item, and so no say in any metric.

    >>> left_out([0, 0, 1, 2, 2])
    1
    >>> left_out([0, 1, 3], gallery_labels=[0, 1, 2])
    1
    """
    queries = as_labels("labels", labels)
    items = queries if gallery_labels is None else as_labels("gallery_labels", gallery_labels)
    return int((count_relevant(queries, items) - int(gallery_labels is None) < 1).sum())
