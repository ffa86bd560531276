"""Iterates over the batches of an epoch and announces each to the criterion while the step before it runs."""

from __future__ import annotations

import time
from collections.abc import Iterator

from proxymetric.core.pieces import Batch
from proxymetric.criterion import Criterion


class Lookahead(Iterator[Batch]):
    """Iterates over batches; `announce` makes the next batch early and passes its labels to the criterion.

    The batches must not depend on the result of a step. Batches are made early if the criterion copies rows from host
    memory, or if `early` is True: otherwise, a second batch would only occupy memory.

    Args:
        batches: the batches of an epoch.
        criterion: receives the labels of the next batch; None: nobody receives them.
        early: make every batch early, so that a device that has finished its step does not wait for the batch.

    Attributes:
        waited: seconds that `next` has waited for batches. Batches that are made early are not counted: the step runs
            meanwhile.

    Example:
        >>> import torch
        >>> batches = Lookahead(iter([Batch(None, torch.tensor([0])), Batch(None, torch.tensor([1]))]), None)
        >>> [batch.labels.item() for batch in batches]
        [0, 1]
    """

    def __init__(self, batches: Iterator[Batch], criterion: Criterion | None, early: bool = False) -> None:
        self._batches = batches
        self._next: list[Batch | Exception] = []
        """the batch that was made early, or the error that was raised; at most one"""
        uses_host_rows = criterion is not None and any(table.host for table in criterion.row_tables())
        self._criterion = criterion if uses_host_rows else None
        self._makes_early = early or uses_host_rows
        self.waited = 0.0

    def __next__(self) -> Batch:
        if self._next:
            batch = self._next.pop()
            if isinstance(batch, Exception):
                raise batch
            return batch
        start_time = time.perf_counter()
        try:
            return next(self._batches)
        finally:
            self.waited += time.perf_counter() - start_time

    def announce(self) -> None:
        """Make the next batch and announce it. An error in making it is raised later, by `next`."""
        if not self._makes_early or self._next:
            return
        try:
            batch = next(self._batches, None)
        except Exception as error:
            self._next.append(error)
            return
        if batch is not None:
            self._next.append(batch)
            if self._criterion is not None:
                self._criterion.prefetch_batch(batch.labels)
