"""Registries: names that stand for a class or a function in a file, one line each."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from typing import Any

from proxymetric.arguments.signatures import did_you_mean


def load_registry(package: str, places: Mapping[str, str]) -> dict[str, Any]:
    """Import what the names of a registry stand for.

    Args:
        package: the package that holds the files.
        places: name -> "module:object", the module inside the package and the class or function in it.

    Returns:
        The classes or functions by name, in the same order.

    Raises:
        ValueError: a line of the registry names a file or an object that does not exist.

    Example:
        >>> load_registry("proxymetric.arguments", {"any registry": "registry:load_registry"})["any registry"].__name__
        'load_registry'
    """
    objects = {}
    for name, place in places.items():
        file, _, attribute = place.partition(":")
        if importlib.util.find_spec(f"{package}.{file}") is None:
            raise ValueError(
                f"{package}, line {name!r}: got {place!r}, expected a module of this package before the colon"
            )
        module = importlib.import_module(f"{package}.{file}")
        if not hasattr(module, attribute):
            nearest = did_you_mean(attribute, vars(module))
            raise ValueError(f"{package}, line {name!r}: got {place!r}, expected a name in {file}.py{nearest}")
        objects[name] = getattr(module, attribute)
    return objects
