"""Rank a gallery for every query, block by block, in bounded memory."""

import difflib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from proxymetric.metrics.similarity import DISTANCES, Gallery, as_gallery, best, full_precision, prepare, products

Vectors = Tensor | np.ndarray
Labels = Tensor | np.ndarray | Sequence[int]

MEMORY = 256 * 2**20  # bytes of scores held at once
TILE = 128  # queries of one matrix product; a block is a multiple of it


class Ranking(NamedTuple):
    """The first k results of Q queries, on the CPU. Queries without a relevant item are not in it."""

    hits: Tensor  # (Q, k) bool: this result is of the query's class
    relevant: Tensor  # (Q,) how many items of the query's class could be found
    neighbours: Tensor  # (Q, k) indices into the gallery, -1 where it has fewer than k items
    queries: Tensor  # (Q,) indices of the queries, ascending
    left_out: int  # queries without a relevant item


class Found(NamedTuple):
    """One block of results, on the device of the search."""

    queries: Tensor
    hits: Tensor
    neighbours: Tensor
    relevant: Tensor


@dataclass(frozen=True)
class Search:
    """Checked and prepared inputs of a ranking."""

    queries: Tensor  # (N, D)
    gallery: Gallery
    labels: Tensor  # (N,)
    gallery_labels: Tensor  # (G,)
    relevant: Tensor  # (N,)
    leave_one_out: bool
    block: int | None

    @property
    def candidates(self) -> int:
        """Items that can be found for a query."""
        return len(self.gallery_labels) - self.leave_one_out

    def run(self, depth: Callable[[int], int]) -> Iterator[Found]:
        """Blocks of results; `depth` gives the number of results wanted where at most so many are relevant.

        Queries are taken in groups of similar numbers of relevant items, so that one large class does not make the
        ranking deep for all. The groups do not depend on the block.
        """
        exponent = torch.ceil(torch.log2(self.relevant.double().clamp(min=1))).long()
        for power in exponent[self.relevant > 0].unique().tolist():
            members = ((exponent == power) & (self.relevant > 0)).nonzero().flatten()
            wanted = depth(min(2**power, int(self.relevant.max())))
            tile, rows = self._shape(wanted)
            for queries in members.split(rows):
                yield self._block(queries, wanted, tile)

    def _shape(self, wanted: int) -> tuple[int, int]:
        """Rows of one matrix product and of one block, a multiple of it."""
        row = self.queries.element_size() * len(self.gallery_labels) + 40 * wanted  # 40: results, and scoring them
        most = max(1, MEMORY // row)
        tile = min(TILE, most)
        return tile, max(1, (self.block or most) // tile) * tile

    def _block(self, queries: Tensor, wanted: int, tile: int) -> Found:
        with full_precision():
            scores = products(self.queries[queries], self.gallery, tile)
        if self.leave_one_out:
            scores[torch.arange(len(queries), device=queries.device), queries] = -torch.inf
        neighbours = best(scores, min(wanted, self.candidates))
        hits = self.gallery_labels[neighbours] == self.labels[queries, None]
        missing = wanted - neighbours.shape[1]
        if missing > 0:
            neighbours = torch.nn.functional.pad(neighbours, (0, missing), value=-1)
            hits = torch.nn.functional.pad(hits, (0, missing), value=False)
        return Found(queries, hits, neighbours, self.relevant[queries])


def search(
    embeddings: Vectors,
    labels: Labels,
    gallery: Vectors | None,
    gallery_labels: Labels | None,
    distance: str,
    block: int | None,
    device: torch.device | str | None,
) -> Search:
    """Check the arguments of `rank` and `evaluate` and make them ready."""
    if distance not in DISTANCES:
        near = difflib.get_close_matches(str(distance), DISTANCES, n=1, cutoff=0.0)[0]
        raise ValueError(f"distance: got {distance!r}, wanted one of {', '.join(DISTANCES)}; did you mean {near!r}?")
    if block is not None and (not isinstance(block, int) or block < 1):
        raise ValueError(f"block: got {block!r}, wanted a number of queries from 1, or None to choose it")
    if (gallery is None) != (gallery_labels is None):
        missing = "gallery_labels" if gallery_labels is None else "gallery"
        raise ValueError(f"{missing}: got None, wanted both gallery and gallery_labels, or neither")
    queries = _vectors("embeddings", embeddings, device)
    query_labels = _labels("labels", labels, "embeddings", queries)
    leave_one_out = gallery is None
    if gallery is None or gallery_labels is None:
        prepared = items = prepare(queries, distance)
        item_labels = query_labels
    else:
        vectors = _vectors("gallery", gallery, queries.device)
        item_labels = _labels("gallery_labels", gallery_labels, "gallery", vectors)
        if vectors.shape[1] != queries.shape[1]:
            raise ValueError(
                f"gallery: got {vectors.shape[1]} dimensions, wanted the {queries.shape[1]} of the embeddings"
            )
        if vectors.dtype != queries.dtype:
            vectors, queries = vectors.double(), queries.double()
        prepared, items = prepare(queries, distance), prepare(vectors, distance)
    relevant = _relevant(query_labels, item_labels) - int(leave_one_out)
    return Search(prepared, as_gallery(items, distance), query_labels, item_labels, relevant, leave_one_out, block)


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

    Args:
        embeddings: (N, D), any float or integer type; need not have unit length.
        labels: (N,) whole numbers.
        k: results wanted, from 1; by default as many as the largest class can fill, which P@R and MAP@R need.
        gallery: (G, D), in the same space.
        gallery_labels: (G,).
        distance: "cosine", or "euclidean" (in float64).
        block: queries ranked at once; by default as many as 256 MB of scores allow. It never changes the result.
        device: where to compute; by default where the embeddings are.

    >>> vectors = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.5, 0.5]])
    >>> ranking = rank(vectors, [0, 0, 1, 2], k=2)
    >>> ranking.neighbours
    tensor([[1, 3], [0, 3]])
    >>> ranking.queries.tolist(), ranking.left_out
    ([0, 1], 2)
    """
    if k is not None and (not isinstance(k, int) or k < 1):
        raise ValueError(f"k: got {k!r}, wanted a number of results from 1, or None for the largest class")
    task = search(embeddings, labels, gallery, gallery_labels, distance, block, device)
    width = k or max(1, int(task.relevant.max()))
    found = [Found(*(part.cpu() for part in each)) for each in task.run(lambda _: width)]
    if not found:
        none = torch.zeros(0, dtype=torch.long)
        wide = torch.zeros(0, width, dtype=torch.long)
        return Ranking(wide.bool(), none, wide, none, len(task.labels))
    queries = torch.cat([each.queries for each in found])
    order = queries.argsort()
    return Ranking(
        torch.cat([each.hits for each in found])[order],
        torch.cat([each.relevant for each in found])[order],
        torch.cat([each.neighbours for each in found])[order],
        queries[order],
        len(task.labels) - len(queries),
    )


def left_out(labels: Labels, gallery_labels: Labels | None = None) -> int:
    """How many queries have no relevant item, and so no say in any metric.

    >>> left_out([0, 0, 1, 2, 2])
    1
    >>> left_out([0, 1, 3], gallery_labels=[0, 1, 2])
    1
    """
    queries = _labels("labels", labels)
    items = queries if gallery_labels is None else _labels("gallery_labels", gallery_labels)
    return int((_relevant(queries, items) - int(gallery_labels is None) < 1).sum())


def _relevant(labels: Tensor, item_labels: Tensor) -> Tensor:
    """The number of items (N,) that carry each query's label."""
    known, counts = item_labels.unique(return_counts=True)
    place = torch.searchsorted(known, labels).clamp(max=len(known) - 1)
    return torch.where(known[place] == labels, counts[place], 0)


def _tensor(name: str, value: Any, wanted: str) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    try:
        # A copy where the array may not be written to: torch would warn about sharing it.
        return torch.from_numpy(np.require(value, requirements=["C", "W"]))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: got {type(value).__name__} that cannot be read as an array of {wanted}") from error


def _vectors(name: str, value: Any, device: torch.device | str | None) -> Tensor:
    vectors = _tensor(name, value, "real numbers")
    if vectors.ndim != 2:
        raise ValueError(f"{name}: got shape {tuple(vectors.shape)}, wanted two axes, items x dimensions")
    if 0 in vectors.shape:
        raise ValueError(f"{name}: got shape {tuple(vectors.shape)}, which is empty; wanted at least one item")
    if vectors.is_complex() or vectors.dtype == torch.bool:
        raise ValueError(f"{name}: got {vectors.dtype}, wanted real numbers")
    if vectors.dtype not in (torch.float32, torch.float64):
        vectors = vectors.to(torch.float32)
    vectors = vectors.to(device) if device is not None else vectors
    bad = int((~vectors.isfinite().all(dim=1)).sum())
    if bad:
        raise ValueError(f"{name}: {bad} of {len(vectors)} rows hold NaN or infinity; wanted finite numbers")
    return vectors


def _labels(name: str, value: Any, of: str = "", vectors: Tensor | None = None) -> Tensor:
    labels = _tensor(name, value, "whole numbers")
    if labels.ndim != 1:
        raise ValueError(f"{name}: got shape {tuple(labels.shape)}, wanted one axis, a class for each item")
    if len(labels) == 0:
        raise ValueError(f"{name}: got none, wanted at least one")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(f"{name}: got {labels.dtype}, wanted whole numbers")
    if vectors is None:
        return labels.long()
    if len(labels) != len(vectors):
        raise ValueError(f"{name}: got {len(labels)} for {len(vectors)} {of}, wanted one for each")
    return labels.to(vectors.device, torch.long)
