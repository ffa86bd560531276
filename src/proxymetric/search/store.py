"""Where the items of an index lie: what an index asks of a local folder and of a database alike."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, Self

import numpy as np
from torch import Tensor

from proxymetric.search.batches import Batch
from proxymetric.search.conditions import Dictionary
from proxymetric.search.engines import Engine
from proxymetric.search.items import Hit, Item
from proxymetric.search.manifest import Manifest
from proxymetric.search.searching import SearchQuestion
from proxymetric.search.storage.changes import Change

Say = Callable[[str], None]


class Store(Protocol):
    """The items of an index, searched and changed as a whole.

    A local store is one state of the files, which never changes: what changes it returns the next one. A remote store
    asks its database each time, so that it always answers from the newest state.
    """

    folder: Path
    """the folder of the index"""

    @property
    def manifest(self) -> Manifest:
        """What the index says about itself, as of the state that was seen last."""
        ...

    @property
    def engine(self) -> Engine:
        """What finds the nearest vectors."""
        ...

    def newest(self) -> Hashable:
        """A value that differs when anybody has changed the index; it costs a look at a file, or one small request."""
        ...

    def refreshed(self) -> Self:
        """The newest state."""
        ...

    def writing(self) -> AbstractContextManager[None]:
        """Keep other processes from changing the index.

        Raises:
            ValueError: another process is changing it.
        """
        ...

    def check(self) -> None:
        """Refuse to answer once damage was seen.

        Raises:
            ValueError: a file is damaged.
        """
        ...

    def search(
        self, queries: Tensor, question: SearchQuestion, without: Sequence[str | Collection[str] | None] | None
    ) -> list[list[Hit]]:
        """Answer a question for each query (Q, dim) of unit length; `without` as in `StoredIndex.search`."""
        ...

    def known(self, ids: Sequence[str]) -> set[str]:
        """Return those of `ids` that there are."""
        ...

    def items(self, ids: Sequence[str]) -> dict[str, Item]:
        """Return those items of `ids` that there are."""
        ...

    def at(self, row: int) -> Item:
        """Return the item of a row in 0..count-1."""
        ...

    def __iter__(self) -> Iterator[Item]:
        """Iterate over all items, in the order in which they were added."""
        ...

    def ids(self) -> list[str]:
        """The ids of all items, in the order of their rows."""
        ...

    def labels(self) -> list[str | None]:
        """The labels of all items, in the order of their rows."""
        ...

    def stamps(self) -> list[str]:
        """The stamps of all items, in the order of their rows."""
        ...

    def batch(self, ids: Sequence[str]) -> Batch:
        """Return those items of `ids` that there are, with vectors and thumbnails."""
        ...

    def thumbnail(self, item: str) -> bytes | None:
        """Return the thumbnail of an item that there is (JPEG); None without one."""
        ...

    def vector(self, item: str) -> np.ndarray:
        """Return the vector (dim,) of an item that there is."""
        ...

    @property
    def vectors(self) -> np.ndarray:
        """The vectors of all items, (count, dim), in the order of their rows."""
        ...

    def dictionaries(self, column: str) -> list[Dictionary]:
        """The different values of a metadata column, in one dictionary or several; none where they are not known."""
        ...

    @property
    def numbers(self) -> np.ndarray | None:
        """(count,) numbers of the items that stay the same until all is written anew; None: it has none."""
        ...

    def vectors_at(self, numbers: np.ndarray) -> np.ndarray:
        """Return the vectors (M, dim) of such numbers, also of items that were removed."""
        ...

    @property
    def points(self) -> np.ndarray | None:
        """The map, (count, 2); None without one."""
        ...

    def commit(self, change: Change, manifest: Manifest, renew: bool = False, say: Say | None = None) -> Self:
        """Make a change in one step; the caller is `writing`.

        Args:
            change: what changes.
            manifest: the facts of the new state, apart from counts and files.
            renew: bring the map and the engine up to date.
            say: called with the name of each stage that may take long.

        Returns:
            The new state.
        """
        ...

    def replace_all(self, batches: Sequence[Batch], manifest: Manifest, say: Say | None = None) -> Self:
        """Put other items in the place of all that there are."""
        ...

    def compact(self) -> Self:
        """Write everything anew, so that nothing of a removed item is left."""
        ...

    def verify(self) -> None:
        """Read everything and compare it with its checksums.

        Raises:
            ValueError: something is damaged.
        """
        ...
