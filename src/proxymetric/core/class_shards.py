"""Classes divided among processes: which classes are here, and how processes combine their results.

All processes have the same queries; each compares them with the references of its own classes. Processes add up their
sums or log-sums, so that all of them continue with the same numbers. Each process then has the exact gradient of its
own references, but only a part of the gradient of the queries: `grad_all_reduce` adds these parts up.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

_made: ContextVar[tuple[int, int, Any] | None] = ContextVar("made", default=None)
"""rank, size and group of the innermost `making_part` block"""


class Shard(NamedTuple):
    """The classes from `start` up to, but not including, `stop`.

    Example:
        >>> [Shard.of(10, rank, 3)[:2] for rank in range(3)]
        [(0, 3), (3, 6), (6, 10)]
    """

    start: int
    stop: int
    classes: int
    """C, the number of classes in all processes"""
    group: Any = None
    """process group of torch.distributed; None: all processes"""

    @staticmethod
    def of(classes: int, rank: int, size: int, group: Any = None) -> Shard:
        """The part of one process; the sizes of parts differ by at most one class.

        Args:
            classes: C.
            rank: number of the process, from 0.
            size: number of processes.
            group: process group of torch.distributed; None: all processes.

        Raises:
            ValueError: there are fewer classes than processes.
        """
        if classes < size:
            raise ValueError(f"classes: got {classes} for {size} processes, expected at least one class per process")
        return Shard(rank * classes // size, (rank + 1) * classes // size, classes, group)


def check_own(rank: int, size: int, group: Any = None) -> None:
    """Refuse numbers that are not those of this process.

    Args:
        rank: number of this process, from 0.
        size: number of processes.
        group: process group of torch.distributed; None: all processes.

    Raises:
        ValueError: the rank is not one of `size` processes, or torch.distributed has other numbers.
    """
    if not 0 <= rank < size:
        raise ValueError(f"rank: got {rank} of {size} processes, expected 0 to {size - 1}")
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        own_rank, own_size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
        if (own_rank, own_size) != (rank, size):
            raise ValueError(
                f"rank, size: got {rank} and {size}, but this is process {own_rank} of {own_size} in its group; "
                f"expected shard({own_rank}, {own_size})"
            )


@contextmanager
def making_part(rank: int, size: int, group: Any = None) -> Iterator[None]:
    """Let sources that are made inside the `with` block make only the proxies that this process will keep.

    `criterion.shard` must follow, with the same numbers.

    Args:
        rank: number of this process, from 0.
        size: number of processes.
        group: process group of torch.distributed; None: all processes.

    Raises:
        ValueError: the rank is not one of `size` processes, or torch.distributed has other numbers.

    Example:
        >>> with making_part(1, 2):
        ...     made_part(classes=10)[:2]
        (5, 10)
    """
    check_own(rank, size, group)
    token = _made.set((rank, size, group))
    try:
        yield
    finally:
        _made.reset(token)


def made_part(classes: int) -> Shard | None:
    """The part of the classes whose proxies a source should make now; None: those of all classes.

    Args:
        classes: C.
    """
    numbers = _made.get()
    return None if numbers is None else Shard.of(classes, *numbers)


def check_part(saved: list[int] | None, here: list[int]) -> None:
    """Refuse a state that holds the proxies of other classes; the parts of two processes may have the same shapes.

    Args:
        saved: first class, last class and number of classes that the state names; None: it names none.
        here: those of this process; empty if its proxies are not divided.

    Raises:
        ValueError: they differ.
    """
    if saved is not None and saved != here:
        expected = "the classes from {:,} to {:,} of {:,}".format(*here) if here else "all classes"
        raise ValueError(
            "state_dict: got the part with the classes from {:,} to {:,} of {:,}, ".format(*saved)
            + f"expected {expected}: each process loads the part that it saved, after criterion.shard(rank, size)"
        )


def all_reduce_sum(part: Tensor, shard: Shard) -> Tensor:
    """The sum of `part` over all processes; each process gets the gradient of its own part."""
    return _AllReduceSum.apply(part, shard.group)


def grad_all_reduce(values: Tensor, shard: Shard) -> Tensor:
    """The same values, whose gradient is summed over all processes; the values must be equal in all of them."""
    return _GradAllReduce.apply(values, shard.group)


def all_reduce_logsumexp(logs: Tensor, shard: Shard) -> Tensor:
    """`log sum exp` over all processes, element by element.

    Where all processes have -inf, the result is -inf and the gradient is zero.

    Args:
        logs: of this process; the same shape in all processes.
        shard: its process group is used.
    """
    rank, size = torch.distributed.get_rank(shard.group), torch.distributed.get_world_size(shard.group)
    gathered = [torch.empty_like(logs) for _ in range(size)]
    torch.distributed.all_gather(gathered, logs.detach().contiguous(), group=shard.group)
    gathered[rank] = logs
    parts = torch.stack(gathered)
    empty = (parts.detach() == -torch.inf).all(0)
    return torch.logsumexp(parts.masked_fill(empty, 0.0), 0).masked_fill(empty, -torch.inf)


class _AllReduceSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        total = part.detach().clone()
        torch.distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _GradAllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].clone()
        torch.distributed.all_reduce(total, group=ctx.group)
        return total, None
