"""Checks of arguments: numbers, and tensors without numbers."""

from __future__ import annotations

import math
import sys
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

SIZES = 8, 4096
"""smallest and largest side of the images in pixels"""
SMALL_SIZE, SIZE = 32, 224
"""side of the images in pixels for the backbone `small`, and for all others, where nothing else is said"""
MAX_DIM = 10**6
"""largest number of dimensions of a vector"""


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


def within(low: float, high: float, reason: str, **numbers: float) -> None:
    """Check that each argument is a number from `low` to `high`.

    Args:
        low: the smallest value that is allowed.
        high: the largest value that is allowed.
        reason: why the range is limited, as the end of the message.
        **numbers: argument name -> value.

    Raises:
        ValueError: a value is not such a number; the message names the argument.

    Example:
        >>> within(-1, 1, "cosines lie there", margin=-9)
        Traceback (most recent call last):
        ...
        ValueError: margin: got -9, expected a number from -1 to 1: cosines lie there
    """
    for name, value in numbers.items():
        if not _is_number(value) or not low <= value <= high:
            raise ValueError(f"{name}: got {value!r}, expected a number from {low} to {high}: {reason}")


def usually(low: float, high: float, reason: str, **numbers: float) -> None:
    """Warn if an argument is outside the range that makes sense in nearly all cases.

    Args:
        low: the smallest usual value.
        high: the largest usual value.
        reason: what happens outside this range, as the end of the message.
        **numbers: argument name -> value.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     usually(0.1, 1000, "larger ones saturate", scale=1e6)
        >>> print(caught[0].message)
        scale: got 1000000.0, expected a number from 0.1 to 1000: larger ones saturate
    """
    for name, value in numbers.items():
        if not low <= value <= high:
            message = f"{name}: got {value!r}, expected a number from {low} to {high}: {reason}"
            warnings.warn(message, stacklevel=callers_level())


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


def check_has_numbers(name: str, tensor: Tensor) -> None:
    """Refuse a tensor on the device "meta", which has a shape and no numbers.

    Args:
        name: the name of the argument, for the error.
        tensor: any tensor.

    Raises:
        ValueError: it is on "meta".
    """
    if tensor.device.type == "meta":
        raise ValueError(f'{name}: got a tensor on the device "meta", which holds no numbers, expected one that does')


def callers_level() -> int:
    """The stack level of the first caller outside this package, for `warnings.warn`."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] == __name__.split(".")[0]:
        frame, level = frame.f_back, level + 1
    return level


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
