"""What a remote store asks of a database."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np

from proxymetric.search.batches import Batch
from proxymetric.search.conditions import Condition
from proxymetric.search.searching import Ranked
from proxymetric.search.storage.change_log import Row
from proxymetric.search.storage.changes import Edit


class Facts(NamedTuple):
    """What a database says about an index.

    Attributes:
        generation: the number of the state; each change makes a new one.
        store: the number of the table or collection that has the items; it has another one after all were written anew.
        dim: dimensions of the vectors.
        model: fingerprint of the model that made them.
        items: number of items.
        added: number of items that are no files.
        last: the number that the next item gets.
        columns: the metadata columns.
        engine: what was measured: `recall`, `built_for`.
    """

    generation: int
    store: int
    dim: int
    model: str
    items: int = 0
    added: int = 0
    last: int = 0
    columns: tuple[str, ...] = ()
    engine: Mapping[str, Any] = MappingProxyType({})


class Session(Protocol):
    """One reading, or one change, of the items of an index in a database."""

    facts: Facts
    """the state that is read, or before the change"""

    def gaps(self, since: int) -> np.ndarray:
        """The numbers whose items were removed or got another number after the state `since`."""
        ...

    def nearest(self, queries: np.ndarray, depth: int, conditions: Sequence[Condition]) -> list[Ranked]:
        """Find at most `depth` items that match all conditions for each query; fewer only if there are no more."""
        ...

    def rows(self, ids: Sequence[str]) -> list[Row]:
        """Return those items of `ids` that there are, in any order."""
        ...

    def row_of(self, number: int) -> Row:
        """Return the item with a number."""
        ...

    def rows_from(self, number: int, limit: int) -> list[Row]:
        """Return the next items from a number on, in the order of their numbers."""
        ...

    def texts(self, column: str) -> list[Any]:
        """Return `number`, `id`, `label` or `stamp` of all items, in the order of their numbers."""
        ...

    def vectors(self, numbers: np.ndarray | None) -> np.ndarray:
        """Return the vectors of these numbers, which rise; None: of all items, in the order of their numbers."""
        ...

    def pictures(self, ids: Sequence[str]) -> dict[str, bytes | None]:
        """Return the thumbnails of these ids."""
        ...

    def anew(self, dim: int) -> None:
        """Make an empty table or collection, to which all that follows is written."""
        ...

    def put(self, batch: Batch, first: int) -> None:
        """Write items, which take the place of those of the same id; their numbers rise from `first`."""
        ...

    def edit(self, edits: Mapping[str, Edit]) -> None:
        """Give items new labels, metadata and thumbnails."""
        ...

    def remove(self, ids: Collection[str]) -> None:
        """Remove items."""
        ...

    def settled(self, facts: Facts, gaps: Iterable[int], renew: bool, say: Callable[[str], None]) -> Facts:
        """Write the facts of the new state, and the numbers that are gone; build an index of the vectors if it is due.

        Returns:
            The facts as they were written.
        """
        ...


class Database(Protocol):
    """A database that may have the items of several indexes; any thread may ask."""

    address: str
    """as it is named in sentences; without a password"""

    def reading(self, identity: str, whole: bool = False, fresh: bool = True) -> AbstractContextManager[Session]:
        """Read one state of an index.

        Args:
            identity: of the index.
            whole: all items are read, so that the answer may take longer than that of a search.
            fresh: whether the facts must be those of now; otherwise they may be a second old.

        Raises:
            OSError: the database does not answer.
            ValueError: it does not have this index.
        """
        ...

    def changing(self, identity: str, first: Facts | None = None) -> AbstractContextManager[Session]:
        """Change an index; what was written is seen at the end.

        Args:
            identity: of the index.
            first: the facts of a new index; None: it is there.
        """
        ...

    def locked(self, identity: str) -> AbstractContextManager[None]:
        """Keep other processes on all machines from changing an index, as far as the database can.

        Raises:
            ValueError: another process is changing it.
        """
        ...
