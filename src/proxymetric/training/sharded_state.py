"""Sharded parameters in checkpoints: a file holds whole tensors and can be loaded by any number of processes.

Proxies are sharded by class (`train.shard`). The encoder is sharded by FSDP2 (`train.parallel`): its parameters and
their optimiser state are DTensors, which know the shape of the whole tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from proxymetric.core.class_shards import Shard
from proxymetric.system.tensor_files import StreamedTensor
from proxymetric.training.learner import Learner

MAX_MESSAGE_BYTES = 2**26
"""small tensors are sent together in messages of at most this size; larger tensors are sent in several messages"""


class Gathered(NamedTuple):
    """The tensors of all processes, in the first process."""

    tensors: dict[str, Tensor]
    """by name; in other processes, their parts"""
    streamed: dict[str, StreamedTensor]
    """tensors that are too large for one message, by name: their parts arrive when they are asked for, once, in the
    order of the names; empty in other processes"""


class ShardedState:
    """Gathers sharded tensors for a checkpoint, and cuts this process's parts out of the tensors of a checkpoint.

    Args:
        learner: the learner; if none of its parameters is sharded, both operations change nothing.
        optimizer: the optimiser; its state is sharded like the parameters.

    Attributes:
        shards: the shard of each sharded parameter of the criterion, by name.
        parameters: this process's parts of these parameters.
        remote: number of elements of these parameters that other processes hold.
        is_sharded: whether any parameter is sharded.
    """

    def __init__(self, learner: Learner, optimizer: torch.optim.Optimizer) -> None:
        self.shards = learner.criterion.sharded()
        self._group = next((shard.group for shard in self.shards.values()), None)
        parameters = dict(learner.criterion.named_parameters())
        self.parameters = [parameters[name] for name in self.shards]
        self.remote = sum(
            p.numel() // (shard.stop - shard.start) * (shard.classes - shard.stop + shard.start)
            for p, shard in zip(self.parameters, self.shards.values(), strict=True)
        )
        numbers = {id(p): i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
        encoder = {name: p for name, p in learner.encoder.named_parameters() if is_dtensor(p)}
        self.is_sharded = bool(self.shards or encoder)
        self._encoder = {f"encoder.{name}": p for name, p in encoder.items()}
        self._encoder |= {f"optimizer.{numbers[id(p)]}": p for p in encoder.values() if id(p) in numbers}
        self._criterion_shards: dict[str, Shard] = {f"criterion.{name}": shard for name, shard in self.shards.items()}
        self._optimizer_shards = {
            f"optimizer.{numbers[id(parameters[name])]}.": shard
            for name, shard in self.shards.items()
            if id(parameters[name]) in numbers
        }

    def gather(self, tensors: dict[str, Tensor]) -> Gathered:
        """Gather whole tensors in the first process. All processes must call this method.

        Small tensors are sent together, because each message has a fixed cost. The first process holds them in host
        memory. Large ones arrive while they are written, so that no process holds the proxies of all classes; the other
        processes wait in this method until theirs have arrived.

        Args:
            tensors: the tensors by their names in a checkpoint.
        """
        row_counts = {
            name: rows for name, value in tensors.items() if (rows := self._row_counts(name, value)) is not None
        }
        if not row_counts:
            return Gathered(tensors, {})
        group = self._group
        rank, size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
        parts = {name: _local(tensors[name]) for name in row_counts}
        large = sorted(name for name in parts if sum(row_counts[name]) * _row_bytes(parts[name]) > MAX_MESSAGE_BYTES)
        large_parts = {name: parts.pop(name) for name in large}
        if rank:
            for names in _bundles(parts):
                torch.distributed.send(_concatenated([_as_bytes(parts[name].cpu()) for name in names]), 0, group=group)
            for part in large_parts.values():
                for rows in part.split(_rows_per_message(part)) if len(part) else ():
                    torch.distributed.send(_as_bytes(rows.cpu()), 0, group=group)
            return Gathered(tensors, {})
        gathered = {
            name: torch.empty(sum(row_counts[name]), *part.shape[1:], dtype=part.dtype) for name, part in parts.items()
        }
        for name, tensor in gathered.items():
            tensor[: row_counts[name][0]] = parts[name]
        for sender in range(1, size):
            targets = {name: tensor.split(row_counts[name])[sender] for name, tensor in gathered.items()}
            for names in _bundles(targets):
                buffers = [_as_bytes(targets[name]) for name in names]
                message = buffers[0] if len(buffers) == 1 else torch.empty(sum(map(len, buffers)), dtype=torch.uint8)
                torch.distributed.recv(message, sender, group=group)
                for buffer, content in zip(buffers, message.split([len(buffer) for buffer in buffers]), strict=True):
                    buffer.copy_(content)
        streamed = {
            name: StreamedTensor(
                part.dtype, (sum(row_counts[name]), *part.shape[1:]), self._arriving(part, row_counts[name])
            )
            for name, part in large_parts.items()
        }
        return Gathered({name: value for name, value in (tensors | gathered).items() if name not in streamed}, streamed)

    def _arriving(self, part: Tensor, row_counts: list[int]) -> Iterator[Tensor]:
        """Yield the rows of the first process, and then those of the other processes as they arrive."""
        rows_per_message = _rows_per_message(part)
        yield from part.split(rows_per_message)
        for sender, count in enumerate(row_counts[1:], 1):
            for start in range(0, count, rows_per_message):
                rows = min(rows_per_message, count - start)
                message = torch.empty(rows, *part.shape[1:], dtype=part.dtype, device="cpu")
                torch.distributed.recv(_as_bytes(message), sender, group=self._group)
                yield message

    def local_part(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Cut this process's part out of the whole tensors of a checkpoint."""
        parts = {}
        for name, value in tensors.items():
            shard = self._shard_of(name, value)
            parts[name] = self._encoder_part(name, value) if shard is None else _cut(value, shard)
        return parts

    def is_part(self, parameter: Tensor) -> bool:
        """Whether other processes hold other parts of this parameter."""
        return is_dtensor(parameter) or any(parameter is shard for shard in self.parameters)

    def norm(self, replicated: Tensor, sharded: Tensor) -> Tensor:
        """Return the norm of all gradients.

        Args:
            replicated: norms of the gradients that are the same in all processes.
            sharded: norms of this process's parts of sharded gradients.
        """
        squared = sharded.square().sum()
        torch.distributed.all_reduce(squared, group=self._group)
        return (replicated.square().sum() + squared).sqrt()

    def _row_counts(self, name: str, value: Any) -> list[int] | None:
        """Return how many rows of a tensor each process holds; None if the tensor is not sharded."""
        if shard := self._shard_of(name, value):
            size = torch.distributed.get_world_size(shard.group)
            rows_per_class = len(value) // (shard.stop - shard.start)
            shards = [Shard.of(shard.classes, rank, size) for rank in range(size)]
            return [(part.stop - part.start) * rows_per_class for part in shards]
        return _dtensor_rows(len(value), value.device_mesh.size()) if is_dtensor(value) and value.ndim else None

    def _shard_of(self, name: str, value: Tensor) -> Shard | None:
        """Return the class shard of a tensor of the criterion or of its optimiser state; None if it has none."""
        if name in self._criterion_shards:
            return self._criterion_shards[name]
        if not value.ndim:  # the optimiser's count of steps
            return None
        return next((shard for prefix, shard in self._optimizer_shards.items() if name.startswith(prefix)), None)

    def _encoder_part(self, name: str, value: Tensor) -> Tensor:
        """Return this process's part of a tensor of the encoder as a DTensor; return other tensors unchanged."""
        key = ".".join(name.split(".")[:2]) if name.startswith("optimizer.") else name
        parameter: Any = self._encoder.get(key)
        if parameter is None or not value.ndim:
            return value
        from torch.distributed.tensor import DTensor

        mesh, local = parameter.device_mesh, parameter.to_local()
        part = value.split(_dtensor_rows(len(value), mesh.size()))[mesh.get_local_rank()].to(local.device)
        assert part.shape == local.shape, (name, part.shape, local.shape)
        return DTensor.from_local(
            part, mesh, parameter.placements, run_check=False, shape=value.shape, stride=value.stride()
        )


def local_tensor(parameter: Tensor) -> Tensor:
    """Return this process's part of a DTensor with its gradient; return any other parameter unchanged."""
    if not is_dtensor(parameter):
        return parameter
    detached: Any = parameter.detach()
    part: Tensor = detached.to_local()
    gradient: Any = parameter.grad
    part.grad = None if gradient is None else gradient.to_local()
    return part


def is_dtensor(value: Any) -> bool:
    """Whether a value is a DTensor, a part of a larger tensor."""
    return hasattr(value, "full_tensor")


def _dtensor_rows(rows: int, size: int) -> list[int]:
    """Return the number of rows of a DTensor in each process: equal, but fewer or none in the last processes."""
    max_rows = -(-rows // size)
    return [max(0, min(max_rows, rows - max_rows * rank)) for rank in range(size)]


def _local(value: Any) -> Tensor:
    """Return this process's part of a tensor, detached."""
    return (value.to_local() if is_dtensor(value) else value).detach()


def _as_bytes(part: Tensor) -> Tensor:
    return part.contiguous().view(-1).view(torch.uint8)


def _row_bytes(part: Tensor) -> int:
    return math.prod(part.shape[1:]) * part.element_size()


def _rows_per_message(part: Tensor) -> int:
    return max(1, MAX_MESSAGE_BYTES // _row_bytes(part))


def _concatenated(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _bundles(parts: dict[str, Tensor]) -> Iterator[list[str]]:
    """Yield the names of the tensors in each message; an empty tensor is in none."""
    names: list[str] = []
    size = 0
    for name, part in parts.items():
        if names and size + part.nbytes > MAX_MESSAGE_BYTES:
            yield names
            names, size = [], 0
        if part.nbytes:
            names, size = [*names, name], size + part.nbytes
    if names:
        yield names


def _cut(value: Tensor, shard: Shard) -> Tensor:
    """Return the rows of the classes of a shard."""
    per_class = len(value) // shard.classes
    return value[shard.start * per_class : shard.stop * per_class].clone()
