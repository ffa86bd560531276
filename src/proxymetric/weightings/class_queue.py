"""A queue that keeps the mean of its rows by class up to date, without a pass over all rows at every step."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from proxymetric.sources.queue import Queue

UNITS_PER_ONE = 2**40
"""sums are whole multiples of 1 / UNITS_PER_ONE, so that adding and removing a row cancel exactly in any order"""
MAX_SUM_ENTRIES = 2**25
"""entries (classes x dim) of the sums; a queue with more keeps no sums"""
MAX_ENTRIES_PER_CHUNK = 2**22
"""entries of stored rows, or of proxies gathered for them, that are processed at once"""


class ClassQueue(Queue):
    """A queue that also keeps the sum of its rows for each class.

    The mean similarity of a proxy to the stored rows of its class is the product of the proxy with their mean:
    ``1/n sum_i p.z_i = p.(1/n sum_i z_i)``. So the cost of a step depends on the batch, not on the size of the queue. A
    checkpoint does not hold the sums; they are computed from the rows when it is loaded.

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

    sums: Tensor
    number: Tensor

    def __init__(self, size: int, dim: int, classes: int) -> None:
        super().__init__(size, dim)
        rows = classes if classes * dim <= MAX_SUM_ENTRIES else 0
        self.register_buffer("sums", torch.zeros(rows, dim, dtype=torch.int64), persistent=False)
        self.register_buffer("number", torch.zeros(classes, dtype=torch.int64), persistent=False)
        self.register_load_state_dict_post_hook(_recompute_sums)

    @property
    def has_sums(self) -> bool:
        """Whether sums are kept: false for very many classes."""
        return len(self.sums) > 0

    @torch.no_grad()
    def remember(self, vectors: Tensor, labels: Tensor) -> None:
        vectors, labels = vectors[-len(self.labels) :], labels[-len(self.labels) :]
        places = self.places(len(labels))
        if len(self) == len(self.labels):
            self._count(places, -1)
        elif len(self) + len(labels) > len(self.labels):
            self._count(places[len(self.labels) - len(self) :], -1)
        super().remember(vectors, labels)
        self._count(places, 1)

    def means(self, classes: Tensor) -> Tensor:
        """The mean of the stored rows of each of these classes; zeros for a class without rows."""
        return self.sums[classes].to(self.vectors) / (UNITS_PER_ONE * self.number[classes].clamp(min=1)[:, None])

    def _count(self, places: Tensor, sign: int) -> None:
        """Add the rows at these places to the sums (sign 1), or remove them (sign -1)."""
        labels = self.labels[places]
        self.number.index_add_(0, labels, torch.full_like(labels, sign))
        if self.has_sums:
            units = (self.vectors[places].double() * (sign * UNITS_PER_ONE)).round().long()
            self.sums.index_add_(0, labels, units)

    def recompute_sums(self) -> None:
        """Compute the sums from the stored rows."""
        self.sums.zero_()
        self.number.zero_()
        rows_per_chunk = max(1, MAX_ENTRIES_PER_CHUNK // self.vectors.shape[1])
        for places in torch.arange(len(self), device=self.labels.device).split(rows_per_chunk):
            self._count(places, 1)


def _recompute_sums(module: nn.Module, incompatible_keys: object) -> None:
    assert isinstance(module, ClassQueue)
    module.recompute_sums()
