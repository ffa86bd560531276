"""How a score depends on the number of classes in the gallery: what the same queries score among fewer classes.

A query with C classes in its gallery is compared with its own class and n - 1 of the C - 1 others, drawn at random.

    R@1     If items of m other classes are nearer than the nearest relevant item, a draw that holds none of them finds
            it: the mean over all draws is exactly binom(C - 1 - m, n - 1) / binom(C - 1, n - 1).
    MAP@R   1/R * sum over j <= R of j / (j + x_j) where j + x_j <= R: x_j items of the drawn classes are nearer than
            the j-th relevant item. The mean over `DRAWS` draws.

A range is that of whole sets of n classes, queries and gallery: between its ends lie 9 of 10 of the draws.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from proxymetric.arguments.vectors import Labels, Vectors
from proxymetric.metrics.ranking import ResultTable, search

METRICS = ("R@1", "MAP@R")
DRAWS = 50
MAX_QUERIES = 1_000
"""queries that are ranked; of more, these are taken evenly from the classes"""
MIN_SET_QUERIES = 10
"""fewest queries that a set of n classes has on average; smaller sets say nothing"""
MAX_CELLS = 2**22
"""largest number of cells of a table in memory"""
RANGE = (0.05, 0.95)


class FewerClasses(NamedTuple):
    """A score among n classes of a gallery.

    Attributes:
        classes: n.
        scores: metric -> mean, and the ends of the range of 9 of 10 sets of n classes; fractions.
    """

    classes: int
    scores: dict[str, tuple[float, float, float]]


def fewer_classes(
    embeddings: Vectors,
    labels: Labels,
    *,
    gallery: Vectors | None = None,
    gallery_labels: Labels | None = None,
    distance: str = "cosine",
    differs: Labels | None = None,
    gallery_differs: Labels | None = None,
    seed: int = 0,
) -> list[FewerClasses]:
    """Compute R@1 and MAP@R among 2, 4, 8, ... and all classes of the gallery.

    Nothing is said of more classes than there are. With more than `MAX_QUERIES` queries, the score among all classes is
    that of the queries that are ranked.

    Args:
        embeddings: (N, D); see `rank`.
        labels: (N,) whole numbers or text.
        gallery: (G, D) the items to search; None: each embedding is a query against all others.
        gallery_labels: (G,).
        distance: "cosine" or "euclidean".
        differs: (N,); items with the value of a query are left out of its results; see `rank`.
        gallery_differs: (G,) the same for the gallery.
        seed: of the draws; the same seed draws the same classes for other embeddings of the same labels.

    Returns:
        The scores by number of classes, ascending. Numbers whose sets have fewer than `MIN_SET_QUERIES` queries are
        left out, and so is all if no query has anything to find.

    Raises:
        ValueError: see `rank`.

    Example:
        >>> corners = torch.eye(4).repeat(5, 1) + torch.linspace(0, 0.8, 20)[:, None]
        >>> for n, scores in fewer_classes(corners, torch.arange(20) % 4):
        ...     print(n, round(scores["R@1"][0], 3), round(scores["MAP@R"][0], 3))
        2 1.0 1.0
        4 1.0 1.0
    """
    task = search(embeddings, labels, gallery, gallery_labels, distance, None, None, differs, gallery_differs)
    present, item_numbers = task.item_labels.cpu().unique(return_inverse=True)
    queries = _evenly(task.labels.cpu(), (task.relevant.cpu() > 0).nonzero().flatten())
    sizes = _sizes(len(present), len(queries))
    if not sizes:
        return []
    draws = _draws(len(present), seed)
    sums = torch.zeros(len(sizes), len(METRICS), dtype=torch.float64)
    of_sets = torch.zeros(len(sizes), len(METRICS), DRAWS, dtype=torch.float64)
    set_queries = torch.zeros(len(sizes), DRAWS, dtype=torch.float64)
    depths = torch.zeros_like(task.relevant)
    depths[queries.to(depths.device)] = task.candidates
    for table in task.run(depths, only_hits=True):
        table = ResultTable(*(column.cpu() for column in table))
        query_classes = torch.searchsorted(present, task.labels[table.queries.to(task.labels.device)].cpu())
        rows = max(1, MAX_CELLS // (int(table.relevant.max()) * max(len(present), DRAWS)))
        for part in torch.arange(len(query_classes)).split(rows):
            nearer = _nearer(ResultTable(*(column[part] for column in table)), item_numbers, len(present))
            first = (nearer[:, 0] > 0).sum(1)
            for place, size in enumerate(sizes):
                sets = draws[:1] if size == len(present) else draws  # all classes are one set
                values, inside = _values(nearer, table.relevant[part], query_classes[part], sets, size)
                sums[place, 0] += _share_of_draws(len(present), size)[first].sum()
                sums[place, 1] += values[1].mean(1).sum()
                of_sets[place] += (values * inside).sum(1)
                set_queries[place] += inside.sum(0)
    means = sums / len(queries)
    has_queries = set_queries > 0
    return [
        FewerClasses(
            size,
            {
                name: (float(means[place, row]), *_range(of_sets[place, row], set_queries[place], has_queries[place]))
                for row, name in enumerate(METRICS)
            },
        )
        for place, size in enumerate(sizes)
    ]


def _evenly(labels: Tensor, queries: Tensor) -> Tensor:
    """At most `MAX_QUERIES` of the queries, evenly from their classes."""
    if len(queries) <= MAX_QUERIES:
        return queries
    by_class = queries[labels[queries].argsort(stable=True)]
    return by_class[torch.linspace(0, len(queries) - 1, MAX_QUERIES).round().long()]


def _sizes(classes: int, queries: int) -> list[int]:
    """The powers of two that are clearly fewer than all classes, and all classes.

    >>> _sizes(40, 600), _sizes(33, 40), _sizes(8, 3), _sizes(1, 50)
    ([2, 4, 8, 16, 40], [16, 33], [], [])
    """
    powers = [2**power for power in range(1, max(classes, 1).bit_length()) if 4 * 2**power <= 3 * classes]
    sizes = [size for size in (*powers, classes) if size > 1 and size * queries >= MIN_SET_QUERIES * classes]
    return sizes


def _draws(classes: int, seed: int) -> Tensor:
    """(DRAWS, C) the classes in random orders: the first n of an order are a set of n classes."""
    generator = np.random.default_rng([seed, classes])
    return torch.from_numpy(generator.random((DRAWS, classes)).argsort(1, kind="stable"))


def _nearer(table: ResultTable, item_numbers: Tensor, classes: int) -> Tensor:
    """(n, R, C) how many items of each class are nearer than the j-th relevant item, for n queries; R is the largest.

    The columns of a query's own class are 0. Rows beyond the relevant items of a query have no meaning.
    """
    count, deepest = len(table.hits), int(table.relevant.max())
    # An item that follows b relevant ones is nearer than the relevant items after the b-th.
    before = table.hits.cumsum(1)
    counted = ~table.hits & (table.neighbours >= 0) & (before < deepest)
    row = torch.arange(count)[:, None].expand_as(before)[counted]
    cells = (row * deepest + before[counted]) * classes + item_numbers[table.neighbours[counted]]
    return torch.bincount(cells, minlength=count * deepest * classes).view(count, deepest, classes).cumsum(1).float()


def _values(nearer: Tensor, relevant: Tensor, query_classes: Tensor, draws: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """R@1 and MAP@R of each query among its own class and size - 1 others, for each draw.

    Args:
        nearer: (n, R, C); see `_nearer`.
        relevant: (n,) relevant items.
        query_classes: (n,) the class of each query, as a number below C.
        draws: (DRAWS, C) classes in random orders.
        size: the number of classes.

    Returns:
        (2, n, DRAWS) values, and (n, DRAWS) whether the class of the query is in the set of the draw.
    """
    count, deepest, classes = nearer.shape
    members = torch.zeros(len(draws), classes).scatter_(1, draws[:, :size], 1.0)
    inside = members[:, query_classes].T > 0
    # Counts below 2^24 are exact in float32. Where the class of the query is not among the first n of an order, its
    # others are the first n - 1.
    drawn = (nearer.view(-1, classes) @ members.T).view(count, deepest, -1)
    drawn -= nearer[:, :, draws[:, size - 1]] * ~inside[:, None]
    hits = (drawn[:, 0] == 0).double()
    ranks = torch.arange(1.0, deepest + 1)[:, None]
    places = drawn.add_(ranks)  # a rank beyond the relevant items has a place beyond them, too
    precision = (ranks / places).masked_fill_(places > relevant[:, None, None], 0.0)
    return torch.stack([hits, precision.sum(1, dtype=torch.float64) / relevant[:, None]]), inside


def _share_of_draws(classes: int, size: int) -> Tensor:
    """(C,) the share of all draws of size - 1 of the C - 1 other classes that hold none of m classes, m = 0, 1, ...

    >>> _share_of_draws(4, 2), _share_of_draws(3, 3)
    (tensor([1.0000, 0.6667, 0.3333, 0.0000], dtype=torch.float64), tensor([1., 0., 0.], dtype=torch.float64))
    """
    m = torch.arange(1, classes, dtype=torch.float64)
    factors = ((classes - size + 1 - m) / (classes - m)).clamp(min=0)
    return torch.cat([torch.ones(1, dtype=torch.float64), factors.cumprod(0)])


def _range(sums: Tensor, queries: Tensor, has_queries: Tensor) -> tuple[float, float]:
    """The ends of the range of the sets' scores."""
    low, high = (sums[has_queries] / queries[has_queries]).quantile(torch.tensor(RANGE, dtype=torch.float64)).tolist()
    return low, high
