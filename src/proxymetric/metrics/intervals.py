"""How sure a score is: bootstrap intervals."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from proxymetric.metrics.inputs import Labels, Vectors, as_labels
from proxymetric.metrics.names import names, parse
from proxymetric.metrics.ranking import search
from proxymetric.metrics.scoring import DEFAULT, of_queries

DRAWS = 2**22  # numbers drawn at once


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
    """Percentile bootstrap interval of the mean of values (Q,).

    With `groups`, whole groups are drawn with replacement, and the mean is over all values of those drawn. Give the
    classes of the queries: queries of one class are not independent of each other, and drawing single queries makes the
    interval too narrow. It says how the score would vary with other classes, not with other training runs.

    Args:
        groups: (Q,) whole numbers; None to draw single values.
        level: share of the resampled means inside, between 0 and 1.
        repeats: resamples, from 1.

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
        raise ValueError(f"level: got {level}, expected a share between 0 and 1")
    if repeats < 1:
        raise ValueError(f"repeats: got {repeats}, expected from 1")
    sums: np.ndarray = numbers
    sizes: np.ndarray = np.ones(len(numbers))
    if groups is not None:
        inverse = as_labels("groups", groups).cpu().unique(return_inverse=True)[1].numpy()
        if len(inverse) != len(numbers):
            raise ValueError(f"groups: got {len(inverse)} for {len(numbers)} values, expected one for each")
        sums, sizes = np.bincount(inverse, numbers), np.bincount(inverse)
    if len(sums) < 2:
        raise ValueError(f"{'values' if groups is None else 'groups'}: got one, expected at least two to draw from")
    draw = np.random.default_rng(seed)
    means = []
    for start in range(0, repeats, step := max(1, DRAWS // len(sums))):
        picked = draw.integers(len(sums), size=(min(step, repeats - start), len(sums)))
        means.append(sums[picked].sum(axis=1) / sizes[picked].sum(axis=1))
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
) -> dict[str, Estimate]:
    """`evaluate` with bootstrap intervals, for metrics that are means over queries.

    Args:
        level, repeats, seed: see `interval`.
        by: "class" (whole classes are drawn, since queries of one class are not independent) or "query".

    >>> vectors = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.6, 0.5]])
    >>> estimate(vectors, [0, 0, 1, 1], "R@1")
    {'R@1': Estimate(value=0.75, low=0.5, high=1.0)}
    """
    if by not in ("class", "query"):
        raise ValueError(f"by: got {by!r}, expected 'class' or 'query'")
    wanted = [parse(name) for name in names(metrics)]
    for metric in wanted:
        if metric.whole:
            raise ValueError(
                f"metrics: got {metric.name}, which is no mean over queries; expected others, or `evaluate`"
            )
    task = search(embeddings, labels, gallery, gallery_labels, distance, block, device)
    found = of_queries(task, wanted)
    groups = task.labels.cpu()[found.queries] if by == "class" else None
    return {
        name: Estimate(float(values.mean()), *interval(values, groups, level=level, repeats=repeats, seed=seed))
        for name, values in found.scores.items()
    }
