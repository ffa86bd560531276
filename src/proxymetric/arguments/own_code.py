"""Functions of the user's own code, named as "module:function", and whose word is enough to import them.

A name that the user typed, on the command line or in Python, is trusted. A name that a file says, such as a recipe, a
study or the `run.json` of a run, is not: files come from others, and an import runs code.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from proxymetric.arguments.signatures import did_you_mean

_trusted: ContextVar[frozenset[str] | None] = ContextVar("trusted", default=None)
"""the names that may be imported; None: all"""


class UntrustedCode(ValueError):
    """A file names code that the user has not."""


@contextlib.contextmanager
def trusting(*typed: Any, everything: bool = False) -> Iterator[None]:
    """Let only code be imported that the user has named, or all code.

    Args:
        *typed: what the user typed: texts, and tables and lists that hold some.
        everything: whether code that only a file names is imported too.

    Example:
        >>> with trusting({"loss": {"base": "math:sqrt"}}):
        ...     find_function("base", "math:sqrt", "my_losses:better")(4.0)
        ...     find_function("method", "os:system", "my_losses:better")
        Traceback (most recent call last):
        proxymetric.arguments.own_code.UntrustedCode: method: got 'os:system', code that a file names; expected
        --trust-code (in Python trust_code=True) to import it, or the same name on the command line
    """
    token = _trusted.set(None if everything else frozenset(_texts(typed)))
    try:
        yield
    finally:
        _trusted.reset(token)


def check_trusted(argument: str, name: str) -> None:
    """Refuse code that only a file names.

    Args:
        argument: what the name is the value of, for errors.
        name: "module:function".

    Raises:
        UntrustedCode: the user has not named it, see `trusting`.
    """
    trusted = _trusted.get()
    if trusted is not None and name not in trusted:
        raise UntrustedCode(
            f"{argument}: got {name!r}, code that a file names; expected --trust-code (in Python trust_code=True) to "
            "import it, or the same name on the command line"
        )


def _texts(value: Any) -> Iterator[str]:
    """All texts in tables and lists."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(inner)


def find_function(argument: str, name: str, example: str) -> Callable[..., Any]:
    """Import a module from the working directory, or an installed one, and return one of its functions.

    Args:
        argument: what the name is the value of, for errors.
        name: "module:function".
        example: such a name, for errors.

    Raises:
        ValueError: there is no such module or function, the module cannot be imported, or only a file names it
            (`trusting`).

    Example:
        >>> find_function("method", "math:srqt", "my_losses:better")
        Traceback (most recent call last):
        ValueError: method: got 'math:srqt', but math has no function 'srqt'; did you mean 'sqrt'?
    """
    module_name, colon, function_name = name.partition(":")
    if not colon or not module_name or not function_name:
        raise ValueError(f"{argument}: got {name!r}, expected module:function, such as {example!r}")
    check_trusted(argument, name)
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
