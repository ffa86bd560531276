"""Arguments by name: one check of a choice, one "did you mean"."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

MAX_NAMES = 30
"""longer lists are not printed whole"""


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """The end of an error's sentence: the nearest right name, or nothing where none is near.

    Args:
        name: what was given.
        known: the names there are.

    Returns:
        `"; did you mean 'x'?"`, or an empty text.

    Example:
        >>> did_you_mean("proxy-ancor", ["proxy-anchor", "triplet"])
        "; did you mean 'proxy-anchor'?"
        >>> did_you_mean("zzz", ["proxy-anchor", "triplet"])
        ''
    """
    spelled = {_plain(each): each for each in known}
    near = difflib.get_close_matches(_plain(str(name)), spelled, 1, 0.5)
    return f"; did you mean {spelled[near[0]]!r}?" if near else ""


def one_of(argument: str, value: Any, known: Iterable[Any]) -> None:
    """Refuse a value that is not among those there are.

    Args:
        argument: its name in the message.
        value: what was given.
        known: what it may be.

    Raises:
        ValueError: the value is none of them; the message names the nearest.

    Example:
        >>> one_of("optimizer", "adamm", ("adam", "sgd"))
        Traceback (most recent call last):
        ValueError: optimizer: got 'adamm', expected one of adam, sgd; did you mean 'adam'?
    """
    choices = list(known)
    if value not in choices:
        shown = ", ".join(map(str, choices[:MAX_NAMES])) + (", ..." if len(choices) > MAX_NAMES else "")
        near = did_you_mean(value, [each for each in choices if isinstance(each, str)])
        raise ValueError(f"{argument}: got {value!r}, expected one of {shown}{near}")


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")
