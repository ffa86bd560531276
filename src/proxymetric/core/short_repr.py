"""Short texts for the pieces of a method, in place of the nested texts of `nn.Module`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor


class ShortRepr:
    """Gives a class a text such as `Name(first, classes=3, dim=2)`: the arguments that it was made with.

    An argument is shown if an attribute of its name holds it and it is not the default. Arguments whose value is
    another piece come first, without their names.

    Example:
        >>> class Ring(ShortRepr):
        ...     def __init__(self, rows, start=0):
        ...         self.rows, self.start = rows, start
        >>> Ring(3), Ring(3, start=2)
        (Ring(rows=3), Ring(rows=3, start=2))
    """

    def __repr__(self) -> str:
        pieces, settings = [], {}
        for name, parameter in inspect.signature(type(self).__init__).parameters.items():
            value = getattr(self, name, parameter.empty)
            if name == "self" or value is parameter.empty or isinstance(value, Tensor):
                continue
            if isinstance(value, ShortRepr) or _is_loss(value):
                pieces.append(repr(value))
            elif isinstance(value, str | int | float | None) and value != parameter.default:
                settings[name] = value
        return call_text(type(self).__name__, *pieces, **settings)


def call_text(name: str, *pieces: str, **arguments: Any) -> str:
    """The text of a call.

    Args:
        name: what is called.
        *pieces: texts of positional arguments.
        **arguments: keyword arguments.

    Example:
        >>> call_text("Compare", "Triplet()", normalise="ball")
        "Compare(Triplet(), normalise='ball')"
    """
    return f"{name}({', '.join([*pieces, *keyword_texts(arguments)])})"


def keyword_texts(arguments: Mapping[str, Any]) -> list[str]:
    """Each keyword argument as in a call."""
    return [f"{key}={value!r}" for key, value in arguments.items()]


def _is_loss(value: Any) -> bool:
    """Whether a value is a loss or a regulariser: a dataclass that can be called."""
    return callable(value) and hasattr(value, "__dataclass_fields__")
