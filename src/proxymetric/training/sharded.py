"""Proxies that are divided among processes, in checkpoints: files hold them whole, for any number of processes."""

from __future__ import annotations

import torch
from torch import Tensor

from proxymetric.criterion import Criterion
from proxymetric.shards import Shard


class Sharded:
    """Puts the parts of all processes together for a checkpoint, and takes this process's part out of one.

    criterion: with sharded proxies or without, when both do nothing. optimizer: whose state is divided with them.
    """

    def __init__(self, criterion: Criterion, optimizer: torch.optim.Optimizer) -> None:
        self.parts = criterion.sharded()
        parameters = dict(criterion.named_parameters())
        self.parameters = [parameters[name] for name in self.parts]
        self.elsewhere = sum(
            p.numel() // (part.stop - part.start) * (part.classes - part.stop + part.start)
            for p, part in zip(self.parameters, self.parts.values(), strict=True)
        )
        """numbers of them that other processes hold"""
        numbers = {id(p): i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
        self._names: dict[str, Shard] = {f"criterion.{name}": part for name, part in self.parts.items()}
        self._states = {
            f"optimizer.{numbers[id(parameters[name])]}.": part
            for name, part in self.parts.items()
            if id(parameters[name]) in numbers
        }

    def whole(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors with the parts of all processes in them, for the first process. All must ask."""
        return {name: self._gathered(value, part) if (part := self._of(name, value)) else value
                for name, value in tensors.items()}  # fmt: skip

    def own(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of a checkpoint with only this process's part of what is divided."""
        return {name: _cut(value, part) if (part := self._of(name, value)) else value
                for name, value in tensors.items()}  # fmt: skip

    def norm(self, norms: Tensor, own: Tensor) -> Tensor:
        """The norm of all gradients, of which `own` norms are those of this process's part."""
        part = next(iter(self.parts.values()))
        squared = own.square().sum()
        torch.distributed.all_reduce(squared, group=part.group)
        return (norms.square().sum() + squared).sqrt()

    def _of(self, name: str, value: Tensor) -> Shard | None:
        if name in self._names:
            return self._names[name]
        if not value.ndim:  # a count of steps
            return None
        return next((part for prefix, part in self._states.items() if name.startswith(prefix)), None)

    def _gathered(self, value: Tensor, part: Shard) -> Tensor:
        """All parts one after the other, in host memory, on the first process; elsewhere what is there."""
        rank, size = torch.distributed.get_rank(part.group), torch.distributed.get_world_size(part.group)
        shards = [Shard.of(part.classes, other, size) for other in range(size)]
        per_class = len(value) // (part.stop - part.start)
        rows = [(each.stop - each.start) * per_class for each in shards]
        if rank:
            torch.distributed.send(value.detach().cpu().contiguous(), 0, group=part.group)
            return value
        whole = torch.empty((sum(rows), *value.shape[1:]), dtype=value.dtype)
        for other, place in enumerate(whole.split(rows)):
            if other == 0:
                place.copy_(value.detach())
            else:
                torch.distributed.recv(place, other, group=part.group)
        return whole


def _cut(value: Tensor, part: Shard) -> Tensor:
    per_class = len(value) // part.classes
    return value[part.start * per_class : part.stop * per_class].clone()
