"""The threshold of "none of these": how a false-accept rate becomes a score.

Impostor scores are the scores of images whose class is not in the index. They are not independent: images of one class
share their look-alikes, and two similar classes of an index accept each other's images. A plain quantile therefore
accepts more images of a new class than it says. So each class is left out in turn, with its images and as an answer;
the share of the scores that may lie above the threshold is lowered until the classes that were left out are accepted at
the rate that was asked for. Beyond the highest score, the tail is taken to be exponential.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

RUNNER_UP_WEIGHT = 0.3
"""how much of the runner-up's similarity is subtracted; chosen on CUB's training half, see docs/how-to/identify.md"""
MAX_LEFT_OUT = 100
"""classes that are left out in turn; of more classes, as many are drawn"""
TAIL_SHARE = 0.05
RESAMPLES = 200
BISECTIONS = 24


class Threshold(NamedTuple):
    """A threshold of scores: higher ones are accepted."""

    value: float
    low: float
    """lower end of its 95 % interval over classes"""
    high: float
    far: float
    """the share of images of other classes that it accepts"""
    is_extrapolated: bool
    """whether there were too few images to count so rare an event"""


def decide(values: np.ndarray) -> np.ndarray:
    """The score of a decision: the best similarity of a class, less a part of the second best.

    Args:
        values: (n, 2 or more) similarities to classes, the highest first; -2 stands for no class.

    Example:
        >>> decide(np.array([[0.9, 0.5], [0.9, -2.0]])).round(2).tolist()
        [0.75, 0.9]
    """
    return values[:, 0] - RUNNER_UP_WEIGHT * np.where(values[:, 1] > -2, values[:, 1], 0.0)


@dataclass(frozen=True)
class Impostors:
    """Images whose class is not among the answers.

    Attributes:
        groups: (n,) the class of each image, as a number; the number of its answer if the index has this class.
        values: (n, 3) similarities to the closest answers, -2 for none; the image's own class is none of them.
        answers: (n, 3) the classes of these.
        candidates: the number of answers that an image has; one less than the classes if its own is left out.
        classes: the number of answers that a new image has.
    """

    groups: np.ndarray
    values: np.ndarray
    answers: np.ndarray
    candidates: int
    classes: int

    def scores(self, without: int | None = None) -> np.ndarray:
        """The score (n,) of each image; `without` is a class that is taken from the answers."""
        values = self.values
        if without is not None:
            values = -np.sort(-np.where(self.answers == without, -2.0, values), axis=1)
        return decide(values)

    def threshold(self, far: float, seed: int = 0) -> Threshold:
        """Find the score that accepts images of new classes at a rate.

        Args:
            far: the false-accept rate, between 0 and 1.
            seed: seed of the draws.

        Raises:
            ValueError: the rate is out of range, or there are fewer than two classes.
        """
        if not 0 < far < 1:
            raise ValueError(f"far: got {far:g}, expected a false-accept rate between 0 and 1")
        generator = np.random.default_rng(seed)
        groups = np.unique(self.groups)
        if len(groups) < 2:
            raise ValueError(f"far: got {len(groups)} classes to calibrate with, expected at least 2")
        scores = np.sort(self.scores())[::-1]
        # Each further answer is one more chance to be accepted.
        wanted = far * min(1.0, self.candidates / self.classes)
        folds = self._folds
        total = sum(len(values) for values, _ in folds)

        def rate(share: float) -> float:
            return sum(int((values > others[int(share * len(others))]).sum()) for values, others in folds) / total

        # Above the highest score no image was accepted, but of so many images one might have been.
        if (lowest := max(rate(0.0), 1 / (total + 1))) > wanted:
            times = float(np.log(lowest / wanted))
            ends = self._interval(generator, groups, 0.0, times)
            return Threshold(float(scores[0]) + times * _tail(scores), *ends, far, True)
        low, high = 0.0, min(1.0 - 1e-9, 2 * wanted)
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if rate(middle) <= wanted else (low, middle)
        return Threshold(float(scores[int(low * len(scores))]), *self._interval(generator, groups, low), far, False)

    @functools.cached_property
    def _folds(self) -> list[tuple[np.ndarray, np.ndarray]]:
        groups = np.unique(self.groups)
        if len(groups) > MAX_LEFT_OUT:
            groups = np.random.default_rng(0).choice(groups, MAX_LEFT_OUT, replace=False)
        return [self._fold(int(group)) for group in groups]

    def _fold(self, group: int) -> tuple[np.ndarray, np.ndarray]:
        """The scores of a class, and those of the others, falling, as they would be without this class."""
        is_own = self.groups == group
        return self.scores()[is_own], np.sort(self.scores(group)[~is_own])[::-1]

    def _interval(
        self, generator: np.random.Generator, groups: np.ndarray, share: float, times: float = 0.0
    ) -> tuple[float, float]:
        """The ends of the interval of the threshold, over classes drawn with replacement.

        Args:
            generator: of the draws.
            groups: the classes.
            share: of the scores above the threshold.
            times: a threshold that is extrapolated lies so many scales of the tail above its score. The highest score
                of a draw is never above that of all classes; its scale can be.
        """
        scores = self.scores()
        order = np.argsort(-scores)
        places = np.searchsorted(groups, self.groups)[order]
        values = []
        for _ in range(RESAMPLES):
            weights = np.bincount(generator.integers(len(groups), size=len(groups)), minlength=len(groups))[places]
            above = weights.cumsum()
            value = scores[order[min(int(np.searchsorted(above, share * above[-1], "right")), len(order) - 1)]]
            values.append(value + (times * _tail(np.repeat(scores[order], weights)) if times else 0.0))
        low, high = np.quantile(values, [0.025, 0.975])
        return float(low), float(high)


def _tail(scores: np.ndarray) -> float:
    """The mean excess of the highest scores: the scale of an exponential tail."""
    count = min(max(10, int(TAIL_SHARE * len(scores))), len(scores) - 1)
    return max(float((scores[:count] - scores[count]).mean()), 1e-6)
