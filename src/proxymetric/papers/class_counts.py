"""Numbers of training images for methods that weigh classes by frequency, and lists with a number for each class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from proxymetric.papers import options
from proxymetric.papers.base import base_of
from proxymetric.weightings.class_balance import is_frequency

BY_CLASS = ("weights", "margins", "counts")
"""arguments of a method that may be lists with a number for each class"""


def uses_frequency(name: str, arguments: Mapping[str, Any]) -> bool:
    """Whether a method, or a method that it is built around, still needs the numbers of training images.

    Args:
        name: a method of the catalogue.
        arguments: its arguments.

    Example:
        >>> uses_frequency("cosface", {"weights": "frequency"}), uses_frequency("cosface", {})
        (True, False)
    """
    return with_class_counts(name, arguments, [1]) != dict(arguments)


def with_class_counts(name: str, arguments: Mapping[str, Any], counts: Sequence[int]) -> dict[str, Any]:
    """The arguments with `counts` wherever weights or margins are "frequency" and no counts are given.

    Args:
        name: a method of the catalogue.
        arguments: its arguments, also with the table of a base.
        counts: the number of training images of each class.

    Example:
        >>> with_class_counts("cosface", {"weights": "frequency"}, [9, 1])
        {'weights': 'frequency', 'counts': [9, 1]}
        >>> with_class_counts("ccp", {"base": {"method": "cosface", "margins": "frequency"}}, [9, 1])
        {'base': {'method': 'cosface', 'margins': 'frequency', 'counts': [9, 1]}}
    """
    parameters, result = options(name), dict(arguments)
    by_frequency = any(is_frequency(arguments.get(key)) for key in ("weights", "margins"))
    if "counts" in parameters and by_frequency and arguments.get("counts") is None:
        result["counts"] = list(counts)
    base = base_of(parameters, arguments)
    if base is not None and (filled := with_class_counts(*base, counts)) != base[1]:
        result["base"] = {"method": base[0], **filled}
    return result


def listed_classes(name: str, arguments: Mapping[str, Any]) -> tuple[str, int] | None:
    """The first argument that lists a number for each class, and the length of its list; None if there is no list.

    Args:
        name: a method of the catalogue.
        arguments: its arguments, also with the table of a base.

    Example:
        >>> listed_classes("cosface", {"margins": [0.3, 0.2, 0.2]})
        ('margins', 3)
    """
    parameters = options(name)
    for key in BY_CLASS:
        value = arguments.get(key) if key in parameters else None
        if isinstance(value, Sequence) and not isinstance(value, str):
            return key, len(value)
    base = base_of(parameters, arguments)
    return None if base is None else listed_classes(*base)
