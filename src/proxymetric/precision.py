"""Matrix products in the full precision of their inputs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def full_precision(device: str = "cpu") -> Iterator[None]:
    """No TF32, no bfloat16, no autocast of this type of device, whatever the training around has switched on."""
    backends = (getattr(module, "matmul", None) for module in (torch.backends.cuda, torch.backends.mkldnn))
    switches: list[Any] = [backend for backend in backends if hasattr(backend, "fp32_precision")]
    before = [switch.fp32_precision for switch in switches]
    legacy = None if switches else torch.get_float32_matmul_precision()  # refused by a torch that has the switches
    for switch in switches:
        switch.fp32_precision = "ieee"
    if legacy is not None:
        torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device, enabled=False), torch.no_grad():
            yield
    finally:
        for switch, value in zip(switches, before):
            switch.fp32_precision = value
        if legacy is not None:
            torch.set_float32_matmul_precision(legacy)
