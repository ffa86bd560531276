"""Engines: ways to find the nearest vectors, behind one small interface.

An engine is opened with each state of an index; some are built when the log is merged. A new engine is a file here and
a line in `ENGINES`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from proxymetric.arguments.signatures import one_of
from proxymetric.search.engines import faiss
from proxymetric.search.engines.binary import Binary
from proxymetric.search.engines.earlier import Earlier
from proxymetric.search.engines.exact import Exact
from proxymetric.search.engines.int8 import Int8
from proxymetric.search.remote.settings import DEFAULTS, checked, is_remote
from proxymetric.search.storage.state import State

__all__ = ["ENGINES", "Earlier", "Engine", "Exact", "build_engine", "check_engine", "check_settings", "open_engine"]


class Engine(Protocol):
    """Finds the nearest vectors of each query."""

    name: str

    def search(self, queries: Tensor, k: int, mask: np.ndarray | None = None) -> tuple[Tensor, Tensor]:
        """Return similarities and rows (Q, k), nearest first; equal similarities in the order of the rows.

        Args:
            queries: (Q, D) of unit length.
            k: results for each query; fewer come back if there are fewer vectors.
            mask: (rows,) bool, the rows to search among; None: all.
        """
        ...


class EngineKind(NamedTuple):
    """How an engine is built and opened."""

    open: Callable[[dict[str, Any], State], Engine]
    """takes the settings with facts, and the state"""
    build: Callable[[dict[str, Any], State, str, Earlier | None], tuple[dict[str, Any], list[str]]] = (
        lambda settings, state, stem, earlier: (settings, [])
    )
    """takes settings, the state, how the names of its files begin, and the engine before the change, if there is one;
    returns the settings with facts, and the names of its files"""
    settings: tuple[str, ...] = ()
    """the settings that a user may give"""
    facts: tuple[str, ...] = ()
    """what `build` adds to the settings"""


def _open_exact(settings: dict[str, Any], state: State) -> Engine:
    """The exact search in vectors of each kind."""
    arrays = {ending: torch.from_numpy(array) for ending, array in state.arrays.items()}
    if "float32" in arrays:
        return Exact(arrays["float32"])
    return Binary(arrays["bits"], arrays["int8"]) if "bits" in arrays else Int8(arrays["int8"])


ENGINES = {
    "exact": EngineKind(_open_exact),
    "faiss": EngineKind(faiss.Faiss.open, faiss.build, settings=("kind",), facts=faiss.FACTS),
}
"""name -> engine"""


def check_settings(settings: dict[str, Any]) -> None:
    """Refuse an engine, or a setting, that there is not.

    Args:
        settings: `name`, settings, and facts of an engine that was built.

    Raises:
        ValueError: there is no such engine, or it has no such setting.

    Example:
        >>> check_settings({"name": "faiss", "kind": "ivf"})
    """
    name = settings.get("name")
    one_of("engine", name, [*ENGINES, *DEFAULTS])
    if is_remote(settings):
        checked(settings)
        return
    engine = ENGINES[str(name)]
    for key in settings:
        if key in ("name", *engine.facts, *engine.settings):
            continue
        if not engine.settings:
            raise ValueError(f"engine: got the setting {key!r} for {name!r}, expected none: it has no settings")
        one_of(f"setting of the engine {name!r}", key, engine.settings)


def check_engine(kind: str, engine: dict[str, Any]) -> None:
    """Refuse small vectors for an engine that keeps 32-bit numbers of its own.

    Raises:
        ValueError: the engine is not the exact one.
    """
    if kind != "float32" and engine.get("name") != "exact":
        raise ValueError(
            f"vectors: got {kind!r} with the engine {engine.get('name')!r}, which keeps 32-bit numbers of its own; "
            "expected the engine 'exact', or vectors 'float32'"
        )


def build_engine(
    settings: dict[str, Any], state: State, stem: str, earlier: Earlier | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Build the engine of an index.

    Args:
        settings: `name`, and settings of that engine.
        state: the state whose vectors it searches.
        stem: how the names of its files begin, in the folder of the index.
        earlier: the engine before the change, which may be extended; None: there is none.

    Returns:
        The settings with facts about the engine, and the names of its files.

    Raises:
        ValueError: the name or a setting is unknown, or the extra that it needs is not installed.
    """
    check_settings(settings)
    check_engine(state.manifest.vectors["kind"], settings)
    return ENGINES[settings["name"]].build(settings, state, stem, earlier)


def open_engine(settings: dict[str, Any], state: State) -> Engine:
    """Open the engine of an index.

    Args:
        settings: what `build_engine` returned, or the settings of an engine that was not built yet.
        state: the state whose vectors it searches.

    Raises:
        ValueError: the name is unknown, the extra that it needs is not installed, or a file is damaged.
    """
    one_of("engine", settings.get("name"), ENGINES)
    return ENGINES[settings["name"]].open(settings, state)
