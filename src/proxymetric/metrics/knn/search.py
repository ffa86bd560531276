"""The first k items of every query, exactly: screened tile by tile in float32, or row by row in float64."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from proxymetric.metrics.knn.candidates import Pool
from proxymetric.metrics.knn.distances import Space, parts
from proxymetric.metrics.knn.ties import Settler
from proxymetric.metrics.knn.topk import largest, places

MEMORY = 256 * 2**20  # bytes of scores held at once
TILE = {"cpu": 1536, "cuda": 4096}  # queries and items of one float32 product
SHARE = 16  # queries that want more than this part of the items are ranked by whole rows
ENTRY = 48  # bytes a candidate takes while the pool is sorted


@dataclass(frozen=True)
class Best:
    """The first `k` items (k,) of each of some queries, best first, one after the other."""

    queries: Tensor  # (n,)
    counts: Tensor  # (n,) how many of `items` are each query's
    items: Tensor


@dataclass(frozen=True)
class Searcher:
    """Queries against the items that can be found.

    Args:
        space: all queries and items.
        settler: for near-ties.
        listed: (G',) ascending indices of the items that can be among the first k of any query.
        itself: (N,) place of each query in `listed`, -1 where it is not; None for a gallery of its own.
        block: queries handled at once; None to choose.
    """

    space: Space
    settler: Settler
    listed: Tensor
    itself: Tensor | None
    block: int | None

    def run(self, wanted: Tensor) -> Iterator[Best]:
        """The first `expected` (N,) items of each query; queries that want 0 are left out."""
        few = (wanted > 0) & (wanted * SHARE <= len(self.listed)) & (self.space.dim < 2**20)  # beyond: no bound
        many = (wanted > 0) & ~few
        room = max(MEMORY, self.space.items.vectors.numel() * 2) // ENTRY
        total = int(wanted[few].sum())
        most_ask = self.block is None and 2 * int(few.sum()) > len(wanted) and 2 * total <= room
        if self.itself is not None and most_ask:
            pool = self._among_themselves(torch.where(few, wanted, 0)[self.listed])
            yield self._settled(pool, self.listed)
            many[self.listed[pool.crowded]] = True
            few &= self.itself < 0  # queries that are not listed, having copies that are
        queries = places(few)
        if len(queries):
            fit = room // (2 * int(wanted[queries].max()))
            for some in queries.split(self.block or max(1, min(fit, 16 * self._tile))):
                pool = self._in_the_list(some, wanted[some])
                yield self._settled(pool, some)
                many[some[pool.crowded]] = True
        yield from self._by_rows(places(many), wanted)

    @property
    def _tile(self) -> int:
        return TILE.get(self.listed.device.type, TILE["cpu"])

    def _among_themselves(self, wanted: Tensor) -> Pool:
        """Screen the listed items as queries of each other: a tile (I, J) serves the rows I and, transposed, J.

        Tiles are taken by their distance from the diagonal, around the end, so that all rows have seen equally much
        at any time and the bars rise together; the pool is cleared whenever that has doubled.
        """
        pool = Pool(wanted, self.space.coarse_slack(self.listed), MEMORY // ENTRY)
        room = torch.empty(self._tile, self._tile, device=self.listed.device)
        blocks = parts(len(self.listed), self._tile)
        half = len(blocks) // 2
        steps = sorted({0, half, *(2**power for power in range(half.bit_length()))})
        for before, until in zip([-1, *steps], steps):
            for i, rows in enumerate(blocks):
                left = self.space.coarse(self.space.items, self._slice(rows))
                for distance in range(before + 1, until + 1):
                    if 2 * distance == len(blocks) and 2 * i >= len(blocks):
                        continue  # the pair (i, j) is also (j, i)
                    columns = blocks[(i + distance) % len(blocks)]
                    self._tile_of_two(pool, room, left, rows, columns)
            if until > 0 or half == 0:  # the bars of the diagonal tiles are as high as they can be
                pool.clear()
        return pool

    def _tile_of_two(self, pool: Pool, room: Tensor, left: Tensor, rows: slice, columns: slice) -> None:
        both = rows != columns
        if not any(bool((pool.bar[each] < torch.inf).any()) for each in (rows, columns)):
            return
        right = self.space.coarse(self.space.items, self._slice(columns)) if both else left
        product = torch.mm(left, right.T, out=room[: len(left), : len(right)])
        scores = self._less_offset(product, columns)
        if not both:
            scores.fill_diagonal_(-torch.inf)
            pool.start(scores, rows.start)
        pool.add(scores, rows.start, columns.start)
        if both:
            scores = self._less_offset(product.T, rows).T
            pool.add(scores, columns.start, rows.start, transposed=True)

    def _in_the_list(self, queries: Tensor, wanted: Tensor) -> Pool:
        """Screen all listed items for some queries."""
        pool = Pool(wanted, self.space.coarse_slack(queries), MEMORY // ENTRY)
        own = self.itself[queries] if self.itself is not None else None
        room = torch.empty(self._tile, self._tile, device=self.listed.device)
        cleared = 1
        groups = [
            (rows, self.space.coarse(self.space.queries, queries[rows])) for rows in parts(len(queries), self._tile)
        ]
        for seen, columns in enumerate(parts(len(self.listed), self._tile), start=1):
            right = self.space.coarse(self.space.items, self._slice(columns))
            for rows, left in groups:
                product = torch.mm(left, right.T, out=room[: len(left), : len(right)])
                scores = self._less_offset(product, columns)
                if own is not None:
                    _hide(scores, own[rows] - columns.start)
                if seen == 1:
                    pool.start(scores, rows.start)
                pool.add(scores, rows.start, columns.start)
            if seen >= 2 * cleared:
                pool.clear()
                cleared = seen
        pool.clear()
        return pool

    def _settled(self, pool: Pool, queries: Tensor) -> Best:
        """What the pool holds, settled and cut to what was expected."""
        counts, starts = pool.extent
        near = torch.zeros(len(pool.rows), dtype=torch.bool, device=queries.device)
        gap = pool.values[:-1] - pool.values[1:]
        near[:-1] = (pool.rows[1:] == pool.rows[:-1]) & (gap <= 2 * pool.slack.index_select(0, pool.rows[:-1]))
        items = self.listed.index_select(0, pool.items)
        self.settler.settle(near, lambda slots: queries[pool.rows[slots].long()], items)
        ends = (starts + torch.minimum(counts, pool.k)).index_select(0, pool.rows)
        items = items[torch.arange(len(items), device=items.device) < ends]
        kept = torch.minimum(counts, pool.k)
        served = places(kept > 0)
        return Best(queries[served], kept[served], items)

    def _by_rows(self, queries: Tensor, wanted: Tensor) -> Iterator[Best]:
        """Rank by whole rows of float64 scores, queries that want similar numbers together."""
        power = torch.ceil(torch.log2(wanted[queries].double())).long()
        for each in power.unique().tolist():
            group = queries[power == each]
            deepest = int(wanted[group].max())
            most = max(1, MEMORY // (16 * len(self.listed) + 64 * deepest))
            for some in group.split(min(self.block or most, most)):
                yield self._rows(some, wanted[some])

    def _rows(self, queries: Tensor, wanted: Tensor) -> Best:
        left = self.space.fine(self.space.queries, queries)
        scores = torch.empty(len(queries), len(self.listed), dtype=torch.float64, device=queries.device)
        for columns in parts(len(self.listed), self._tile):
            product = left @ self.space.fine(self.space.items, self._slice(columns)).T
            scores[:, columns] = self._less_offset(product, columns)
        if self.itself is not None:
            _hide(scores, self.itself[queries])
        slack = self.space.fine_slack(queries)
        values, items, least = self._until_parted(scores, wanted, slack)
        near = torch.zeros_like(values, dtype=torch.bool)
        near[:, :-1] = (values[:, :-1] - values[:, 1:] <= 2 * slack[:, None]) & (values[:, 1:] >= least)
        if len(self.listed) < len(self.space.items.vectors):
            items = self.listed[items]
        width = items.shape[1]
        self.settler.settle(near.view(-1), lambda slots: queries[slots // width], items.view(-1))
        if bool((wanted == wanted[0]).all()):
            return Best(queries, wanted, items[:, : int(wanted[0])].reshape(-1))
        return Best(queries, wanted, items[torch.arange(width, device=items.device) < wanted[:, None]])

    def _until_parted(self, scores: Tensor, wanted: Tensor, slack: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The largest scores of each row, their columns, and the score (n, 1) below which none can be expected."""
        deepest, width = int(wanted.max()), scores.shape[1]
        depth = min(width, deepest + 16 + deepest // 8)
        while True:
            values, columns = largest(scores, depth)
            least = values.gather(1, wanted[:, None] - 1) - 2 * slack[:, None]
            if depth == width or bool((values[:, -1:] < least).all()):
                return values, columns, least
            depth = min(width, 4 * depth)

    def _slice(self, columns: slice) -> slice | Tensor:
        """Indices of the items at these places of the list."""
        return columns if len(self.listed) == len(self.space.items.vectors) else self.listed[columns]

    def _less_offset(self, product: Tensor, columns: slice) -> Tensor:
        if self.space.offset is None:
            return product
        return product - self.space.offset[self._slice(columns)].to(product.dtype)


def _hide(scores: Tensor, own: Tensor) -> None:
    """Take each row's own column, where it is one of these, out of the ranking."""
    rows = ((own >= 0) & (own < scores.shape[1])).nonzero().flatten()
    scores[rows, own[rows]] = -torch.inf
