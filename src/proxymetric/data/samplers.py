"""Samplers for a PyTorch `DataLoader` in your own training loop."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch.utils.data import Sampler

from proxymetric.arguments.checks import whole_number
from proxymetric.arguments.vectors import Labels, as_labels
from proxymetric.data.batches import Batches

__all__ = ["PerClass"]


class PerClass(Sampler[list[int]]):
    """Batches of `batch // per_class` classes with `per_class` images each: a `batch_sampler` for a `DataLoader`.

    The batches are those of `proxymetric train`. With several processes, each gets a consecutive part of the same
    global batch, so that the images of a step do not depend on the number of processes.

    Args:
        labels: (N,) whole numbers or text, the label of every image.
        batch: images of all processes in a step; a multiple of `world` and of `per_class`.
        per_class: images of one class in a step. If a class has fewer, its images repeat.
        seed: seed of the batches, at least 0; the same in all processes.
        rank: number of this process. None: that of the process group, 0 without one.
        world: number of processes. None: that of the process group, 1 without one.

    Raises:
        ValueError: an argument is out of range, or there are fewer classes than a batch needs.

    Example:
        >>> labels = np.repeat(np.arange(10), 6)
        >>> sampler = PerClass(labels, batch=12, per_class=3)
        >>> rows = next(iter(sampler))
        >>> len(sampler), np.unique(labels[rows], return_counts=True)[1].tolist()
        (5, [3, 3, 3, 3])
        >>> sampler.set_epoch(1)
        >>> loader = torch.utils.data.DataLoader(range(60), batch_sampler=sampler)
    """

    def __init__(
        self,
        labels: Labels,
        batch: int,
        per_class: int,
        seed: int = 0,
        rank: int | None = None,
        world: int | None = None,
    ) -> None:
        grouped = torch.distributed.is_available() and torch.distributed.is_initialized()
        if rank is None:
            rank = torch.distributed.get_rank() if grouped else 0
        if world is None:
            world = torch.distributed.get_world_size() if grouped else 1
        whole_number(1, batch=batch, per_class=per_class)
        numbers: np.ndarray = as_labels("labels", labels).cpu().numpy()
        self.batches = Batches(numbers, batch, per_class, seed, rank, world)
        self.epoch = 0
        self.start = 0

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Choose the batches of epoch `epoch`, from step `start` on, for the next iteration.

        Without this call, each iteration is the next epoch, from 0.

        Args:
            epoch: number of the epoch, from 0.
            start: first step, to continue in the middle of an epoch.

        Raises:
            ValueError: the epoch or the step does not exist.
        """
        if epoch < 0:
            raise ValueError(f"epoch: got {epoch}, expected at least 0")
        if not 0 <= start <= len(self.batches):
            raise ValueError(f"start: got {start}, expected a step in 0..{len(self.batches)}")
        self.epoch, self.start = epoch, start

    def __len__(self) -> int:
        """Return the number of steps that the next iteration has."""
        return len(self.batches) - self.start

    def __iter__(self) -> Iterator[list[int]]:
        """Give the image indices of this process for every step; the next iteration is that of the next epoch."""
        batches = self.batches.epoch(self.epoch, self.start)
        self.epoch, self.start = self.epoch + 1, 0
        return (rows.tolist() for rows in batches)
