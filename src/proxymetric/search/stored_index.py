"""An index that is opened, searched and changed; its items lie in its folder or in a database."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
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
from proxymetric.search.engines import Engine, check_engine, check_settings
from proxymetric.search.identify import FILE as CALIBRATION
from proxymetric.search.identify import Answer, Identifier, IndexedQueries
from proxymetric.search.items import Changed, HasFingerprint, Hit, Item
from proxymetric.search.manifest import Manifest, is_index
from proxymetric.search.searching import checked_question
from proxymetric.search.storage.changes import Change, Edit, check_place
from proxymetric.search.store import Store
from proxymetric.search.stores import create_store, move_to, open_store
from proxymetric.system.lock import locked


class StoredIndex:
    """An index: opened, searched and changed; `Index` also builds one of a folder of images.

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
        self.store: Store = open_store(self.folder)
        """where the items lie: in the folder, or in a database"""
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
                vectors={"kind": vectors},
            )
            create_store(folder, manifest)
        return cls(folder)

    def newest(self) -> Hashable:
        """A value that differs when anybody has changed the index: cheap to ask for again and again."""
        return self.store.newest()

    def reload(self) -> bool:
        """Open the newest state of the index; return whether anybody has changed it since."""
        with self._change_lock:  # a change by another thread opens the state that it makes
            before = self.manifest
            self._replace(self.store.refreshed())
            return self.manifest != before

    def _replace(self, store: Store) -> None:
        """Put the next state in the place of the one that is open."""
        if store is not self.store:
            self.store, self._identifier = store, None

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
            with self.store.writing():
                self._is_writing = True
                try:
                    self.reload()
                    yield
                finally:
                    self._is_writing = False

    def _current(self) -> Self:
        """This index in its present state, which stays the same while another thread changes the index."""
        return copy.copy(self)

    @property
    def manifest(self) -> Manifest:
        """What the index says about itself."""
        return self.store.manifest

    @property
    def engine(self) -> Engine:
        """What finds the nearest vectors."""
        return self.store.engine

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
        return torch.from_numpy(self.store.vectors)

    @property
    def points(self) -> Tensor | None:
        """(N, 2) the map, in the same order; None without one. Items that are newer than the map are placed on it."""
        points = self.store.points
        return None if points is None else torch.from_numpy(points)

    @property
    def row_numbers(self) -> Tensor | None:
        """(N,) numbers of the items that stay the same until the files are written anew; None: it has none."""
        numbers = self.store.numbers
        return None if numbers is None else torch.from_numpy(numbers)

    def vectors_at(self, numbers: Tensor) -> Tensor:
        """Return the vectors (M, dim) of such numbers, also of items that were removed."""
        return torch.from_numpy(self.store.vectors_at(numbers.numpy()))

    @property
    def ids(self) -> list[str]:
        """The ids of all items, in the order in which they were added."""
        return self.store.ids()

    @property
    def added(self) -> list[str]:
        """The ids of the items that are no files of the indexed folder, sorted."""
        return sorted(item for item, stamp in self.stamps().items() if not stamp)

    @property
    def labels(self) -> list[str | None]:
        """The labels of all items, in the order of the ids."""
        return self.store.labels()

    @property
    def classes(self) -> dict[str, int]:
        """The classes of the index, sorted, and the number of items of each."""
        return dict(sorted(Counter(label for label in self.labels if label is not None).items()))

    def __len__(self) -> int:
        return self.manifest.count

    def __contains__(self, item: object) -> bool:
        return isinstance(item, str) and bool(self.store.known([item]))

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
        return self._known(self.store, item)

    def at(self, row: int) -> Item:
        """Return the item of a row of `vectors`.

        Raises:
            IndexError: there is no such row.
        """
        store = self.store
        if not 0 <= row < store.manifest.count:
            raise IndexError(f"row: got {row}, expected a number in 0..{store.manifest.count - 1}")
        return store.at(row)

    def items(self) -> Iterator[Item]:
        """Iterate over all items, in the order of `vectors`."""
        yield from self.store

    def stamps(self) -> dict[str, str]:
        """Return the stamp of each id: size and time of the file that it was made from; empty if there is none."""
        store = self.store
        return dict(zip(store.ids(), store.stamps(), strict=True))

    def metadata(self, ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return the metadata of those ids that the index has."""
        return {name: item.metadata for name, item in self.store.items(ids).items()}

    def vector(self, item: str) -> Tensor:
        """Return the vector of an item, (dim,).

        Raises:
            KeyError: there is no such item.
        """
        store = self.store
        return torch.from_numpy(store.vector(self._known(store, item).id))

    def thumbnail(self, item: str) -> bytes | None:
        """Return the thumbnail of an item (JPEG); None without one.

        Raises:
            KeyError: there is no such item.
        """
        store = self.store
        return store.thumbnail(self._known(store, item).id)

    def batch(self, ids: Sequence[str]) -> Batch:
        """Return those items of `ids` that the index has, to write them again with `change`."""
        return self.store.batch(ids)

    def _known(self, store: Store, item: str) -> Item:
        if (known := store.items([item]).get(item)) is None:
            raise KeyError(f"id: got {item!r}, expected an id of {self.folder}")
        return known

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
        store = self.store
        store.check()
        queries = self._checked_queries(queries)
        self._check_without(queries, without)
        question = checked_question(store.manifest.columns, k, where, differs, offset, min_similarity, one_per)
        return store.search(torch.from_numpy(unit_rows(queries)), question, without)

    def value_of(self, item: str, column: str) -> str | None:
        """Return the value of an item in a column, as text: `class` is the label; None if it has none.

        Raises:
            KeyError: there is no such item.
            ValueError: no item has this column.
        """
        store = self.store
        one_of("column", column, [CLASS_COLUMN, *store.manifest.columns])
        known = self._known(store, item)
        value = known.label if column == CLASS_COLUMN else known.metadata.get(column)
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
        current.store.check()
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
            if known := self.store.known(batch.ids):
                first = next(item for item in batch.ids if item in known)
                raise ValueError(f"ids: got {first!r}, which the index has already; expected a new id, or `update`")

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
            earlier = self.store.items(ids)
            items = [earlier[item] for item in ids]
            batch = new_items(
                self.dim,
                ids,
                torch.zeros(len(items), self.dim) if vectors is None else vectors,
                [item.label for item in items] if labels is None else labels,
                [item.metadata for item in items] if metadata is None else metadata,
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
            before = self.store.batch(ids)
            pictures = before.thumbnails if thumbnails is None else batch.thumbnails
            self._commit(Change([batch._replace(stamps=before.stamps, thumbnails=pictures)]), self.manifest)

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
        if (move := move_to(self.store, manifest)) is not None:
            if any(change):
                self._replace(self.store.commit(change, self.manifest, say=say))
            self._replace(move(self.store, say))
            return
        self._replace(self.store.commit(change, manifest, renew, say))

    def replace_all(self, batches: Sequence[Batch], say: Callable[[str], None] | None = None, **facts: Any) -> None:
        """Put other items in the place of all that there are, in one step; dimensions and model may be others."""
        with self.writing():
            manifest = replace(self.manifest, **facts)
            if (move := move_to(self.store, manifest)) is not None:
                self._replace(move(batches, say))
                return
            self._replace(self.store.replace_all(batches, manifest, say))

    def renew(self) -> None:
        """Bring the map, the engine and the calibration of `identify` up to date.

        Until then, items that were added since are placed on the map, compared one by one and counted to their class.
        """
        self.change(renew=True)
        if (self.folder / CALIBRATION).exists() and any(label is not None for label in self.labels):
            self._identifier = Identifier(self._current(), fresh=True)

    def compact(self) -> None:
        """Write all files anew, so that nothing of a removed item is left in them; it takes as long as copying them.

        Raises:
            ValueError: a file is damaged.
        """
        with self.writing():
            self._replace(self.store.compact())

    def verify(self) -> None:
        """Read all files and compare them with their checksums.

        Raises:
            ValueError: a file is damaged.
        """
        self.store.verify()

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
        known = self.store.known([item for item in ids if isinstance(item, str)])
        unknown = next((item for item in ids if item not in known), None)
        if unknown is not None:
            raise ValueError(f"ids: got {unknown!r}, which the index does not have; expected ids of {self.folder}")
