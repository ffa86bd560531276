"""An index on the disk: a folder of vectors, ids, labels, metadata and thumbnails that is searched by similarity."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from proxymetric.arguments.signatures import one_of
from proxymetric.core.quantisation import check_kind
from proxymetric.search.atlas import METHODS
from proxymetric.search.batches import Batch, new_items, unit_rows
from proxymetric.search.conditions import CLASS_COLUMN, Condition, text_of
from proxymetric.search.derived import derive
from proxymetric.search.engines import Engine, check_engine, check_settings
from proxymetric.search.identify import Answer, Identifier, IndexedQueries
from proxymetric.search.items import Changed, HasFingerprint, Hit, Item
from proxymetric.search.manifest import Manifest, is_index
from proxymetric.search.measuring import drawn_rows, measure_loss, with_loss
from proxymetric.search.searching import answered, as_item, checked_question, opened_state
from proxymetric.search.storage.change_log import Row
from proxymetric.search.storage.changes import Change, Derive, Edit, check_place, clean, commit, cut_off, write_anew
from proxymetric.search.storage.changes import create as create_files
from proxymetric.search.storage.state import State, batch_of, damaged_files, stored_bytes
from proxymetric.system.lock import locked


class StoredIndex:
    """An index on the disk: opened, searched and changed; `Index` also builds one of a folder of images.

    Args:
        folder: the folder of an index.
        model: the model whose vectors will be searched for, or its fingerprint; None does not compare.

    Raises:
        ValueError: the folder is not an index, it is damaged, or another model made its vectors.
    """

    def __init__(self, folder: str | Path, model: HasFingerprint | str | None = None) -> None:
        self.folder = Path(folder)
        self._change_lock = threading.RLock()
        self._is_writing = False
        self._identifier: Identifier | None = None
        self.changed: Changed | None = None
        """what `Index.build` did before it returned this object"""
        self._opened = opened_state(self.folder, None)
        if model is not None:
            self.check_model(model)

    @classmethod
    def open(cls, folder: str | Path, model: HasFingerprint | str | None = None) -> Self:
        """Open an index; the same as `Index(folder, model)`."""
        return cls(folder, model)

    @classmethod
    def create(
        cls,
        folder: str | Path,
        dim: int,
        model: HasFingerprint | str = "",
        *,
        engine: str | Mapping[str, Any] = "exact",
        map: str = "pca",
        run: Mapping[str, str] | None = None,
        photos: str | None = None,
        vectors: str = "float32",
    ) -> Self:
        """Make an empty index.

        Args:
            folder: where; it must not exist, or be empty.
            dim: dimensions of the vectors, at least 1.
            model: the model that makes the vectors, or its fingerprint; another model is refused later.
            engine: what searches: `exact` or `faiss` (needs the extra `index`); or a dictionary with settings, such as
                `{"name": "faiss", "kind": "ivf"}`.
            map: how the map of the index is made: `tsne`, `pca` or `none`.
            run: where the model lies: `run` and, where needed, `which` and `weights`.
            photos: the folder that will be indexed.
            vectors: how vectors are stored: `float32`; `int8`, a quarter of the bytes; or `binary`, bits that are
                searched first, and 8-bit numbers with which the first results are ranked again. The last two need the
                engine `exact`.

        Returns:
            The index, opened.

        Raises:
            ValueError: the folder holds something, or an argument is wrong.
        """
        if dim < 1:
            raise ValueError(f"dim: got {dim}, expected at least 1")
        one_of("map", map, METHODS)
        chosen_engine = {"name": engine} if isinstance(engine, str) else dict(engine)
        check_settings(chosen_engine)
        check_kind(vectors)
        check_engine(vectors, chosen_engine)
        folder = Path(folder)
        check_place(folder)
        fingerprint = model if isinstance(model, str) else model.fingerprint()
        with locked(folder):
            if is_index(folder):
                raise ValueError(f"folder: got {folder}, which is an index already; expected a new folder")
            manifest = Manifest(
                0,
                0,
                dim,
                fingerprint,
                dict(run or {}),
                photos,
                chosen_engine,
                {"method": map},
                vectors={"kind": vectors, "bytes": stored_bytes(vectors, dim)},
            )
            create_files(folder, manifest)
        return cls(folder)

    def _load(self) -> None:
        self._opened = opened_state(self.folder, self._opened.state)
        self._identifier = None

    @property
    def state(self) -> State:
        """The state that is open."""
        return self._opened.state

    def reload(self) -> bool:
        """Open the newest state of the index; return whether another process has changed it since."""
        with self._change_lock:  # a change by another thread opens the state that it makes
            if Manifest.read(self.folder) == self.manifest:
                return False
            self._load()
            return True

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Keep other processes from changing the index during several changes; the newest state is open.

        Other threads that want to change this object wait.

        Raises:
            ValueError: another process is changing the index.
        """
        with self._change_lock:
            if self._is_writing:
                yield
                return
            with locked(self.folder):
                self._is_writing = True
                try:
                    self.reload()
                    clean(self.folder, self.manifest)  # a killed process may have left files
                    cut_off(self.folder, self.manifest)
                    yield
                finally:
                    self._is_writing = False

    def _current(self) -> Self:
        """This index in its present state, which stays the same while another thread changes the index."""
        return copy.copy(self)

    @property
    def manifest(self) -> Manifest:
        """What the index says about itself."""
        return self.state.manifest

    @property
    def engine(self) -> Engine:
        """What finds the nearest vectors."""
        return self._opened.engine

    @property
    def model(self) -> str:
        """The fingerprint of the model that made the vectors; empty if unknown."""
        return self.manifest.model

    @property
    def dim(self) -> int:
        """The dimensions of the vectors."""
        return self.manifest.dim

    @property
    def vectors(self) -> Tensor:
        """(N, dim) of unit length, in the order in which the items were added; do not write to it.

        32-bit vectors are mapped from the file. Small vectors, and those between removed ones, are copied to memory
        when this is first asked for.
        """
        return torch.from_numpy(self._opened.vectors)

    @property
    def points(self) -> Tensor | None:
        """(N, 2) the map, in the same order; None without one. Items that are newer than the map are placed on it."""
        points = self._opened.points
        return None if points is None else torch.from_numpy(points)

    @property
    def ids(self) -> list[str]:
        """The ids of all items, in the order in which they were added."""
        return self.state.texts("id")

    @property
    def added(self) -> list[str]:
        """The ids of the items that are no files of the indexed folder, sorted."""
        return sorted(item for item, stamp in self.stamps().items() if not stamp)

    @property
    def labels(self) -> list[str | None]:
        """The labels of all items, in the order of the ids."""
        return self.state.labels()

    @property
    def classes(self) -> dict[str, int]:
        """The classes of the index, sorted, and the number of items of each."""
        return dict(sorted(Counter(label for label in self.labels if label is not None).items()))

    def __len__(self) -> int:
        return self.manifest.count

    def __contains__(self, item: object) -> bool:
        return isinstance(item, str) and self.state.number_of(item) is not None

    def __repr__(self) -> str:
        return f"Index({str(self.folder)!r}, {len(self):,} items, dim={self.dim}, engine={self.engine.name!r})"

    def check_model(self, model: HasFingerprint | str) -> None:
        """Refuse a model that did not make the vectors of this index.

        Raises:
            ValueError: the fingerprints differ.
        """
        fingerprint = model if isinstance(model, str) else model.fingerprint()
        if fingerprint != self.model:
            made_by = f"the model of {self.manifest.run['run']}" if self.manifest.run.get("run") else "the same model"
            raise ValueError(
                f"model: got the model {fingerprint[:12]}, but the vectors of {self.folder} were made by the model "
                f"{self.model[:12] or 'of no name'}; expected {made_by} as it was, or `proxymetric index --rebuild`"
            )

    def __getitem__(self, item: str) -> Item:
        """Return an item by its id.

        Raises:
            KeyError: there is no such item.
        """
        state = self.state
        return as_item(state, self._row(state, item))

    def at(self, row: int) -> Item:
        """Return the item of a row of `vectors`.

        Raises:
            IndexError: there is no such row.
        """
        state = self.state
        if not 0 <= row < len(state):
            raise IndexError(f"row: got {row}, expected a number in 0..{len(state) - 1}")
        return as_item(state, state.at([int(state.living[row])])[0])

    def items(self) -> Iterator[Item]:
        """Iterate over all items, in the order of `vectors`."""
        for number, row in enumerate(self.state):
            yield Item(row.id, row.label, row.values(), number)

    def stamps(self) -> dict[str, str]:
        """Return the stamp of each id: size and time of the file that it was made from; empty if there is none."""
        state = self.state
        return dict(zip(state.texts("id"), state.texts("stamp"), strict=True))

    def metadata(self, ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return the metadata of those ids that the index has."""
        state = self.state
        numbers = {item: number for item in ids if (number := state.number_of(item)) is not None}
        return {row.id: row.values() for row in state.at(list(numbers.values()))}

    def vector(self, item: str) -> Tensor:
        """Return the vector of an item, (dim,).

        Raises:
            KeyError: there is no such item.
        """
        state = self.state
        return torch.from_numpy(state.floats([self._row(state, item).number])[0].copy())

    def thumbnail(self, item: str) -> bytes | None:
        """Return the thumbnail of an item (JPEG); None without one.

        Raises:
            KeyError: there is no such item.
        """
        state = self.state
        return state.thumbnail(self._row(state, item))

    def batch(self, ids: Sequence[str]) -> Batch:
        """Return those items of `ids` that the index has, to write them again with `change`."""
        return batch_of(self.state, ids)

    def _row(self, state: State, item: str) -> Row:
        number = state.number_of(item)
        if number is None:
            raise KeyError(f"id: got {item!r}, expected an id of {self.folder}")
        return state.at([number])[0]

    def search(
        self,
        queries: Tensor | np.ndarray,
        k: int = 10,
        where: Mapping[str, Any] | Iterable[str | Condition] | None = None,
        without: Sequence[str | Collection[str] | None] | None = None,
        differs: Mapping[str, Any] | None = None,
        *,
        offset: int = 0,
        min_similarity: float | None = None,
        one_per: str | None = None,
    ) -> list[list[Hit]]:
        """Find the items that are most similar to each query.

        Args:
            queries: (Q, dim).
            k: results for each query, at least 1; fewer come back if fewer items match.
            where: conditions, see `as_conditions`: `["price<50", "brand=a,b"]`, or
                `{"price": {"<": 50}, "brand": ["a", "b"]}`; `class` is the label, other names are metadata columns.
            without: for each of the Q queries an id, or several, that are left out of its results; None leaves nothing
                out.
            differs: column -> the value of the queries, one for all or a list of Q. Items with the value of a query,
                such as its camera, are left out of its results; a query with the value None leaves nothing out.
            offset: the first results of each query that are left out, for the next page.
            min_similarity: only items at least this similar, from -1 to 1.
            one_per: a column; of items with the same value, only the most similar one is a result.

        Returns:
            For each query its results, most similar first; of equal ones, the item that was added first.

        Raises:
            ValueError: an argument is wrong.
        """
        opened = self._opened
        opened.state.raise_fault()
        queries = self._checked_queries(queries)
        self._check_without(queries, without)
        question = checked_question(opened.state.manifest.columns, k, where, differs, offset, min_similarity, one_per)
        return answered(opened, torch.from_numpy(unit_rows(queries)), question, without)

    def value_of(self, item: str, column: str) -> str | None:
        """Return the value of an item in a column, as text: `class` is the label; None if it has none.

        Raises:
            KeyError: there is no such item.
            ValueError: no item has this column.
        """
        state = self.state
        one_of("column", column, [CLASS_COLUMN, *state.manifest.columns])
        row = self._row(state, item)
        value = row.label if column == CLASS_COLUMN else row.values().get(column)
        return None if value is None else text_of(value)

    def identify(
        self, queries: Tensor | np.ndarray, far: float = 0.01, without: Sequence[str | None] | None = None
    ) -> list[Answer]:
        """Say for each query which class of the index it is, or none of them.

        Args:
            queries: (Q, dim).
            far: the false-accept rate: the share of images of other classes that are taken for one of these.
            without: Q ids, one for each query, that are left out of their own class; None leaves nothing out.

        Returns:
            For each query the class, or None, with its score and the runner-up; see `search.identify`.

        Raises:
            ValueError: an argument is wrong, or the index has too few labelled items to calibrate with.
        """
        current = self._current()
        current.state.raise_fault()
        queries = current._checked_queries(queries)
        current._check_without(queries, without)
        identifier = current._identifier
        if identifier is None or identifier.generation != current.manifest.generation:
            identifier = self._identifier = Identifier(current)
        return identifier(queries, far, None if without is None else IndexedQueries.of(current, without))

    def add(
        self,
        ids: Sequence[str],
        vectors: Tensor | np.ndarray,
        *,
        labels: Sequence[str | None] | None = None,
        metadata: Sequence[Mapping[str, Any]] | None = None,
        thumbnails: Sequence[bytes | None] | None = None,
    ) -> None:
        """Add items; all at once, or none if there is a mistake.

        Args:
            ids: N texts that the index does not have yet.
            vectors: (N, dim); their length does not matter.
            labels: N labels.
            metadata: N dictionaries of text, numbers, bools, lists of words and None.
            thumbnails: N JPEG files.

        Raises:
            ValueError: an argument is wrong, or the index has an id already.
        """
        batch = new_items(self.dim, ids, vectors, labels, metadata, thumbnails)

        def check() -> None:
            if known := next((item for item in batch.ids if item in self), None):
                raise ValueError(f"ids: got {known!r}, which the index has already; expected a new id, or `update`")

        self.change([batch], check=check)

    def put(
        self,
        ids: Sequence[str],
        vectors: Tensor | np.ndarray,
        *,
        labels: Sequence[str | None] | None = None,
        metadata: Sequence[Mapping[str, Any]] | None = None,
        thumbnails: Sequence[bytes | None] | None = None,
    ) -> None:
        """Add items, or replace those of the same id; all at once. Called twice, it changes nothing the second time."""
        self.change([new_items(self.dim, ids, vectors, labels, metadata, thumbnails)])

    def update(
        self,
        ids: Sequence[str],
        vectors: Tensor | np.ndarray | None = None,
        *,
        labels: Sequence[str | None] | None = None,
        metadata: Sequence[Mapping[str, Any]] | None = None,
        thumbnails: Sequence[bytes | None] | None = None,
    ) -> None:
        """Replace parts of items, those that are given; all at once, or none if there is a mistake.

        Args:
            ids: N ids of the index.
            vectors: (N, dim).
            labels: N labels.
            metadata: N dictionaries.
            thumbnails: N JPEG files.

        Raises:
            ValueError: an argument is wrong, or the index does not have an id.
        """
        with self.writing():
            self._check_known(ids)
            state = self.state
            rows = [self._row(state, item) for item in ids]
            batch = new_items(
                self.dim,
                ids,
                torch.zeros(len(rows), self.dim) if vectors is None else vectors,
                [row.label for row in rows] if labels is None else labels,
                [row.values() for row in rows] if metadata is None else metadata,
                thumbnails,
            )
            if vectors is None:
                columns = zip(batch.labels, batch.metadata, batch.thumbnails, strict=True)
                edits = {
                    item: Edit(label, content, thumbnail, thumbnails is None)
                    for item, (label, content, thumbnail) in zip(batch.ids, columns, strict=True)
                }
                self._commit(Change(edits=edits), self.manifest)
                return
            pictures = [state.thumbnail(row) for row in rows] if thumbnails is None else batch.thumbnails
            batch = batch._replace(stamps=[row.stamp for row in rows], thumbnails=pictures)
            self._commit(Change([batch]), self.manifest)

    def delete(self, ids: Sequence[str]) -> None:
        """Remove items; all at once, or none if there is a mistake.

        They are in no answer any more. Their bytes are gone when the files are written anew: at a merge of the log
        that finds many removed items, or with `compact`.

        Args:
            ids: ids of the index.

        Raises:
            ValueError: the index does not have an id.
        """
        with self.writing():
            self._check_known(ids)
            self._commit(Change(deleted=ids), self.manifest)

    def change(
        self,
        batches: Sequence[Batch] = (),
        edits: Mapping[str, Edit] | None = None,
        deleted: Collection[str] = (),
        check: Callable[[], None] | None = None,
        renew: bool = False,
        say: Callable[[str], None] | None = None,
        **facts: Any,
    ) -> None:
        """Make several changes in one step.

        Args:
            batches: items that are added or replace items of the same id.
            edits: id -> what an item that stays gets.
            deleted: ids of items that are removed.
            check: called before anything is written, with the newest state of the index open.
            renew: bring the map and the engine up to date.
            say: called with the name of each stage that may take long, when it begins.
            **facts: fields of the manifest that change, such as `run`.
        """
        with self.writing():
            if check is not None:
                check()
            self._commit(Change(batches, edits or {}, deleted), replace(self.manifest, **facts), renew, say)

    def _commit(
        self,
        change: Change,
        manifest: Manifest,
        renew: bool = False,
        say: Callable[[str], None] | None = None,
    ) -> None:
        derived = partial(derive, say=say)
        before, kind = self.manifest, manifest.vectors["kind"]
        check_engine(kind, manifest.engine)
        if kind == before.vectors["kind"]:
            if kind != "float32" and not len(self) and change.batches:
                manifest = with_loss(manifest, change.batches)
            renew = renew or manifest.engine != before.engine or manifest.map["method"] != before.map["method"]
            commit(self.state, change, manifest, derived, renew=renew)
            self._load()
            return
        if any(change):
            commit(self.state, change, before, derived)
            self._load()
            manifest = _with_counts(manifest, self.manifest)
        self._change_kind(manifest, derived)

    def _change_kind(self, manifest: Manifest, derived: Derive) -> None:
        """Store all vectors as another kind of numbers."""
        kinds, state = (self.manifest.vectors["kind"], manifest.vectors["kind"]), self.state
        if kinds[1] == "float32" and len(state):
            raise ValueError(
                f"vectors: got 'float32' for {self.folder}, whose vectors are {kinds[0]}; the other bits are gone; "
                "expected `proxymetric index --rebuild`"
            )
        facts = {"kind": kinds[1], "bytes": stored_bytes(kinds[1], self.dim)}
        if kinds[0] == "float32" and len(state):
            some, labels = drawn_rows(len(state)), state.labels()
            originals = torch.from_numpy(state.floats(state.living[some]).copy())
            facts["lost"] = measure_loss(kinds[1], originals, [labels[row] for row in some])
        elif "lost" in state.manifest.vectors:
            facts["lost"] = state.manifest.vectors["lost"]
        write_anew(self.folder, state, replace(manifest, vectors=facts), derived)
        self._load()

    def replace_all(self, batches: Sequence[Batch], say: Callable[[str], None] | None = None, **facts: Any) -> None:
        """Put other items in the place of all that there are, in one step; dimensions and model may be others."""
        with self.writing():
            manifest = replace(self.manifest, **facts)
            check_engine(manifest.vectors["kind"], manifest.engine)
            write_anew(self.folder, self.state, with_loss(manifest, batches), partial(derive, say=say), batches)
            self._load()

    def renew(self) -> None:
        """Bring the map and the engine up to date: items that were added since are placed or compared one by one."""
        self.change(renew=True)

    def compact(self) -> None:
        """Write all files anew, so that nothing of a removed item is left in them; it takes as long as copying them.

        Raises:
            ValueError: a file is damaged.
        """
        with self.writing():
            write_anew(self.folder, self.state, self.manifest, derive)
            self._load()

    def verify(self) -> None:
        """Read all files and compare them with their checksums.

        Raises:
            ValueError: a file is damaged.
        """
        if damaged := damaged_files(self.folder, self.manifest):
            raise ValueError(
                f"index: got {self.folder}, where {', '.join(damaged)} was damaged after it was written; expected the "
                "files as they were; `proxymetric index --rebuild` makes them anew"
            )

    def _checked_queries(self, given: Tensor | np.ndarray) -> Tensor:
        queries = torch.as_tensor(given)
        if queries.ndim != 2 or queries.shape[1] != self.dim:
            raise ValueError(
                f"queries: got a tensor of shape {tuple(queries.shape)}, expected (Q, {self.dim}) as in the index, "
                "embedded by the same model"
            )
        if not queries.isfinite().all():
            raise ValueError("queries: got numbers that are not finite (NaN or infinite), expected finite numbers")
        return queries

    def _check_without(self, queries: Tensor, without: Sequence[str | Collection[str] | None] | None) -> None:
        if without is not None and len(without) != len(queries):
            raise ValueError(f"without: got {len(without)} ids for {len(queries)} queries, expected one for each")

    def _check_known(self, ids: Sequence[str]) -> None:
        unknown = next((item for item in ids if item not in self), None)
        if unknown is not None:
            raise ValueError(f"ids: got {unknown!r}, which the index does not have; expected ids of {self.folder}")


def _with_counts(manifest: Manifest, now: Manifest) -> Manifest:
    """Chosen facts, with the counts and files of another manifest."""
    names = ("generation", "count", "columns", "added", "rows", "pictures", "log", "base", "store", "files", "derived")
    return replace(manifest, **{name: getattr(now, name) for name in names})
