"""The batches of an epoch, and a word on the next one while a step is under way."""

from __future__ import annotations

from collections.abc import Iterator

from proxymetric.core.pieces import Batch
from proxymetric.criterion import Criterion


class Lookahead(Iterator[Batch]):
    """Batches in their order; `tell` has the next one made early and tells the criterion of it.

    Batches must not depend on what a step changes. Only a criterion that fetches from host memory hears of the next
    one: for others a second batch would lie on the accelerator for nothing.

    >>> import torch
    >>> batches = Ahead(iter([Batch(None, torch.tensor([0])), Batch(None, torch.tensor([1]))]), None)
    >>> [batch.labels.item() for batch in batches]
    [0, 1]
    """

    def __init__(self, batches: Iterator[Batch], criterion: Criterion | None) -> None:
        self._batches, self._next = batches, list[Batch | Exception]()
        fetches = criterion is not None and any(table.host for table in criterion.row_tables())
        self._criterion = criterion if fetches else None

    def __next__(self) -> Batch:
        found = self._next.pop() if self._next else next(self._batches)
        if isinstance(found, Exception):
            raise found
        return found

    def tell(self) -> None:
        """Say what comes next, where there is somebody to hear it. What cannot be made fails in its own step."""
        if self._criterion is None or self._next:
            return
        try:
            batch = next(self._batches, None)
        except Exception as error:
            self._next.append(error)
            return
        if batch is not None:
            self._next.append(batch)
            self._criterion.expect(batch.labels)
