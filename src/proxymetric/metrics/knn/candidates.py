"""A pool of results that may still be among the first k of their query."""

import torch
from torch import Tensor

from proxymetric.metrics.knn.topk import above, argsort, kth_largest, places

ROOM = 64  # results a query may keep beyond twice those it wants


class Pool:
    """Coarse scores of R queries above a bar that rises as more of the items have been seen.

    Let c be the k-th largest coarse score of a query so far, each within `slack` of the exact one. Then k items score
    at least c - slack exactly, and an item among the first k, a tie included, has a coarse score of at least
    c - 2 slack: the bar. Queries with too many so near to each other that the bar does not part them are given up
    and listed in `crowded`, so that the pool stays small.

    Args:
        k: (R,) results expected, 0 for rows that are no query.
        slack: (R,) float32.
        limit: entries held before the pool is cleared of what has fallen below the bar.
    """

    def __init__(self, k: Tensor, slack: Tensor, limit: int) -> None:
        self.k, self.slack, self.limit = k, slack, max(limit, int((2 * k + ROOM).sum()))
        self.bar = torch.where(k > 0, -torch.inf, torch.inf).to(slack)
        self.crowded = torch.zeros_like(k, dtype=torch.bool)
        # One table for all entries (row, item, bits of the score): many small tensors would scatter the memory.
        self._table = torch.empty(3, 2**12, dtype=torch.int32, device=k.device)
        self._count = self._cleared = 0

    @property
    def rows(self) -> Tensor:
        """Row of each entry, int32."""
        return self._table[0, : self._count]

    @property
    def items(self) -> Tensor:
        """Item of each entry, int32."""
        return self._table[1, : self._count]

    @property
    def values(self) -> Tensor:
        """Coarse score of each entry."""
        return self._table[2, : self._count].view(torch.float32)

    def start(self, scores: Tensor, first_row: int) -> None:
        """Set the bar of rows that have seen nothing from their first scores (n, C)."""
        rows = slice(first_row, first_row + len(scores))
        bar = kth_largest(scores, self.k[rows]) - 2 * self.slack[rows]
        self.bar[rows] = torch.maximum(self.bar[rows], bar)

    def add(self, scores: Tensor, first_row: int, first_item: int, *, transposed: bool = False) -> None:
        """Take what is above the bar from a tile (n, C) of rows and items, or (C, n) of items and rows."""
        n, width = scores.shape[int(transposed)], scores.shape[1]
        bar = self.bar[first_row : first_row + n]
        flat = above(scores, bar[None] if transposed else bar[:, None])
        if len(flat) == 0:
            return
        y, x = flat.div(width, rounding_mode="floor").int(), flat.remainder(width).int()
        row, item = (x, y) if transposed else (y, x)
        self._put(row + first_row, item + first_item, scores.flatten()[flat])
        if self._count - self._cleared > self.limit:
            self.clear()

    def _put(self, rows: Tensor, items: Tensor, values: Tensor) -> None:
        count = self._count + len(rows)
        if count > self._table.shape[1]:
            larger = self._table.new_empty(3, 2 * count)
            larger[:, : self._count] = self._table[:, : self._count]
            self._table = larger
        for line, part in zip(self._table, (rows, items, values.view(torch.int32))):
            line[self._count : count] = part
        self._count = count

    def clear(self) -> None:
        """Sort by row, best first, raise the bars and drop what is below."""
        order = argsort((self.rows.long() << 32) + _descending(self.values))
        rows, items, values = (each.index_select(0, order) for each in (self.rows, self.items, self.values))
        counts, starts = self._extent(rows)
        full = (counts >= self.k) & (self.k > 0)
        last = values[(starts + self.k - 1)[full]]
        self.bar[full] = torch.maximum(self.bar[full], last - 2 * self.slack[full])
        keep = places(values > self.bar.index_select(0, rows))
        rows, items, values = (each.index_select(0, keep) for each in (rows, items, values))
        crowded = self._extent(rows)[0] > 2 * self.k + ROOM
        # A row that has not seen k items yet has no bar, however many it holds.
        crowded &= self.bar > -torch.inf
        if crowded.any():
            self.crowded |= crowded
            self.bar[crowded] = torch.inf
            keep = ~crowded[rows.long()]
            rows, items, values = rows[keep], items[keep], values[keep]
        self._count = 0
        self._put(rows, items, values)
        self._cleared = self._count

    def _extent(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """How many entries each row has and where they start, rows in order."""
        counts = torch.bincount(rows, minlength=len(self.k))
        return counts, counts.cumsum(dim=0) - counts

    @property
    def extent(self) -> tuple[Tensor, Tensor]:
        """How many entries each row has and where they start, after `clear`."""
        return self._extent(self.rows)


def _descending(values: Tensor) -> Tensor:
    """Whole numbers in 0..2^32 in the opposite order of float32 values."""
    bits = values.view(torch.int32)
    ascending = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    return 2**31 - 1 - ascending
