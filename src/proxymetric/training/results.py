"""What a run leaves behind for comparison: one JSON with everything that could explain its numbers."""

from __future__ import annotations

import os
import platform
import resource
import sys
from importlib.metadata import version
from typing import Any

import torch

from proxymetric.encoders import tuned_parameters
from proxymetric.learner import Learner


def versions() -> dict[str, str]:
    names = ("proxymetric", "torch", "torchvision", "timm", "numpy", "safetensors")
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = version(name)
        except ImportError:
            found[name] = "not installed as a package"
    return found


def machine(device: torch.device) -> dict[str, Any]:
    about: dict[str, Any] = {"system": platform.system(), "processor": platform.machine(), "cores": os.cpu_count()}
    if device.type == "cuda":
        about["gpu"] = torch.cuda.get_device_name(device)
    return about


def peak_memory(device: torch.device) -> dict[str, int]:
    """Megabytes: of the process, and of the accelerator."""
    unit = 1024 if sys.platform == "darwin" else 1
    peak = {"process_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024 // unit}
    if device.type == "cuda":
        peak["device_mb"] = torch.cuda.max_memory_allocated(device) // 2**20
    return peak


def counts(learner: Learner, trained: int, rows: int = 0, elsewhere: int = 0) -> dict[str, Any]:
    """Parameters that are trained (row tables included), those there are, and the trained ones of each part.

    elsewhere: numbers of the proxies that other processes hold, which `trained` counts already.
    """
    encoder = {"head": sum(p.numel() for p in learner.encoder.head_parameters())}
    if not learner.frozen:
        encoder = tuned_parameters(learner.encoder)
    parts = encoder | learner.criterion.parts()
    parts["proxies"] = parts.get("proxies", 0) + elsewhere
    return {
        "trained": trained + rows,
        "total": sum(p.numel() for p in learner.parameters()) + rows + elsewhere,
        "parts": {part: count for part, count in parts.items() if count},
    }
