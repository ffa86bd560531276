"""Which images make up a batch: a pure function of the seed, the epoch and the step."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np


class Batches:
    """Index batches for every epoch, at random or `per_class` images of each of `batch // per_class` classes.

    Nothing here changes while it is used: to go on in the middle of an epoch, ask for `epoch(number, start=position)`.
    The batch of all ranks together is the same for any `world`; each rank takes its consecutive part of it.

    Arguments:
        labels: (N,) integers, the label of every image.
        batch: images in a step, over all ranks together; a multiple of `world` and of `per_class`.
        per_class: m, images of one class in a batch. None: a fresh permutation of all images every epoch. Otherwise
            each step draws its classes without replacement, and m different images of each (with repeats only where
            a class has fewer than m).
        seed: 0 or more.
        rank, world: which of how many processes this is.
        drop_last: leave out the incomplete batch at the end of a permutation. When `batch` is larger than N, an epoch
            is one batch of all N images.

    >>> batches = Batches(np.array([0, 0, 0, 1, 1, 1]), batch=4, per_class=2)
    >>> len(batches)
    1
    >>> sorted(np.array([0, 0, 0, 1, 1, 1])[next(batches.epoch(0))].tolist())
    [0, 0, 1, 1]
    """

    def __init__(
        self,
        labels: np.ndarray,
        batch: int,
        per_class: int | None = None,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        drop_last: bool = True,
    ) -> None:
        labels = np.asarray(labels)
        if len(labels) == 0:
            raise ValueError("labels is empty: there is nothing to make batches of")
        if world < 1 or not 0 <= rank < world:
            raise ValueError(f"rank must be in 0..world-1, got rank {rank} of world {world}")
        if seed < 0:
            raise ValueError(f"seed must be 0 or more, got {seed}")
        if batch < 1 or batch % world:
            raise ValueError(f"batch must be a positive multiple of world ({world} processes), got {batch}")
        if per_class is not None and (per_class < 1 or batch % per_class):
            raise ValueError(f"batch must be a multiple of per_class, got batch {batch} and per_class {per_class}")
        self.count, self.batch, self.per_class = len(labels), batch, per_class
        self.seed, self.rank, self.world, self.drop_last = seed, rank, world, drop_last
        self._members: list[np.ndarray] = []
        if per_class is not None:
            order = np.argsort(labels, kind="stable")
            starts = np.flatnonzero(np.diff(labels[order])) + 1
            self._members = np.split(order, starts)
            wanted = batch // per_class
            if wanted > len(self._members):
                raise ValueError(
                    f"batch {batch} with per_class {per_class} needs {wanted} classes in every batch, "
                    f"but there are {len(self._members)}"
                )

    def __len__(self) -> int:
        """Steps in an epoch."""
        if self.per_class is None and not self.drop_last:
            return -(-self.count // self.batch)
        return max(1, self.count // self.batch)

    def share(self, total: int) -> slice:
        """The rows of a whole batch of `total` rows that belong to this rank."""
        return slice(total * self.rank // self.world, total * (self.rank + 1) // self.world)

    def epoch(self, number: int, start: int = 0) -> Iterator[np.ndarray]:
        """The image indices of THIS rank, for every step of epoch `number` from step `start` on."""
        for whole in self.whole(number, start):
            yield whole[self.share(len(whole))]

    def whole(self, number: int, start: int = 0) -> Iterator[np.ndarray]:
        """The image indices of all ranks together, for every step of epoch `number` from step `start` on."""
        if not 0 <= start <= len(self):
            raise ValueError(f"start must be a step in 0..{len(self)}, got {start}")
        if self.per_class is None:
            order = np.random.default_rng([self.seed, number]).permutation(self.count)
            for step in range(start, len(self)):
                yield order[step * self.batch : (step + 1) * self.batch]
        else:
            for step in range(start, len(self)):
                yield self._of_classes(np.random.default_rng([self.seed, number, step]), self.per_class)

    def _of_classes(self, random: np.random.Generator, per_class: int) -> np.ndarray:
        chosen = random.choice(len(self._members), self.batch // per_class, replace=False)
        rows = []
        for c in chosen:
            members = self._members[c]
            # A class smaller than m: every image as often as any other, give or take one.
            rounds = -(-per_class // len(members))
            rows.append(np.concatenate([random.permutation(members) for _ in range(rounds)])[:per_class])
        return np.concatenate(rows)
