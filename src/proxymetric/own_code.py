"""Functions of the user's own code, named as "module:function"."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from proxymetric.signatures import did_you_mean


def find_function(argument: str, name: str, example: str) -> Callable[..., Any]:
    """Import a module from the working directory, or an installed one, and return one of its functions.

    Args:
        argument: what the name is the value of, for errors.
        name: "module:function".
        example: such a name, for errors.

    Raises:
        ValueError: there is no such module or function, or the module cannot be imported.

    Example:
        >>> find_function("method", "math:srqt", "my_losses:better")
        Traceback (most recent call last):
        ValueError: method: got 'math:srqt', but math has no function 'srqt'; did you mean 'sqrt'?
    """
    module_name, colon, function_name = name.partition(":")
    if not colon or not module_name or not function_name:
        raise ValueError(f"{argument}: got {name!r}, expected module:function, such as {example!r}")
    module = _import(argument, module_name, name)
    function = getattr(module, function_name, None)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ValueError(
            f"{argument}: got {name!r}, but {module_name} has no function {function_name!r}"
            f"{did_you_mean(function_name, functions)}"
        )
    return function


def _import(argument: str, module_name: str, name: str) -> Any:
    """Import a module from the working directory or from what is installed."""
    folder = os.getcwd()
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(module_name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            files = [file.stem for file in Path(folder).glob("*.py")]
            raise ValueError(
                f"{argument}: got {name!r}, but there is no module {module_name!r} in {folder} or among the installed "
                f"ones{did_you_mean(module_name, files)}"
            ) from None
        raise ValueError(
            f"{argument}: got {name!r}, but importing {module_name} failed with {type(error).__name__}: {error}"
        ) from error
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(folder)
