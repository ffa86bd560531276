"""Bootstrap intervals over classes for the error rates of pairs.

Classes are drawn with replacement. A class that is drawn w times counts its genuine pairs w times, and the impostor
pairs of two classes a and b count w_a w_b times, so that the interval includes the chance of both sides. The pairs are
counted once for each two classes, in a few hundred bins of similarity; each resample is a weighted sum of these counts.
With more than `MAX_GROUPS` classes, classes are put into that many groups by chance, and whole groups are drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from proxymetric.metrics.intervals import Estimate
from proxymetric.metrics.names import Metric
from proxymetric.metrics.pairs import BINS, LOW_BITS, Pairs, Tally, similarity_of
from proxymetric.metrics.ranking import Search
from proxymetric.metrics.verification import Verification, crossing_rate, verify

MAX_GROUPS = 100
IMPOSTOR_BINS, GENUINE_BINS = 128, 64
"""bins of the resamples: dense where few impostor pairs are accepted, and over the genuine pairs"""
REPEATS_AT_ONCE = 100


class PairEstimate(NamedTuple):
    """An operating point with intervals: the threshold, and the rate of genuine pairs that it rejects."""

    threshold: Estimate
    fmr: float
    """the share of impostor pairs that it accepts, at most the rate that was asked for"""
    fnmr: Estimate


class VerificationEstimate(NamedTuple):
    """Error rates of pairs with intervals.

    Attributes:
        verification: the error rates and the ROC.
        eer: the equal error rate.
        points: false-match rate that was asked for -> the operating point.
    """

    verification: Verification
    eer: Estimate
    points: dict[float, PairEstimate]


class Resamples(NamedTuple):
    """Error rates of resampled classes; resamples without a genuine or an impostor pair are NaN."""

    eer: np.ndarray
    """(repeats,)"""
    thresholds: dict[float, np.ndarray]
    """false-match rate -> (repeats,)"""
    fnmr: dict[float, np.ndarray]
    """false-match rate -> (repeats,)"""

    def of(self, metric: Metric) -> np.ndarray:
        """The values of a metric, (repeats,)."""
        return self.eer if metric.fmr is None else self.fnmr[metric.fmr]


def verification_estimate(
    task: Search, fmr: Sequence[float], *, level: float = 0.95, repeats: int = 1000, seed: int = 0
) -> VerificationEstimate:
    """Count the errors of the pairs of a search, with bootstrap intervals over classes.

    Args:
        task: the checked vectors and labels.
        fmr: false-match rates, each from 0 to 1.
        level: the share of the resampled values inside an interval.
        repeats: resamples.
        seed: seed of the draws.
    """
    tally = Pairs(task).count()
    verification = verify(task, fmr, tally)
    resamples = resample(task, fmr, repeats=repeats, seed=seed, tally=tally)
    points = {
        rate: PairEstimate(
            Estimate(point.threshold, *ends(resamples.thresholds[rate], level)),
            point.fmr,
            Estimate(point.fnmr, *ends(resamples.fnmr[rate], level)),
        )
        for rate, point in verification.points.items()
    }
    return VerificationEstimate(verification, Estimate(verification.eer, *ends(resamples.eer, level)), points)


def ends(values: np.ndarray, level: float = 0.95) -> tuple[float, float]:
    """The ends of the interval that holds a share of resampled values.

    Raises:
        ValueError: no resample has both kinds of pairs.
    """
    if not np.isfinite(values).any():
        raise ValueError("labels: got too few classes to draw from, expected several with two vectors or more")
    low, high = np.nanquantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def resample(
    task: Search, fmr: Sequence[float], *, repeats: int = 1000, seed: int = 0, tally: Tally | None = None
) -> Resamples:
    """Draw classes with replacement and compute the error rates of each resample.

    Two calls with the same labels and the same seed draw the same classes, so that their differences are paired.

    Args:
        task: the checked vectors and labels.
        fmr: false-match rates.
        repeats: resamples.
        seed: seed of the draws.
        tally: the count of all pairs, which saves a pass if it is there already.
    """
    pairs = Pairs(task)
    edges = _edges(pairs.count() if tally is None else tally)
    generator = np.random.default_rng(seed)
    groups = _groups(task, generator)
    number = int(max(codes.max() for codes in groups)) + 1
    genuine, within, between = _counts(pairs, groups, number, edges)
    draws = generator.integers(number, size=(repeats, number))
    weights = np.stack([np.bincount(row, minlength=number) for row in draws]).astype(np.float64)
    similarities = similarity_of((np.array([0, *edges, BINS]) << LOW_BITS) - 1)
    places = np.arange(len(similarities))
    eer: list[float] = []
    thresholds: dict[float, list[float]] = {rate: [] for rate in fmr}
    missed: dict[float, list[float]] = {rate: [] for rate in fmr}
    for part in np.split(weights, range(REPEATS_AT_ONCE, repeats, REPEATS_AT_ONCE)):
        crossed = (part @ between.reshape(number, -1)).reshape(len(part), number, -1)
        impostor = np.einsum("rgb,rg->rb", crossed, part) + part @ within
        for accepted, rejected in zip(impostor, part @ genuine, strict=True):
            if not (accepted.sum() and rejected.sum()):
                eer.append(np.nan)
                for rate in fmr:
                    thresholds[rate].append(np.nan)
                    missed[rate].append(np.nan)
                continue
            false_matches = np.append(accepted[::-1].cumsum()[::-1], 0) / accepted.sum()
            false_non_matches = np.append(0, rejected.cumsum()) / rejected.sum()
            eer.append(crossing_rate(false_matches, false_non_matches))
            for rate in fmr:
                # Of several edges with this rate, the lowest one counts; between two edges the curves are straight.
                place = min(np.interp(-rate, -false_matches, places), int((false_matches > rate).sum()))
                thresholds[rate].append(float(np.interp(place, places, similarities)))
                missed[rate].append(float(np.interp(place, places, false_non_matches)))
    return Resamples(
        np.array(eer),
        {rate: np.array(values) for rate, values in thresholds.items()},
        {rate: np.array(values) for rate, values in missed.items()},
    )


def _edges(tally: Tally) -> np.ndarray:
    """The lower edges of the bins of the resamples, without the first bin."""
    fmr, fnmr = tally.rates()
    rates = np.geomspace(1 / tally.impostor_pairs, 1.0, IMPOSTOR_BINS)
    shares = np.linspace(0, 1, GENUINE_BINS)
    of_impostors = BINS - np.searchsorted(fmr[::-1], rates)
    edges = np.unique(np.concatenate([of_impostors, np.searchsorted(fnmr, shares)]))
    return edges[(edges > 0) & (edges < BINS)]


def _groups(task: Search, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """The group of each query and of each item: its class, or some classes by chance."""
    labels, items = task.labels.cpu().numpy(), task.item_labels.cpu().numpy()
    classes = np.unique(np.concatenate([labels, items]))
    group = np.arange(len(classes))
    if len(classes) > MAX_GROUPS:
        group = generator.permutation(len(classes)) % MAX_GROUPS
    return group[np.searchsorted(classes, labels)], group[np.searchsorted(classes, items)]


def _counts(
    pairs: Pairs, groups: tuple[np.ndarray, np.ndarray], number: int, edges: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Count pairs by groups and bins.

    Returns:
        Genuine pairs (G, B), impostor pairs within a group (G, B), and between two groups (G, G, B).
    """
    device, bins = pairs.task.labels.device, len(edges) + 1
    bin_of = torch.from_numpy(np.searchsorted(edges, np.arange(BINS), side="right")).to(device)
    query_groups, item_groups = (torch.from_numpy(codes).to(device) for codes in groups)
    genuine = torch.zeros(number * bins, device=device, dtype=torch.float64)
    impostor = torch.zeros(number * number * bins, device=device, dtype=torch.float64)
    for block in pairs.blocks():
        code = bin_of[block.keys >> LOW_BITS]
        g, h = query_groups[block.queries], item_groups[block.items]
        same = block.is_genuine
        genuine += torch.bincount((g * bins + code)[same], minlength=len(genuine))
        impostor += torch.bincount(((g * number + h) * bins + code)[~same], minlength=len(impostor))
    between = impostor.view(number, number, bins).cpu().numpy()
    within = np.einsum("ggb->gb", between).copy()
    np.einsum("ggb->gb", between)[:] = 0
    return genuine.view(number, bins).cpu().numpy(), within, between
