"""Engines: ways to find the nearest vectors, behind one small interface."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from proxymetric.search.engines.exact import Exact

__all__ = ["Engine", "Exact"]


class Engine(Protocol):
    """Finds the nearest vectors of each query."""

    name: str

    def search(self, queries: Tensor, k: int, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return similarities and rows (Q, k), nearest first.

        Args:
            queries: (Q, D) of unit length.
            k: results for each query; fewer come back if there are fewer vectors.
            rows: (M,) sorted rows to search among; None: all.
        """
        ...
