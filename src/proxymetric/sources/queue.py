"""A queue of past embeddings with their labels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from proxymetric.checks import whole_number


class Queue(nn.Module):
    """The last `size` rows that were put in, oldest out first; rows, labels and position are in its state.

    size: rows kept, > 0. dim: D. `len(queue)` rows are filled, the first ones of `vectors` (size, D) and `labels`.

    >>> queue = Queue(size=4, dim=2)
    >>> queue.remember(torch.eye(2), torch.tensor([0, 1])); queue.remember(-torch.eye(2), torch.tensor([2, 3]))
    >>> queue.remember(torch.ones(1, 2), torch.tensor([4]))
    >>> queue.labels, len(queue)
    (tensor([4, 1, 2, 3]), 4)
    """

    vectors: Tensor
    labels: Tensor

    def __init__(self, size: int, dim: int) -> None:
        super().__init__()
        whole_number(1, memory=size)
        self.register_buffer("vectors", torch.zeros(size, dim))
        self.register_buffer("labels", torch.full((size,), -1, dtype=torch.int64))
        self._seen = 0

    def __len__(self) -> int:
        return min(self._seen, len(self.labels))

    @torch.no_grad()
    def remember(self, vectors: Tensor, labels: Tensor) -> None:
        """Put rows in the places of the oldest; of more rows than there are places, the last ones."""
        vectors, labels = vectors[-len(self.labels) :], labels[-len(self.labels) :]
        places = self.places(len(labels))
        self.vectors[places] = vectors.to(self.vectors)
        self.labels[places] = labels.to(self.labels)
        self._seen += len(labels)

    def places(self, count: int) -> Tensor:
        """Where the next `count` rows will go; a place that was never filled has the label -1."""
        size = len(self.labels)
        return (self._seen + torch.arange(min(count, size), device=self.labels.device)) % size

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self._seen)

    def set_extra_state(self, state: Any) -> None:
        self._seen = int(state)
