"""Classes that are divided among processes: which ones are here, and how processes put their parts together.

All processes see the same queries; each compares them with its own classes. What the parts make together, a sum or a
log-sum, all of them then know, and go on alike. So each has the gradient of its own references, whole and exact, and of
the queries a part: `felt_by_all` adds these up.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Shard(NamedTuple):
    """The classes from `start` to `stop` of `classes` lie here.

    >>> [Shard.of(10, rank, 3)[:2] for rank in range(3)]
    [(0, 3), (3, 6), (6, 10)]
    """

    start: int
    stop: int
    classes: int
    group: Any = None
    """of torch.distributed; None: that of all processes"""

    @staticmethod
    def of(classes: int, rank: int, size: int, group: Any = None) -> Shard:
        """The part of process `rank` among `size`; parts differ by one class at most."""
        if classes < size:
            raise ValueError(f"classes: got {classes} for {size} processes, expected one for each at least")
        return Shard(rank * classes // size, (rank + 1) * classes // size, classes, group)


def all_reduce_sum(part: Tensor, shard: Shard) -> Tensor:
    """The sum of what all processes have; each gets the gradient of its own part."""
    return _AllReduceSum.apply(part, shard.group)


def grad_all_reduce(values: Tensor, shard: Shard) -> Tensor:
    """Values that all processes have alike; their gradient is the sum of what comes of them in each."""
    return _GradAllReduce.apply(values, shard.group)


def all_reduce_logsumexp(logs: Tensor, shard: Shard) -> Tensor:
    """`log sum exp` of what all processes have, element by element; -inf with a zero gradient where all have -inf."""
    rank, size = torch.distributed.get_rank(shard.group), torch.distributed.get_world_size(shard.group)
    found = [torch.empty_like(logs) for _ in range(size)]
    torch.distributed.all_gather(found, logs.detach().contiguous(), group=shard.group)
    found[rank] = logs
    parts = torch.stack(found)
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
