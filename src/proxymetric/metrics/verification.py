"""Verification: are two images of the same class? A pair is accepted if its similarity is above a threshold.

    FMR(t)      share of the impostor pairs (two classes) with a similarity above t: false matches
    FNMR(t)     share of the genuine pairs (one class) with a similarity of at most t: false non-matches
    FNMR@FMR=f  FNMR at the lowest threshold with FMR <= f; absent if one false match is a rate above f
    EER         the rate at which FMR and FNMR are equal, on straight lines between neighbouring points of the ROC

All pairs are counted, exactly: see `pairs`. Without a gallery the pairs are the unordered pairs of the vectors; with a
gallery, each query with each item.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from proxymetric.arguments.checks import callers_level
from proxymetric.arguments.vectors import Labels, Vectors
from proxymetric.metrics.names import Metric
from proxymetric.metrics.pairs import BINS, LOW, LOW_BITS, Pairs, Tally, similarity_of
from proxymetric.metrics.ranking import Search, search


class OperatingPoint(NamedTuple):
    """A threshold and its two error rates."""

    threshold: float
    """pairs above it are accepted; -1.0 and less accept nearly all"""
    fmr: float
    fnmr: float


class Roc(NamedTuple):
    """Points of the curve of the error rates, by rising threshold."""

    thresholds: np.ndarray
    fmr: np.ndarray
    fnmr: np.ndarray


@dataclass(frozen=True)
class Verification:
    """The error rates of all pairs.

    Attributes:
        pairs: numbers of genuine and of impostor pairs.
        eer: the equal error rate.
        points: false-match rate that was asked for -> the operating point.
        roc: points of the curve; each is exact.
    """

    pairs: tuple[int, int]
    eer: float
    points: dict[float, OperatingPoint]
    roc: Roc


def verification(
    embeddings: Vectors,
    labels: Labels,
    fmr: Sequence[float] = (0.01, 0.001),
    *,
    gallery: Vectors | None = None,
    gallery_labels: Labels | None = None,
    device: torch.device | str | None = None,
) -> Verification:
    """Count the errors of deciding by cosine similarity whether two vectors have the same class.

    Args:
        embeddings: (N, D); see `rank`.
        labels: (N,).
        fmr: false-match rates for which thresholds are computed, each from 0 to 1.
        gallery: (G, D); None: all pairs of the embeddings are compared.
        gallery_labels: (G,).
        device: where to compute; by default where the embeddings are.

    Returns:
        Equal error rate, operating points and ROC.

    Raises:
        ValueError: an argument is out of range, or there is no genuine or no impostor pair.

    Example:
        >>> vectors = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [0.6, 0.8]])
        >>> result = verification(vectors, [0, 0, 1, 1], fmr=[0.25])
        >>> result.pairs, result.eer
        ((2, 4), 0.25)
        >>> threshold, fmr, fnmr = result.points[0.25]
        >>> round(threshold, 6), fmr, fnmr  # both genuine pairs have 0.8, the impostor pairs 0, 0.6, 0.6 and 0.96
        (0.6, 0.25, 0.0)
    """
    return verify(search(embeddings, labels, gallery, gallery_labels, "cosine", None, device), fmr)


def verify(task: Search, fmr: Sequence[float], tally: Tally | None = None) -> Verification:
    """Count the errors of the pairs of a search; see `verification`. `tally` saves a pass if it is there already."""
    for rate in fmr:
        if not 0 <= rate <= 1:
            raise ValueError(f"fmr: got {rate}, expected rates from 0 to 1")
    pairs = Pairs(task)
    tally = pairs.count() if tally is None else tally
    tables = pairs.refine([bin for rate in fmr if (bin := _bin_of_rate(tally, rate)) is not None] + [_crossing(tally)])
    points = {rate: _point(tally, tables, rate) for rate in fmr}
    roc = _roc(tally)
    return Verification((tally.genuine_pairs, tally.impostor_pairs), _eer(tally, tables), points, roc)


def verification_scores(task: Search, metrics: Sequence[Metric]) -> dict[str, float]:
    """Compute EER and FNMR@FMR=f of the pairs of a search, by name; without the rates that it has too few pairs for."""
    refused = too_few_pairs(task, metrics)
    for sentence in refused.values():
        warnings.warn(sentence, stacklevel=callers_level())
    metrics = [metric for metric in metrics if metric.name not in refused]
    if not metrics:
        return {}
    result = verify(task, [metric.fmr for metric in metrics if metric.fmr is not None])
    return {metric.name: result.eer if metric.fmr is None else result.points[metric.fmr].fnmr for metric in metrics}


def too_few_pairs(task: Search, metrics: Sequence[Metric]) -> dict[str, str]:
    """A sentence for each FNMR@FMR=f that the pairs of a search are too few for, by name.

    A rate f is measured with at least 1 / f impostor pairs, so that one false match is a rate of f at most. With fewer,
    FMR <= f means no false match at all: the threshold is that of the most similar impostor pair, whatever f is, and
    the figure is not that of f.

    Args:
        task: the vectors and labels, of which only the labels are read.
        metrics: metrics of pairs; others have no rate.
    """
    impostors = Pairs(task).impostors() if any(metric.fmr for metric in metrics) else 0
    return {
        metric.name: f"{metric.name}: got {impostors:,} pairs of different classes, expected at least "
        f"{needed_impostors(metric.fmr):,}, so that one false match is a rate of {metric.fmr:g} at most; the figure is "
        "left out"
        for metric in metrics
        if metric.fmr and 0 < impostors < needed_impostors(metric.fmr)
    }


def needed_impostors(rate: float) -> int:
    """The fewest impostor pairs of which one may be accepted at a false-match rate.

    Args:
        rate: > 0.

    Example:
        >>> needed_impostors(1e-7), needed_impostors(0.3), needed_impostors(1.0)
        (10000000, 4, 1)
    """
    count = round(min(1 / rate, 1e300))
    return count if 1 / count <= rate else count + 1


def accepted_impostors(rate: float, impostors: int) -> int:
    """The largest number of impostor pairs that may be accepted at a false-match rate.

    Example:
        >>> accepted_impostors(0.1, 30), accepted_impostors(0.1, 29)
        (3, 2)
    """
    count = round(rate * impostors)
    return count if count / impostors <= rate else count - 1


def _bin_of_rate(tally: Tally, rate: float) -> int | None:
    """The bin of the most similar impostor pair that must be rejected; None if none must."""
    accepted = accepted_impostors(rate, tally.impostor_pairs)
    if accepted >= tally.impostor_pairs:
        return None
    from_above = tally.impostor[::-1].cumsum()
    return BINS - 1 - int(np.searchsorted(from_above, accepted + 1))


def _point(tally: Tally, tables: dict[int, tuple[np.ndarray, np.ndarray]], rate: float) -> OperatingPoint:
    bin = _bin_of_rate(tally, rate)
    if bin is None:
        return OperatingPoint(-1.0 - 1.0 / LOW, 1.0, 0.0)
    genuine, impostor = tables[bin]
    above = int(tally.impostor[bin + 1 :].sum())
    accepted = accepted_impostors(rate, tally.impostor_pairs)
    low = LOW - 1 - int(np.searchsorted(impostor[::-1].cumsum(), accepted + 1 - above))
    false_matches = above + int(impostor[low + 1 :].sum())
    rejected = int(tally.genuine[:bin].sum()) + int(genuine[: low + 1].sum())
    key = (bin << LOW_BITS) + low
    return OperatingPoint(similarity_of(key), false_matches / tally.impostor_pairs, rejected / tally.genuine_pairs)


def _crossing(tally: Tally) -> int:
    """The bin in which FMR and FNMR cross."""
    fmr, fnmr = tally.rates()
    return int(np.flatnonzero(fmr - fnmr >= 0)[-1])  # at the lowest edge FMR is 1, at the highest one FNMR is 1


def _eer(tally: Tally, tables: dict[int, tuple[np.ndarray, np.ndarray]]) -> float:
    bin = _crossing(tally)
    genuine, impostor = tables[bin]
    above, below = int(tally.impostor[bin:].sum()), int(tally.genuine[:bin].sum())
    fmr = (above - np.append(0, impostor.cumsum())) / tally.impostor_pairs
    fnmr = (below + np.append(0, genuine.cumsum())) / tally.genuine_pairs
    return crossing_rate(fmr, fnmr)


def crossing_rate(fmr: np.ndarray, fnmr: np.ndarray) -> float:
    """Return the rate at which a falling and a rising curve cross, on straight lines between their points.

    Example:
        >>> crossing_rate(np.array([1.0, 0.5, 0.0]), np.array([0.0, 0.5, 1.0]))
        0.5
        >>> crossing_rate(np.array([1.0, 0.0]), np.array([0.0, 1.0]))
        0.5
    """
    differences = fmr - fnmr
    last = int(np.flatnonzero(differences >= 0)[-1])
    if differences[last] == 0 or last == len(fmr) - 1:
        return float(fmr[last])
    share = differences[last] / (differences[last] - differences[last + 1])
    return float(fmr[last] + share * (fmr[last + 1] - fmr[last]))


def _roc(tally: Tally) -> Roc:
    """The points at the edges of the bins between which a pair lies."""
    fmr, fnmr = tally.rates()
    changes = np.flatnonzero(tally.genuine + tally.impostor)
    edges = np.unique(np.concatenate([changes, changes + 1]))
    return Roc(similarity_of((edges << LOW_BITS) - 1), fmr[edges], fnmr[edges])
