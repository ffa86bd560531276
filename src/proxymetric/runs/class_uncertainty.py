"""How sure a method is of the classes it was trained on, and whether that shows in their images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from proxymetric.core.pieces import Source
from proxymetric.criterion import Criterion

SHOWN = 5
"""classes at either end"""


def knows_uncertainty(criterion: Criterion) -> bool:
    """Whether a part of the method can say how unsure it is of a class."""
    return any(hasattr(part, "uncertainty") for part in list(criterion.modules())[1:])


def class_uncertainty(
    criterion: Criterion, classes: list[str], embed: Callable[[], tuple[Tensor, Tensor]]
) -> dict[str, Any]:
    """The mean, the classes it is least and most unsure of, and the correlation with how alike their images are.

    embed: vectors (N, D) and labels (N,) of the training images; asked only where there are proxies to compare with.
    `least` and `most` are (class, uncertainty) pairs from the end inwards, no class in both. The correlation
    (Pearson's) is that of a class's uncertainty and the median similarity of its images to the mean of its proxies; it
    is left out where it is not defined.
    """
    values = criterion.uncertainty().double().cpu().numpy()
    assert values.shape == (len(classes),), (values.shape, len(classes))
    order = np.argsort(values, kind="stable")
    count = min(SHOWN, max(1, len(order) // 2))
    found: dict[str, Any] = {
        "mean": float(values.mean()),
        "least": [[classes[c], float(values[c])] for c in order[:count]],
        "most": [[classes[c], float(values[c])] for c in order[::-1][:count]],
    }
    proxies = _proxy_means(criterion)
    if proxies is not None:
        alike = _median_similarities(criterion.normalised(proxies), *embed(), criterion)
        present = np.isfinite(alike)
        correlation = _pearson(values[present], alike[present])
        if correlation is not None:
            found["correlation"] = correlation
    return found


def _proxy_means(criterion: Criterion) -> Tensor | None:
    """The mean of each class's proxies as they are compared, (C, D), where exactly one source has proxies."""
    seated = [part for part in criterion.modules() if isinstance(part, Source) and part.seats > 0]
    if len(seated) != 1:
        return None
    return criterion.normalised(seated[0].seated().float()).unflatten(0, (-1, seated[0].seats)).mean(1)


@torch.no_grad()
def _median_similarities(means: Tensor, vectors: Tensor, labels: Tensor, criterion: Criterion) -> np.ndarray:
    """(C,) the median over a class's images of their similarity to its mean; NaN for a class without images."""
    own = means.to(vectors)[labels.to(vectors.device)]
    similarity = (criterion.normalised(vectors) * own).sum(1).double().cpu().numpy()
    order = np.argsort(labels.cpu().numpy(), kind="stable")
    present, first = np.unique(labels.cpu().numpy()[order], return_index=True)
    medians = np.full(len(means), np.nan)
    medians[present] = [np.median(part) for part in np.split(similarity[order], first[1:])]
    return medians


def _pearson(one: np.ndarray, other: np.ndarray) -> float | None:
    """The correlation of two series; None where one of them does not vary, or there are too few to tell.

    >>> _pearson(np.array([1.0, 2.0, 3.0]), np.array([3.0, 2.0, 1.0])), _pearson(np.ones(3), np.arange(3.0))
    (-1.0, None)
    """
    if len(one) < 3 or not (np.isfinite(one).all() and np.ptp(one) > 0 and np.ptp(other) > 0):
        return None
    return float(np.corrcoef(one, other)[0, 1])
