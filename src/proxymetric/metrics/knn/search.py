"""Find the first k items of every query exactly: by screening float32 tiles, or by ranking whole rows in float64."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from proxymetric.metrics.knn.candidates import CandidatePool
from proxymetric.metrics.knn.distances import Space, row_slices
from proxymetric.metrics.knn.ties import TieBreaker
from proxymetric.metrics.knn.topk import topk, true_indices

MEMORY_BYTES = 256 * 2**20
"""memory of the scores that are computed at a time"""
TILE_ROWS = {"cpu": 1536, "cuda": 4096}
"""the number of queries, and of items, in one float32 product"""
MIN_ITEMS_PER_RESULT = 16
"""a query with fewer items per result than this is ranked by whole rows"""
BYTES_PER_CANDIDATE = 48
"""memory of a candidate while the pool is sorted"""
MIN_COPIES = 8
"""equal queries from this number on are ranked once, by whole rows"""
MAX_DIM_OF_BOUND = 2**20
"""from this number of dimensions on, float32 products have no useful error bound"""


@dataclass(frozen=True)
class TopItems:
    """The first items of n queries, best first, one query after the other.

    Attributes:
        queries: (n,) the queries.
        counts: (n,) how many of `items` belong to each query.
        items: the items of the first query, then those of the second, and so on.
    """

    queries: Tensor
    counts: Tensor
    items: Tensor


@dataclass(frozen=True)
class Searcher:
    """Searches the items for the nearest ones of each query.

    Args:
        space: all queries and items.
        tie_breaker: re-ranks near-ties.
        listed_items: (G',) ascending indices of the items that can be among the first k of any query.
        query_positions: (N,) the position of each query in `listed_items`, -1 if the query is not listed; None: queries
            and items are two sets.
        block: queries processed at a time; None: a number that suits the memory.
        query_groups: (N,) the number of each query's distinct row, so that equal queries are ranked once; None: all
            queries differ.
    """

    space: Space
    tie_breaker: TieBreaker
    listed_items: Tensor
    query_positions: Tensor | None
    block: int | None
    query_groups: Tensor | None = None

    def run(self, depths: Tensor) -> Iterator[TopItems]:
        """Yield the first `depths` (N,) items of each query; queries of depth 0 are left out."""
        is_shallow = (depths > 0) & (depths * MIN_ITEMS_PER_RESULT <= len(self.listed_items))
        is_shallow &= self.space.dim < MAX_DIM_OF_BOUND
        if self.query_groups is not None:
            is_shallow &= torch.bincount(self.query_groups)[self.query_groups] < MIN_COPIES
        is_deep = (depths > 0) & ~is_shallow
        max_candidates = max(MEMORY_BYTES, self.space.items.vectors.numel() * 2) // BYTES_PER_CANDIDATE
        total = int(depths[is_shallow].sum())
        most_are_shallow = (
            self.block is None and 2 * int(is_shallow.sum()) > len(depths) and 2 * total <= max_candidates
        )
        if self.query_positions is not None and most_are_shallow:
            pool = self._screen_all_pairs(torch.where(is_shallow, depths, 0)[self.listed_items])
            yield self._rank_pool(pool, self.listed_items)
            is_deep[self.listed_items[pool.crowded]] = True
            is_shallow &= self.query_positions < 0  # the remaining queries have copies that are listed
        queries = true_indices(is_shallow)
        if len(queries):
            max_queries = max_candidates // (2 * int(depths[queries].max()))
            for block in queries.split(self.block or max(1, min(max_queries, 16 * self._tile_rows))):
                pool = self._screen(block, depths[block])
                yield self._rank_pool(pool, block)
                is_deep[block[pool.crowded]] = True
        yield from self._rank_deep(true_indices(is_deep), depths)

    @property
    def _tile_rows(self) -> int:
        return TILE_ROWS.get(self.listed_items.device.type, TILE_ROWS["cpu"])

    def _screen_all_pairs(self, depths: Tensor) -> CandidatePool:
        """Screen the listed items as queries of each other: tile (I, J) serves the rows I and, transposed, the rows J.

        Tiles are processed in the order of their distance from the diagonal, which wraps around. So at any time all
        rows have seen equally many items, and their thresholds rise together. The pool is pruned each time this number
        of items has doubled.
        """
        pool = CandidatePool(depths, self.space.coarse_slack(self.listed_items), MEMORY_BYTES // BYTES_PER_CANDIDATE)
        buffer = torch.empty(self._tile_rows, self._tile_rows, dtype=torch.float32, device=self.listed_items.device)
        blocks = row_slices(len(self.listed_items), self._tile_rows)
        half = len(blocks) // 2
        steps = sorted({0, half, *(2**power for power in range(half.bit_length()))})
        for previous_step, step in zip([-1, *steps], steps):
            for i, rows in enumerate(blocks):
                left = self.space.coarse(self.space.items, self._slice(rows))
                for distance in range(previous_step + 1, step + 1):
                    if 2 * distance == len(blocks) and 2 * i >= len(blocks):
                        continue  # the pair (i, j) was processed as (j, i)
                    columns = blocks[(i + distance) % len(blocks)]
                    self._screen_tile(pool, buffer, left, rows, columns)
            if step > 0 or half == 0:  # pruning after the diagonal tiles would raise no threshold
                pool.prune()
        return pool

    def _screen_tile(self, pool: CandidatePool, buffer: Tensor, left: Tensor, rows: slice, columns: slice) -> None:
        off_diagonal = rows != columns
        if not any(bool((pool.threshold[part] < torch.inf).any()) for part in (rows, columns)):
            return
        right = self.space.coarse(self.space.items, self._slice(columns)) if off_diagonal else left
        product = torch.mm(left, right.T, out=buffer[: len(left), : len(right)])
        scores = self._minus_offset(product, columns)
        if not off_diagonal:
            scores.fill_diagonal_(-torch.inf)
            pool.start(scores, rows.start)
        pool.add(scores, rows.start, columns.start)
        if off_diagonal:
            scores = self._minus_offset(product.T, rows).T
            pool.add(scores, columns.start, rows.start, transposed=True)

    def _screen(self, queries: Tensor, depths: Tensor) -> CandidatePool:
        """Screen all listed items for the given queries."""
        pool = CandidatePool(depths, self.space.coarse_slack(queries), MEMORY_BYTES // BYTES_PER_CANDIDATE)
        positions = self.query_positions[queries] if self.query_positions is not None else None
        buffer = torch.empty(self._tile_rows, self._tile_rows, dtype=torch.float32, device=self.listed_items.device)
        pruned_at = 1
        groups = [
            (rows, self.space.coarse(self.space.queries, queries[rows]))
            for rows in row_slices(len(queries), self._tile_rows)
        ]
        for tiles_seen, columns in enumerate(row_slices(len(self.listed_items), self._tile_rows), start=1):
            right = self.space.coarse(self.space.items, self._slice(columns))
            for rows, left in groups:
                product = torch.mm(left, right.T, out=buffer[: len(left), : len(right)])
                scores = self._minus_offset(product, columns)
                if positions is not None:
                    _exclude_itself(scores, positions[rows] - columns.start)
                if tiles_seen == 1:
                    pool.start(scores, rows.start)
                pool.add(scores, rows.start, columns.start)
            if tiles_seen >= 2 * pruned_at:
                pool.prune()
                pruned_at = tiles_seen
        pool.prune()
        return pool

    def _rank_pool(self, pool: CandidatePool, queries: Tensor) -> TopItems:
        """The entries of the pool with near-ties re-ranked, cut to the depth of each query."""
        counts, starts = pool.extent
        near = torch.zeros(len(pool.rows), dtype=torch.bool, device=queries.device)
        gap = pool.values[:-1] - pool.values[1:]
        near[:-1] = (pool.rows[1:] == pool.rows[:-1]) & (gap <= 2 * pool.slack.index_select(0, pool.rows[:-1]))
        items = self.listed_items.index_select(0, pool.items)
        self.tie_breaker.sort_runs(near, lambda slots: queries[pool.rows[slots].long()], items)
        ends = (starts + torch.minimum(counts, pool.k)).index_select(0, pool.rows)
        items = items[torch.arange(len(items), device=items.device) < ends]
        result_counts = torch.minimum(counts, pool.k)
        rows_with_results = true_indices(result_counts > 0)
        return TopItems(queries[rows_with_results], result_counts[rows_with_results], items)

    def _rank_deep(self, queries: Tensor, depths: Tensor) -> Iterator[TopItems]:
        """Rank by whole rows of float64 scores; of queries with equal rows only one is ranked."""
        if self.query_groups is None or len(queries) == 0:
            for block in self._blocks_of_rows(depths[queries]):
                yield self._rank_rows(queries[block], depths[queries[block]])
            return
        place = self.query_groups[queries].unique(return_inverse=True)[1]
        place, order = place.sort(stable=True)
        queries = queries[order]
        sizes = torch.bincount(place)
        ends = sizes.cumsum(dim=0)
        # A query that finds itself among its results needs one more.
        needed = (depths[queries] + int(self.query_positions is not None)).clamp(max=len(self.listed_items))
        group_depths = torch.zeros_like(sizes).scatter_reduce_(0, place, needed, "amax")
        for groups in self._blocks_of_rows(group_depths):
            width = int(group_depths[groups].max())
            of_groups = self._rank_rows(
                queries[(ends - sizes)[groups]], torch.full_like(groups, width), for_equal_queries=True
            )
            ranked = of_groups.items.view(-1, width)
            rows = torch.repeat_interleave(torch.arange(len(groups), device=groups.device), sizes[groups])
            within = torch.arange(len(rows), device=rows.device) - (sizes[groups].cumsum(0) - sizes[groups])[rows]
            members = queries[(ends - sizes)[groups][rows] + within]
            part = max(1, MEMORY_BYTES // (BYTES_PER_CANDIDATE * width))
            for some_rows, some_queries in zip(rows.split(part), members.split(part), strict=True):
                yield self._results_of_members(some_queries, depths[some_queries], ranked[some_rows])

    def _results_of_members(self, queries: Tensor, depths: Tensor, ranked: Tensor) -> TopItems:
        """The first results of queries, each with a ranking (n, W) in which it may be itself."""
        positions = torch.arange(ranked.shape[1], device=ranked.device)
        if self.query_positions is None:
            return TopItems(queries, depths, ranked[positions < depths[:, None]])
        is_itself = ranked == queries[:, None]
        before = positions - is_itself.cumsum(dim=1)
        return TopItems(queries, depths, ranked[~is_itself & (before < depths[:, None])])

    def _blocks_of_rows(self, depths: Tensor) -> Iterator[Tensor]:
        """The positions in `depths`, in blocks of similar depth whose rows of scores fit into the memory."""
        exponents = torch.ceil(torch.log2(depths.double())).long()
        for exponent in exponents.unique().tolist():
            group = true_indices(exponents == exponent)
            deepest = int(depths[group].max())
            max_rows = max(1, MEMORY_BYTES // (16 * len(self.listed_items) + 64 * deepest))
            yield from group.split(min(self.block or max_rows, max_rows))

    def _rank_rows(self, queries: Tensor, depths: Tensor, for_equal_queries: bool = False) -> TopItems:
        """Rank rows; for all queries that equal these, a query is itself a result, and all near-ties are sorted."""
        left = self.space.fine(self.space.queries, queries)
        scores = torch.empty(len(queries), len(self.listed_items), dtype=torch.float64, device=queries.device)
        for columns in row_slices(len(self.listed_items), self._tile_rows):
            product = left @ self.space.fine(self.space.items, self._slice(columns)).T
            scores[:, columns] = self._minus_offset(product, columns)
        if self.query_positions is not None and not for_equal_queries:
            _exclude_itself(scores, self.query_positions[queries])
        slack = self.space.fine_slack(queries)
        values, items, lowest_results = self._separated_topk(scores, depths, slack)
        near = torch.zeros_like(values, dtype=torch.bool)
        near[:, :-1] = (values[:, :-1] - values[:, 1:] <= 2 * slack[:, None]) & (values[:, 1:] >= lowest_results)
        if len(self.listed_items) < len(self.space.items.vectors):
            items = self.listed_items[items]
        width = items.shape[1]
        tie_breaker = self.tie_breaker.of_all_runs if for_equal_queries else self.tie_breaker
        tie_breaker.sort_runs(near.view(-1), lambda slots: queries[slots // width], items.view(-1))
        if bool((depths == depths[0]).all()):
            return TopItems(queries, depths, items[:, : int(depths[0])].reshape(-1))
        return TopItems(queries, depths, items[torch.arange(width, device=items.device) < depths[:, None]])

    def _separated_topk(self, scores: Tensor, depths: Tensor, slack: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The highest scores of each row, their columns, and (n, 1) the lowest score that can be a result."""
        deepest, width = int(depths.max()), scores.shape[1]
        depth = min(width, deepest + 16 + deepest // 8)
        while True:
            values, columns = topk(scores, depth)
            lowest_results = values.gather(1, depths[:, None] - 1) - 2 * slack[:, None]
            if depth == width or bool((values[:, -1:] < lowest_results).all()):
                return values, columns, lowest_results
            depth = min(width, 4 * depth)

    def _slice(self, columns: slice) -> slice | Tensor:
        """The indices of the items at these positions of the list."""
        return columns if len(self.listed_items) == len(self.space.items.vectors) else self.listed_items[columns]

    def _minus_offset(self, product: Tensor, columns: slice) -> Tensor:
        if self.space.offset is None:
            return product
        return product - self.space.offset[self._slice(columns)].to(product.dtype)


def _exclude_itself(scores: Tensor, positions: Tensor) -> None:
    """Set the score of each query with itself to -inf, if its column is in this matrix."""
    rows = ((positions >= 0) & (positions < scores.shape[1])).nonzero().flatten()
    scores[rows, positions[rows]] = -torch.inf
