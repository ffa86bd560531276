"""Items of an index, results of a search, and what an index needs of a model."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol


class HasFingerprint(Protocol):
    """A model, as far as an index needs it to compare it with the model that made its vectors."""

    def fingerprint(self) -> str:
        """Return the sha256 of everything that determines the vectors."""
        ...


class Item(NamedTuple):
    """An item of an index."""

    id: str
    label: str | None
    metadata: dict[str, Any]
    row: int
    """its row in `Index.vectors`, until the index changes"""


class Hit(NamedTuple):
    """A result of a search: an item, and its cosine similarity with the query."""

    id: str
    similarity: float
    label: str | None
    metadata: dict[str, Any]
    row: int
    """its row in `Index.vectors`, until the index changes"""
