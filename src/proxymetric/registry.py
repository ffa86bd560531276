"""Registries: names that stand for a class or a function in a file, one line each."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any


def load_registry(package: str, places: Mapping[str, str]) -> dict[str, Any]:
    """Import what the names of a registry stand for.

    Args:
        package: the package that holds the files.
        places: name -> "module:object", the module inside the package and the class or function in it.

    Returns:
        The classes or functions by name, in the same order.

    Example:
        >>> load_registry("proxymetric", {"any registry": "registry:load_registry"})["any registry"].__name__
        'load_registry'
    """
    objects = {}
    for name, place in places.items():
        module, _, attribute = place.partition(":")
        objects[name] = getattr(importlib.import_module(f"{package}.{module}"), attribute)
    return objects
