"""The device to compute on."""

from __future__ import annotations

import os

import torch


def pick_device(name: str) -> torch.device:
    """Return the device with a given name.

    Args:
        name: "cpu", "cuda", "cuda:0", or "auto": this process's GPU if there is one, else the CPU. Apple's GPU ("mps")
            is refused, because it lacks the float64 that scores are computed in.

    Raises:
        ValueError: the device does not exist or is not supported.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        name = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device: got {name!r}, expected auto, cpu, cuda or cuda:0") from None
    if device.type not in ("cpu", "cuda"):
        reason = "; Apple's GPU lacks the float64 that scores are computed in" if device.type == "mps" else ""
        raise ValueError(f"device: got {name!r}, expected auto, cpu, cuda or cuda:0{reason}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device: got {name!r}, but this machine has no CUDA device; expected cpu or auto")
    return device


def accelerator() -> tuple[str, int] | None:
    """Return the name and the memory in bytes of this process's GPU; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(pick_device("cuda"))
    return properties.name, properties.total_memory
