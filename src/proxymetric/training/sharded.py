"""Parameters that are divided among processes, in checkpoints: files hold them whole, for any number of processes.

Proxies are divided class after class (`train.shard`), the encoder by FSDP2 (`train.parallel`), whose parameters, and
their optimiser state, are DTensors: they know what they are a part of.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from proxymetric.learner import Learner
from proxymetric.shards import Shard


class Sharded:
    """Puts the parts of all processes together for a checkpoint, and takes this process's part out of one.

    learner: with parameters in parts or without, when both do nothing. optimizer: whose state is divided with them.
    """

    def __init__(self, learner: Learner, optimizer: torch.optim.Optimizer) -> None:
        self.parts = learner.criterion.sharded()
        parameters = dict(learner.criterion.named_parameters())
        self.parameters = [parameters[name] for name in self.parts]
        self.elsewhere = sum(
            p.numel() // (part.stop - part.start) * (part.classes - part.stop + part.start)
            for p, part in zip(self.parameters, self.parts.values(), strict=True)
        )
        """numbers of them that other processes hold"""
        numbers = {id(p): i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
        encoder = {name: p for name, p in learner.encoder.named_parameters() if is_part(p)}
        self.anything = bool(self.parts or encoder)
        self._encoder = {f"encoder.{name}": p for name, p in encoder.items()}
        self._encoder |= {f"optimizer.{numbers[id(p)]}": p for p in encoder.values() if id(p) in numbers}
        self._names: dict[str, Shard] = {f"criterion.{name}": part for name, part in self.parts.items()}
        self._states = {
            f"optimizer.{numbers[id(parameters[name])]}.": part
            for name, part in self.parts.items()
            if id(parameters[name]) in numbers
        }

    def whole(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors with the parts of all processes in them, for the first process. All must ask."""
        return {name: self._gathered(value, part) if (part := self._of(name, value)) else _full(value)
                for name, value in tensors.items()}  # fmt: skip

    def own(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of a checkpoint with only this process's part of what is divided."""
        return {name: _cut(value, part) if (part := self._of(name, value)) else self._as_ours(name, value)
                for name, value in tensors.items()}  # fmt: skip

    def divides(self, parameter: Tensor) -> bool:
        """Whether other processes hold other parts of it."""
        return is_part(parameter) or any(parameter is own for own in self.parameters)

    def norm(self, norms: Tensor, own: Tensor) -> Tensor:
        """The norm of all gradients, of which `own` norms are those of this process's part."""
        squared = own.square().sum()
        torch.distributed.all_reduce(squared, group=next((part.group for part in self.parts.values()), None))
        return (norms.square().sum() + squared).sqrt()

    def _of(self, name: str, value: Tensor) -> Shard | None:
        if name in self._names:
            return self._names[name]
        if not value.ndim:  # a count of steps
            return None
        return next((part for prefix, part in self._states.items() if name.startswith(prefix)), None)

    def _as_ours(self, name: str, value: Tensor) -> Tensor:
        """What of `value` belongs to this process's part of the encoder, as such a part."""
        key = ".".join(name.split(".")[:2]) if name.startswith("optimizer.") else name
        parameter: Any = self._encoder.get(key)
        if parameter is None or not value.ndim:
            return value
        from torch.distributed.tensor import DTensor

        mesh, local = parameter.device_mesh, parameter.to_local()
        # As torch divides: parts of equal length, of which the last may be shorter or empty.
        rows = -(-len(value) // mesh.size())
        part = value[rows * mesh.get_local_rank() :][:rows].to(local.device)
        assert part.shape == local.shape, (name, part.shape, local.shape)
        return DTensor.from_local(
            part, mesh, parameter.placements, run_check=False, shape=value.shape, stride=value.stride()
        )

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


def here(parameter: Tensor) -> Tensor:
    """The part of a parameter that lies here, with its gradient; the parameter itself where that is all of it."""
    if not is_part(parameter):
        return parameter
    whole: Any = parameter.detach()
    part: Tensor = whole.to_local()
    gradient: Any = parameter.grad
    part.grad = None if gradient is None else gradient.to_local()
    return part


def is_part(value: Any) -> bool:
    """Whether it is a DTensor: a part of something."""
    return hasattr(value, "full_tensor")


def _full(value: Any) -> Tensor:
    """The whole of a part of the encoder, in host memory, on the first process; elsewhere what is there."""
    if not is_part(value):
        return value
    full = value.full_tensor()
    return value if torch.distributed.get_rank() else full.cpu()


def _cut(value: Tensor, part: Shard) -> Tensor:
    per_class = len(value) // part.classes
    return value[part.start * per_class : part.stop * per_class].clone()
