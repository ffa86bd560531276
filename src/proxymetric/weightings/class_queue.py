"""How alike a class's remembered samples are to its proxies, without reading them all again at every step."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from proxymetric.sources.queue import Queue

ONE = 2**40
"""sums are whole numbers of this part: what enters and later leaves cancels exactly, in any order and precision"""
LARGEST = 2**25
"""numbers that sums by class may take: beyond that, and with several proxies a class, stored rows are read"""
AT_ONCE = 2**22
"""numbers of stored rows and proxies that are multiplied at once"""


class ClassQueue(Queue):
    """A queue that also keeps the sum of its rows by class.

    One proxy's mean similarity to the stored rows of its class is its product with their mean:
    ``1/n sum_i p.z_i = p.(1/n sum_i z_i)``, so that a step costs what its batch costs, not what the queue holds. The
    sums follow from the rows; a checkpoint does not hold them.

    >>> queue = ClassQueue(size=2, dim=2, classes=3)
    >>> queue.remember(torch.eye(2), torch.tensor([1, 1])); queue.remember(torch.ones(1, 2), torch.tensor([0]))
    >>> queue.number.tolist(), queue.means(torch.tensor([1]))
    ([1, 1, 0], tensor([[0., 1.]]))
    """

    sums: Tensor
    number: Tensor

    def __init__(self, size: int, dim: int, classes: int) -> None:
        super().__init__(size, dim)
        rows = classes if classes * dim <= LARGEST else 0
        self.register_buffer("sums", torch.zeros(rows, dim, dtype=torch.int64), persistent=False)
        self.register_buffer("number", torch.zeros(classes, dtype=torch.int64), persistent=False)
        self.register_load_state_dict_post_hook(_summed_again)

    @property
    def has_sums(self) -> bool:
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
        """Mean of the stored rows of these classes; zeros where there are none."""
        return self.sums[classes].to(self.vectors) / (ONE * self.number[classes].clamp(min=1)[:, None])

    def _count(self, places: Tensor, sign: int) -> None:
        of = self.labels[places]
        self.number.index_add_(0, of, torch.full_like(of, sign))
        if self.has_sums:
            self.sums.index_add_(0, of, (self.vectors[places].double() * (sign * ONE)).round().long())

    def sum_again(self) -> None:
        """From the rows that are stored."""
        self.sums.zero_()
        self.number.zero_()
        for places in torch.arange(len(self), device=self.labels.device).split(
            max(1, AT_ONCE // self.vectors.shape[1])
        ):
            self._count(places, 1)


def _summed_again(module: nn.Module, incompatible: object) -> None:
    assert isinstance(module, ClassQueue)
    module.sum_again()
