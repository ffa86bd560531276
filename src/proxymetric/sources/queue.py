"""A queue of past embeddings with their labels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from proxymetric.arguments.checks import whole_number


class Queue(nn.Module):
    """The last `size` rows that were added; new rows replace the oldest.

    `len(queue)` rows are filled: the first rows of `vectors` (size, D) and of `labels`. Rows, labels and position are
    in `state_dict`.

    Args:
        size: number of rows, at least 1.
        dim: D.

    Example:
        >>> queue = Queue(size=4, dim=2)
        >>> queue.remember(torch.eye(2), torch.tensor([0, 1])); queue.remember(-torch.eye(2), torch.tensor([2, 3]))
        >>> queue.remember(torch.ones(1, 2), torch.tensor([4]))
        >>> queue.labels, len(queue)
        (tensor([4, 1, 2, 3]), 4)
    """

    changed_by_commit = ("vectors", "labels", "_seen")
    vectors: Tensor
    labels: Tensor

    def __init__(self, size: int, dim: int) -> None:
        super().__init__()
        whole_number(1, memory=size)
        self.size = size
        self.register_buffer("vectors", torch.zeros(size, dim))
        self.register_buffer("labels", torch.full((size,), -1, dtype=torch.int64))
        self._seen = 0
        """rows added so far"""

    def __len__(self) -> int:
        return min(self._seen, len(self.labels))

    @torch.no_grad()
    def remember(self, vectors: Tensor, labels: Tensor) -> None:
        """Add rows. If there are more than `size`, only the last ones are added.

        Args:
            vectors: (n, D).
            labels: (n,).
        """
        vectors, labels = vectors[-len(self.labels) :], labels[-len(self.labels) :]
        places = self.places(len(labels))
        self.vectors[places] = vectors.to(self.vectors)
        self.labels[places] = labels.to(self.labels)
        self._seen += len(labels)

    def places(self, count: int) -> Tensor:
        """The row numbers that the next `count` rows will replace; rows that were never filled have the label -1."""
        size = len(self.labels)
        return (self._seen + torch.arange(min(count, size), device=self.labels.device)) % size

    def get_extra_state(self) -> Tensor:
        """The number of rows added so far, for `state_dict`."""
        return torch.tensor(self._seen)

    def set_extra_state(self, state: Any) -> None:
        """Restore the number of rows added so far."""
        self._seen = int(state)
