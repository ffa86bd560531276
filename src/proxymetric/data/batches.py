"""Batches of image indices as a pure function of the seed, the epoch and the step."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np


class Batches:
    """Batches of image indices for every epoch: random ones, or `batch // per_class` classes of `per_class` images.

    Iteration does not change the object: to continue in the middle of an epoch, call `epoch(number, start=step)`. The
    global batch (the images of all ranks in one step) is the same for any `world`; each rank takes a consecutive part.

    Args:
        labels: (N,) integers, the label of every image.
        batch: size of the global batch; a multiple of `world` and of `per_class`.
        per_class: m, the number of images of one class in a batch. None: every epoch is a new permutation of all
            images. Otherwise each step draws its classes without replacement and m different images of each class;
            images repeat only if their class has fewer than m.
        seed: seed of the random batches, at least 0.
        rank: number of this process, in 0..world-1.
        world: number of processes.
        drop_last: leave out the incomplete batch at the end of a permutation. If `batch` is larger than N, an epoch is
            one batch of all N images.

    Raises:
        ValueError: an argument is out of range, or there are fewer classes than a batch needs.

    Example:
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
            raise ValueError("labels: got an empty array, expected the label of at least one image")
        if world < 1 or not 0 <= rank < world:
            raise ValueError(f"rank: got {rank} with world={world}, expected a number in 0..world-1")
        if seed < 0:
            raise ValueError(f"seed: got {seed}, expected at least 0")
        if batch < 1 or batch % world:
            raise ValueError(f"batch: got {batch}, expected a positive multiple of world={world}")
        if per_class is not None and (per_class < 1 or batch % per_class):
            raise ValueError(f"per_class: got {per_class}, expected a divisor of batch={batch}")
        self.count = len(labels)
        self.batch = batch
        self.per_class = per_class
        self.seed = seed
        self.rank = rank
        self.world = world
        self.drop_last = drop_last
        self._members: list[np.ndarray] = []
        if per_class is not None:
            order = np.argsort(labels, kind="stable")
            starts = np.flatnonzero(np.diff(labels[order])) + 1
            self._members = np.split(order, starts)
            classes = batch // per_class
            if classes > len(self._members):
                raise ValueError(
                    f"per_class: got {per_class} with batch={batch}, which needs {classes} classes in every batch, "
                    f"expected at most {len(self._members)}, the number of classes"
                )

    def __len__(self) -> int:
        """Return the number of steps in an epoch."""
        if self.per_class is None and not self.drop_last:
            return -(-self.count // self.batch)
        return max(1, self.count // self.batch)

    def share(self, total: int) -> slice:
        """Return the rows of this rank in a global batch of `total` rows."""
        return slice(total * self.rank // self.world, total * (self.rank + 1) // self.world)

    def epoch(self, number: int, start: int = 0) -> Iterator[np.ndarray]:
        """Yield the image indices of this rank for every step of epoch `number`, from step `start` on."""
        for rows in self.global_batches(number, start):
            yield rows[self.share(len(rows))]

    def global_batches(self, number: int, start: int = 0) -> Iterator[np.ndarray]:
        """Yield the image indices of all ranks together for every step of epoch `number`, from step `start` on."""
        if not 0 <= start <= len(self):
            raise ValueError(f"start: got {start}, expected a step in 0..{len(self)}")
        if self.per_class is None:
            order = np.random.default_rng([self.seed, number]).permutation(self.count)
            for step in range(start, len(self)):
                yield order[step * self.batch : (step + 1) * self.batch]
        else:
            for step in range(start, len(self)):
                yield self._draw_by_class(np.random.default_rng([self.seed, number, step]), self.per_class)

    def _draw_by_class(self, random: np.random.Generator, per_class: int) -> np.ndarray:
        """Return `per_class` images of each of `batch // per_class` random classes."""
        class_indices = random.choice(len(self._members), self.batch // per_class, replace=False)
        rows = []
        for c in class_indices:
            members = self._members[c]
            # If a class has n < m images, each of them is drawn floor(m / n) or ceil(m / n) times.
            rounds = -(-per_class // len(members))
            rows.append(np.concatenate([random.permutation(members) for _ in range(rounds)])[:per_class])
        return np.concatenate(rows)
