"""Numbers as people type them, such as 5_000_000, 5e6 or 5M."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from decimal import Decimal, InvalidOperation, Overflow

FACTORS = {"k": 1_000, "m": 1_000_000}
MAX_COUNT = 10**12
"""larger numbers are refused as typing errors"""


def count(name: str, text: str | int) -> int:
    """Read a whole number of at least 1.

    Args:
        name: the name of the option, for errors.
        text: what the user typed, or a number.

    Raises:
        ValueError: the text is not a whole number from 1 to 10^12.

    Example:
        >>> [count("classes", text) for text in ("5_000_000", "5e6", "5M", "1.5k", "8")]
        [5000000, 5000000, 5000000, 1500, 8]
        >>> count("classes", "5 million")
        Traceback (most recent call last):
        ...
        ValueError: classes: got '5 million', expected a whole number from 1 to 10^12, such as 5_000_000, 5e6 or 5M
    """
    value = _decimal(str(text))
    if value is None or not 1 <= value <= MAX_COUNT or value != value.to_integral_value():
        raise ValueError(f"{name}: got {text!r}, expected a whole number from 1 to 10^12, such as 5_000_000, 5e6 or 5M")
    return int(value)


def gigabytes(name: str, text: str) -> int:
    """Read a number of GB (10^9 bytes) and return bytes.

    Example:
        >>> gigabytes("memory", "79.5")
        79500000000
    """
    value = _decimal(text)
    if value is None or not Decimal("1e-9") <= value <= MAX_COUNT:
        raise ValueError(f"{name}: got {text!r}, expected a number of GB above 0, such as 80")
    return int(value * 10**9)


def _decimal(text: str) -> Decimal | None:
    text = text.strip()
    factor = FACTORS.get(text[-1:].lower(), 1)
    try:
        value = factor * Decimal(text if factor == 1 else text[:-1])
    except (InvalidOperation, Overflow):
        return None
    return value if value.is_finite() else None


def share(name: str, text: str) -> float | str:
    """Read a number above 0 and below 1; text that is not a number is returned unchanged.

    Example:
        >>> share("touched", "0.1"), share("touched", "batch")
        (0.1, 'batch')
    """
    value = _decimal(text)
    if value is None:
        return text
    if not 0 < value < 1:
        raise ValueError(f"{name}: got {text!r}, expected a number above 0 and below 1")
    return float(value)


def figure(value: float) -> str:
    """Format a number with three significant digits, or as a whole number if it is at least 1,000.

    Example:
        >>> figure(0.0123), figure(7.8643), figure(1258.29)
        ('0.0123', '7.86', '1,258')
    """
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def nearest(value: str, names: Iterable[str]) -> str:
    """The most similar name, ignoring case.

    Example:
        >>> nearest("h100", ("cpu", "NVIDIA H200"))
        'NVIDIA H200'
    """
    spellings = {name.lower(): name for name in names}
    return spellings[difflib.get_close_matches(value.lower(), spellings, 1, 0.0)[0]]
