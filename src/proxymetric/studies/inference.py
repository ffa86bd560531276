"""Statistics of a few seeds: Student intervals, paired differences, and the seeds needed to resolve a claim."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

MAX_SEEDS = 10_000
"""most seeds that `seeds_needed` tries"""
POINTS = 4096
"""quantiles of the estimated deviation over which `power` averages; the error is below 1e-5"""


class Mean(NamedTuple):
    """A mean over n seeds.

    Attributes:
        value: the mean.
        half: half the width of its 95 % interval; None for a single seed.
        n: the number of seeds.
        sd: the standard deviation over the seeds; None for a single seed.
    """

    value: float
    half: float | None
    n: int
    sd: float | None = None


def student(values: Sequence[float], level: float = 0.95) -> Mean:
    """The mean and its Student interval.

    Args:
        values: one for each seed, at least one.
        level: probability that the interval covers the mean.

    Returns:
        The mean, half the width of the interval, the number of values, their standard deviation.

    Example:
        >>> mean = student([1.0, 2.0, 3.0])
        >>> mean.value, round(mean.half, 3), mean.n
        (2.0, 2.484, 3)
    """
    from scipy.special import stdtrit

    n = len(values)
    if n == 0:
        raise ValueError("values: got none, expected at least one")
    mean = statistics.fmean(values)
    if n == 1:
        return Mean(mean, None, 1)
    sd = statistics.stdev(values)
    return Mean(mean, float(stdtrit(n - 1, (1 + level) / 2)) * sd / math.sqrt(n), n, sd)


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Mean | None:
    """The mean difference between two rows at equal seeds; None if the rows have no seed in common.

    Example:
        >>> paired({0: 2.0, 1: 3.0, 2: 9.0}, {0: 1.0, 1: 1.0}).value
        1.5
    """
    common = sorted(ours.keys() & theirs.keys())
    return student([ours[seed] - theirs[seed] for seed in common]) if common else None


def power(effect: float, n: int, level: float = 0.05) -> float:
    """The power of a two-sided paired t-test.

    ``E[Phi(shift - limit u) + Phi(-shift - limit u)]``, with the limit of the test, ``shift = effect sqrt(n)``, and u,
    the estimated deviation over the true one: ``(n - 1) u^2`` has a chi-squared distribution with n - 1 degrees of
    freedom. (scipy's noncentral t, which is the same distribution, returns NaN for many shifts above 8.)

    Args:
        effect: true mean of the differences in units of their standard deviation.
        n: the number of pairs.
        level: significance level of the test.

    Example:
        >>> round(power(1.0, 10), 3)
        0.803
    """
    from scipy.special import gammaincinv, ndtr, stdtrit

    limit, shift = float(stdtrit(n - 1, 1 - level / 2)), abs(effect) * math.sqrt(n)
    quantiles = (np.arange(POINTS) + 0.5) / POINTS
    spread = np.sqrt(2 * gammaincinv((n - 1) / 2, quantiles) / (n - 1))
    return float(np.mean(ndtr(shift - limit * spread) + ndtr(-shift - limit * spread)))


def seeds_needed(claim: float, sd: float, target: float = 0.8, level: float = 0.05) -> int | None:
    """The smallest number of paired seeds with which a t-test detects the claimed difference; None above 10,000.

    Args:
        claim: the difference.
        sd: standard deviation of the paired differences, as measured.
        target: the required power.
        level: significance level of the two-sided test.

    Example:
        >>> seeds_needed(claim=1.0, sd=1.0), seeds_needed(claim=0.0, sd=1.0)
        (10, None)
    """
    if claim == 0:
        return None
    if sd == 0:
        return 2
    effect, high = abs(claim) / sd, 2
    while power(effect, high, level) < target:
        if high >= MAX_SEEDS:
            return None
        high = min(2 * high, MAX_SEEDS)
    low = high // 2
    while high - low > 1 and high > 2:
        middle = (low + high) // 2
        low, high = (low, middle) if power(effect, middle, level) >= target else (middle, high)
    return high
