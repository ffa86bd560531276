"""A pool of candidates: items that may still be among the first k of their query."""

import torch
from torch import Tensor

from proxymetric.metrics.knn.topk import argsort, indices_above, kth_largest, true_indices

SPARE_PER_QUERY = 64
"""the number of entries that a query may have beyond 2 k"""


class CandidatePool:
    """Coarse scores of R queries above a threshold that rises while more items are seen.

    Let c be the k-th highest coarse score of a query so far, and let each coarse score differ by at most `slack` from
    the exact score. Then k items have an exact score of at least c - slack. So an item among the first k, ties
    included, has a coarse score of at least c - 2 slack, which is the threshold. Queries with too many items near the
    threshold are dropped and marked in `crowded`, so that the pool stays small.

    Args:
        k: (R,) the number of results of each query; 0 for rows that are not queries.
        slack: (R,) float32, the error bound of the coarse scores.
        limit: the number of new entries after which the pool is pruned.
    """

    def __init__(self, k: Tensor, slack: Tensor, limit: int) -> None:
        self.k, self.slack, self.limit = k, slack, max(limit, int((2 * k + SPARE_PER_QUERY).sum()))
        self.threshold = torch.where(k > 0, -torch.inf, torch.inf).to(slack)
        self.crowded = torch.zeros_like(k, dtype=torch.bool)
        # One table for all entries (row, item, bits of the score): many small tensors would fragment the memory.
        self._table = torch.empty(3, 2**12, dtype=torch.int32, device=k.device)
        self._count = self._pruned = 0

    @property
    def rows(self) -> Tensor:
        """The row of each entry, int32."""
        return self._table[0, : self._count]

    @property
    def items(self) -> Tensor:
        """The item of each entry, int32."""
        return self._table[1, : self._count]

    @property
    def values(self) -> Tensor:
        """The coarse score of each entry."""
        return self._table[2, : self._count].view(torch.float32)

    def start(self, scores: Tensor, first_row: int) -> None:
        """Set the thresholds of rows that have seen no item yet, from their first scores (n, C)."""
        rows = slice(first_row, first_row + len(scores))
        threshold = kth_largest(scores, self.k[rows]) - 2 * self.slack[rows]
        self.threshold[rows] = torch.maximum(self.threshold[rows], threshold)

    def add(self, scores: Tensor, first_row: int, first_item: int, *, transposed: bool = False) -> None:
        """Add the scores above the threshold from a tile (n, C) of rows and items, or (C, n) of items and rows."""
        n, width = scores.shape[int(transposed)], scores.shape[1]
        threshold = self.threshold[first_row : first_row + n]
        flat_indices = indices_above(scores, threshold[None] if transposed else threshold[:, None])
        if len(flat_indices) == 0:
            return
        tile_row, tile_column = (
            flat_indices.div(width, rounding_mode="floor").int(),
            flat_indices.remainder(width).int(),
        )
        row, item = (tile_column, tile_row) if transposed else (tile_row, tile_column)
        self._put(row + first_row, item + first_item, scores.flatten()[flat_indices])
        if self._count - self._pruned > self.limit:
            self.prune()

    def _put(self, rows: Tensor, items: Tensor, values: Tensor) -> None:
        count = self._count + len(rows)
        if count > self._table.shape[1]:
            larger_table = self._table.new_empty(3, 2 * count)
            larger_table[:, : self._count] = self._table[:, : self._count]
            self._table = larger_table
        for line, part in zip(self._table, (rows, items, values.view(torch.int32))):
            line[self._count : count] = part
        self._count = count

    def prune(self) -> None:
        """Sort by row, best first, raise the thresholds and drop the entries below them."""
        order = argsort((self.rows.long() << 32) + _descending(self.values))
        rows, items, values = (column.index_select(0, order) for column in (self.rows, self.items, self.values))
        counts, starts = self._extent(rows)
        full_rows = (counts >= self.k) & (self.k > 0)
        kth_scores = values[(starts + self.k - 1)[full_rows]]
        self.threshold[full_rows] = torch.maximum(self.threshold[full_rows], kth_scores - 2 * self.slack[full_rows])
        kept_entries = true_indices(values > self.threshold.index_select(0, rows))
        rows, items, values = (column.index_select(0, kept_entries) for column in (rows, items, values))
        crowded = self._extent(rows)[0] > 2 * self.k + SPARE_PER_QUERY
        # A row that has not seen k items yet has no threshold, so it is not crowded.
        crowded &= self.threshold > -torch.inf
        if crowded.any():
            self.crowded |= crowded
            self.threshold[crowded] = torch.inf
            kept_entries = ~crowded[rows.long()]
            rows, items, values = rows[kept_entries], items[kept_entries], values[kept_entries]
        self._count = 0
        self._put(rows, items, values)
        self._pruned = self._count

    def _extent(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The number of entries of each row and where they start, given rows in ascending order."""
        counts = torch.bincount(rows, minlength=len(self.k))
        return counts, counts.cumsum(dim=0) - counts

    @property
    def extent(self) -> tuple[Tensor, Tensor]:
        """The number of entries of each row and where they start; valid after `prune`."""
        return self._extent(self.rows)


def _descending(values: Tensor) -> Tensor:
    """Whole numbers in 0..2^32 whose order is the reverse of that of the float32 values."""
    bits = values.view(torch.int32)
    ascending = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    return 2**31 - 1 - ascending
