"""Which of several candidates is kept: the best simple one, unless another one is clearly better.

It is the one rule of a run, which compares the trained model with what needs no training (`runs.simplest`), and of
`--method auto` (`runs.auto_method`).
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

import numpy as np

LEAST_GAIN = 0.01
"""what another candidate must gain, as a fraction of the metric"""


class ClassScores(NamedTuple):
    """A metric of some candidates on the same queries.

    Attributes:
        metric: its name, a mean over queries.
        queries: the number of queries of each class.
        sums: candidate -> the sum of the metric over the queries of each class.
    """

    metric: str
    queries: list[int]
    sums: dict[str, list[float]]


class Kept(NamedTuple):
    """The candidate that is kept, and why.

    Attributes:
        name: of the candidate.
        metric: what decided.
        classes: with queries.
        scores: candidate -> its score.
        simple: the best simple candidate; None if there was none.
        other: the best one of the others; None if there was none.
        gain: how far the other one is above the simple one.
        error: the standard error of this difference, over classes.
        least: what the other one had to gain.
    """

    name: str
    metric: str
    classes: int
    scores: dict[str, float]
    simple: str | None
    other: str | None
    gain: float
    error: float
    least: float

    @property
    def reason(self) -> str:
        """Why it is kept, in words."""
        gain, error, least = (round(100 * value, 1) for value in (self.gain, self.error, self.least))
        if self.simple is None or self.other is None:
            lower = [name for name in self.scores if name != self.name]
            if not lower:
                return "the only candidate"
            second = max(lower, key=self.scores.__getitem__)
            return f"{100 * (self.scores[self.name] - self.scores[second]):.1f} above {second}"
        if self.name == self.other:
            return f"{gain} above {self.simple}, with a standard error of {error}"
        if self.gain <= 0:
            return f"{abs(gain)} above {self.other}"
        if self.gain < self.least:
            return f"{self.other} is higher by {gain}, less than {least:g} point{'s' * (least != 1)}"
        return f"{self.other} is higher by {gain}, not more than one standard error ({error})"

    def __str__(self) -> str:
        values = ", ".join(f"{name} {100 * score:.1f}" for name, score in self.scores.items())
        return f"{self.metric} on {self.classes} held-out classes: {values}; {self.name} is kept: {self.reason}"


def standard_error(sums: np.ndarray, counts: np.ndarray) -> float:
    """The standard error of a mean over queries when classes are drawn: images of one class depend on each other.

    ``d = sum_c d_c / N,  SE(d)^2 = C / (C - 1) * sum_c (d_c - n_c d)^2 / N^2``

    Args:
        sums: (C,) d_c, the sum over the queries of each class.
        counts: (C,) n_c, the number of its queries; their sum is N.

    Example:
        >>> standard_error(np.array([0.0, 2.0]), np.array([2, 2])), standard_error(np.ones(2), np.array([2, 2]))
        (0.5, 0.0)
    """
    total, classes = counts.sum(), len(counts)
    squares = ((sums - counts * sums.sum() / total) ** 2).sum() * classes / max(1, classes - 1)
    return math.sqrt(squares) / float(total)


def keep_simple(scores: ClassScores, simple: Collection[str], least: float = LEAST_GAIN) -> Kept:
    """Keep the best simple candidate, unless another one is clearly better.

    ``s = the simple candidate with the highest mean m,  o = the other one with the highest mean``
    ``d = m_o - m_s;  o is kept if d > SE(d) and d >= g, else s``

    A trained candidate is often almost the same as a simple one: then the standard error of their difference is tiny,
    and the least gain g decides. With few classes, the standard error decides. Simple candidates are not trained on
    anything that could make them better by luck, so their means alone decide between them: to prefer the simplest of
    them within one standard error loses more on other classes (docs: frozen backbone).

    Args:
        scores: of all candidates.
        simple: the names of those that need no reason.
        least: g, the least gain.

    Example:
        >>> scores = ClassScores("R@1", [10] * 4, {"untrained": [6.0, 5, 6, 6], "lda": [6.0, 7, 6, 6]})
        >>> trained = scores._replace(sums=scores.sums | {"trained": [8.0, 8, 6, 5]})
        >>> print(keep_simple(trained, ["untrained", "lda"]))
        R@1 on 4 held-out classes: untrained 57.5, lda 62.5, trained 67.5; lda is kept: trained is higher by 5.0, not
        more than one standard error (6.5)
        >>> better = scores._replace(sums=scores.sums | {"trained": [8.0, 9, 8, 8]})
        >>> keep_simple(better, ["untrained", "lda"]).name
        'trained'
    """
    counts = np.array(scores.queries, dtype=np.float64)
    is_scored = counts > 0
    counts, total = counts[is_scored], counts.sum()
    sums = {name: np.array(values)[is_scored] for name, values in scores.sums.items()}
    means = {name: float(values.sum() / total) for name, values in sums.items()}
    best_simple = max((name for name in means if name in simple), key=means.__getitem__, default=None)
    best_other = max((name for name in means if name not in simple), key=means.__getitem__, default=None)
    gain = error = 0.0
    if best_simple is not None and best_other is not None:
        difference = sums[best_other] - sums[best_simple]
        gain, error = float(difference.sum() / total), standard_error(difference, counts)
    is_clear = gain > error and gain >= least
    name = best_other if best_simple is None or (best_other is not None and is_clear) else best_simple
    assert name is not None
    return Kept(name, scores.metric, len(counts), means, best_simple, best_other, gain, error, least)
