"""The order of results whose scores are too near to each other to be told apart."""

from collections.abc import Callable

import torch
from torch import Tensor

from proxymetric.metrics.knn.distances import Space
from proxymetric.metrics.knn.topk import lexsort, places


class Settler:
    """Sorts runs of near-ties by scores of single pairs: fine ones, then exact ones; equal ones by smaller index.

    Args:
        space: what scores are.
        group: distinct-row numbers of the queries and of the items; pairs of equal rows are computed once. None where
            all rows differ.
        labels: of queries and items, where only hits and misses matter: runs of nothing but hits, or nothing but
            misses, are then left as they are. None to settle all.
    """

    def __init__(
        self, space: Space, group: tuple[Tensor, Tensor] | None, labels: tuple[Tensor, Tensor] | None = None
    ) -> None:
        self.space, self.group, self.labels = space, group, labels

    def settle(self, near: Tensor, query_of: Callable[[Tensor], Tensor], items: Tensor) -> None:
        """Reorder `items` in place.

        Args:
            near: (M,) this result and the next one are of one query and cannot be told apart; the last is False.
            query_of: gives the queries of some places of `items`.
            items: (M,) int64, those of one query together and best first.
        """
        slots, run = _runs(near)
        if len(slots) == 0:
            return
        q, g = query_of(slots), items[slots]
        if self.labels is not None:
            mixed = places(_mixed(run, self.labels[0][q] == self.labels[1][g]))
            if len(mixed) == 0:
                return
            slots, run, q, g = slots[mixed], run[mixed], q[mixed], g[mixed]
        values, slack = self._once(self.space.pairs, q, g)
        order = lexsort(run, -values, g)
        g, values, slack = g[order], values[order], slack[order]
        near = torch.zeros_like(slots, dtype=torch.bool)
        near[:-1] = (run[1:] == run[:-1]) & (values[:-1] - values[1:] <= slack[:-1] + slack[1:])
        finer, run = _runs(near)
        if len(finer):
            high, low = self._once(self.space.exact, q[finer], g[finer])
            g[finer] = g[finer[lexsort(run, -high, -low, g[finer])]]
        items[slots] = g

    def _once(
        self, score: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], queries: Tensor, items: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Two numbers for each pair, computed once for each pair of distinct rows."""
        if self.group is None:
            return score(queries, items)
        of_query, of_item = (each[index] for each, index in zip(self.group, (queries, items)))
        keys, inverse = torch.unique(of_query * (int(self.group[1].max()) + 1) + of_item, return_inverse=True)
        one = torch.empty_like(keys)
        one[inverse] = torch.arange(len(queries), device=keys.device)
        a, b = score(queries[one], items[one])
        return a[inverse], b[inverse]


def _mixed(run: Tensor, hit: Tensor) -> Tensor:
    """Whether the run of each place holds hits as well as misses; runs are numbered from 1.

    >>> _mixed(torch.tensor([1, 1, 2, 2, 2]), torch.tensor([True, True, False, True, False]))
    tensor([False, False,  True,  True,  True])
    """
    size = torch.bincount(run)
    hits = torch.bincount(run[hit], minlength=len(size))
    return ((hits > 0) & (hits < size))[run]


def _runs(near: Tensor) -> tuple[Tensor, Tensor]:
    """Places that are near to their next or their last one, and the number of the run each belongs to.

    >>> _runs(torch.tensor([False, True, True, False, True, False]))
    (tensor([1, 2, 3, 4, 5]), tensor([1, 1, 1, 2, 2]))
    """
    first = places(near)
    marked = torch.zeros_like(near)
    marked[first] = True
    marked[first + 1] = True
    slots = places(marked)
    begins = (slots == 0) | ~near[(slots - 1).clamp(min=0)]
    return slots, begins.cumsum(dim=0)
