"""A checkpoint: one safetensors file with all tensors of a run; its header holds the other state as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from proxymetric.system.files import NotSaved, replacing
from proxymetric.system.tensor_files import StreamedTensor, read_tensors, write_tensors


@dataclass
class Checkpoint:
    """The tensors of a run by name, and its other state as JSON values.

    Args:
        tensors: the tensors by name.
        state: the other state, as values that JSON can represent.
        file: the file that the checkpoint was read from; None if it was created in memory.
        streamed: tensors that are written but never in memory as a whole, by name.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "last.safetensors"
        >>> Checkpoint({"a": torch.ones(2)}, {"step": 3}).write(file)
        >>> restored = Checkpoint.read(file)
        >>> restored.tensors["a"], restored.state
        (tensor([1., 1.]), {'step': 3})
    """

    tensors: dict[str, Tensor]
    state: dict[str, Any]
    file: Path | None = None
    streamed: Mapping[str, StreamedTensor] = field(default_factory=dict)

    def write(self, file: Path) -> None:
        """Write the checkpoint atomically: a reader sees either the old file or the complete new file.

        Raises:
            NotSaved: the file could not be written.
        """
        try:
            with replacing(file) as temporary:
                write_tensors(temporary, {**self.tensors, **self.streamed}, {"state": json.dumps(self.state)})
        except NotSaved as error:
            raise NotSaved(f"{error}. Once this is fixed, continue with --resume") from error

    @classmethod
    def read(cls, file: Path) -> Checkpoint:
        """Read a checkpoint.

        Raises:
            ValueError: the file is not a readable checkpoint.
        """
        try:
            tensors, header = read_tensors(file)
            state = json.loads(header.get("state", "{}"))
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ValueError(f"{file}: got a file that cannot be read ({reason}), expected a checkpoint") from None
        if not isinstance(state, dict):
            raise ValueError(f"{file}: got a damaged header, expected a checkpoint")
        return cls(tensors, state, file)

    def under(self, prefix: str) -> dict[str, Tensor]:
        """Return the tensors whose names start with `prefix`, with the prefix removed from their names."""
        return {name.removeprefix(prefix): value for name, value in self.tensors.items() if name.startswith(prefix)}

    def load_into(self, module: nn.Module, prefix: str, what: str) -> None:
        """Load the tensors under a prefix into a module; all names and shapes must match.

        Args:
            module: the module to load into.
            prefix: prefix of the tensor names.
            what: a description of the module for the error message.

        Raises:
            ValueError: names or shapes do not match; the message lists the first three mismatches.
        """
        stored, expected = self.under(prefix), module.state_dict()
        mismatches = [f"{name}: got no tensor, expected one" for name in expected if name not in stored]
        mismatches += [f"{name}: got an unknown tensor, expected none" for name in stored if name not in expected]
        mismatches += [
            f"{name}: got shape {tuple(stored[name].shape)}, expected {tuple(expected[name].shape)}"
            for name in expected
            if name in stored and stored[name].shape != expected[name].shape
        ]
        if mismatches:
            rest = f" and {len(mismatches) - 3} more" if len(mismatches) > 3 else ""
            origin = "the checkpoint" if self.file is None else self.file
            raise ValueError(f"{origin} does not fit {what}: {'; '.join(mismatches[:3])}{rest}")
        module.load_state_dict(stored)


def module_tensors(module: nn.Module, prefix: str) -> dict[str, Tensor]:
    """Return the tensors of a module's `state_dict`, with `prefix` prepended to their names."""
    return {prefix + name: value for name, value in module.state_dict().items()}


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the state of an optimiser as a flat dictionary: `optimizer.<parameter index>.<name>` -> tensor."""
    return {
        f"optimizer.{index}.{name}": torch.as_tensor(value)
        for index, entry in optimizer.state_dict()["state"].items()
        for name, value in entry.items()
        if value is not None
    }


def _optimizer_fault(optimizer: torch.optim.Optimizer, state: Mapping[int, Mapping[str, Tensor]]) -> str:
    """Say what is wrong in the state of an optimiser; empty if nothing is.

    All parameters of a group have the same names. A tensor has numbers of floating point: one, or as many as its
    parameter, in which some axes may have the length 1.
    """
    groups = [group["params"] for group in optimizer.param_groups]
    parameters = [parameter for group in groups for parameter in group]
    first = 0
    for group in groups:
        entries = {index: state[index] for index in range(first, first + len(group)) if index in state}
        names = {name for entry in entries.values() for name in entry}
        for index, entry in entries.items():
            if missing := sorted(names - entry.keys()):
                return f"optimizer.{index}.{missing[0]}: got no tensor, expected one"
        first += len(group)
    for index, entry in state.items():
        if not 0 <= index < len(parameters):
            return f"optimizer.{index}: got an unknown parameter, expected one of {len(parameters)}"
        shape = parameters[index].shape
        for name, value in entry.items():
            if not value.is_floating_point():
                return f"optimizer.{index}.{name}: got {value.dtype}, expected a type of floating point"
            fits = value.ndim == len(shape) and all(a in (1, b) for a, b in zip(value.shape, shape, strict=True))
            if value.ndim and not (fits and name != "step"):
                return f"optimizer.{index}.{name}: got shape {tuple(value.shape)}, expected {tuple(shape)}"
    return ""


def load_optimizer(
    optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], origin: str = "the checkpoint"
) -> None:
    """Load the tensors of `optimizer_tensors` into an optimiser; its parameter groups and learning rates do not change.

    Args:
        optimizer: the optimiser to load into.
        tensors: tensors by name, without the prefix "optimizer.".
        origin: where they come from, for the error message.

    Raises:
        ValueError: a tensor is missing or has another shape than the parameter allows.
    """
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        index, _, key = name.partition(".")
        state.setdefault(int(index) if index.isdecimal() else -1, {})[key] = value
    if fault := _optimizer_fault(optimizer, state):
        raise ValueError(f"{origin} does not fit the optimiser: {fault}")
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    for parameter, entry in optimizer.state.items():
        for key, value in entry.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                # Files hold contiguous tensors, but fused kernels need state with the strides of the parameter.
                entry[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
