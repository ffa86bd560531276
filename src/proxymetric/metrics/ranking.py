"""Rank the items of a gallery for every query, exactly and in bounded memory."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from proxymetric.arguments.vectors import Labels, Vectors, as_labels, as_vectors, count_relevant, number_texts
from proxymetric.metrics.knn.distances import SPACES, check_distance
from proxymetric.metrics.knn.duplicates import copies_before, distinct
from proxymetric.metrics.knn.search import Searcher, TopItems
from proxymetric.metrics.knn.ties import TieBreaker
from proxymetric.system.precision import full_precision

MAX_CELLS = 2**22
"""the largest number of cells of a `ResultTable`"""


class Ranking(NamedTuple):
    """The first k results of Q queries, on the CPU. Queries without a relevant item are left out.

    Attributes:
        hits: (Q, k) bool: the result has the query's class.
        relevant: (Q,) the number of items of the query's class that can be found.
        neighbours: (Q, k) indices into the gallery, -1 beyond its end.
        queries: (Q,) indices of the queries, ascending.
        left_out: the number of queries without a relevant item.
    """

    hits: Tensor
    relevant: Tensor
    neighbours: Tensor
    queries: Tensor
    left_out: int


class ResultTable(NamedTuple):
    """The results of n queries, on the device of the search.

    Attributes:
        queries: (n,) indices of the queries.
        hits: (n, k) bool: the result has the query's class.
        neighbours: (n, k) indices into the gallery, -1 beyond the depth of the query.
        relevant: (n,) the number of relevant items.
    """

    queries: Tensor
    hits: Tensor
    neighbours: Tensor
    relevant: Tensor


@dataclass(frozen=True)
class Search:
    """The checked inputs of a ranking.

    Attributes:
        vectors: (N, D) the queries.
        items: (G, D); the same tensor as `vectors` without a gallery.
        labels: (N,).
        item_labels: (G,).
        relevant: (N,) the number of relevant items of each query.
        leave_one_out: whether there is no gallery, so that each query is compared with all other queries.
        distance: "cosine" or "euclidean".
        block: queries ranked at a time; None: chosen by the search.
        differs: (N,) and (G,) numbers; items with the number of a query are left out of its ranking. None: all count.
    """

    vectors: Tensor
    items: Tensor
    labels: Tensor
    item_labels: Tensor
    relevant: Tensor
    leave_one_out: bool
    distance: str
    block: int | None
    differs: tuple[Tensor, Tensor] | None = None

    @property
    def candidates(self) -> int:
        """The number of items that a query can find."""
        return len(self.item_labels) - self.leave_one_out

    def run(self, depths: Tensor, *, only_hits: bool = False) -> Iterator[ResultTable]:
        """Yield the first results of each query that has a relevant item; queries of similar depth share a table.

        Args:
            depths: (N,) the number of results of each query.
            only_hits: whether only `hits` must be exact. Adjacent neighbours that are all hits, or all misses, may then
                be in another order.
        """
        if self.differs is not None:
            yield from self._run_among_others(depths, self.differs, only_hits)
            return
        depths = torch.where(self.relevant > 0, depths.clamp(max=self.candidates), 0)
        if not depths.any():
            return
        with full_precision(self.vectors.device.type):
            steps = self._searcher(int(depths.max()), only_hits).run(depths)
        while True:
            # Full precision is set for each step only: the caller's code between the steps keeps its own setting.
            with full_precision(self.vectors.device.type):
                top_items = next(steps, None)
            if top_items is None:
                return
            yield from self._tables(top_items)

    def _run_among_others(
        self, depths: Tensor, differs: tuple[Tensor, Tensor], only_hits: bool
    ) -> Iterator[ResultTable]:
        """The same as `run`, without the items that have a query's number.

        A ranking that is longer by the number of those items holds the first results without them: it is ranked by the
        same exact search, and the items are taken out.
        """
        query_values, item_values = differs
        excluded = count_relevant(query_values, item_values) - int(self.leave_one_out)
        depths = torch.minimum(depths, self.candidates - excluded).clamp(min=0)
        longer = torch.where(depths > 0, depths + excluded, 0)
        for table in replace(self, differs=None).run(longer, only_hits=only_hits):
            counts = depths[table.queries, None]
            stays = (table.neighbours >= 0) & (item_values[table.neighbours] != query_values[table.queries, None])
            order = (~stays).long().sort(dim=1, stable=True).indices[:, : int(counts.max())]
            is_result = torch.arange(order.shape[1], device=order.device) < counts
            neighbours = torch.where(is_result, table.neighbours.gather(1, order), -1)
            yield table._replace(hits=table.hits.gather(1, order) & is_result, neighbours=neighbours)

    def _searcher(self, deepest: int, only_hits: bool = False) -> Searcher:
        groups = self._groups()
        space = SPACES[self.distance](self.vectors, self.items)
        listed_items = torch.arange(len(self.items), device=self.items.device)
        if groups is not None:
            # Of equal items only the first `deepest` can be results, and one more if one of them is the query itself.
            listed_items = listed_items[copies_before(groups[1]) <= deepest]
        query_positions = None
        if self.leave_one_out:
            query_positions = torch.full_like(self.labels, -1)
            query_positions[listed_items] = torch.arange(len(listed_items), device=listed_items.device)
        labels = (self.labels, self.item_labels) if only_hits else None
        query_groups = None if groups is None else groups[0]
        ties = TieBreaker(space, groups, labels)
        return Searcher(space, ties, listed_items, query_positions, self.block, query_groups)

    def _groups(self) -> tuple[Tensor, Tensor] | None:
        """The group of equal rows that each query and each item belongs to; None if no rows are equal."""
        item_groups = distinct(self.items)
        if self.leave_one_out:
            return None if item_groups is None else (item_groups, item_groups)
        query_groups = distinct(self.vectors)
        if item_groups is None and query_groups is None:
            return None
        if query_groups is None:
            query_groups = torch.arange(len(self.vectors), device=self.vectors.device)
        if item_groups is None:
            item_groups = torch.arange(len(self.items), device=self.items.device)
        return query_groups, item_groups

    def _tables(self, top_items: TopItems) -> Iterator[ResultTable]:
        """Arrange the results in tables, one for each power of two of the number of results."""
        width = int(top_items.counts.max()) if len(top_items.counts) else 0
        if 0 < width * len(top_items.counts) == len(top_items.items):
            neighbours = top_items.items.view(-1, width)
            hits = self.item_labels[neighbours] == self.labels[top_items.queries, None]
            yield ResultTable(top_items.queries, hits, neighbours, self.relevant[top_items.queries])
            return
        ends = top_items.counts.cumsum(dim=0)
        exponents = torch.ceil(torch.log2(top_items.counts.double())).long()
        for exponent in exponents.unique().tolist():
            rows = (exponents == exponent).nonzero().flatten()
            width = int(top_items.counts[rows].max())
            positions = torch.arange(width, device=rows.device)
            for block in rows.split(max(1, MAX_CELLS // width)):
                counts = top_items.counts[block, None]
                is_result = positions < counts
                flat_indices = torch.where(is_result, ends[block, None] - counts + positions, 0)
                neighbours = torch.where(is_result, top_items.items[flat_indices], -1)
                queries = top_items.queries[block]
                hits = is_result & (self.item_labels[neighbours] == self.labels[queries, None])
                yield ResultTable(queries, hits, neighbours, self.relevant[queries])


def search(
    embeddings: Vectors,
    labels: Labels,
    gallery: Vectors | None,
    gallery_labels: Labels | None,
    distance: str,
    block: int | None,
    device: torch.device | str | None,
    differs: Labels | None = None,
    gallery_differs: Labels | None = None,
) -> Search:
    """Check the arguments of `rank` and `evaluate`."""
    if differs is None and gallery_differs is not None:
        raise ValueError("differs: got None with gallery_differs, expected both, or neither")
    if differs is not None and (gallery is None) != (gallery_differs is None):
        raise ValueError("gallery_differs: got a value for only one of queries and gallery, expected both")
    check_distance(distance)
    if block is not None and (not isinstance(block, int) or block < 1):
        raise ValueError(f"block: got {block!r}, expected a whole number of at least 1, or None")
    if (gallery is None) != (gallery_labels is None):
        missing = "gallery_labels" if gallery_labels is None else "gallery"
        raise ValueError(f"{missing}: got None, expected both gallery and gallery_labels, or neither")
    if gallery_labels is not None:
        labels, gallery_labels = number_texts(labels, gallery_labels)
    vectors = as_vectors("embeddings", embeddings, device)
    query_labels = as_labels("labels", labels, "embeddings", vectors)
    if gallery is None or gallery_labels is None:
        relevant = count_relevant(query_labels, query_labels) - 1
        numbers = None
        if differs is not None:
            query_values = as_labels("differs", differs, "embeddings", vectors)
            numbers = query_values, query_values
            relevant = relevant + 1 - count_relevant(*_joined(query_labels, query_values, query_labels, query_values))
        return Search(vectors, vectors, query_labels, query_labels, relevant, True, distance, block, numbers)
    items = as_vectors("gallery", gallery, vectors.device)
    item_labels = as_labels("gallery_labels", gallery_labels, "gallery", items)
    if items.shape[1] != vectors.shape[1]:
        raise ValueError(f"gallery: got {items.shape[1]} dimensions, expected the {vectors.shape[1]} of the embeddings")
    relevant = count_relevant(query_labels, item_labels)
    numbers = None
    if differs is not None:
        differs, gallery_differs = number_texts(differs, gallery_differs)
        query_values = as_labels("differs", differs, "embeddings", vectors)
        item_values = as_labels("gallery_differs", gallery_differs, "gallery", items)
        numbers = query_values, item_values
        relevant = relevant - count_relevant(*_joined(query_labels, query_values, item_labels, item_values))
    return Search(vectors, items, query_labels, item_labels, relevant, False, distance, block, numbers)


def _joined(labels: Tensor, numbers: Tensor, item_labels: Tensor, item_numbers: Tensor) -> tuple[Tensor, Tensor]:
    """One number for each pair of label and number, the same for queries and items."""
    pairs = torch.stack([torch.cat([labels, item_labels]), torch.cat([numbers, item_numbers])], 1)
    codes = pairs.unique(dim=0, return_inverse=True)[1]
    return codes[: len(labels)], codes[len(labels) :]


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
    differs: Labels | None = None,
    gallery_differs: Labels | None = None,
) -> Ranking:
    """Find the k nearest items of every query, nearest first. Items of equal similarity keep the order of the gallery.

    Without a gallery each embedding is a query against all others; it is left out of its own results by its index. With
    a gallery the embeddings are the queries, and nothing is left out.

    The ranks are exact: they follow the similarity of the given numbers, computed without rounding and then rounded
    once to 2^-72. Candidates are found in float32 with a proven error bound; near-ties are re-ranked exactly.

    Args:
        embeddings: (N, D), of any float or integer type; rows need not have unit length.
        labels: (N,) whole numbers or text.
        k: the number of results of each query, at least 1; by default the largest number of relevant items of a query,
            which P@R and MAP@R need.
        gallery: (G, D) the items to search.
        gallery_labels: (G,).
        distance: "cosine" or "euclidean".
        block: queries ranked at a time; fewer need less memory and more time. The result does not depend on it.
        device: where to compute; by default where the embeddings are.
        differs: (N,) whole numbers or text, such as the camera of each image: items with the value of a query are left
            out of its results, neither right nor wrong.
        gallery_differs: (G,) the same for the gallery.

    Returns:
        The ranking.

    Raises:
        ValueError: an argument is out of range, or the numbers of vectors and labels differ.

    Example:
        >>> vectors = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.5, 0.5]])
        >>> ranking = rank(vectors, [0, 0, 1, 2], k=2)
        >>> ranking.neighbours
        tensor([[1, 3], [0, 3]])
        >>> ranking.queries.tolist(), ranking.left_out
        ([0, 1], 2)
    """
    if k is not None and (not isinstance(k, int) or k < 1):
        raise ValueError(f"k: got {k!r}, expected a whole number of at least 1, or None")
    task = search(embeddings, labels, gallery, gallery_labels, distance, block, device, differs, gallery_differs)
    queries = (task.relevant > 0).nonzero().flatten().cpu()
    width = k or max(1, int(task.relevant.max()))
    neighbours = torch.full((len(queries), width), -1)
    hits = torch.zeros(len(queries), width, dtype=torch.bool)
    for table in task.run(torch.full_like(task.relevant, width)):
        rows = torch.searchsorted(queries, table.queries.cpu())
        neighbours[rows, : table.neighbours.shape[1]] = table.neighbours.cpu()
        hits[rows, : table.hits.shape[1]] = table.hits.cpu()
    left_out_count = len(task.labels) - len(queries)
    return Ranking(hits, task.relevant.cpu()[queries], neighbours, queries, left_out_count)


def left_out(
    labels: Labels,
    gallery_labels: Labels | None = None,
    differs: Labels | None = None,
    gallery_differs: Labels | None = None,
) -> int:
    """Count the queries without a relevant item: no metric includes them.

    Args:
        labels: (N,) of the queries.
        gallery_labels: (G,); None: each query is compared with all other queries.
        differs: (N,); see `rank`.
        gallery_differs: (G,).

    Example:
        >>> left_out([0, 0, 1, 2, 2])
        1
        >>> left_out([0, 1, 3], gallery_labels=[0, 1, 2])
        1
    """
    if gallery_labels is not None:
        labels, gallery_labels = number_texts(labels, gallery_labels)
    queries = as_labels("labels", labels)
    items = queries if gallery_labels is None else as_labels("gallery_labels", gallery_labels)
    relevant = count_relevant(queries, items) - int(gallery_labels is None)
    if differs is not None:
        others = differs if gallery_differs is None else gallery_differs
        query_values, item_values = (as_labels("differs", each) for each in number_texts(differs, others))
        same = count_relevant(*_joined(queries, query_values, items, item_values)) - int(gallery_labels is None)
        relevant = relevant - same
    return int((relevant < 1).sum())
