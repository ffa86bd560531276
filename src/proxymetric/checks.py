"""Checks of numeric arguments."""

from __future__ import annotations

import math


def above_zero(**numbers: float) -> None:
    """Check that each argument is a finite number above 0.

    Args:
        **numbers: argument name -> value.

    Raises:
        ValueError: a value is not such a number; the message names the argument.

    Example:
        >>> above_zero(scale=-1)
        Traceback (most recent call last):
        ...
        ValueError: scale: got -1, expected a number above 0
    """
    for name, value in numbers.items():
        if not _is_number(value) or not value > 0:
            raise ValueError(f"{name}: got {value!r}, expected a number above 0")


def number(**numbers: float) -> None:
    """Check that each argument is a finite number.

    Args:
        **numbers: argument name -> value.

    Raises:
        ValueError: a value is not such a number; the message names the argument.
    """
    for name, value in numbers.items():
        if not _is_number(value):
            raise ValueError(f"{name}: got {value!r}, expected a number")


def at_least_zero(**numbers: float) -> None:
    """Check that each argument is a finite number of at least 0.

    Args:
        **numbers: argument name -> value.

    Raises:
        ValueError: a value is not such a number; the message names the argument.
    """
    for name, value in numbers.items():
        if not _is_number(value) or value < 0:
            raise ValueError(f"{name}: got {value!r}, expected a number of at least 0")


def whole_number(least: int = 0, **numbers: int) -> None:
    """Check that each argument is a whole number of at least `least`.

    Args:
        least: the smallest value that is allowed.
        **numbers: argument name -> value.

    Raises:
        ValueError: a value is not such a number; the message names the argument.

    Example:
        >>> whole_number(1, patience=2.5)
        Traceback (most recent call last):
        ...
        ValueError: patience: got 2.5, expected a whole number of at least 1
    """
    for name, value in numbers.items():
        if not hasattr(value, "__index__") or isinstance(value, bool) or value < least:
            raise ValueError(f"{name}: got {value!r}, expected a whole number of at least {least}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
