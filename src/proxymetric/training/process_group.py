"""Which of how many processes this is, and how they agree."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch.distributed.rendezvous import rendezvous

T = TypeVar("T")
SETTLE = 0.1
"""seconds that the threads of a group have to come to rest before it is left"""


def restarts() -> int:
    """How often torchrun started the processes anew because one of them was lost."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


class ProcessGroup(NamedTuple):
    """Rank and size of the group that `torchrun` started; (0, 1) without it.

    >>> World().from_first(lambda: 3), World().any(False)
    (3, False)
    """

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this process writes files and speaks."""
        return self.rank == 0

    @staticmethod
    @contextlib.contextmanager
    def joined() -> Iterator[ProcessGroup]:
        """The group that the environment describes, joined here and left at the end, unless the caller did so."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            yield ProcessGroup()
            return
        ours = not torch.distributed.is_initialized()
        if ours:
            # What processes agree on travels by the CPU, gradients by whatever they lie on.
            kind, attempt = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", restarts()
            if attempt == 0:
                torch.distributed.init_process_group(kind)
            else:
                # Workers that are started again would find in the store where the lost ones were.
                store, rank, size = next(rendezvous("env://"))
                store = torch.distributed.PrefixStore(f"attempt {attempt}", store)
                torch.distributed.init_process_group(kind, store=store, rank=rank, world_size=size)
        try:
            yield ProcessGroup(torch.distributed.get_rank(), size)
        finally:
            if ours:
                # A thread of gloo that lets go of the last tensors wants the interpreter's lock. Who destroys the group
                # may hold that lock, and waits for the thread: neither would ever go on. And an interpreter that ends
                # in the meantime ends the thread where it must not end, which aborts the process. Here it can have it.
                time.sleep(SETTLE)
                torch.distributed.destroy_process_group()

    def from_first(self, make: Callable[[], T]) -> T:
        """What the first process makes, for all of them; what it raises, all raise."""
        if self.size == 1:
            return make()
        made: list[Any] = [None, None]
        if self.first:
            try:
                made[0] = make()
            except Exception as error:
                made[1] = error
        torch.distributed.broadcast_object_list(made)
        if made[1] is not None:
            raise made[1]
        return made[0]

    def any(self, flag: bool) -> bool:
        """Whether any process says so. All must ask."""
        if self.size == 1:
            return flag
        said = torch.tensor(int(flag))
        torch.distributed.all_reduce(said, torch.distributed.ReduceOp.MAX)
        return bool(said)

    def wait(self) -> None:
        """Until all processes are here."""
        self.any(False)
