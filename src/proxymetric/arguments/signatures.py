"""Check that an argument is one of several choices or has the right type, with a "did you mean" for wrong names."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

MAX_LISTED_NAMES = 30
"""names listed in an error; longer lists are cut"""
MIN_LIKENESS = 0.5
"""how alike two names must be for a "did you mean", from 0 to 1 (`difflib`)"""


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Suggest the known name that is most similar to a wrong one, as the end of an error message.

    Args:
        name: the wrong name.
        known: the right names.

    Returns:
        `"; did you mean 'x'?"`, or an empty text if no known name is similar.

    Example:
        >>> did_you_mean("proxy-ancor", ["proxy-anchor", "triplet"])
        "; did you mean 'proxy-anchor'?"
        >>> did_you_mean("zzz", ["proxy-anchor", "triplet"])
        ''
    """
    spellings = {_normalised(spelling): spelling for spelling in known}
    matches = difflib.get_close_matches(_normalised(str(name)), spellings, 1, MIN_LIKENESS)
    return f"; did you mean {spellings[matches[0]]!r}?" if matches else ""


def neighbour(path: Path, suits: Callable[[Path], bool] = Path.is_file) -> str:
    """Suggest what lies next to a missing file or folder and has the most similar name.

    Names are alike if they are so without their ending: two photos are not alike because both end in `.jpg`.

    Args:
        path: what is missing.
        suits: which files or folders may be suggested.

    Returns:
        `"; did you mean 'x'?"` as the end of an error message, or an empty text if nothing is similar.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> (folder / "wren.jpg").touch()
        >>> neighbour(folder / "wern.jpg").endswith("wren.jpg'?"), neighbour(folder / "owl.jpg")
        (True, '')
    """
    try:
        others = [each for each in path.parent.iterdir() if each != path and did_you_mean(path.stem, [each.stem])]
    except OSError:
        return ""
    places = {each.name: str(each) for each in others if suits(each)}
    hint = did_you_mean(path.name, places)
    return next((f"; did you mean {place!r}?" for name, place in places.items() if repr(name) in hint), "")


def one_of(argument: str, value: Any, known: Iterable[Any]) -> None:
    """Raise an error if a value is not one of the known values.

    Args:
        argument: name of the argument, for the message.
        value: its value.
        known: the values it may have.

    Raises:
        ValueError: the value is not known; the message suggests the most similar known value.

    Example:
        >>> one_of("optimizer", "adamm", ("adam", "sgd"))
        Traceback (most recent call last):
        ValueError: optimizer: got 'adamm', expected one of adam, sgd; did you mean 'adam'?
    """
    choices = list(known)
    if value not in choices:
        suggestion = did_you_mean(value, [choice for choice in choices if isinstance(choice, str)])
        raise ValueError(f"{argument}: got {value!r}, expected one of {_listed(choices)}{suggestion}")


def fit(argument: str, value: Any, annotation: Any) -> Any:
    """Check a value against a type annotation.

    Three conversions are made: a whole number to a float, a list to a tuple, and the text "none" to None (TOML has no
    None). A path may be text.

    Args:
        argument: name of the argument, for the message.
        value: its value, as TOML, JSON or the command line gives it.
        annotation: a type, a union, a `Literal`, a tuple of types, or `Any`.

    Returns:
        The value, converted where needed.

    Raises:
        ValueError: the value does not fit.

    Example:
        >>> fit("train.lr", 1, float | None), fit("train.lr", "none", float | None)
        (1.0, None)
        >>> fit("train.batch", "many", int)
        Traceback (most recent call last):
        ValueError: train.batch: got 'many', expected a whole number
    """
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    options = typing.get_args(annotation) if is_union else (annotation,)
    if isinstance(value, str) and value.lower() == "none" and type(None) in options:
        return None
    for option in options:
        kind, inner = typing.get_origin(option) or option, typing.get_args(option)
        if kind is Any or (kind is type(None) and value is None):
            return value
        if kind is typing.Literal:
            if value in inner:
                return value
        elif kind is float:
            if isinstance(value, int | float) and not isinstance(value, bool):
                return float(value)
        elif kind is tuple:
            if isinstance(value, list | tuple):
                types_of_items = [inner[0]] * len(value) if inner[-1] is Ellipsis else list(inner)
                if len(types_of_items) == len(value):
                    return tuple(fit(argument, item, kind) for item, kind in zip(value, types_of_items, strict=True))
        elif kind is Path:
            if isinstance(value, str | Path):
                return value
        elif isinstance(kind, type) and isinstance(value, kind) and not (isinstance(value, bool) and kind is int):
            return value
    raise ValueError(f"{argument}: got {value!r}, expected {' or '.join(in_words(option) for option in options)}")


def in_words(annotation: Any) -> str:
    """Describe the values that a type annotation allows.

    Example:
        >>> in_words(tuple[float, float]), in_words(int)
        ('a list of 2 numbers', 'a whole number')
    """
    inner = typing.get_args(annotation)
    if typing.get_origin(annotation) is Callable:
        return "a function"
    if typing.get_origin(annotation) is dict:
        return "a table"
    if typing.get_origin(annotation) is typing.Literal:
        return f"one of {_listed(inner)}"
    if inner:
        items = {float: "numbers", int: "whole numbers", str: "names"}.get(inner[0], "values")
        return f"a list of {items}" if inner[-1] is Ellipsis else f"a list of {len(inner)} {items}"
    words = {float: "a number", int: "a whole number", bool: "true or false", str: "text", Path: "a file"}
    return words.get(
        annotation, "none" if annotation is type(None) else getattr(annotation, "__name__", str(annotation))
    )


def _listed(choices: Iterable[Any]) -> str:
    names = [str(choice) for choice in choices]
    return ", ".join(names[:MAX_LISTED_NAMES]) + (", ..." if len(names) > MAX_LISTED_NAMES else "")


def _normalised(name: str) -> str:
    return name.lower().replace("_", "-")
