"""Thresholds of similarity, chosen on the held-out classes of a run, never on its test classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from proxymetric.data.splits import some_classes
from proxymetric.metrics.verification_intervals import verification_estimate
from proxymetric.runs.score import EmbeddedSet, search_task
from proxymetric.search.run_knowledge import RunKnowledge, write_knowledge

FALSE_MATCH_RATES = (0.1, 0.01, 0.001)
"""the rates for which a run stores thresholds"""
MIN_CLASSES = 5
"""fewest held-out classes: with fewer, a threshold says nothing about new classes"""
MAX_IMAGES = 8_000
"""images of held-out classes that are compared and stored; whole classes are drawn if there are more"""
ROC_POINTS = 200


def held_out_thresholds(embedded: EmbeddedSet) -> dict[str, Any] | None:
    """Choose thresholds on held-out classes.

    Args:
        embedded: the held-out classes, embedded by the trained encoder; at most about `MAX_IMAGES` images.

    Returns:
        `classes` and `images` that were compared, numbers of `genuine` and `impostor` pairs; `eer`, its value with the
        ends of its 95 % interval over classes; `points`, for each of `FALSE_MATCH_RATES` the `asked` rate, the
        `threshold` and `fnmr` with their intervals, and the `fmr` of the threshold; and `roc`, points of the curve as
        lists of threshold, FMR and FNMR. None if there are too few classes or no pairs.
    """
    counts = np.unique(embedded.labels.numpy(), return_counts=True)[1]
    if not has_pairs(embedded.labels.numpy()):
        return None
    estimate = verification_estimate(search_task(embedded), FALSE_MATCH_RATES)
    genuine, impostor = estimate.verification.pairs
    roc = estimate.verification.roc
    # Points that are even in the threshold show both curves; the first and the last one are kept.
    shown = np.unique(np.searchsorted(roc.thresholds, np.linspace(roc.thresholds[0], roc.thresholds[-1], ROC_POINTS)))
    return {
        "classes": len(counts),
        "images": int(counts.sum()),
        "genuine": genuine,
        "impostor": impostor,
        "eer": list(estimate.eer),
        "points": [
            {"asked": asked, "threshold": list(point.threshold), "fmr": point.fmr, "fnmr": list(point.fnmr)}
            for asked, point in estimate.points.items()
        ],
        "roc": [[round(float(value), 6) for value in values[shown]] for values in roc],
    }


def has_pairs(labels: np.ndarray) -> bool:
    """Whether enough classes have two images or more, so that thresholds can be chosen on them.

    Example:
        >>> has_pairs(np.repeat(np.arange(5), 2)), has_pairs(np.arange(20))
        (True, False)
    """
    return bool((np.unique(labels, return_counts=True)[1] > 1).sum() >= MIN_CLASSES)


def store_thresholds(
    folder: Path, embedded: EmbeddedSet, uncertainty: dict[str, float], trained: list[str], seed: int = 0
) -> dict[str, Any] | None:
    """Choose thresholds on the held-out classes of a run, and write what `search --identify` needs of it.

    The file holds the vectors of the held-out classes, the names of the training classes, and how certain the method is
    of each of them if it has an estimate (VCPA).

    Args:
        folder: the folder of the run.
        embedded: the held-out classes, embedded by the trained encoder.
        uncertainty: training class -> how uncertain the method is of it; empty for methods without an estimate.
        trained: the names of the training classes.
        seed: seed of the choice of classes, if there are too many.

    Returns:
        See `held_out_thresholds`.
    """
    rows = some_classes(embedded.labels.numpy(), MAX_IMAGES, seed, MIN_CLASSES)
    held_out = embedded._replace(vectors=embedded.vectors[torch.from_numpy(rows)], kept=embedded.kept[rows])
    labels = [held_out.images.classes[label] for label in held_out.labels.tolist()]
    write_knowledge(folder, RunKnowledge(trained, held_out.vectors, labels, uncertainty))
    return held_out_thresholds(held_out)
