"""Methods from pieces: the arguments of a method are the numbers of its pieces, each of which is written once."""

from __future__ import annotations

import functools
import inspect
import re
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from proxymetric.arguments.signatures import did_you_mean
from proxymetric.core.pieces import Objective

Piece = TypeVar("Piece")
SIZE_ARGUMENTS = {"classes": "number of training classes, C", "dim": "width of the embeddings, D"}
"""the arguments of every method, with their explanations"""
ENTRY = re.compile(r"^ {4}(\w+): ")
"""the first line of the explanation of an argument"""


class Builder:
    """Builds the pieces of a method: `build(CosFace)` gives `CosFace` those numbers of the method that it takes.

    Args:
        numbers: the arguments of the method by name, with classes and dim. Pieces that take a number of the same name
            are given the same number.

    Example:
        >>> from proxymetric.losses import CosFace
        >>> Builder({"classes": 100, "dim": 64, "scale": 20.0, "init": "unit"})(CosFace, margin=0.0)
        CosFace(scale=20.0, margin=0.0)
    """

    def __init__(self, numbers: Mapping[str, Any]) -> None:
        self.numbers = numbers
        self.classes: int = numbers["classes"]
        self.dim: int = numbers["dim"]

    def __call__(self, piece: Callable[..., Piece], *parts: object, **more: object) -> Piece:
        """Build a piece.

        Args:
            piece: a class, or a function that returns a piece.
            *parts: its first arguments, such as the objective that a scheme is built around.
            **more: arguments that are not numbers of the method.
        """
        taken = {name: self.numbers[name] for name in inspect.signature(piece).parameters if name in self.numbers}
        return piece(*parts, **taken | more)

    def unless(self, piece: Callable[..., Piece], **idle: object) -> Piece | None:
        """Build a piece; None if each of these numbers has the value with which the piece does nothing.

        Args:
            piece: a class, or a function that returns a piece.
            **idle: number -> the value with which the piece does nothing.
        """
        given = ((self.numbers.get(name), value) for name, value in idle.items())
        does_nothing = all(number is None if value is None else number == value for number, value in given)
        return None if does_nothing else self(piece)


def assembled(
    *pieces: Callable[..., object], without: tuple[str, ...] = (), **paper: object
) -> Callable[[Callable[..., Objective]], Callable[..., Objective]]:
    """Make a method of a function that puts pieces together.

    The function takes a `Builder`, and as keyword arguments what belongs to no piece. The arguments of the method are
    classes, dim, those keyword arguments, and the numbers of the pieces: the parameters that are a number, a text or a
    truth value by default. Defaults, types and explanations are those of the first piece that has the parameter; the
    docstring of the function may explain an argument in other words.

    Args:
        *pieces: the classes and functions that `build` is called with.
        without: numbers of the pieces that are no arguments of the method.
        **paper: defaults that differ from those of the pieces, such as the numbers of the paper.

    Raises:
        ValueError: no piece takes a number of this name.

    Example:
        >>> from proxymetric.core.pieces import Compare
        >>> from proxymetric.losses import CosFace
        >>> from proxymetric.sources import proxies
        >>> @assembled(CosFace, proxies, scale=20.0)
        ... def better(build):
        ...     return Compare(build(CosFace), build(proxies))
        >>> better(classes=3, dim=2, margin=0.2).loss, list(inspect.signature(better).parameters)
        (CosFace(scale=20.0, margin=0.2), ['classes', 'dim', 'scale', 'margin', 'per_class', 'init', 'touched'])
    """

    def attach(function: Callable[..., Objective]) -> Callable[..., Objective]:
        signature, of_function = _signature(function, pieces, without, paper), _numbers(function)

        @functools.wraps(function)
        def method(*args: object, **kwargs: object) -> Objective:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            return function(Builder(given.arguments), **{name: given.arguments[name] for name in of_function})

        method.__signature__ = signature  # type: ignore[attr-defined]
        types = {name: each for piece in (*reversed(pieces), function) for name, each in _types(piece).items()}
        method.__annotations__ = {name: types.get(name, int) for name in signature.parameters} | {"return": Objective}
        method.__doc__ = _help(function, pieces, signature)
        return method

    return attach


def _signature(
    function: Callable[..., object],
    pieces: tuple[Callable[..., object], ...],
    without: tuple[str, ...],
    paper: Mapping[str, object],
) -> inspect.Signature:
    """The arguments of a method: the sizes, the keyword arguments of its function, the numbers of its pieces."""
    of_pieces: dict[str, inspect.Parameter] = {}
    for piece in pieces:
        for name, number in _numbers(piece).items():
            of_pieces.setdefault(name, number)
    for name in (*paper, *without):
        if name not in of_pieces:
            hint = did_you_mean(name, of_pieces)
            raise ValueError(f"{function.__name__}: got {name!r}, expected a number of its pieces{hint}")
    sizes = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation="int") for name in SIZE_ARGUMENTS
    ]
    of_function = _numbers(function)
    offered = [
        number.replace(default=paper.get(name, number.default))
        for name, number in of_pieces.items()
        if name not in of_function and name not in without
    ]
    return inspect.Signature([*sizes, *of_function.values(), *offered], return_annotation="Objective")


@functools.cache
def _numbers(piece: Callable[..., object]) -> dict[str, inspect.Parameter]:
    """The parameters of a piece that are a number, a text, a truth value or None by default, as keyword arguments."""
    return {
        name: parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(piece).parameters.items()
        if isinstance(parameter.default, int | float | str | None)
    }


@functools.cache
def _types(piece: Callable[..., object]) -> dict[str, Any]:
    """The types of the parameters of a piece, with the names in its annotations looked up where it is written."""
    return typing.get_type_hints(piece.__init__ if inspect.isclass(piece) else piece)


def _help(
    function: Callable[..., object], pieces: tuple[Callable[..., object], ...], signature: inspect.Signature
) -> str | None:
    """The docstring of a function, with an explanation of every argument of the method."""
    if function.__doc__ is None:  # python -OO
        return None
    head, of_function, tail = _sections(function)
    has_sizes = any(
        name in inspect.signature(piece).parameters for piece in (function, *pieces) for name in SIZE_ARGUMENTS
    )
    ignored = "" if has_sizes or _numbers(function) else "; the loss has no proxies and ignores it"
    known = {name: [f"    {name}: {text}{ignored}."] for name, text in SIZE_ARGUMENTS.items()}
    for piece in pieces:
        known = _sections(piece)[1] | known
    entries = [line for name in signature.parameters for line in (known | of_function).get(name, ())]
    return "\n".join([*head, "", "Args:", *entries, *tail])


@functools.cache
def _sections(piece: Callable[..., object]) -> tuple[list[str], dict[str, list[str]], list[str]]:
    """The lines of a docstring before its arguments, those of each argument, and those after its arguments."""
    lines = (inspect.getdoc(piece) or "").splitlines()
    start = lines.index("Args:") if "Args:" in lines else len(lines)
    entries: dict[str, list[str]] = {}
    end = start + 1
    while end < len(lines) and lines[end].startswith("    "):
        if match := ENTRY.match(lines[end]):
            entries[match[1]] = []
        list(entries.values())[-1].append(lines[end])
        end += 1
    return "\n".join(lines[:start]).rstrip().splitlines(), entries, lines[end:]
