"""An index on the disk: a folder of vectors, ids, labels, metadata and thumbnails that is searched by similarity."""

from __future__ import annotations

import contextlib
import copy
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from proxymetric.search.engines import ENGINES, Engine
from proxymetric.search.generation import (
    GENERATIONS,
    THUMBNAILS,
    Generation,
    check_place,
    clean,
    commit,
    damaged_files,
    empty,
)
from proxymetric.search.identify import Answer, Identifier, IndexedQueries
from proxymetric.search.items import Changed, HasFingerprint, Hit, Item
from proxymetric.search.manifest import FILE, Manifest, is_index
from proxymetric.search.rows import Row, Value, check_columns, queries_alike
from proxymetric.search.stored_vectors import check_engine
from proxymetric.system.lock import locked

OPEN_ATTEMPTS = 20
"""a generation may be replaced between the reading of the manifest and the opening of its files"""


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
        self._load()
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
            engine: what searches: `exact`, `faiss` (needs the extra `index`) or `milvus` (needs the extra `milvus`);
                or a dictionary with settings, such as `{"name": "milvus", "uri": "shop.db"}`.
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
        one_of("engine", chosen_engine.get("name"), ENGINES)
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
            try:
                empty(folder, manifest)
            except BaseException:
                for part in (GENERATIONS, THUMBNAILS):
                    shutil.rmtree(folder / part, ignore_errors=True)
                raise
        return cls(folder)

    def _load(self) -> None:
        for attempt in range(OPEN_ATTEMPTS):
            manifest = Manifest.read(self.folder)
            try:
                self._generation = Generation(self.folder, manifest)
                self._identifier = None
                break
            except FileNotFoundError as error:
                # Another process has replaced the generation since the manifest was read, or files are missing.
                if attempt == OPEN_ATTEMPTS - 1:
                    raise ValueError(
                        f"index: got {self.folder}, where {error.filename} is missing; expected all files that "
                        f"{FILE} names; `proxymetric index --rebuild` makes them anew"
                    ) from None

    def reload(self) -> bool:
        """Open the newest state of the index; return whether another process has changed it since."""
        if Manifest.read(self.folder) == self.manifest:  # another index in its place may have the same number
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
                    yield
                finally:
                    self._is_writing = False

    def _current(self) -> Self:
        """This index in its present state, which stays the same while another thread changes the index."""
        return copy.copy(self)

    @property
    def manifest(self) -> Manifest:
        """What the index says about itself."""
        return self._generation.manifest

    @property
    def engine(self) -> Engine:
        """What finds the nearest vectors."""
        return self._generation.engine

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
        """(N, dim) of unit length, in the order of the ids; do not write to it.

        32-bit vectors are mapped from the file. Small vectors are read back into memory when this is first asked for.
        """
        return self._generation.stored.tensor

    @property
    def points(self) -> Tensor | None:
        """(N, 2) the map of the index, in the order of the ids; None for an index without a map."""
        points = self._generation.points
        return None if points is None else torch.from_numpy(points)

    @property
    def ids(self) -> list[str]:
        """The ids of all items, sorted."""
        return [row.id for row in self._generation.rows]

    @property
    def added(self) -> list[str]:
        """The ids of the items that are no files of the indexed folder, sorted."""
        return self._generation.rows.added()

    @property
    def labels(self) -> list[str | None]:
        """The labels of all items, in the order of the ids."""
        return self._generation.rows.labels()

    @property
    def classes(self) -> dict[str, int]:
        """The classes of the index, sorted, and the number of items of each."""
        return dict(sorted(Counter(label for label in self.labels if label is not None).items()))

    def __len__(self) -> int:
        return self.manifest.count

    def __contains__(self, item: object) -> bool:
        return isinstance(item, str) and self._generation.rows.number_of(item) is not None

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
        state = self._current()
        return _item(state._row(item), state._number(item))

    def at(self, row: int) -> Item:
        """Return the item of a row of `vectors`.

        Raises:
            IndexError: there is no such row.
        """
        state = self._current()
        if not 0 <= row < len(state):
            raise IndexError(f"row: got {row}, expected a number in 0..{len(state) - 1}")
        return _item(state._generation.rows.at([row])[0], row)

    def stamps(self) -> dict[str, str]:
        """Return the stamp of each id: size and time of the file that it was made from; empty if there is none."""
        return {item: stamp for item, (_, stamp) in self._generation.rows.stamps().items()}

    def metadata(self, ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return the metadata of those ids that the index has."""
        state = self._current()
        return {item: state[item].metadata for item in ids if item in state}

    def vector(self, item: str) -> Tensor:
        """Return the vector of an item, (dim,).

        Raises:
            KeyError: there is no such item.
        """
        state = self._current()
        return torch.from_numpy(state._generation.stored[[state._number(item)]][0].copy())

    def thumbnail(self, item: str) -> bytes | None:
        """Return the thumbnail of an item (JPEG); None without one.

        Raises:
            KeyError: there is no such item.
        """
        state = self._current()
        return state._generation.thumbnail(state._row(item))

    def batch(self, ids: Sequence[str]) -> Batch:
        """Return those items of `ids` that the index has, to write them again with `change`."""
        return self._generation.batch(ids)

    def _number(self, item: str) -> int:
        number = self._generation.rows.number_of(item)
        if number is None:
            raise KeyError(f"id: got {item!r}, expected an id of {self.folder}")
        return number

    def _row(self, item: str) -> Row:
        return self._generation.rows.at([self._number(item)])[0]

    def search(
        self,
        queries: Tensor | np.ndarray,
        k: int = 10,
        where: Mapping[str, Value] | None = None,
        without: Sequence[str | None] | None = None,
        differs: Mapping[str, Value | Sequence[Value | None] | None] | None = None,
    ) -> list[list[Hit]]:
        """Find the items that are most similar to each query.

        Args:
            queries: (Q, dim).
            k: results for each query, at least 1; fewer come back if fewer items match.
            where: only items with these values: `class` is the label, other names are metadata columns.
            without: Q ids, one for each query, that are left out of its results; None leaves nothing out.
            differs: column -> the value of the queries, one for all or a list of Q. Items with the value of a query,
                such as its camera, are left out of its results; a query with the value None leaves nothing out.

        Returns:
            For each query its results, most similar first; equal ones are in the order of their ids.

        Raises:
            ValueError: an argument is wrong.
        """
        if k < 1:
            raise ValueError(f"k: got {k}, expected at least 1")
        state = self._current()
        queries = state._checked_queries(queries)
        state._check_without(queries, without)
        check_columns(where or {}, state.manifest.columns)
        check_columns(differs or {}, state.manifest.columns, "differs")
        unit_queries = torch.from_numpy(unit_rows(queries))
        own_ids = without or [None] * len(queries)
        hits: list[list[Hit]] = [[] for _ in queries]
        for values, members in queries_alike(len(queries), differs or {}).items():
            rows = None
            if where or values:
                rows = torch.tensor(state._generation.rows.matching(where or {}, dict(values)), dtype=torch.long)
            similarities, nearest_rows = state.engine.search(unit_queries[members], k + (without is not None), rows)
            items = {row: _item(content, row) for row, content in state._contents(nearest_rows)}
            for member, numbers, scores in zip(
                members, nearest_rows.tolist(), similarities.clamp(-1, 1).tolist(), strict=True
            ):
                hits[member] = [
                    Hit(items[row].id, similarity, items[row].label, items[row].metadata, row)
                    for row, similarity in zip(numbers, scores, strict=True)
                    if own_ids[member] is None or items[row].id != own_ids[member]
                ][:k]
        return hits

    def value_of(self, item: str, column: str) -> str | None:
        """Return the value of an item in a column, as text: `class` is the label; None if it has none.

        Raises:
            KeyError: there is no such item.
            ValueError: no item has this column.
        """
        state = self._current()
        check_columns({column: ""}, state.manifest.columns, "column")
        return state._generation.rows.value_of(state._number(item), column)

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
        state = self._current()
        queries = state._checked_queries(queries)
        state._check_without(queries, without)
        identifier = state._identifier
        if identifier is None or identifier.generation != state.manifest.generation:
            identifier = self._identifier = Identifier(state)
        return identifier(queries, far, None if without is None else IndexedQueries.of(state, without))

    def _contents(self, rows: Tensor) -> list[tuple[int, Row]]:
        numbers = rows.unique().tolist()
        return list(zip(numbers, self._generation.rows.at(numbers), strict=True))

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
            metadata: N dictionaries of text, numbers, bools and None.
            thumbnails: N JPEG files.

        Raises:
            ValueError: an argument is wrong, or the index has an id already.
        """
        batch = new_items(self.dim, ids, vectors, labels, metadata, thumbnails)

        def check() -> None:
            if known := next((item for item in batch.ids if item in self), None):
                raise ValueError(f"ids: got {known!r}, which the index has already; expected a new id, or `update`")

        self.change([batch], check=check)

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
            rows = [self._row(item) for item in ids]
            numbers = [self._number(item) for item in ids]
            batch = new_items(
                self.dim,
                ids,
                torch.from_numpy(self._generation.stored[numbers]) if vectors is None else vectors,
                [row.label for row in rows] if labels is None else labels,
                [row.values() for row in rows] if metadata is None else metadata,
                [self._generation.thumbnail(row) for row in rows] if thumbnails is None else thumbnails,
            )
            stamps = [row.stamp for row in rows]
            self._commit([batch._replace(stamps=stamps)], {}, None, self.manifest)

    def delete(self, ids: Sequence[str]) -> None:
        """Remove items; all at once, or none if there is a mistake.

        Args:
            ids: ids of the index.

        Raises:
            ValueError: the index does not have an id.
        """
        with self.writing():
            self._check_known(ids)
            self._commit([], {}, set(self.ids) - set(ids), self.manifest)

    def change(
        self,
        batches: Sequence[Batch],
        edits: Mapping[str, tuple[str | None, str]] | None = None,
        kept: set[str] | None = None,
        check: Callable[[], None] | None = None,
        say: Callable[[str], None] | None = None,
        **facts: Any,
    ) -> None:
        """Make several changes in one step.

        Args:
            batches: items that are added or replace items of the same id.
            edits: new label and metadata (JSON) of items that stay.
            kept: ids of the earlier items that stay; None: all.
            check: called before anything is written, with the newest state of the index open.
            say: called with the name of each stage when it begins.
            **facts: fields of the manifest that change, such as `model`.
        """
        with self.writing():
            if check is not None:
                check()
            self._commit(batches, edits or {}, kept, replace(self.manifest, **facts), say)

    def _commit(
        self,
        batches: Sequence[Batch],
        edits: Mapping[str, tuple[str | None, str]],
        kept: set[str] | None,
        manifest: Manifest,
        say: Callable[[str], None] | None = None,
    ) -> None:
        kinds = self.manifest.vectors["kind"], manifest.vectors["kind"]
        if kinds[0] != kinds[1] and kinds[0] != "float32" and kinds[1] == "float32" and kept != set() and len(self):
            raise ValueError(
                f"vectors: got 'float32' for {self.folder}, whose vectors are {kinds[0]}; the other bits are gone; "
                "expected `proxymetric index --rebuild`"
            )
        before = None if manifest.dim != self.dim else self._generation
        commit(self.folder, manifest, before, batches, edits, kept, say)
        self._load()

    def verify(self) -> None:
        """Read all files and compare them with the checksums of the manifest.

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

    def _check_without(self, queries: Tensor, without: Sequence[str | None] | None) -> None:
        if without is not None and len(without) != len(queries):
            raise ValueError(f"without: got {len(without)} ids for {len(queries)} queries, expected one for each")

    def _check_known(self, ids: Sequence[str]) -> None:
        unknown = next((item for item in ids if item not in self), None)
        if unknown is not None:
            raise ValueError(f"ids: got {unknown!r}, which the index does not have; expected ids of {self.folder}")


def _item(row: Row, number: int) -> Item:
    return Item(row.id, row.label, row.values(), number)
