"""The items of an index in a database: asked anew each time, so that every answer is from the newest state."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from proxymetric.search.batches import Batch
from proxymetric.search.conditions import Condition, Dictionary
from proxymetric.search.engines import Engine
from proxymetric.search.items import Hit, Item
from proxymetric.search.local_store import stamp_of
from proxymetric.search.manifest import Manifest
from proxymetric.search.remote.database import Database, Facts, Session
from proxymetric.search.remote.databases import database_of
from proxymetric.search.remote.remote_map import make_map, map_of
from proxymetric.search.remote.settings import MEASURED, checked
from proxymetric.search.searching import Nearest, Ranked, SearchQuestion, answered
from proxymetric.search.storage.change_log import Row
from proxymetric.search.storage.changes import Change, clean
from proxymetric.search.store import Say

T = TypeVar("T")
ROWS_AT_ONCE = 4_096
"""items that are read or copied at once"""


class RemoteStore:
    """The items of an index in a database; see `Store`.

    Args:
        folder: the folder of the index, which has its manifest.
        manifest: the manifest.

    Raises:
        ValueError: the database does not have the items.
        OSError: it does not answer.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.database: Database = database_of(folder, manifest.engine)
        self.engine: Engine = RemoteEngine(manifest.engine["name"], self)
        self._lock = threading.Lock()
        self._written, self._stamp = manifest, stamp_of(folder)
        self._facts = Facts(-1, 0, manifest.dim, manifest.model)
        self._gaps = np.empty(0, np.int64)
        self._read(lambda session: None)

    @classmethod
    def open(cls, folder: Path) -> RemoteStore:
        """Open the items of an index."""
        return cls(folder, Manifest.read(folder))

    @classmethod
    def create(cls, folder: Path, manifest: Manifest) -> RemoteStore:
        """Make a table or a collection without items, then the manifest."""
        manifest = replace(manifest, engine=checked(manifest.engine), vectors={"kind": "float32"})
        database = database_of(folder, manifest.engine)
        with database.changing(manifest.identity, Facts(0, 0, manifest.dim, manifest.model)) as session:
            session.anew(manifest.dim)
            session.settled(session.facts._replace(generation=1), [], False, _silent)
        manifest.write(folder)
        return cls(folder, manifest)

    def _read(self, ask: Callable[[Session], T], whole: bool = False, fresh: bool = True) -> T:
        """Ask something of the newest state."""
        with self.database.reading(self._written.identity, whole, fresh) as session:
            self._see(session)
            return ask(session)

    def _see(self, session: Session) -> None:
        """Keep the facts of a state, and the numbers that are gone in it."""
        facts, before = session.facts, self._facts
        if facts.model != self._written.model or facts.dim != self._written.dim:
            self._written, self._stamp = Manifest.read(self.folder), stamp_of(self.folder)
            if facts.model != self._written.model or facts.dim != self._written.dim:
                raise ValueError(
                    f"index: got {self.folder}, whose vectors in {self.database.address} were made by the model "
                    f"{facts.model[:12] or 'of no name'} on another machine; expected the folder as it is there"
                )
        if facts.generation == before.generation:
            return
        is_same = facts.store == before.store and facts.generation > before.generation
        gaps = session.gaps(before.generation if is_same else 0)
        with self._lock:
            self._gaps = np.union1d(self._gaps, gaps) if is_same else np.sort(gaps)
            self._facts = facts

    @property
    def manifest(self) -> Manifest:
        """See `Store`: the manifest of the folder, with what the database says."""
        facts, written = self._facts, self._written
        return replace(
            written,
            generation=facts.generation,
            count=facts.items,
            added=facts.added,
            columns=list(facts.columns),
            rows=facts.last,
            engine={**written.engine, **facts.engine},
        )

    def newest(self) -> Hashable:
        """The manifest's file and the number of the state; that of the last answer while the database gives none."""
        with contextlib.suppress(OSError), self.database.reading(self._written.identity) as session:
            return stamp_of(self.folder), session.facts.generation
        return stamp_of(self.folder), self._facts.generation

    def refreshed(self) -> RemoteStore:
        """See `Store`."""
        if stamp_of(self.folder) != self._stamp:
            return RemoteStore.open(self.folder)
        self._read(lambda session: None)
        return self

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """See `Store`: one process on all machines where the database has locks."""
        with self.database.locked(self._written.identity):
            yield

    def check(self) -> None:
        """See `Store`: the database sees to it."""

    def search(
        self, queries: Tensor, question: SearchQuestion, without: Sequence[str | Collection[str] | None] | None
    ) -> list[list[Hit]]:
        """See `Store`."""

        def ask(session: Session) -> list[list[Hit]]:
            def matching(conditions: Sequence[Condition]) -> Nearest:
                def nearest(members: Sequence[int], depth: int) -> list[Ranked]:
                    return session.nearest(queries.numpy()[list(members)], depth, conditions)

                return nearest

            return [
                [Hit(row.id, score, row.label, row.values(), self._position(row.number)) for row, score in ranked]
                for ranked in answered(len(queries), matching, question, without)
            ]

        return self._read(ask, fresh=False)

    def known(self, ids: Sequence[str]) -> set[str]:
        """See `Store`."""
        return {row.id for row in self._read(lambda session: session.rows(ids))}

    def items(self, ids: Sequence[str]) -> dict[str, Item]:
        """See `Store`."""
        return {row.id: self._item(row) for row in self._read(lambda session: session.rows(ids))}

    def at(self, row: int) -> Item:
        """See `Store`."""
        # A gap that has so many items before it as the row has, or fewer, lies before the item.
        passed = int(np.searchsorted(self._gaps - np.arange(len(self._gaps)), row, side="right"))
        return self._item(self._read(lambda session: session.row_of(row + passed)))

    def __iter__(self) -> Iterator[Item]:
        number = position = 0
        while rows := self._rows_from(number):
            for row in rows:
                yield Item(row.id, row.label, row.values(), position)
                position += 1
            number = rows[-1].number + 1

    def _rows_from(self, number: int) -> list[Row]:
        return self._read(lambda session: session.rows_from(number, ROWS_AT_ONCE))

    def ids(self) -> list[str]:
        """See `Store`."""
        return self._read(lambda session: session.texts("id"), whole=True)

    def labels(self) -> list[str | None]:
        """See `Store`."""
        return self._read(lambda session: session.texts("label"), whole=True)

    def stamps(self) -> list[str]:
        """See `Store`."""
        return self._read(lambda session: session.texts("stamp"), whole=True)

    def batch(self, ids: Sequence[str]) -> Batch:
        """See `Store`."""

        def ask(session: Session) -> Batch:
            rows = sorted(session.rows(ids), key=lambda row: row.number)
            vectors = session.vectors(np.array([row.number for row in rows], np.int64))
            places, pictures = {row.id: place for place, row in enumerate(rows)}, session.pictures(ids)
            order = [places[item] for item in dict.fromkeys(ids) if item in places]
            rows = [rows[place] for place in order]
            return Batch(
                [row.id for row in rows],
                vectors[order],
                [row.label for row in rows],
                [row.metadata for row in rows],
                [row.stamp for row in rows],
                [pictures[row.id] for row in rows],
            )

        return self._read(ask)

    def thumbnail(self, item: str) -> bytes | None:
        """See `Store`."""
        return self._read(lambda session: session.pictures([item])).get(item)

    def vector(self, item: str) -> np.ndarray:
        """See `Store`."""
        vector: np.ndarray = self.batch([item]).vectors[0]
        return vector

    @property
    def vectors(self) -> np.ndarray:
        """See `Store`; all of them are fetched each time."""
        return self._read(lambda session: session.vectors(None), whole=True)

    def dictionaries(self, column: str) -> list[Dictionary]:
        """None: the database is not asked for all values of a column."""
        return []

    @property
    def numbers(self) -> None:
        """None: the rows of a database have no numbers that stay the same."""
        return None

    def vectors_at(self, numbers: np.ndarray) -> np.ndarray:
        """Return the vectors (M, dim) of items, by their places."""
        return self.vectors[numbers]

    @property
    def points(self) -> np.ndarray | None:
        """See `Store`."""
        if self._written.map["method"] == "none":
            return None
        return self._read(partial(map_of, self.folder, self._written), whole=True)

    def commit(self, change: Change, manifest: Manifest, renew: bool = False, say: Say | None = None) -> RemoteStore:
        """See `Store`."""
        written, tell = self._as_written(manifest), say or _silent
        renew = renew or written.engine != self._written.engine
        if any(change) or renew or (written.model, written.dim) != (self._facts.model, self._facts.dim):
            with self.database.changing(written.identity) as session:
                facts = session.facts._replace(model=written.model)
                gone = [*(item for batch in change.batches for item in batch.ids), *change.deleted]
                facts, numbers = _without(session, facts, gone)
                session.remove(change.deleted)
                facts = _edited(session, facts, change)
                for batch in change.batches:
                    session.put(batch, facts.last)
                    facts = _with(facts, batch)
                session.settled(facts._replace(generation=facts.generation + 1), numbers, renew, tell)
        return self._with_manifest(written, renew or written.map["method"] != self._written.map["method"], tell)

    def replace_all(self, batches: Sequence[Batch], manifest: Manifest, say: Say | None = None) -> RemoteStore:
        """See `Store`."""
        written, tell = self._as_written(manifest), say or _silent
        with self.database.changing(written.identity) as session:
            session.anew(written.dim)
            _fill(session, written, batches, tell)
        return self._with_manifest(written, True, tell)

    def fill(self, batches: Sequence[Batch], say: Say | None = None) -> RemoteStore:
        """Write the first items of an index that is made."""
        return self.commit(Change(batches), self._written, renew=True, say=say)

    def left_behind(self) -> str:
        """Say what stays in the database when the index leaves it: a copy of the index may still search there."""
        return (
            f"{self.database.address} keeps the items of this index, proxymetric_{self._written.identity}_*; drop them "
            "if no copy of the index uses them"
        )

    def compact(self) -> RemoteStore:
        """See `Store`: a new table or collection takes the place of the one with removed items."""
        ids = self.ids()
        batches = [self.batch(ids[start : start + ROWS_AT_ONCE]) for start in range(0, len(ids), ROWS_AT_ONCE)]
        return self.replace_all(batches, self._written)

    def verify(self) -> None:
        """See `Store`: all items are read, and counted; checksums are the database's own."""
        numbers = self._read(lambda session: session.texts("number"), whole=True)
        if len(numbers) != self._facts.items or np.isin(numbers, self._gaps).any():
            raise ValueError(
                f"index: got {self.database.address} with {len(numbers):,} items of {self.folder}, expected "
                f"{self._facts.items:,}: an item was changed by another program, or a change was cut off; "
                "`proxymetric index --rebuild` writes them anew"
            )

    def _as_written(self, manifest: Manifest) -> Manifest:
        """What of a manifest is written to the folder."""
        engine = checked({key: value for key, value in manifest.engine.items() if key not in MEASURED})
        kept = {name: getattr(self._written, name) for name in ("generation", "count", "added", "columns", "rows")}
        return replace(manifest, engine=engine, vectors={"kind": "float32"}, **kept)

    def _with_manifest(self, written: Manifest, renew: bool, say: Callable[[str], None]) -> RemoteStore:
        """Write the manifest and the map, if they differ."""
        if renew and written.map["method"] != "none":
            say(f"making the map ({written.map['method']})")
            with self.database.reading(written.identity, whole=True) as session:
                written = make_map(self.folder, written, session)
        elif renew:
            written = replace(written, map={"method": "none"}, derived={})
        if written != self._written:
            generation = self._written.generation + 1
            written = replace(written, generation=generation)
            written.write(self.folder)
            clean(self.folder, written)
            return RemoteStore(self.folder, written)
        self._read(lambda session: None)
        return self

    def _position(self, number: int) -> int:
        """The place of an item among all."""
        return number - int(np.searchsorted(self._gaps, number))

    def _item(self, row: Row) -> Item:
        return Item(row.id, row.label, row.values(), self._position(row.number))


def _without(session: Session, facts: Facts, ids: Sequence[str]) -> tuple[Facts, list[int]]:
    """The facts without some items, and the numbers that these had."""
    gone = session.rows(ids) if ids else []
    without_file = sum(not row.stamp for row in gone)
    facts = facts._replace(items=facts.items - len(gone), added=facts.added - without_file)
    return facts, [row.number for row in gone]


def _with(facts: Facts, batch: Batch) -> Facts:
    """The facts with the items of a batch."""
    return facts._replace(
        items=facts.items + len(batch.ids),
        added=facts.added + sum(not stamp for stamp in batch.stamps),
        last=facts.last + len(batch.ids),
        columns=_columns(facts, batch.metadata),
    )


def _columns(facts: Facts, metadata: Sequence[str]) -> tuple[str, ...]:
    values = (Row(0, "", None, content, "").values() for content in set(metadata) if content != "{}")
    return tuple(sorted({*facts.columns}.union(*values)))


def _edited(session: Session, facts: Facts, change: Change) -> Facts:
    """Edit items; return the facts with their columns."""
    if not change.edits:
        return facts
    session.edit(change.edits)
    return facts._replace(columns=_columns(facts, [edit.metadata for edit in change.edits.values()]))


def _fill(session: Session, written: Manifest, batches: Sequence[Batch], say: Callable[[str], None]) -> None:
    """Write all items of a new table or collection; of those of the same id the last one counts."""
    facts = Facts(session.facts.generation + 1, session.facts.store, written.dim, written.model)
    for batch in batches:
        session.put(batch, facts.last)
        facts = _with(facts, batch)
    session.settled(facts, [], True, say)


def _silent(sentence: str) -> None:
    """Say nothing."""


class RemoteEngine:
    """What measures a remote store as it measures any engine; see `Engine`.

    Args:
        name: of the engine.
        store: the store.
    """

    def __init__(self, name: str, store: RemoteStore) -> None:
        self.name, self._store = name, store

    def search(self, queries: Tensor, k: int, mask: np.ndarray | None = None) -> tuple[Tensor, Tensor]:
        """Find the nearest vectors among all; a mask is a local engine's."""
        assert mask is None
        hits = self._store.search(queries, SearchQuestion(k, [], {}, 0, None, None), None)
        scores = torch.tensor([[hit.similarity for hit in each] for each in hits])
        return scores, torch.tensor([[hit.row for hit in each] for each in hits])
