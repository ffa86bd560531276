"""Methods that are built around another one."""

from __future__ import annotations

from typing import Any

import torch

from proxymetric.core.pieces import Compare, Loss, References

Base = str | dict[str, Any]
"""a method's name, or a table of its name (`method`) and arguments"""


def named(base: Base) -> tuple[str, dict[str, Any]]:
    """The name and the arguments of a base."""
    arguments = {"method": base} if isinstance(base, str) else dict(base) if isinstance(base, dict) else {}
    if "method" not in arguments or {"classes", "dim"} & set(arguments):
        raise ValueError(f"base: got {base!r}, expected a method's name, or a table with the key method")
    return arguments.pop("method"), arguments


def base_objective(base: Base, classes: int, dim: int, **advised: object) -> Compare:
    """The objective of the base method; what is `advised` it gets where it takes it and its table says nothing."""
    from proxymetric.papers import method

    name, arguments = named(_told(base, advised))
    objective = method(name, classes=classes, dim=dim, **arguments).objective
    if not isinstance(objective, Compare):
        raise ValueError(f"base: {name} is built around another method already; expected a single loss")
    return objective


def _told(base: Base, advised: dict[str, object]) -> Base:
    """The base with what is advised filled in, in itself or in the base that it is built around."""
    from proxymetric.papers import options

    name, arguments = named(base)
    known = options(name)
    told = {key: value for key, value in advised.items() if key in known} | arguments
    inner = told.get("base", known["base"].default) if "base" in known else None
    if isinstance(inner, str | dict):
        told["base"] = _told(inner, {key: told.get(key, value) for key, value in advised.items()})
    return {"method": name, **told}


def base_needs(base: Base) -> frozenset[str]:
    """What the base method needs beyond embeddings and labels."""
    from proxymetric.papers import needs

    return needs(*named(base))


def compares_with_rows(loss: Loss, dim: int) -> None:
    """Refuse a loss that cannot be compared with loose rows now, not when a memory starts."""
    rows = torch.zeros(2, dim)
    loss(rows, torch.arange(2), References(rows, torch.arange(2)))
