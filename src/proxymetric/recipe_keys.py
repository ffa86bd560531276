"""The dotted keys of a recipe, such as `train.lr`: of trackers, of `--set`, and of the comparison of two recipes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def flat_keys(tables: Mapping[str, Any], deep: bool = False) -> dict[str, Any]:
    """Return the values of tables by their dotted keys.

    Args:
        tables: the tables of a recipe, and its keys outside of tables.
        deep: whether tables inside of tables are flattened too; if not, they are values.

    Example:
        >>> tables = {"seed": 1, "loss": {"base": {"method": "mpa"}}}
        >>> flat_keys(tables), flat_keys(tables, deep=True)
        ({'seed': 1, 'loss.base': {'method': 'mpa'}}, {'seed': 1, 'loss.base.method': 'mpa'})
    """
    flat: dict[str, Any] = {}
    for name, value in tables.items():
        if isinstance(value, Mapping):
            inner = flat_keys(value, deep) if deep else value
            flat |= {f"{name}.{key}": item for key, item in inner.items()}
        else:
            flat[name] = value
    return flat
