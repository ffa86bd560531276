"""A queue that keeps the mean of its rows by class up to date, without a pass over all rows at every step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from proxymetric.arguments.checks import whole_number

UNITS_PER_ONE = 2**40
"""sums are whole multiples of 1 / UNITS_PER_ONE, so that adding and removing a row cancel exactly in any order"""
MAX_SUM_ENTRIES = 2**25
"""entries (classes x dim) of the sums; a queue with more keeps no sums"""
MAX_ENTRIES_PER_CHUNK = 2**22
"""entries of stored rows, or of proxies gathered for them, that are processed at once"""


class ClassQueue(nn.Module):
    """A `Queue` that also keeps the sum of its rows for each class, and to which a part of a batch can be added.

    The mean similarity of a proxy to the stored rows of its class is the product of the proxy with their mean:
    ``1/n sum_i p.z_i = p.(1/n sum_i z_i)``. So the cost of a step depends on the batch, not on the size of the queue. A
    checkpoint is that of a `Queue`: it does not hold the sums; they are computed from the rows when it is loaded.

    How many rows have been added is known to the device only, so that `remember` does not synchronise with the GPU.

    Args:
        size: rows kept.
        dim: D.
        classes: C.

    Example:
        >>> queue = ClassQueue(size=2, dim=2, classes=3)
        >>> queue.remember(torch.eye(2), torch.tensor([1, 1])); queue.remember(torch.ones(1, 2), torch.tensor([0]))
        >>> queue.number.tolist(), queue.means(torch.tensor([1]))
        ([1, 1, 0], tensor([[0., 1.]]))
    """

    changed_by_commit = ("vectors", "labels", "added_count", "sums", "number")
    vectors: Tensor
    labels: Tensor
    added_count: Tensor
    sums: Tensor
    number: Tensor

    def __init__(self, size: int, dim: int, classes: int) -> None:
        super().__init__()
        whole_number(1, memory=size)
        self.register_buffer("vectors", torch.zeros(size, dim))
        self.register_buffer("labels", torch.full((size,), -1, dtype=torch.int64))
        self.register_buffer("added_count", torch.zeros((), dtype=torch.int64), persistent=False)  # rows added so far
        rows = classes if classes * dim <= MAX_SUM_ENTRIES else 0
        self.register_buffer("sums", torch.zeros(rows, dim, dtype=torch.int64), persistent=False)
        self.register_buffer("number", torch.zeros(classes, dtype=torch.int64), persistent=False)
        self.register_load_state_dict_post_hook(_recompute_sums)

    def __len__(self) -> int:
        """The number of filled rows; this synchronises with the GPU."""
        return min(int(self.added_count), len(self.labels))

    @property
    def has_sums(self) -> bool:
        """Whether sums are kept: false for very many classes."""
        return len(self.sums) > 0

    @torch.no_grad()
    def remember(self, vectors: Tensor, labels: Tensor, chosen: Tensor | None = None) -> None:
        """Add rows. If there are more than `size`, only the last ones are added.

        Args:
            vectors: (n, D).
            labels: (n,).
            chosen: (n,) which of the rows to add, bool; None: all.

        Example:
            >>> queue = ClassQueue(size=3, dim=1, classes=9)
            >>> queue.remember(torch.ones(4, 1), torch.tensor([5, 6, 7, 8]), torch.tensor([True, False, True, False]))
            >>> queue.labels, len(queue)
            (tensor([ 5,  7, -1]), 2)
        """
        size = len(self.labels)
        order = torch.arange(min(len(labels), size), device=self.labels.device)
        if chosen is None:
            count = torch.full_like(self.added_count, len(labels))
            rows = order + (len(labels) - len(order))
        else:
            count = chosen.sum()
            chosen_first = (~chosen).to(torch.uint8).argsort(stable=True)
            rows = chosen_first[order + (count - size).clamp(min=0)]
        # As many places as there may be rows to add; those that are left over keep their rows.
        places = (self.added_count + order) % size
        is_added = order < count
        replaced_labels = self.labels[places]
        self._count(places, -(is_added & (replaced_labels >= 0)).long())
        self.vectors[places] = torch.where(is_added[:, None], vectors[rows].to(self.vectors), self.vectors[places])
        self.labels[places] = torch.where(is_added, labels[rows].to(self.labels), replaced_labels)
        self._count(places, is_added.long())
        self.added_count.add_(count.clamp(max=size))

    def means(self, classes: Tensor) -> Tensor:
        """The mean of the stored rows of each of these classes; zeros for a class without rows."""
        return self.sums[classes].to(self.vectors) / (UNITS_PER_ONE * self.number[classes].clamp(min=1)[:, None])

    def _count(self, places: Tensor, signs: Tensor) -> None:
        """Add the rows at these places to the sums (sign 1), remove them (sign -1), or leave them out (sign 0)."""
        labels = self.labels[places].clamp(min=0)
        self.number.index_add_(0, labels, signs)
        if self.has_sums:
            units = (self.vectors[places].double() * UNITS_PER_ONE).round().long()
            self.sums.index_add_(0, labels, units * signs[:, None])

    def recompute_sums(self) -> None:
        """Compute the sums from the stored rows."""
        self.sums.zero_()
        self.number.zero_()
        rows_per_chunk = max(1, MAX_ENTRIES_PER_CHUNK // self.vectors.shape[1])
        for places in torch.arange(len(self), device=self.labels.device).split(rows_per_chunk):
            self._count(places, torch.ones_like(places))

    def get_extra_state(self) -> Tensor:
        """The number of rows added so far, for `state_dict`."""
        return self.added_count.to("cpu", copy=True)

    def set_extra_state(self, state: Any) -> None:
        """Restore the number of rows added so far."""
        self.added_count.fill_(int(state))


def _recompute_sums(module: nn.Module, incompatible_keys: object) -> None:
    assert isinstance(module, ClassQueue)
    module.recompute_sums()
