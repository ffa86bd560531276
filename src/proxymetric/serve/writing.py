"""Changes of the index over HTTP: what they are, and one writer that makes them."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from proxymetric.search import Index
from proxymetric.search.batches import Batch, as_metadata, new_items
from proxymetric.search.storage.changes import Edit, encoded
from proxymetric.serve.errors import Refused
from proxymetric.serve.searcher import Searcher
from proxymetric.system.files import NotSaved
from proxymetric.system.lock import InUse

LOOK_SECONDS = 0.02
"""time between two looks whether another process has ended its change"""
SAME_CODE, SAME_NUMBER = 1, 1e-5
"""the vector of the same image differs so much at most between two batches: of 8-bit numbers, and of others"""


log = logging.getLogger("proxymetric.serve")


class Put(NamedTuple):
    """An item that is added, or takes the place of the item of the same id.

    Attributes:
        id: its id.
        vector: (1, D).
        model: fingerprint of the model that made the vector.
        label: its class.
        metadata: its metadata.
        thumbnail: a JPEG file; None: the vector was given without an image.
    """

    id: str
    vector: Tensor
    model: str
    label: str | None
    metadata: Mapping[str, Any]
    thumbnail: bytes | None


class Patch(NamedTuple):
    """What changes of an item that keeps its vector.

    Attributes:
        id: its id.
        label: its class, in a tuple; an empty tuple leaves it as it is.
        metadata: the columns that change; None removes a value.
    """

    id: str
    label: tuple[str | None] | tuple[()]
    metadata: Mapping[str, Any]


class Write(NamedTuple):
    """What one request changes, in one step or not at all; each id comes once."""

    puts: Sequence[Put] = ()
    patches: Sequence[Patch] = ()
    deleted: Sequence[str] = ()

    @property
    def ids(self) -> list[str]:
        """The ids of all items that it is about."""
        return [*(put.id for put in self.puts), *(patch.id for patch in self.patches), *self.deleted]


class Written(NamedTuple):
    """What was done: numbers of items, and the state of the index that has it."""

    added: int
    updated: int
    deleted: int
    unchanged: int
    generation: int


class _Prepared(NamedTuple):
    """A write, compared with the index."""

    batches: list[Batch]
    edits: dict[str, Edit]
    deleted: list[str]
    added: int
    unchanged: int

    def written(self, generation: int) -> Written:
        replaced = sum(len(batch.ids) for batch in self.batches) - self.added
        return Written(self.added, replaced + len(self.edits), len(self.deleted), self.unchanged, generation)


class Writer:
    """Makes changes in the order in which they come; those that wait for the disk together are one commit.

    Args:
        searcher: what opens the new state, so that the next search of this process sees it.
        seconds: time that a change waits for another process that is changing the index.
    """

    def __init__(self, searcher: Searcher, seconds: float) -> None:
        self.searcher, self.seconds = searcher, seconds

    @property
    def index(self) -> Index:
        """The index."""
        return self.searcher.newest

    def __call__(self, writes: list[Write]) -> list[Written | Exception]:
        """Make changes; each is on the disk when this returns, or was refused and has changed nothing."""
        end = time.monotonic() + self.seconds
        while True:
            try:
                with self.index.writing():
                    answers = self._commit_all(writes)
                break
            except InUse:
                if time.monotonic() > end:
                    return [
                        Refused(
                            503,
                            f"index: got one that another process has been changing for {self.seconds:g} s, expected "
                            "it to end; try again",
                            "locked",
                            {"retry-after": "1"},
                        )
                    ] * len(writes)
                time.sleep(LOOK_SECONDS)
        self.searcher.look()
        return answers

    def _commit_all(self, writes: list[Write]) -> list[Written | Exception]:
        answers: dict[int, Written | Exception] = {}
        waiting: dict[int, _Prepared] = {}
        touched: set[str] = set()
        for number, write in enumerate(writes):
            if not touched.isdisjoint(write.ids):
                answers |= self._commit(waiting)
                waiting, touched = {}, set()
            try:
                waiting[number] = self._prepared(write)
                touched.update(write.ids)
            except Refused as refusal:
                answers[number] = refusal
            except Exception as error:  # a damaged file, for instance; the others are made
                log.exception("a change could not be prepared")
                answers[number] = RuntimeError(str(error))
        answers |= self._commit(waiting)
        return [answers[number] for number in range(len(writes))]

    def _commit(self, waiting: Mapping[int, _Prepared]) -> dict[int, Written | Exception]:
        """Make several changes in one step."""
        batches = [batch for each in waiting.values() for batch in each.batches]
        edits = {item: edit for each in waiting.values() for item, edit in each.edits.items()}
        deleted = [item for each in waiting.values() for item in each.deleted]
        try:
            if batches or edits or deleted:
                self.index.change(batches, edits, deleted)
        except NotSaved as error:
            return dict.fromkeys(waiting, Refused(507, f"index: got a disk on which nothing can be saved ({error})"))
        except Exception as error:  # a damaged file, for instance; the index is as it was
            log.exception("a change could not be made")
            return dict.fromkeys(waiting, RuntimeError(str(error)))
        return {number: each.written(self.index.manifest.generation) for number, each in waiting.items()}

    def _prepared(self, write: Write) -> _Prepared:
        """Compare a write with the index, and leave out what changes nothing.

        Raises:
            Refused: it cannot be done.
        """
        index = self.index
        for put in write.puts:
            if put.vector.shape[1] != index.dim:
                raise Refused(422, f"vector: got {put.vector.shape[1]} numbers, expected {index.dim}")
            if put.model != index.model:
                raise Refused(
                    503,
                    f"model: got a vector of the model {put.model[:12]}, and now the index has another one; try again",
                    "model_changed",
                    {"retry-after": "1"},
                )
        if unknown := [patch.id for patch in write.patches if patch.id not in index]:
            raise Refused(404, f"id: got {unknown[0][:200]!r}, expected the id of an item of the index")
        try:
            puts = [put for put in write.puts if not _is_there(index, put)]
            batch = new_items(
                index.dim,
                [put.id for put in puts],
                torch.cat([put.vector for put in puts]) if puts else torch.empty(0, index.dim),
                [put.label for put in puts],
                [put.metadata for put in puts],
                [put.thumbnail for put in puts],
            )
            edits = {patch.id: edit for patch in write.patches if (edit := _edit(index, patch)) is not None}
        except ValueError as error:
            raise Refused(422, str(error)) from None
        deleted = [item for item in write.deleted if item in index]
        added = sum(put.id not in index for put in puts)
        unchanged = len(write.ids) - len(puts) - len(edits) - len(deleted)
        return _Prepared([batch] if puts else [], edits, deleted, added, unchanged)


def _is_there(index: Index, put: Put) -> bool:
    """Whether the index has an item as it would be written."""
    if put.id not in index:
        return False
    item = index[put.id]
    if (item.label, as_metadata(item.metadata)) != (put.label, as_metadata(put.metadata)):
        return False
    if index.thumbnail(put.id) != put.thumbnail:
        return False
    batch = new_items(index.dim, [put.id], put.vector, None, None, None)
    kind = index.manifest.vectors["kind"]
    stored, given = (encoded(kind, vector) for vector in (index.vector(put.id)[None].numpy(), batch.vectors))
    if put.thumbnail is None:
        return all(np.array_equal(stored[ending], given[ending]) for ending in stored)
    ending = "float32" if "float32" in stored else "int8"
    most = SAME_NUMBER if ending == "float32" else SAME_CODE
    return bool(np.abs(stored[ending].astype(np.float64) - given[ending].astype(np.float64)).max() <= most)


def _edit(index: Index, patch: Patch) -> Edit | None:
    """What an item gets; None if it has it already."""
    item = index[patch.id]
    metadata = {column: value for column, value in (item.metadata | dict(patch.metadata)).items() if value is not None}
    label = patch.label[0] if patch.label else item.label
    batch = new_items(index.dim, [patch.id], torch.zeros(1, index.dim), [label], [metadata], None)
    edit = Edit(label, batch.metadata[0])
    return None if edit == Edit(item.label, as_metadata(item.metadata)) else edit
