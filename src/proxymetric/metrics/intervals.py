"""The uncertainty of a score: bootstrap intervals."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from proxymetric.arguments.signatures import one_of
from proxymetric.arguments.vectors import Labels, Vectors, as_labels
from proxymetric.metrics.names import names, parse
from proxymetric.metrics.ranking import search
from proxymetric.metrics.scoring import DEFAULT, of_queries

MAX_DRAWS = 2**22
"""numbers drawn at a time"""


class Estimate(NamedTuple):
    """A mean over queries and its interval."""

    value: float
    low: float
    high: float


def interval(
    values: Tensor | np.ndarray | Sequence[float],
    groups: Labels | None = None,
    *,
    level: float = 0.95,
    repeats: int = 1000,
    seed: int = 0,
) -> tuple[float, float]:
    """Compute the percentile bootstrap interval of the mean of values (Q,).

    With `groups`, whole groups are drawn with replacement, and the mean is taken over all their values. Use the classes
    of the queries as groups: queries of one class depend on each other, so drawing single queries makes the interval
    too narrow. The interval describes the variation over classes, not over training runs.

    Args:
        values: (Q,).
        groups: (Q,) whole numbers; None: single values are drawn.
        level: the share of the resampled means inside the interval, between 0 and 1.
        repeats: resamples, at least 1.
        seed: seed of the draws.

    Returns:
        The lower and the upper end.

    Raises:
        ValueError: an argument is out of range, or there are fewer than two values or groups.

    Example:
        >>> low, high = interval([0.0, 1.0] * 50)
        >>> 0.35 < low < 0.5 < high < 0.65
        True
        >>> low, high = interval([0.0, 1.0] * 50, groups=[0, 1] * 50)  # two classes, one all wrong, one all right
        >>> low, high
        (0.0, 1.0)
    """
    numbers = np.asarray(values.cpu() if isinstance(values, Tensor) else values, dtype=np.float64)
    if numbers.ndim != 1 or len(numbers) == 0:
        raise ValueError(f"values: got shape {numbers.shape}, expected one axis with at least one value")
    if not 0 < level < 1:
        raise ValueError(f"level: got {level}, expected a number between 0 and 1")
    if repeats < 1:
        raise ValueError(f"repeats: got {repeats}, expected a number of at least 1")
    sums: np.ndarray = numbers
    sizes: np.ndarray = np.ones(len(numbers))
    if groups is not None:
        inverse = as_labels("groups", groups).cpu().unique(return_inverse=True)[1].numpy()
        if len(inverse) != len(numbers):
            raise ValueError(f"groups: got {len(inverse)} groups, expected {len(numbers)}, one for each value")
        sums, sizes = np.bincount(inverse, numbers), np.bincount(inverse)
    if len(sums) < 2:
        raise ValueError(f"{'values' if groups is None else 'groups'}: got one, expected at least two to draw from")
    generator = np.random.default_rng(seed)
    means = []
    for start in range(0, repeats, step := max(1, MAX_DRAWS // len(sums))):
        draws = generator.integers(len(sums), size=(min(step, repeats - start), len(sums)))
        means.append(sums[draws].sum(axis=1) / sizes[draws].sum(axis=1))
    low, high = np.quantile(np.concatenate(means), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def estimate(
    embeddings: Vectors,
    labels: Labels,
    metrics: str | Sequence[str] = DEFAULT,
    *,
    level: float = 0.95,
    repeats: int = 1000,
    seed: int = 0,
    by: str = "class",
    gallery: Vectors | None = None,
    gallery_labels: Labels | None = None,
    distance: str = "cosine",
    block: int | None = None,
    device: torch.device | str | None = None,
    differs: Labels | None = None,
    gallery_differs: Labels | None = None,
) -> dict[str, Estimate]:
    """Compute metrics with bootstrap intervals: `evaluate` for metrics that are means over queries.

    Args:
        embeddings: (N, D); see `rank`.
        labels: (N,).
        metrics: names; see `evaluate`.
        level: see `interval`.
        repeats: see `interval`.
        seed: see `interval`.
        by: "class" draws whole classes, since queries of one class depend on each other; "query" draws single queries.
        gallery: (G, D) the items to search; None: each embedding is a query against all others.
        gallery_labels: (G,).
        distance: "cosine" or "euclidean".
        block: queries ranked at a time; None: chosen by the search.
        device: where to compute; by default where the embeddings are.
        differs: (N,); items with the value of a query, such as its camera, are left out of its results; see `rank`.
        gallery_differs: (G,) the same for the gallery.

    Returns:
        Metric -> value with its interval.

    Example:
        >>> vectors = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.6, 0.5]])
        >>> estimate(vectors, [0, 0, 1, 1], "R@1")
        {'R@1': Estimate(value=0.75, low=0.5, high=1.0)}
    """
    one_of("by", by, ("class", "query"))
    parsed = [parse(name) for name in names(metrics)]
    for metric in parsed:
        if metric.whole:
            raise ValueError(
                f"metrics: got {metric.name}, expected means over queries; `evaluate` computes {metric.name}"
            )
    task = search(embeddings, labels, gallery, gallery_labels, distance, block, device, differs, gallery_differs)
    scored = of_queries(task, parsed)
    groups = task.labels.cpu()[scored.queries] if by == "class" else None
    return {
        name: Estimate(float(values.mean()), *interval(values, groups, level=level, repeats=repeats, seed=seed))
        for name, values in scored.scores.items()
    }
