"""The items of an index in the files of its folder."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from proxymetric.search.batches import Batch
from proxymetric.search.conditions import Condition, Dictionary
from proxymetric.search.derived import derive, points_of
from proxymetric.search.engines import check_engine, open_engine
from proxymetric.search.items import Hit, Item
from proxymetric.search.manifest import FILE, Manifest
from proxymetric.search.measuring import drawn_rows, measure_loss, with_loss
from proxymetric.search.searching import Nearest, Ranked, SearchQuestion, answered
from proxymetric.search.storage.change_log import Row
from proxymetric.search.storage.changes import Change, Derive, clean, commit, cut_off, write_anew
from proxymetric.search.storage.changes import create as create_files
from proxymetric.search.storage.state import State, batch_of, damaged_files, open_state, stored_bytes
from proxymetric.search.store import Say
from proxymetric.system.lock import locked


class LocalStore:
    """One state of the files of an index, and the engine that searches it; see `Store`.

    Args:
        state: the state.
    """

    def __init__(self, state: State) -> None:
        self.state, self.folder = state, state.folder
        self.engine = open_engine(state.manifest.engine, state)

    @classmethod
    def open(cls, folder: Path, earlier: LocalStore | None = None) -> LocalStore:
        """Open the newest state of an index.

        Args:
            folder: the folder of the index.
            earlier: a state that this process has opened before.

        Raises:
            ValueError: the folder is not an index, or a file is missing or damaged.
        """
        return cls(open_state(folder, None if earlier is None else earlier.state))

    @classmethod
    def create(cls, folder: Path, manifest: Manifest) -> LocalStore:
        """Write the files of an index without items."""
        facts = {"kind": manifest.vectors["kind"], "bytes": stored_bytes(manifest.vectors["kind"], manifest.dim)}
        create_files(folder, replace(manifest, vectors=facts))
        return cls.open(folder)

    @property
    def manifest(self) -> Manifest:
        """See `Store`."""
        return self.state.manifest

    def newest(self) -> Hashable:
        """Time, size and number of the manifest's file; another one takes its place at each change."""
        return stamp_of(self.folder)

    def refreshed(self) -> LocalStore:
        """See `Store`."""
        return self if Manifest.read(self.folder) == self.manifest else LocalStore.open(self.folder, self)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """See `Store`."""
        with locked(self.folder):
            manifest = Manifest.read(self.folder)
            clean(self.folder, manifest)  # a killed process may have left files
            cut_off(self.folder, manifest)
            yield

    def check(self) -> None:
        """See `Store`."""
        self.state.raise_fault()

    def search(
        self, queries: Tensor, question: SearchQuestion, without: Sequence[str | Collection[str] | None] | None
    ) -> list[list[Hit]]:
        """See `Store`."""
        answers = answered(len(queries), partial(self._matching, queries), question, without)
        return [[self._hit(row, score) for row, score in ranked] for ranked in answers]

    def _matching(self, queries: Tensor, conditions: Sequence[Condition]) -> Nearest:
        state = self.state
        mask = state.matching(conditions) if conditions else state.is_living if state.has_dead else None

        def nearest(members: Sequence[int], depth: int) -> list[Ranked]:
            similarities, numbers = self.engine.search(queries[list(members)], depth, mask)
            different = numbers.unique().tolist()
            rows = dict(zip(different, state.at(different), strict=True))
            lists = zip(similarities.clamp(-1, 1).tolist(), numbers.tolist(), strict=True)
            return [[(rows[number], score) for score, number in zip(*each, strict=True)] for each in lists]

        return nearest

    def known(self, ids: Sequence[str]) -> set[str]:
        """See `Store`."""
        return {item for item in ids if self.state.number_of(item) is not None}

    def items(self, ids: Sequence[str]) -> dict[str, Item]:
        """See `Store`."""
        numbers = [number for item in dict.fromkeys(ids) if (number := self.state.number_of(item)) is not None]
        return {row.id: self._item(row) for row in self.state.at(numbers)}

    def at(self, row: int) -> Item:
        """See `Store`."""
        return self._item(self.state.at([int(self.state.living[row])])[0])

    def __iter__(self) -> Iterator[Item]:
        for number, row in enumerate(self.state):
            yield Item(row.id, row.label, row.values(), number)

    def ids(self) -> list[str]:
        """See `Store`."""
        return self.state.texts("id")

    def labels(self) -> list[str | None]:
        """See `Store`."""
        return self.state.labels()

    def stamps(self) -> list[str]:
        """See `Store`."""
        return self.state.texts("stamp")

    def batch(self, ids: Sequence[str]) -> Batch:
        """See `Store`."""
        return batch_of(self.state, ids)

    def thumbnail(self, item: str) -> bytes | None:
        """See `Store`."""
        return self.state.thumbnail(self.state.at([self._number(item)])[0])

    def vector(self, item: str) -> np.ndarray:
        """See `Store`."""
        vector: np.ndarray = self.state.floats([self._number(item)])[0].copy()
        return vector

    @functools.cached_property
    def vectors(self) -> np.ndarray:
        """See `Store`; 32-bit vectors without removed ones between them are mapped from the file."""
        if "float32" in self.state.arrays and not self.state.has_dead:
            return self.state.arrays["float32"]
        return self.state.floats(self.state.living)

    def dictionaries(self, column: str) -> list[Dictionary]:
        """The different values of a column that items have, in the table and in the log."""
        table, changes = self.state.table, self.state.changes
        changed = [value for values in changes.values.values() if (value := values.get(column)) is not None]
        if column not in table.places:
            return [Dictionary(changed)]
        is_current = self.state.is_living[: table.rows].copy()
        is_current[[number for number in changes.rows if number < table.rows]] = False
        codes = np.unique(table.codes[table.places[column]][is_current])
        values = table.dictionary(column).values
        return [Dictionary([values[code] for code in codes[codes >= 0].tolist()]), Dictionary(changed)]

    @property
    def numbers(self) -> np.ndarray:
        """(count,) the row of each item in the files."""
        return self.state.living

    def vectors_at(self, numbers: np.ndarray) -> np.ndarray:
        """Return the vectors (M, dim) of some rows, also of items that were removed."""
        return self.state.floats(numbers)

    @functools.cached_property
    def points(self) -> np.ndarray | None:
        """See `Store`."""
        return points_of(self.state)

    def commit(self, change: Change, manifest: Manifest, renew: bool = False, say: Say | None = None) -> LocalStore:
        """See `Store`."""
        derived = partial(derive, say=say)
        before, kind = self.manifest, manifest.vectors["kind"]
        check_engine(kind, manifest.engine)
        if kind == before.vectors["kind"]:
            if kind != "float32" and not before.count and change.batches:
                manifest = with_loss(manifest, change.batches)
            renew = renew or manifest.engine != before.engine or manifest.map["method"] != before.map["method"]
            commit(self.state, change, manifest, derived, renew=renew)
            return LocalStore.open(self.folder, self)
        store = self
        if any(change):
            commit(self.state, change, before, derived)
            store = LocalStore.open(self.folder, self)
            manifest = _with_counts(manifest, store.manifest)
        return store._as_kind(manifest, derived)

    def _as_kind(self, manifest: Manifest, derived: Derive) -> LocalStore:
        """Store all vectors as another kind of numbers."""
        kinds, state = (self.manifest.vectors["kind"], manifest.vectors["kind"]), self.state
        if kinds[1] == "float32" and len(state):
            raise ValueError(
                f"vectors: got 'float32' for {self.folder}, whose vectors are {kinds[0]}; the other bits are gone; "
                "expected `proxymetric index --rebuild`"
            )
        facts = {"kind": kinds[1], "bytes": stored_bytes(kinds[1], manifest.dim)}
        if kinds[0] == "float32" and len(state):
            some, labels = drawn_rows(len(state)), state.labels()
            originals = torch.from_numpy(state.floats(state.living[some]).copy())
            facts["lost"] = measure_loss(kinds[1], originals, [labels[row] for row in some])
        elif "lost" in state.manifest.vectors:
            facts["lost"] = state.manifest.vectors["lost"]
        write_anew(self.folder, state, replace(manifest, vectors=facts), derived)
        return LocalStore.open(self.folder, self)

    def replace_all(self, batches: Sequence[Batch], manifest: Manifest, say: Say | None = None) -> LocalStore:
        """See `Store`."""
        check_engine(manifest.vectors["kind"], manifest.engine)
        write_anew(self.folder, self.state, with_loss(manifest, batches), partial(derive, say=say), batches)
        return LocalStore.open(self.folder, self)

    def compact(self) -> LocalStore:
        """See `Store`; it takes as long as copying the files."""
        write_anew(self.folder, self.state, self.manifest, derive)
        return LocalStore.open(self.folder, self)

    def verify(self) -> None:
        """See `Store`."""
        if damaged := damaged_files(self.folder, Manifest.read(self.folder)):
            raise ValueError(
                f"index: got {self.folder}, where {', '.join(damaged)} was damaged after it was written; expected the "
                "files as they were; `proxymetric index --rebuild` makes them anew"
            )

    def _number(self, item: str) -> int:
        number = self.state.number_of(item)
        assert number is not None, item
        return number

    def _item(self, row: Row) -> Item:
        return Item(row.id, row.label, row.values(), self._position(row.number))

    def _hit(self, row: Row, similarity: float) -> Hit:
        return Hit(row.id, similarity, row.label, row.values(), self._position(row.number))

    def _position(self, number: int) -> int:
        """The place of a row among those with items."""
        return int(np.searchsorted(self.state.living, number)) if self.state.has_dead else number


def stamp_of(folder: Path) -> Hashable:
    """What differs when the manifest of an index was replaced."""
    try:
        status = (folder / FILE).stat()
    except FileNotFoundError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _with_counts(manifest: Manifest, now: Manifest) -> Manifest:
    """Chosen facts, with the counts and files of another manifest."""
    names = ("generation", "count", "columns", "added", "rows", "pictures", "log", "base", "store", "files", "derived")
    return replace(manifest, **{name: getattr(now, name) for name in names})
