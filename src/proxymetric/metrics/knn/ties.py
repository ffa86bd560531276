"""Order results whose scores are closer than their error bounds."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from proxymetric.metrics.knn.distances import Space
from proxymetric.metrics.knn.topk import lexsort, true_indices


class TieBreaker:
    """Sorts runs of near-ties by the scores of single pairs: first in float64, then exactly, then by index.

    Args:
        space: computes the scores.
        group: the numbers of the distinct rows of the queries and of the items, so that the score of equal pairs is
            computed once; None: all rows differ.
        labels: the classes of the queries and of the items, if only hits and misses matter: a run of only hits, or of
            only misses, then keeps its order. None: all runs are sorted.
    """

    def __init__(
        self, space: Space, group: tuple[Tensor, Tensor] | None, labels: tuple[Tensor, Tensor] | None = None
    ) -> None:
        self.space, self.group, self.labels = space, group, labels

    @property
    def of_all_runs(self) -> TieBreaker:
        """The same, which sorts every run: the hits of equal queries may differ."""
        return TieBreaker(self.space, self.group)

    def sort_runs(self, near: Tensor, query_of: Callable[[Tensor], Tensor], items: Tensor) -> None:
        """Reorder `items` in place.

        Args:
            near: (M,) whether this result and the next one belong to the same query and are a near-tie; the last is
                False.
            query_of: returns the queries of given positions in `items`.
            items: (M,) int64, the items of one query after the other, best first.
        """
        slots, run = _runs(near)
        if len(slots) == 0:
            return
        q, g = query_of(slots), items[slots]
        if self.labels is not None:
            mixed_positions = true_indices(_in_mixed_run(run, self.labels[0][q] == self.labels[1][g]))
            if len(mixed_positions) == 0:
                return
            slots, run, q, g = slots[mixed_positions], run[mixed_positions], q[mixed_positions], g[mixed_positions]
        values, slack = self._per_distinct_pair(self.space.pairs, q, g)
        order = lexsort(run, -values, g)
        g, values, slack = g[order], values[order], slack[order]
        near = torch.zeros_like(slots, dtype=torch.bool)
        near[:-1] = (run[1:] == run[:-1]) & (values[:-1] - values[1:] <= slack[:-1] + slack[1:])
        fine_slots, run = _runs(near)
        if len(fine_slots):
            high, low = self._per_distinct_pair(self.space.exact, q[fine_slots], g[fine_slots])
            g[fine_slots] = g[fine_slots[lexsort(run, -high, -low, g[fine_slots])]]
        items[slots] = g

    def _per_distinct_pair(
        self, score: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], queries: Tensor, items: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Two numbers for each pair, computed once for each pair of distinct rows."""
        if self.group is None:
            return score(queries, items)
        of_query, of_item = (groups[index] for groups, index in zip(self.group, (queries, items)))
        keys, inverse = torch.unique(of_query * (int(self.group[1].max()) + 1) + of_item, return_inverse=True)
        examples = torch.empty_like(keys)
        examples[inverse] = torch.arange(len(queries), device=keys.device)
        a, b = score(queries[examples], items[examples])
        return a[inverse], b[inverse]


def _in_mixed_run(run: Tensor, hit: Tensor) -> Tensor:
    """Whether the run of each position holds both hits and misses; runs are numbered from 1.

    >>> _in_mixed_run(torch.tensor([1, 1, 2, 2, 2]), torch.tensor([True, True, False, True, False]))
    tensor([False, False,  True,  True,  True])
    """
    size = torch.bincount(run)
    hits = torch.bincount(run[hit], minlength=len(size))
    return ((hits > 0) & (hits < size))[run]


def _runs(near: Tensor) -> tuple[Tensor, Tensor]:
    """The positions in a near-tie with their successor or predecessor, and the number of the run of each.

    >>> _runs(torch.tensor([False, True, True, False, True, False]))
    (tensor([1, 2, 3, 4, 5]), tensor([1, 1, 1, 2, 2]))
    """
    first_slots = true_indices(near)
    in_run = torch.zeros_like(near)
    in_run[first_slots] = True
    in_run[first_slots + 1] = True
    slots = true_indices(in_run)
    starts_run = (slots == 0) | ~near[(slots - 1).clamp(min=0)]
    return slots, starts_run.cumsum(dim=0)
