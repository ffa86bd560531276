"""Parameters that are divided among processes, in checkpoints: files hold them whole, for any number of processes.

Proxies are divided class after class (`train.shard`), the encoder by FSDP2 (`train.parallel`), whose parameters, and
their optimiser state, are DTensors: they know what they are a part of.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from proxymetric.core.class_shards import Shard
from proxymetric.training.learner import Learner

MESSAGE = 2**26
"""bytes that are put together for one message"""


class ShardedState:
    """Puts the parts of all processes together for a checkpoint, and takes this process's part out of one.

    learner: with parameters in parts or without, when both do nothing. optimizer: whose state is divided with them.
    """

    def __init__(self, learner: Learner, optimizer: torch.optim.Optimizer) -> None:
        self.parts = learner.criterion.sharded()
        self._group = next((part.group for part in self.parts.values()), None)
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
        """The tensors with the parts of all processes in them, in host memory, for the first process. All must ask.

        Small parts travel together, since a message costs more than what is in it; elsewhere what is there comes back.
        """
        divided = {name: rows for name, value in tensors.items() if (rows := self._rows(name, value)) is not None}
        if not divided:
            return tensors
        group = self._group
        rank, size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
        parts = {name: _local(tensors[name]) for name in divided}
        if rank:
            for names in _bundles(parts):
                torch.distributed.send(_joined([_as_bytes(parts[name].cpu()) for name in names]), 0, group=group)
            return tensors
        found = {
            name: torch.empty(sum(divided[name]), *part.shape[1:], dtype=part.dtype) for name, part in parts.items()
        }
        for name, whole in found.items():
            whole[: divided[name][0]] = parts[name]
        for other in range(1, size):
            places = {name: whole.split(divided[name])[other] for name, whole in found.items()}
            for names in _bundles(places):
                theirs = [_as_bytes(places[name]) for name in names]
                message = theirs[0] if len(theirs) == 1 else torch.empty(sum(map(len, theirs)), dtype=torch.uint8)
                torch.distributed.recv(message, other, group=group)
                for place, some in zip(theirs, message.split([len(each) for each in theirs]), strict=True):
                    place.copy_(some)
        return tensors | found

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
        torch.distributed.all_reduce(squared, group=self._group)
        return (norms.square().sum() + squared).sqrt()

    def _rows(self, name: str, value: Any) -> list[int] | None:
        """How many rows of it each process holds; None: all hold all of it."""
        if part := self._of(name, value):
            size = torch.distributed.get_world_size(part.group)
            shards = [Shard.of(part.classes, other, size) for other in range(size)]
            return [(each.stop - each.start) * (len(value) // (part.stop - part.start)) for each in shards]
        return _as_torch_divides(len(value), value.device_mesh.size()) if is_part(value) and value.ndim else None

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
        part = value.split(_as_torch_divides(len(value), mesh.size()))[mesh.get_local_rank()].to(local.device)
        assert part.shape == local.shape, (name, part.shape, local.shape)
        return DTensor.from_local(
            part, mesh, parameter.placements, run_check=False, shape=value.shape, stride=value.stride()
        )


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


def _as_torch_divides(rows: int, size: int) -> list[int]:
    """Rows of each process's part: of equal length, but the last may be shorter or empty."""
    most = -(-rows // size)
    return [max(0, min(most, rows - most * rank)) for rank in range(size)]


def _local(value: Any) -> Tensor:
    """The part of a divided tensor that lies here."""
    return (value.to_local() if is_part(value) else value).detach()


def _as_bytes(part: Tensor) -> Tensor:
    return part.contiguous().view(-1).view(torch.uint8)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _bundles(parts: dict[str, Tensor]) -> Iterator[list[str]]:
    """The names of parts that travel in one message; a large one travels alone, an empty one not at all."""
    names: list[str] = []
    filled = 0
    for name, part in parts.items():
        if names and filled + part.nbytes > MESSAGE:
            yield names
            names, filled = [], 0
        if part.nbytes:
            names, filled = [*names, name], filled + part.nbytes
    if names:
        yield names


def _cut(value: Tensor, part: Shard) -> Tensor:
    per_class = len(value) // part.classes
    return value[part.start * per_class : part.stop * per_class].clone()
