"""Matrix products in the full precision of their inputs."""

import platform
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
    switches = _switches("matmul")
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


def arithmetic(device: torch.device) -> str:
    """Describe how a device computes here: its kind, the precision of float32 products, and the version of torch.

    Example:
        >>> arithmetic(torch.device("cpu")).startswith(f"cpu {platform.machine()} torch {torch.__version__}")
        True
    """
    switches = [*_switches("matmul"), *_switches("conv")]
    precision = [str(switch.fp32_precision) for switch in switches] or [torch.get_float32_matmul_precision()]
    kind = f"{device.type} {platform.machine()}" if device.type == "cpu" else device.type
    return f"{kind} torch {torch.__version__} {' '.join(precision)}"


def _switches(products: str) -> list[Any]:
    """The settings of torch for the precision of "matmul" or "conv"; an empty list for older versions."""
    modules = (torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn)
    backends = (getattr(module, products, None) for module in modules)
    return [backend for backend in backends if hasattr(backend, "fp32_precision")]
