"""Matrix products in the full precision of their inputs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def training_precision(deterministic: bool, device: torch.device) -> Iterator[None]:
    """Set what torch computes a training with, and restore it afterwards: a user's own code goes on in this process.

    Args:
        deterministic: only deterministic algorithms, and float32 products as they are; else products on a GPU may use
            TF32.
        device: where the training computes.
    """
    was_deterministic, precision = torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(deterministic)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("highest" if deterministic else "high")
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_deterministic, warn_only=only_warned)
        if device.type == "cuda":
            torch.set_float32_matmul_precision(precision)


@contextmanager
def full_precision(device: str = "cpu") -> Iterator[None]:
    """Turn off TF32, bfloat16 products, autocast and gradients, whatever the surrounding training has turned on.

    Args:
        device: type of the device whose autocast is turned off, such as "cpu" or "cuda".

    Example:
        >>> with torch.autocast("cpu", torch.bfloat16), full_precision():
        ...     (torch.ones(1, 1) @ torch.ones(1, 1)).dtype
        torch.float32
    """
    backends = (getattr(module, "matmul", None) for module in (torch.backends.cuda, torch.backends.mkldnn))
    switches: list[Any] = [backend for backend in backends if hasattr(backend, "fp32_precision")]
    previous = [switch.fp32_precision for switch in switches]
    # Versions of torch that have these switches raise an error in the older function.
    legacy = None if switches else torch.get_float32_matmul_precision()
    for switch in switches:
        switch.fp32_precision = "ieee"
    if legacy is not None:
        torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device, enabled=False), torch.no_grad():
            yield
    finally:
        for switch, value in zip(switches, previous):
            switch.fp32_precision = value
        if legacy is not None:
            torch.set_float32_matmul_precision(legacy)
