"""The similarities of all pairs of vectors, counted block by block: memory does not grow with the number of pairs.

The similarity of a pair is the exact cosine, rounded once to a multiple of 2^-32, so that a count depends neither on
the size of the blocks nor on the machine. Float64 products decide almost every pair; the few that lie too close to the
middle between two multiples are computed without rounding error, as in `knn`.

A count is made by radix: a first pass over all pairs counts the high bits of the similarities, a second one the low
bits of those few bins that hold an answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from proxymetric.arguments.vectors import count_relevant
from proxymetric.metrics.knn.distances import FLOAT64_UNIT, Cosine, rounding_bound, row_slices
from proxymetric.metrics.ranking import Search
from proxymetric.system.precision import full_precision

STEPS = 2**32
"""similarities are multiples of 1 / STEPS"""
LOW_BITS = 16
LOW = 2**LOW_BITS
BINS = 2 * STEPS // LOW + 1
"""values of the high bits"""
BLOCK_ROWS = 512
MAX_CELLS = 2**20
"""pairs whose similarities are in memory at a time"""


def similarity_of(key: Any) -> Any:
    """Return the similarity that a key stands for, or an array of them.

    Example:
        >>> similarity_of(0), similarity_of(STEPS), similarity_of(2 * STEPS)
        (-1.0, 0.0, 1.0)
    """
    return (key - STEPS) / STEPS


def _equal_pairs(values: Tensor, item_values: Tensor, leave_one_out: bool) -> int:
    """The ordered pairs of a query and an item with equal values; leave-one-out, without those of a query itself."""
    return int(count_relevant(values, item_values).sum()) - len(values) * leave_one_out


class Block(NamedTuple):
    """Some pairs: keys are similarities as whole numbers, 0 for -1 and 2 * STEPS for 1."""

    keys: Tensor
    """(M,)"""
    is_genuine: Tensor
    """(M,) bool: both vectors have the same class"""
    queries: Tensor
    """(M,) row of the query"""
    items: Tensor
    """(M,) row of the item"""


@dataclass(frozen=True)
class Pairs:
    """All pairs of a search: unordered pairs of its vectors, or each query with each item of the gallery.

    If the search has `differs`, pairs with the same value are left out.

    Args:
        task: the checked vectors and labels.

    Raises:
        ValueError: the distance is not the cosine.
    """

    task: Search

    def __post_init__(self) -> None:
        if self.task.distance != "cosine":
            raise ValueError(
                f"distance: got {self.task.distance!r}, expected 'cosine': verification compares cosine similarities"
            )

    def blocks(self) -> Iterator[Block]:
        """Yield all pairs, each once."""
        task = self.task
        queries, items = task.labels, task.item_labels
        with full_precision(task.vectors.device.type):
            space = Cosine(task.vectors, task.items)
        slack = rounding_bound(space.dim + 8, FLOAT64_UNIT) + 2.1 * space.length_error
        for rows in row_slices(len(queries), BLOCK_ROWS):
            with full_precision(task.vectors.device.type):
                left = space.rows(space.queries, rows)
            for columns in row_slices(len(items), MAX_CELLS // BLOCK_ROWS):
                if task.leave_one_out and columns.stop <= rows.start + 1:
                    continue
                with full_precision(task.vectors.device.type):
                    yield self._block(space, slack, left, rows, columns)

    def _block(self, space: Cosine, slack: float, left: Tensor, rows: slice, columns: slice) -> Block:
        device = left.device
        cosines = left @ space.rows(space.items, columns).T
        q = torch.arange(rows.start, rows.stop, device=device)[:, None].expand(cosines.shape)
        g = torch.arange(columns.start, columns.stop, device=device).expand(cosines.shape)
        is_pair = q < g if self.task.leave_one_out and columns.start < rows.stop else None
        if self.task.differs is not None:
            query_values, item_values = self.task.differs
            is_other = query_values[rows, None] != item_values[columns]
            is_pair = is_other if is_pair is None else is_pair & is_other
        if is_pair is not None:
            cosines, q, g = cosines[is_pair], q[is_pair], g[is_pair]
        else:
            cosines, q, g = cosines.flatten(), q.flatten(), g.flatten()
        scaled = cosines * STEPS
        steps = (scaled + 0.5).floor()
        near_middle = (scaled - steps).abs() >= 0.5 - 1.01 * slack * STEPS
        unsure = near_middle.nonzero().flatten()
        if len(unsure):
            high, low = space.exact(q[unsure], g[unsure])
            base = (high * STEPS).floor()
            # The difference is exact, so that its sign and that of the sum are right.
            steps[unsure] = base + ((high * STEPS - base - 0.5) + low * STEPS >= 0)
        keys = steps.long() + STEPS
        return Block(keys, self.task.labels[q] == self.task.item_labels[g], q, g)

    def impostors(self) -> int:
        """The number of impostor pairs, from labels alone: no vectors are compared."""
        task = self.task
        equal_labels = _equal_pairs(task.labels, task.item_labels, task.leave_one_out)
        number = len(task.labels) * (len(task.item_labels) - task.leave_one_out)
        if task.differs is None:
            return (number - equal_labels) // (1 + task.leave_one_out)
        equal_values = _equal_pairs(*task.differs, task.leave_one_out)
        both = torch.stack([torch.cat([task.labels, task.item_labels]), torch.cat(task.differs)], dim=1)
        groups = both.unique(dim=0, return_inverse=True)[1]
        equal_in_both = _equal_pairs(groups[: len(task.labels)], groups[len(task.labels) :], task.leave_one_out)
        return (number - equal_labels - equal_values + equal_in_both) // (1 + task.leave_one_out)

    def count(self) -> Tally:
        """Count the high bits of all similarities.

        Raises:
            ValueError: there is no genuine or no impostor pair.
        """
        counts = np.zeros(2 * BINS, np.int64)
        for block in self.blocks():
            codes = (block.keys >> LOW_BITS) * 2 + block.is_genuine
            counts += torch.bincount(codes, minlength=2 * BINS).cpu().numpy()
        tally = Tally(counts[1::2].copy(), counts[::2].copy())
        for kind, total in (("genuine", tally.genuine_pairs), ("impostor", tally.impostor_pairs)):
            if not total:
                what = "two vectors of one class" if kind == "genuine" else "vectors of two classes"
                others = "" if self.task.differs is None else " with different values of `differs`"
                raise ValueError(f"labels: got no {kind} pair, expected at least {what}{others}")
        return tally

    def refine(self, bins: Sequence[int]) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """Count the low bits of the similarities in these bins.

        Returns:
            Bin -> counts (LOW,) of genuine and of impostor pairs.
        """
        wanted = sorted(set(bins))
        device = self.task.labels.device
        place = torch.full((BINS,), -1, device=device)
        place[torch.tensor(wanted, device=device)] = torch.arange(len(wanted), device=device)
        counts = np.zeros(len(wanted) * LOW * 2, np.int64)
        for block in self.blocks():
            places = place[block.keys >> LOW_BITS]
            chosen = (places >= 0).nonzero().flatten()
            codes = (places[chosen] * LOW + (block.keys[chosen] & (LOW - 1))) * 2 + block.is_genuine[chosen]
            counts += torch.bincount(codes, minlength=len(counts)).cpu().numpy()
        tables = counts.reshape(len(wanted), LOW, 2)
        return {number: (table[:, 1], table[:, 0]) for number, table in zip(wanted, tables, strict=True)}


@dataclass(frozen=True)
class Tally:
    """Numbers of pairs by the high bits of their similarity.

    Attributes:
        genuine: (BINS,).
        impostor: (BINS,).
    """

    genuine: np.ndarray
    impostor: np.ndarray

    @property
    def genuine_pairs(self) -> int:
        """The number of pairs of one class."""
        return int(self.genuine.sum())

    @property
    def impostor_pairs(self) -> int:
        """The number of pairs of two classes."""
        return int(self.impostor.sum())

    def rates(self) -> tuple[np.ndarray, np.ndarray]:
        """Return FMR and FNMR (BINS + 1,) at the lower edges of the bins, which reject the bins below."""
        fmr = np.append(self.impostor[::-1].cumsum()[::-1], 0) / self.impostor_pairs
        fnmr = np.append(0, self.genuine.cumsum()) / self.genuine_pairs
        return fmr, fnmr
