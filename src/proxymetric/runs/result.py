"""What a run leaves behind for comparison: one JSON with everything that could explain its numbers."""

from __future__ import annotations

import os
import platform
import re
import resource
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from proxymetric.encoders import tuned_parameters
from proxymetric.training.learner import Learner

SCHEMA = 2
"""of result.json. 1: up to 0.1.0, without protocol, commit and schema. 2: with them, and the last epoch in `papers`"""


def commit() -> str | None:
    """The commit that this package's files are of, with "+changes" where they differ from it; None if unknown.

    An export by `git archive` knows it from the file `commit.txt`, a checkout from git.
    """
    package = Path(__file__).resolve().parent.parent
    exported = package / "commit.txt"
    if exported.is_file() and re.fullmatch(r"[0-9a-f]{40}", exported.read_text().strip()):
        return exported.read_text().strip()
    if not (package.parent.parent / ".git").exists():
        return None
    try:
        head, changed = (
            subprocess.run(["git", *words], cwd=package, capture_output=True, text=True, timeout=10, check=True).stdout
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "."))
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{head.strip()}+changes" if changed.strip() else head.strip()


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
