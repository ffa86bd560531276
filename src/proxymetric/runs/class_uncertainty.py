"""How certain a method is of its training classes, and how this correlates with the similarity of their images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from proxymetric.core.capabilities import EstimatesUncertainty
from proxymetric.core.pieces import Source
from proxymetric.criterion import Criterion

CLASSES_LISTED = 5
"""classes listed as most certain, and as least certain"""


def has_uncertainty(criterion: Criterion) -> bool:
    """Whether a part of the method has an uncertainty for each class."""
    return any(isinstance(part, EstimatesUncertainty) for part in list(criterion.modules())[1:])


def class_uncertainty(
    criterion: Criterion, of_classes: Tensor, classes: list[str], embed: Callable[[], tuple[Tensor, Tensor]]
) -> dict[str, Any]:
    """Summarise the uncertainty of the training classes.

    Args:
        criterion: a method for which `has_uncertainty` is true.
        of_classes: (C,) its uncertainty of each class.
        classes: the names of the C training classes.
        embed: returns vectors (N, D) and labels (N,) of the training images; called only where exactly one source has
            proxies to compare them with.

    Returns:
        `mean`, the mean uncertainty; `least` and `most`, the classes with the lowest and the highest uncertainty as
        [class, uncertainty] pairs, the extreme one first (no class is in both lists); and `correlation`, Pearson's
        correlation between the uncertainty of a class and the median similarity of its images to the mean of its
        proxies. The correlation is left out where it is not defined.
    """
    values = of_classes.double().cpu().numpy()
    assert values.shape == (len(classes),), (values.shape, len(classes))
    order = np.argsort(values, kind="stable")
    count = min(CLASSES_LISTED, max(1, len(order) // 2))
    summary: dict[str, Any] = {
        "mean": float(values.mean()),
        "least": [[classes[c], float(values[c])] for c in order[:count]],
        "most": [[classes[c], float(values[c])] for c in order[::-1][:count]],
    }
    proxies = _proxy_means(criterion)
    if proxies is not None:
        similarities = _median_similarities(criterion.normalised(proxies), *embed(), criterion)
        present = np.isfinite(similarities)
        correlation = _pearson(values[present], similarities[present])
        if correlation is not None:
            summary["correlation"] = correlation
    return summary


def _proxy_means(criterion: Criterion) -> Tensor | None:
    """(C, D) the mean of each class's normalised proxies; None unless exactly one source has proxies."""
    sources = [part for part in criterion.modules() if isinstance(part, Source) and part.seats > 0]
    if len(sources) != 1:
        return None
    return criterion.normalised(sources[0].seated().float()).unflatten(0, (-1, sources[0].seats)).mean(1)


@torch.no_grad()
def _median_similarities(means: Tensor, vectors: Tensor, labels: Tensor, criterion: Criterion) -> np.ndarray:
    """(C,) the median similarity of a class's images to its mean proxy; NaN for a class without images."""
    class_means = means.to(vectors)[labels.to(vectors.device)]
    similarity = (criterion.normalised(vectors) * class_means).sum(1).double().cpu().numpy()
    order = np.argsort(labels.cpu().numpy(), kind="stable")
    present, first = np.unique(labels.cpu().numpy()[order], return_index=True)
    medians = np.full(len(means), np.nan)
    medians[present] = [np.median(part) for part in np.split(similarity[order], first[1:])]
    return medians


def _pearson(x: np.ndarray, y: np.ndarray) -> float | None:
    """Pearson's correlation; None for fewer than 3 points, or if x or y is constant.

    >>> _pearson(np.array([1.0, 2.0, 3.0]), np.array([3.0, 2.0, 1.0])), _pearson(np.ones(3), np.arange(3.0))
    (-1.0, None)
    """
    if len(x) < 3 or not (np.isfinite(x).all() and np.ptp(x) > 0 and np.ptp(y) > 0):
        return None
    return float(np.corrcoef(x, y)[0, 1])
