"""A checkpoint: one safetensors file with every tensor of a run; its header holds everything else as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from proxymetric.files import NotSaved, replacing, save_tensors


@dataclass
class Checkpoint:
    """Tensors by name, and other state that JSON can hold.

    Args:
        tensors: by name.
        state: everything else.
        file: the file that it was read from; None if it was not read from a file.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "last.safetensors"
        >>> Checkpoint({"a": torch.ones(2)}, {"step": 3}).write(file)
        >>> again = Checkpoint.read(file)
        >>> again.tensors["a"], again.state
        (tensor([1., 1.]), {'step': 3})
    """

    tensors: dict[str, Tensor]
    state: dict[str, Any]
    file: Path | None = None

    def write(self, file: Path) -> None:
        """Write the checkpoint in one move: a reader finds the old file or the new one, never a part.

        Raises:
            NotSaved: the file could not be written.
        """
        tensors = {name: value.detach().contiguous() for name, value in self.tensors.items()}
        try:
            with replacing(file) as temporary:
                save_tensors(temporary, tensors, {"state": json.dumps(self.state)})
        except NotSaved as error:
            raise NotSaved(f"{error}. Once this is fixed, continue with --resume") from error

    @classmethod
    def read(cls, file: Path) -> Checkpoint:
        """Read a checkpoint.

        Raises:
            ValueError: the file is not a checkpoint that can be read.
        """
        try:
            with safe_open(str(file), "pt") as opened:
                state = json.loads((opened.metadata() or {}).get("state", "{}"))
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no dict
                return cls(tensors, state, file)
        except (OSError, SafetensorError, ValueError) as error:
            raise ValueError(f"{file} is not a checkpoint that can be read: {error}") from None

    def under(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names start with `prefix`; the prefix is removed from the names."""
        return {name.removeprefix(prefix): value for name, value in self.tensors.items() if name.startswith(prefix)}

    def load_into(self, module: nn.Module, prefix: str, what: str) -> None:
        """Load the tensors under a prefix into a module; all names and shapes must fit.

        Args:
            module: to load into.
            prefix: of the tensor names.
            what: the module in words, for the error.

        Raises:
            ValueError: names or shapes do not fit; the message lists the first three.
        """
        stored, expected = self.under(prefix), module.state_dict()
        mismatches = [f"{name} is missing" for name in expected if name not in stored]
        mismatches += [f"{name} is not known" for name in stored if name not in expected]
        mismatches += [
            f"{name} is {tuple(stored[name].shape)} and should be {tuple(expected[name].shape)}"
            for name in expected
            if name in stored and stored[name].shape != expected[name].shape
        ]
        if mismatches:
            more = f" and {len(mismatches) - 3} more" if len(mismatches) > 3 else ""
            origin = "the checkpoint" if self.file is None else self.file
            raise ValueError(f"{origin} does not fit {what}: {'; '.join(mismatches[:3])}{more}")
        module.load_state_dict(stored)


def module_tensors(module: nn.Module, prefix: str) -> dict[str, Tensor]:
    """The tensors of a module's `state_dict`, with a prefix before their names."""
    return {prefix + name: value for name, value in module.state_dict().items()}


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The state of an optimiser as a flat dictionary: `optimizer.<number of the parameter>.<name>` -> tensor."""
    return {
        f"optimizer.{index}.{name}": torch.as_tensor(value)
        for index, entry in optimizer.state_dict()["state"].items()
        for name, value in entry.items()
        if value is not None
    }


def load_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Load what `optimizer_tensors` returned; learning rates and groups stay as they are.

    Args:
        optimizer: to load into.
        tensors: by name, without the prefix "optimizer.".
    """
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        index, _, key = name.partition(".")
        state.setdefault(int(index), {})[key] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    for parameter, entry in optimizer.state.items():
        for key, value in entry.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                # A file holds contiguous tensors, but fused kernels need state with the strides of its parameter.
                entry[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
