"""The exact engine: every vector is compared with every query."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from proxymetric.system.precision import full_precision

CHUNK_ROWS = 65_536
"""vectors that are compared with the queries at once, so that the similarities fit into the cache"""
GROUP = 64
"""similarities of which only the largest is looked at first"""


COPIED_ROWS = 8_192
"""vectors of a search among some that are copied at once, always to the same place"""
COPY = 7
"""a vector is copied, to be searched among a few, in the time of this many comparisons"""
LEFT_OUT = -2.0
"""the similarity of a vector that is not searched"""


class Exact:
    """Search by comparing every vector: exact, and the fastest way up to about 200,000 vectors.

    Args:
        vectors: (N, D) of unit length.

    Example:
        >>> similarities, rows = Exact(torch.eye(3)).search(torch.tensor([[0.0, 0.6, 0.8]]), k=2)
        >>> rows.tolist()
        [[2, 1]]
    """

    name = "exact"

    def __init__(self, vectors: Tensor) -> None:
        self.vectors = vectors
        self._array = vectors.numpy() if vectors.device.type == "cpu" else None

    def search(self, queries: Tensor, k: int, mask: np.ndarray | None = None) -> tuple[Tensor, Tensor]:
        """Find the nearest vectors of each query.

        Args:
            queries: (Q, D) of unit length.
            k: results for each query; fewer come back if there are fewer vectors.
            mask: (N,) bool, the vectors to search among; None: all.

        Returns:
            Similarities and rows (Q, min(k, M)), nearest first; equal similarities are in the order of the rows.
        """
        rows = None
        if mask is not None:
            count = int(np.count_nonzero(mask))
            if count * (COPY + len(queries)) <= len(mask) * len(queries):  # to compare all takes longer
                rows, mask = torch.from_numpy(np.flatnonzero(mask)), None
            k = min(k, count)
        if rows is None and queries.shape[0] == 1 and self._array is not None and k > 0:  # all similarities are few
            return _search_for_one(queries.numpy(), self._array, k, mask)
        if self._array is None:  # a training in the same process may have turned on TF32
            with full_precision(self.vectors.device.type):
                return self._search(queries, k, rows, mask)
        return self._search(queries, k, rows, mask)

    def _search(self, queries: Tensor, k: int, rows: Tensor | None, mask: np.ndarray | None) -> tuple[Tensor, Tensor]:
        """Find the nearest vectors of each query, some of the vectors at a time."""
        total = len(self.vectors) if rows is None else len(rows)
        k = min(k, total)
        left_out = None if mask is None else torch.from_numpy(~mask).to(self.vectors.device)
        best = queries.new_empty(len(queries), 0)
        places = queries.new_empty(len(queries), 0, dtype=torch.long)
        step = CHUNK_ROWS if rows is None else COPIED_ROWS
        copied = None if rows is None or self._array is None else self.vectors.new_empty(step, self.vectors.shape[1])
        for start in range(0, total, step):
            stop = min(start + step, total)
            if rows is None:
                part = self.vectors[start:stop]
            elif copied is None:
                part = self.vectors[rows[start:stop]]
            else:
                part = torch.index_select(self.vectors, 0, rows[start:stop], out=copied[: stop - start])
            products = _products(queries, part)
            if left_out is not None:
                products.masked_fill_(left_out[start:stop], LEFT_OUT)
            similarities, columns = top_k(products, k)
            if start == 0:
                best, places = similarities, columns
                continue
            best, order = top_k(torch.cat([best, similarities], dim=1), k)
            places = torch.cat([places, columns + start], dim=1).gather(1, order)
        return best, places if rows is None else rows[places]


def _search_for_one(query: np.ndarray, vectors: np.ndarray, k: int, mask: np.ndarray | None) -> tuple[Tensor, Tensor]:
    """Search for one query (1, D) among all vectors, on a CPU.

    PyTorch is kept out of it: reading the vectors drives its code out of the cache, and then each small operation costs
    as much as reading some hundred vectors.
    """
    similarities = vectors @ query[0]
    if mask is not None:
        np.copyto(similarities, LEFT_OUT, where=~mask)
    columns = _top_k_of_one(similarities, k)
    return torch.from_numpy(similarities[columns][None]), torch.from_numpy(columns[None])


def _products(queries: Tensor, vectors: Tensor) -> Tensor:
    """The inner products (Q, N); for a single query by NumPy, whose product with a vector is some per cent faster."""
    if len(queries) == 1 and vectors.device.type == "cpu":
        return torch.from_numpy(vectors.numpy() @ queries[0].numpy())[None]
    return queries @ vectors.T


def top_k(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest values of each row and their columns; equal values are in the order of the columns.

    Not all values are sorted: the k largest values lie in the k groups of columns with the largest maxima.

    Args:
        values: (Q, N), finite.
        k: at least 0; at most N values come back.

    Example:
        >>> top_k(torch.tensor([[1.0, 3.0, 1.0, 2.0, 1.0]]), 3)[1].tolist()
        [[1, 3, 0]]
    """
    count, width = values.shape
    k = min(k, width)
    if k == 0 or count == 0:
        return values[:, :0], torch.empty(count, 0, dtype=torch.long, device=values.device)
    if count == 1 and values.device.type == "cpu":
        row = values.numpy()[0]
        columns_of_row = _top_k_of_one(row, k)
        return torch.from_numpy(row[columns_of_row][None]), torch.from_numpy(columns_of_row[None])
    more = min(k + 1, width)  # one more tells whether the last value that counts has equals
    groups = width // GROUP
    if groups <= 2 * more:
        best, columns = values.topk(more, dim=1)
    else:
        # A group is every `groups`-th column: maxima over the outer dimension are computed by vector instructions.
        grouped = values[:, : groups * GROUP].view(count, GROUP, groups)
        chosen = grouped.amax(dim=1).topk(more, dim=1).indices
        columns = (torch.arange(GROUP, device=values.device)[:, None] * groups + chosen[:, None]).flatten(1)
        rest = torch.arange(groups * GROUP, width, device=values.device).expand(count, -1)
        columns = torch.cat([columns, rest], dim=1)
        best, places = values.gather(1, columns).topk(more, dim=1)
        columns = columns.gather(1, places)
    if not (best[:, 1:] == best[:, :-1]).any():
        return best[:, :k], columns[:, :k]
    tied = best[:, k] == best[:, k - 1] if more > k else best.new_zeros(count, dtype=torch.bool)
    best, columns = best[:, :k].clone(), columns[:, :k].clone()
    for row in tied.nonzero().flatten().tolist():  # the first of the equal columns count
        smallest = best[row, -1]
        larger = (values[row] > smallest).nonzero().flatten()
        equal = (values[row] == smallest).nonzero().flatten()
        columns[row] = torch.cat([larger, equal])[:k]
        best[row] = values[row, columns[row]]
    columns, order = columns.sort(dim=1)
    best, order = best.gather(1, order).sort(dim=1, descending=True, stable=True)
    return best, columns.gather(1, order)


def _top_k_of_one(values: np.ndarray, k: int) -> np.ndarray:
    """The columns of the k largest values; for one row, whose few operations cost less in NumPy than in PyTorch."""
    groups = len(values) // GROUP
    if groups <= 2 * k:
        candidates = np.arange(len(values))
    else:
        # k groups have a maximum of at least this value, so that no smaller one is among the k largest.
        maxima = values[: groups * GROUP].reshape(GROUP, groups).max(axis=0)
        threshold = np.partition(maxima, groups - k)[groups - k]
        candidates = np.flatnonzero(values >= threshold)
    return candidates[np.argsort(-values[candidates], kind="stable")[:k]]
