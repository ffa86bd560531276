"""A checkpoint: one safetensors file with every tensor of a run and, in its header, everything else as JSON."""

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
    """Tensors by name, and JSON-able state.

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
    """where it was read from"""

    def write(self, file: Path) -> None:
        """Write to a temporary file and move it into place: a reader finds the old one or the new one, whole."""
        tensors = {name: value.detach().contiguous() for name, value in self.tensors.items()}
        try:
            with replacing(file) as temporary:
                save_tensors(temporary, tensors, {"state": json.dumps(self.state)})
        except NotSaved as error:
            raise NotSaved(f"{error}. When that is mended, go on with --resume") from error

    @classmethod
    def read(cls, file: Path) -> Checkpoint:
        try:
            with safe_open(str(file), "pt") as opened:
                state = json.loads((opened.metadata() or {}).get("state", "{}"))
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no dict
                return cls(tensors, state, file)
        except (OSError, SafetensorError, ValueError) as error:
            raise ValueError(f"{file} is not a checkpoint that can be read: {error}") from None

    def under(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names begin with `prefix`, without it."""
        return {name.removeprefix(prefix): v for name, v in self.tensors.items() if name.startswith(prefix)}

    def load_into(self, module: nn.Module, prefix: str, what: str) -> None:
        """Load strictly; a checkpoint of something else is refused with the first names that do not fit."""
        found, own = self.under(prefix), module.state_dict()
        wrong = [f"{name} is missing" for name in own if name not in found]
        wrong += [f"{name} is not known" for name in found if name not in own]
        wrong += [
            f"{name} is {tuple(found[name].shape)} and should be {tuple(own[name].shape)}"
            for name in own
            if name in found and found[name].shape != own[name].shape
        ]
        if wrong:
            more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            found_in = "the checkpoint" if self.file is None else self.file
            raise ValueError(f"{found_in} does not fit {what}: {'; '.join(wrong[:3])}{more}")
        module.load_state_dict(found)


def module_tensors(module: nn.Module, prefix: str) -> dict[str, Tensor]:
    return {prefix + name: value for name, value in module.state_dict().items()}


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's state, flat: `optimizer.<number of the parameter>.<name>`."""
    return {
        f"optimizer.{index}.{name}": torch.as_tensor(value)
        for index, entry in optimizer.state_dict()["state"].items()
        for name, value in entry.items()
        if value is not None
    }


def load_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """The inverse of `optimizer_tensors`; rates and groups stay as the recipe made them."""
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        index, _, key = name.partition(".")
        state.setdefault(int(index), {})[key] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    for parameter, entry in optimizer.state.items():
        for key, value in entry.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                # A file holds rows; fused kernels go through memory and take for granted that both lie alike.
                entry[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
