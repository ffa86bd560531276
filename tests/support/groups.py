"""Processes of one group, which leave it as the library does."""

from __future__ import annotations

import faulthandler
import os
import socket
from collections.abc import Callable
from typing import Any

import torch

from proxymetric.training.process_group import ProcessGroup
from training_runs import forks

PATIENCE = 120.0


def free_port() -> int:
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        return door.getsockname()[1]


def place(rank: int, size: int, port: int) -> dict[str, str]:
    """The environment variables by which `torchrun` describes the group to a process."""
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {key: str(value) for key, value in told.items()}


def together(size: int, target: Callable[..., None], *args: Any) -> None:
    """Call `target(rank, *args)` in each of `size` processes of a group, all of which must end with code 0."""
    port = free_port()
    all_end([forks.Process(target=_member, args=(place(r, size, port), target, args)) for r in range(size)])


def all_end(processes: list[Any]) -> None:
    """Start the processes, and wait until all of them end with code 0."""
    for process in processes:
        process.daemon = True
        process.start()
    for process in processes:
        process.join(PATIENCE)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0] * len(processes)


def _member(told: dict[str, str], target: Callable[..., None], args: tuple[Any, ...]) -> None:
    os.environ |= told
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(PATIENCE - 5)  # prints the stack if the process does not end
    # Leave the group as the library does: a gloo thread that outlives the interpreter would abort the process.
    with ProcessGroup.joined() as world:
        target(world.rank, *args)
