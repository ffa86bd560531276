"""The kinds of stores: which one an index has, and how its items move to another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from proxymetric.search.batches import Batch
from proxymetric.search.local_store import LocalStore
from proxymetric.search.manifest import Manifest
from proxymetric.search.store import Say, Store

Move = Callable[[Store | Sequence[Batch], Say | None], Store]
"""writes items, those of a store or of batches, to another store, which takes its place"""


def open_store(folder: Path) -> Store:
    """Open the items of an index.

    Raises:
        ValueError: the folder is not an index, or a file is missing or damaged.
    """
    return LocalStore.open(folder)


def create_store(folder: Path, manifest: Manifest) -> Store:
    """Make the place of an index without items; the caller holds the lock of its folder."""
    return LocalStore.create(folder, manifest)


def move_to(store: Store, manifest: Manifest) -> Move | None:
    """What moves the items of an index to where its new manifest says; None: they lie there already."""
    return None
