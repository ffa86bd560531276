"""The ranges of margins, scales and temperatures: what is refused, and what only gets a warning."""

from __future__ import annotations

from proxymetric.arguments.checks import above_zero, usually, within

MIN_SCALE, MAX_SCALE = 0.1, 1000
"""usual factors of a cosine in an exponent; the papers have 1 to 256"""


def check_scale(**scales: float) -> None:
    """Refuse a factor of a cosine that is not above 0; warn about a factor far from those of all papers.

    Args:
        **scales: argument name -> value.

    Example:
        >>> check_scale(scale=0)
        Traceback (most recent call last):
        ...
        ValueError: scale: got 0, expected a number above 0
    """
    above_zero(**scales)
    usually(MIN_SCALE, MAX_SCALE, "smaller values hardly train, and with larger values a single pair decides", **scales)


def check_temperature(**temperatures: float) -> None:
    """Refuse a divisor of a cosine that is not above 0; warn about a divisor far from those of all papers.

    Args:
        **temperatures: argument name -> value.
    """
    above_zero(**temperatures)
    usually(
        1 / MAX_SCALE,
        1 / MIN_SCALE,
        "with smaller values a single pair decides, and larger values hardly train",
        **temperatures,
    )


def check_cosine(**cosines: float) -> None:
    """Refuse a number that is compared with cosines and lies outside their range.

    Args:
        **cosines: argument name -> value.
    """
    within(-1, 1, "it is compared with cosines", **cosines)


def check_cosine_margin(**margins: float) -> None:
    """Refuse a margin that no cosine can have; warn about a negative one.

    Args:
        **margins: argument name -> value.

    Example:
        >>> check_cosine_margin(margin=-9)
        Traceback (most recent call last):
        ...
        ValueError: margin: got -9, expected a number from -1 to 1: it is compared with cosines
    """
    check_cosine(**margins)
    usually(0, 1, "a negative margin allows positive pairs to be less similar than negative pairs", **margins)


def check_distance_margin(**distances: float) -> None:
    """Warn about a distance that vectors of unit length cannot have.

    Args:
        **distances: argument name -> value.
    """
    usually(0, 2, "vectors of unit length are at most 2 apart", **distances)
