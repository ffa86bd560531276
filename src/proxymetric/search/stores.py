"""The kinds of stores: which one an index has, and how its items move to another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from proxymetric.search.batches import Batch
from proxymetric.search.derived import derive
from proxymetric.search.engines import check_engine
from proxymetric.search.local_store import LocalStore
from proxymetric.search.manifest import Manifest
from proxymetric.search.measuring import with_loss
from proxymetric.search.remote.remote_store import RemoteStore
from proxymetric.search.remote.settings import is_remote, place_of
from proxymetric.search.storage.changes import clean, write_anew
from proxymetric.search.store import Say, Store
from proxymetric.system.lock import locked

Move = Callable[[Store | Sequence[Batch], Say | None], Store]
"""writes items, those of a store or of batches, to another store, which takes its place"""
ROWS_AT_ONCE = 4_096


def open_store(folder: Path) -> Store:
    """Open the items of an index.

    Raises:
        ValueError: the folder is not an index, or a file is missing or damaged.
        OSError: the database that has the items does not answer.
    """
    return RemoteStore.open(folder) if is_remote(Manifest.read(folder).engine) else LocalStore.open(folder)


def create_store(folder: Path, manifest: Manifest) -> Store:
    """Make the place of an index without items; the caller holds the lock of its folder."""
    return (RemoteStore if is_remote(manifest.engine) else LocalStore).create(folder, manifest)


def move_to(store: Store, manifest: Manifest) -> Move | None:
    """What moves the items of an index to where its new manifest says; None: they lie there already."""
    if place_of(store.manifest.engine) == place_of(manifest.engine):
        return None

    fresh = _fresh(manifest)

    def move(items: Store | Sequence[Batch], say: Say | None) -> Store:
        if isinstance(store, RemoteStore) and say is not None:
            say(store.left_behind())
        batches = list(items) if isinstance(items, Sequence) else _batches(items)
        if is_remote(manifest.engine):
            check_engine(manifest.vectors["kind"], manifest.engine)
            target = RemoteStore.create(store.folder, fresh).fill(batches, say)
            clean(store.folder, target.manifest)
            return target
        write_anew(store.folder, None, with_loss(fresh, batches), partial(derive, say=say), batches)
        return LocalStore.open(store.folder)

    return move


def make_lost_store(folder: Path, engine: Mapping[str, Any] | None = None) -> None:
    """Make the place of an index anew, without items, if its database has lost them; it will be rebuilt.

    Args:
        folder: the folder of the index.
        engine: the engine that it will have; None: the one that it has.

    Raises:
        OSError: the database does not answer, so that it may have them.
    """
    manifest = Manifest.read(folder)
    try:
        RemoteStore(folder, manifest)
    except ValueError:
        with locked(folder):
            create_store(folder, replace(_fresh(manifest), engine=dict(engine or manifest.engine)))


def _fresh(manifest: Manifest) -> Manifest:
    """The manifest of an index in another place, before it has items."""
    names = ("dim", "model", "run", "photos", "engine", "layout", "vectors")
    facts: dict[str, Any] = {name: getattr(manifest, name) for name in names}
    return Manifest(0, 0, map={"method": manifest.map["method"]}, **facts)


def _batches(store: Store) -> list[Batch]:
    """All items of a store, some at a time."""
    ids = store.ids()
    return [store.batch(ids[start : start + ROWS_AT_ONCE]) for start in range(0, len(ids), ROWS_AT_ONCE)]
