"""Numbers as people type them: 5_000_000, 5e6 or 5M."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from decimal import Decimal, InvalidOperation, Overflow

ENDINGS = {"k": 1_000, "m": 1_000_000}
MOST = 10**12
"""beyond this a number is a slip of the hand"""


def count(name: str, text: str) -> int:
    """A whole number of at least 1, from text; `name` is the option that a refusal names.

    >>> [count("classes", text) for text in ("5_000_000", "5e6", "5M", "1.5k", "8")]
    [5000000, 5000000, 5000000, 1500, 8]
    >>> count("classes", "5 million")
    Traceback (most recent call last):
    ...
    ValueError: classes: got '5 million', expected a whole number from 1 to 10^12, such as 5_000_000, 5e6 or 5M
    """
    value = _decimal(text)
    if value is None or not 1 <= value <= MOST or value != value.to_integral_value():
        raise ValueError(f"{name}: got {text!r}, expected a whole number from 1 to 10^12, such as 5_000_000, 5e6 or 5M")
    return int(value)


def gigabytes(name: str, text: str) -> int:
    """Bytes, from a number of GB (10^9 bytes).

    >>> gigabytes("memory", "79.5")
    79500000000
    """
    value = _decimal(text)
    if value is None or not Decimal("1e-9") <= value <= MOST:
        raise ValueError(f"{name}: got {text!r}, expected a number of GB above 0, such as 80")
    return int(value * 10**9)


def _decimal(text: str) -> Decimal | None:
    text = text.strip()
    factor = ENDINGS.get(text[-1:].lower(), 1)
    try:
        value = factor * Decimal(text if factor == 1 else text[:-1])
    except (InvalidOperation, Overflow):
        return None
    return value if value.is_finite() else None


def share(name: str, text: str) -> float | str:
    """A number above 0 and below 1, from text; what is no number stays text.

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
    """Three digits, and never an exponent for large numbers.

    >>> figure(0.0123), figure(7.8643), figure(1258.29)
    ('0.0123', '7.86', '1,258')
    """
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def known(name: str, value: str, wanted: Iterable[str]) -> str:
    """`value`, if it is one of the expected; else a refusal that names the nearest.

    >>> known("dtype", "bf16", ("float32", "bfloat16"))
    Traceback (most recent call last):
    ...
    ValueError: dtype: got 'bf16', expected one of float32, bfloat16; nearest is 'bfloat16'
    """
    wanted = tuple(wanted)
    if value not in wanted:
        raise ValueError(
            f"{name}: got {value!r}, expected one of {', '.join(wanted)}; nearest is {nearest(value, wanted)!r}"
        )
    return value


def nearest(value: str, wanted: Iterable[str]) -> str:
    """The most similar name, whatever its case.

    >>> nearest("h100", ("cpu", "NVIDIA H200"))
    'NVIDIA H200'
    """
    spelled = {name.lower(): name for name in wanted}
    return spelled[difflib.get_close_matches(value.lower(), spelled, 1, 0.0)[0]]
