"""Which of how many processes this is."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch


class World(NamedTuple):
    """Rank and size of the group that `torchrun` started; (0, 1) without it."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this process writes files and speaks."""
        return self.rank == 0

    @staticmethod
    def join() -> World:
        """Join the group that the environment describes."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return World()
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        return World(torch.distributed.get_rank(), size)


def pick_device(name: str) -> torch.device:
    """The device of that name; "auto" is this process's GPU if there is one, else the CPU."""
    if name == "auto":
        name = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device: got {name!r}, wanted auto, cpu, cuda or cuda:0") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device: {name} was asked for, but no CUDA device can be used here; wanted cpu or auto")
    return device
