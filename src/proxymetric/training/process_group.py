"""The processes that train together: their ranks, their number, and how they exchange values."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch.distributed.rendezvous import rendezvous

T = TypeVar("T")
SETTLE_SECONDS = 0.1
"""time for the threads of a group to finish before the group is destroyed"""


def restarts() -> int:
    """Return how often torchrun restarted the processes after one of them failed."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _size_from_torchrun() -> int:
    """The number of processes that `torchrun` started; 1 without it. Refuse half of its variables."""
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"WORLD_SIZE: got {text!r} in the environment, expected the number of processes")
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if int(text) > 1 and missing and not torch.distributed.is_initialized():
        raise ValueError(
            f"WORLD_SIZE: got {text} in the environment, without {' and '.join(missing)}; expected all of them from "
            "torchrun (torchrun --nproc-per-node 2 -m proxymetric train ...), or none for a single process"
        )
    return int(text)


class ProcessGroup(NamedTuple):
    """The processes that `torchrun` started, or a single process without `torchrun`.

    Attributes:
        rank: number of this process, from 0.
        size: number of processes.

    Example:
        >>> ProcessGroup().from_first(lambda: 3), ProcessGroup().any(False)
        (3, False)
    """

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this process writes files and messages."""
        return self.rank == 0

    @staticmethod
    @contextlib.contextmanager
    def joined() -> Iterator[ProcessGroup]:
        """Join the group that the environment describes and leave it at the end; an existing group is not left."""
        size = _size_from_torchrun()
        if size == 1:
            yield ProcessGroup()
            return
        is_creator = not torch.distributed.is_initialized()
        if is_creator:
            # Values that all processes must agree on are exchanged between CPUs, gradients between their devices.
            backend, attempt = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", restarts()
            if attempt == 0:
                torch.distributed.init_process_group(backend)
            else:
                # Without a prefix, restarted processes would find the addresses of the failed ones in the store.
                store, rank, size = next(rendezvous("env://"))
                store = torch.distributed.PrefixStore(f"attempt {attempt}", store)
                torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=size)
        try:
            yield ProcessGroup(torch.distributed.get_rank(), size)
        finally:
            if is_creator:
                # A gloo thread needs the interpreter's lock to free its last tensors. If this thread destroys the group
                # while it holds the lock, the two threads wait for each other forever. If the interpreter exits first,
                # the process aborts. Sleeping releases the lock, so that the gloo thread can finish.
                time.sleep(SETTLE_SECONDS)
                torch.distributed.destroy_process_group()

    def from_first(self, make: Callable[[], T]) -> T:
        """Call `make` in the first process; all processes return its value or raise its exception."""
        if self.size == 1:
            return make()
        value_and_error: list[Any] = [None, None]
        if self.first:
            try:
                value_and_error[0] = make()
            except Exception as error:
                value_and_error[1] = error
        torch.distributed.broadcast_object_list(value_and_error)
        if value_and_error[1] is not None:
            raise value_and_error[1]
        return value_and_error[0]

    def gather(self, value: T) -> list[T]:
        """The values of all processes, in the order of their ranks. All processes must call this method."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(values, value)
        return values

    def any(self, flag: bool) -> bool:
        """Whether `flag` is true in any process. All processes must call this method."""
        if self.size == 1:
            return flag
        flags = torch.tensor(int(flag))
        torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MAX)
        return bool(flags)

    def wait(self) -> None:
        """Wait until all processes have called this method."""
        self.any(False)
