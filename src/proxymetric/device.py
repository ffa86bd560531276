"""The device to compute on."""

from __future__ import annotations

import os

import torch


def pick_device(name: str) -> torch.device:
    """The device of this name.

    Args:
        name: "auto" (this process's GPU if there is one, else the CPU), "cpu", "cuda" (this process's GPU) or "cuda:0".

    Raises:
        ValueError: there is no such device.

    Example:
        >>> pick_device("cpu")
        device(type='cpu')
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        name = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device: got {name!r}, expected auto, cpu, cuda or cuda:0") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device: got {name!r}, but torch finds no CUDA device here, expected cpu or auto")
    return device


def accelerator() -> tuple[str, int] | None:
    """The name and the bytes of memory of this process's GPU; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(pick_device("cuda"))
    return properties.name, properties.total_memory
