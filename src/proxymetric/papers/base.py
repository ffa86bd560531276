"""Methods that are built around another method, their base."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from proxymetric.core.pieces import Compare, Loss, References

Base = str | dict[str, Any]
"""the name of a method, or a table of its name (key `method`) and its arguments"""


def split_base(base: Base) -> tuple[str, dict[str, Any]]:
    """The name and the arguments of a base.

    Args:
        base: the name of a method, or a table with the key `method`.

    Returns:
        The name, and the other keys of the table.

    Raises:
        ValueError: the table does not name a method, or sets classes, dim or nested.

    Example:
        >>> split_base({"method": "mpa", "per_class": 4})
        ('mpa', {'per_class': 4})
    """
    arguments = {"method": base} if isinstance(base, str) else dict(base) if isinstance(base, dict) else {}
    if "method" not in arguments or {"classes", "dim"} & set(arguments):
        raise ValueError(
            f"base: got {base!r}, expected a method's name, or a table with the key method and without classes and dim"
        )
    if "nested" in arguments:
        raise ValueError(
            f"base: got nested={arguments['nested']!r} in its table, expected nested as an argument of the method that "
            "is built around it"
        )
    return arguments.pop("method"), arguments


def base_of(
    parameters: Mapping[str, inspect.Parameter], arguments: Mapping[str, Any]
) -> tuple[str, dict[str, Any]] | None:
    """The name and the arguments of the base that a method is built around; None if it has no base.

    Args:
        parameters: the parameters of the method.
        arguments: the arguments that the method is given.
    """
    if "base" not in parameters:
        return None
    base = arguments.get("base", parameters["base"].default)
    return split_base(base) if isinstance(base, str | dict) else None  # in multi-similarity `base` is a number


def base_objective(base: Base, classes: int, dim: int, **advice: object) -> Compare:
    """Build the objective of a base method.

    Args:
        base: the name of a method, or a table of its name and arguments.
        classes: number of training classes, C.
        dim: width of the embeddings, D.
        **advice: default arguments for the base, and for the base's own base if it has one. A default applies
            only if the method takes this argument and its table does not set it.

    Raises:
        ValueError: the base is not a single loss against a single source.
    """
    from proxymetric.papers import method

    name, arguments = split_base(_with_advice(base, advice))
    objective = method(name, classes=classes, dim=dim, **arguments).objective
    if not isinstance(objective, Compare):
        raise ValueError(f"base: got {name!r}, which is built around another method; expected a single loss")
    return objective


def _with_advice(base: Base, advice: dict[str, object]) -> Base:
    """The base with the advised arguments filled in, at every level that takes them."""
    from proxymetric.papers import options

    name, arguments = split_base(base)
    parameters = options(name)
    arguments = {key: value for key, value in advice.items() if key in parameters} | arguments
    inner_base = arguments.get("base", parameters["base"].default) if "base" in parameters else None
    if isinstance(inner_base, str | dict):
        inner_advice = {key: arguments.get(key, value) for key, value in advice.items()}
        arguments["base"] = _with_advice(inner_base, inner_advice)
    return {"method": name, **arguments}


def base_needs(base: Base) -> frozenset[str]:
    """What the base method needs beyond embeddings and labels: keys of `criterion.NEEDS`."""
    from proxymetric.papers import needs

    return needs(*split_base(base))


def check_compares_with_rows(loss: Loss, dim: int) -> None:
    """Raise an error now if a loss does not accept references without a fixed number per class, as in a memory."""
    vectors = torch.zeros(2, dim)
    loss(vectors, torch.arange(2), References(vectors, torch.arange(2)))
