"""Methods that are built around another one."""

from __future__ import annotations

from typing import Any

from proxymetric.seam import Compare


def base_objective(base: str | dict[str, Any], classes: int, dim: int) -> Compare:
    """The objective of the base method: a name, or a table of its name (`method`) and arguments."""
    from proxymetric.papers import method

    arguments = {"method": base} if isinstance(base, str) else dict(base)
    if "method" not in arguments:
        raise ValueError(f"base: got {base!r}, wanted a method's name, or a table with the key method")
    name = arguments.pop("method")
    objective = method(name, classes=classes, dim=dim, **arguments).objective
    if not isinstance(objective, Compare):
        raise ValueError(f"base: {name} is built around another method already; wanted a single loss")
    return objective
