"""Engines: ways to find the nearest vectors, behind one small interface.

An engine is built with each state of an index and opened with it. A new engine is a file here and a line in `ENGINES`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from proxymetric.arguments.signatures import one_of
from proxymetric.search.engines import faiss, milvus
from proxymetric.search.engines.earlier import Earlier
from proxymetric.search.engines.exact import Exact

__all__ = ["ENGINES", "Earlier", "Engine", "Exact", "build_engine", "check_settings", "clean_engine", "open_engine"]


class Engine(Protocol):
    """Finds the nearest vectors of each query."""

    name: str

    def search(self, queries: Tensor, k: int, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return similarities and rows (Q, k), nearest first; equal similarities in the order of the rows.

        Args:
            queries: (Q, D) of unit length.
            k: results for each query; fewer come back if there are fewer vectors.
            rows: (M,) sorted rows to search among; None: all.
        """
        ...


class EngineKind(NamedTuple):
    """How an engine is built and opened."""

    build: Callable[[dict[str, Any], np.ndarray, Path, Earlier | None], tuple[dict[str, Any], list[str]]]
    """takes settings, vectors, a folder, and the state before the change, if there is one; returns the settings with
    facts, and the names of the files it wrote"""
    open: Callable[[dict[str, Any], Tensor, Path], Engine]
    """takes the settings with facts, the vectors and the folder"""
    clean: Callable[[dict[str, Any]], None] = lambda settings: None
    """takes the settings with facts after a change, and removes what earlier states left outside of the folder"""

    settings: tuple[str, ...] | None = ()
    """the settings that a user may give; None: `build` checks them"""
    facts: tuple[str, ...] = ()
    """what `build` adds to the settings"""


def _nothing(
    settings: dict[str, Any], vectors: np.ndarray, folder: Path, earlier: Earlier | None
) -> tuple[dict[str, Any], list[str]]:
    """An engine that needs nothing but the vectors."""
    return settings, []


ENGINES = {
    "exact": EngineKind(_nothing, lambda settings, vectors, folder: Exact(vectors)),
    "faiss": EngineKind(faiss.build, faiss.Faiss.open, settings=("kind",), facts=faiss.FACTS),
    "milvus": EngineKind(milvus.build, milvus.Milvus.open, milvus.clean, settings=None),
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
    one_of("engine", name, ENGINES)
    engine = ENGINES[str(name)]
    for key in settings if engine.settings is not None else ():
        if key in ("name", *engine.facts, *(engine.settings or ())):
            continue
        if not engine.settings:
            raise ValueError(f"engine: got the setting {key!r} for {name!r}, expected none: it has no settings")
        one_of(f"setting of the engine {name!r}", key, engine.settings)


def build_engine(
    settings: dict[str, Any], vectors: np.ndarray, folder: Path, earlier: Earlier | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Build the engine of an index.

    Args:
        settings: `name`, and settings of that engine.
        vectors: (N, D) of unit length.
        folder: where it writes its files.
        earlier: the state before the change, which an engine may extend; None: there is none.

    Returns:
        The settings with facts about the engine, and the names of its files.

    Raises:
        ValueError: the name or a setting is unknown, or the extra that it needs is not installed.
    """
    check_settings(settings)
    return ENGINES[settings["name"]].build(settings, vectors, folder, earlier)


def open_engine(settings: dict[str, Any], vectors: Tensor, folder: Path) -> Engine:
    """Open the engine of an index.

    Args:
        settings: what `build_engine` returned.
        vectors: (N, D) of unit length.
        folder: where its files are.

    Raises:
        ValueError: the name is unknown, the extra that it needs is not installed, or a file is damaged.
    """
    one_of("engine", settings.get("name"), ENGINES)
    return ENGINES[settings["name"]].open(settings, vectors, folder)


def clean_engine(settings: dict[str, Any]) -> None:
    """Remove what earlier states of an index left outside of its folder; called when a change is complete.

    Args:
        settings: what `build_engine` returned for the newest state.
    """
    ENGINES[settings["name"]].clean(settings)
