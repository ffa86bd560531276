"""What all benchmarks share: what their JSON says about the run, interleaved rounds, and atomic writes.

    python benchmarks/common.py                  print what a JSON would say about this machine

Every record has the same head (`about`): the commit and a digest of the source, the machine, the GPU with its clock
and driver, the versions, the precision of matrix products and the number of threads. Every measurement has the same
form (`Timing`): the median of the rounds, their quartiles, and the rounds themselves.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import gc
import hashlib
import importlib
import json
import os
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
PACKAGES = ("torch", "triton", "timm", "numpy", "pytorch-metric-learning", "faiss-cpu")
MIN_STEPS, ROUNDS, WARM_UP_STEPS = 50, 10, 3
"""steps of one candidate in all rounds, at least; rounds; steps before the first round"""


def _output(*command: str) -> str | None:
    """Return what a command prints; None if it is missing or fails."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def commit() -> dict[str, Any]:
    """Return the commit, whether tracked files differ from it, and a digest of the package's source.

    Without git, the commit is that of the variable BENCHMARK_COMMIT; the digest can be compared in any case.
    """
    digest = hashlib.sha256()
    for file in sorted((ROOT / "src").rglob("*.py")):
        digest.update(file.relative_to(ROOT).as_posix().encode() + b"\0" + file.read_bytes())
    found = _output("git", "rev-parse", "HEAD")
    changed = _output("git", "status", "--porcelain", "--untracked-files=no") if found else None
    return {
        "commit": found or os.environ.get("BENCHMARK_COMMIT"),
        "dirty": None if changed is None else bool(changed),
        "source_digest": digest.hexdigest()[:16],
    }


def stamped(found: dict[str, Any]) -> dict[str, Any]:
    """Return a measurement with its own commit, for a file whose measurements are made one by one.

    >>> sorted(stamped({"ms": 1.0}))
    ['commit', 'ms']
    """
    return found | {"commit": commit()["commit"]}


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of the packages that benchmarks use; None: not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = _version_of_copy(name)
    return found


def _version_of_copy(package: str) -> str | None:
    """The version that a copy of a package on PYTHONPATH says itself; None: there is no copy."""
    try:
        return getattr(importlib.import_module(package.replace("-", "_")), "__version__", None)
    except ImportError:
        return None


def clock_mhz() -> int | None:
    """Return the clock of the GPU's multiprocessors at this moment in MHz; None: no GPU, or it cannot be read."""
    if not torch.cuda.is_available():
        return None
    text = _output("nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits")
    found = re.match(r"\d+", text or "")
    return int(found[0]) if found else None


def processor() -> str:
    """Return the name of the processor; that of an ARM processor is known to `lscpu` alone."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = re.search(r"model name\s*:\s*(.+)", info) or re.search(r"Model name:\s*(.+)", _output("lscpu") or "")
    return model[1] if model else platform.processor() or platform.machine()


def machine(threads: int | None = None) -> dict[str, Any]:
    """Return what the benchmark ran on."""
    cuda = torch.cuda.is_available()
    return {
        "processor": processor(),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "threads": threads or torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "gpu_memory_gib": round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1) if cuda else None,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if cuda else None,
        "clock_mhz": clock_mhz(),
        "versions": versions(),
    }


def matmul_precision() -> str:
    """Return the precision of float32 products: "highest", "high" (TF32) or "medium", or that of the newer switch."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # the newer switch was used
        return str(torch.backends.cuda.matmul.fp32_precision)


def about(benchmark: str, device: str, threads: int | None = None) -> dict[str, Any]:
    """Return the head of a record."""
    return {
        "benchmark": benchmark,
        "device": device,
        **commit(),
        "machine": machine(threads),
        "matmul_precision": matmul_precision(),
    }


def write(file: Path, record: Mapping[str, Any]) -> None:
    """Write a record as JSON; a reader sees the old file or the whole new one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{os.getpid()}.part")
    temporary.write_text(json.dumps(record, indent=2) + "\n")
    os.replace(temporary, file)


def spread(values: list[float], digits: int = 4) -> dict[str, Any]:
    """Return the median, the quartiles, and the lowest and highest of some values.

    >>> spread([3.0, 1.0, 2.0])
    {'median': 2.0, 'quartiles': [1.5, 2.5], 'lowest and highest': [1.0, 3.0]}
    """
    quartiles = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {
        "median": round(statistics.median(values), digits),
        "quartiles": [round(quartiles[0], digits), round(quartiles[2], digits)],
        "lowest and highest": [round(min(values), digits), round(max(values), digits)],
    }


class Candidate(NamedTuple):
    """One side of a comparison."""

    step: Callable[[], Any]
    clear: Callable[[], Any]
    """frees what a step leaves behind, such as gradients"""


class Timing(NamedTuple):
    """The measurements of one candidate."""

    rounds: list[float]
    """milliseconds of a step in each round, by the wall clock"""
    cpu_rounds: list[float]
    """milliseconds of CPU time of a step in each round, summed over threads"""
    steps: int
    """steps in a round"""
    extra_mb: float | None
    """peak of the memory in a step above what was held before it, see `peak_mb`"""

    def record(self) -> dict[str, Any]:
        """Return the measurements for a JSON."""
        return {
            "ms": spread(self.rounds),
            "cpu_ms": spread(self.cpu_rounds),
            "rounds": [round(each, 4) for each in self.rounds],
            "steps": self.steps * len(self.rounds),
            "extra_mb": None if self.extra_mb is None else round(self.extra_mb, 2),
        }


def synchronise(device: str) -> None:
    """Wait until the GPU has finished."""
    if device == "cuda":
        torch.cuda.synchronize()


def release(device: str) -> None:
    """Free memory that nothing refers to."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def _block(step: Callable[[], Any], steps: int, device: str) -> tuple[float, float]:
    """Return the milliseconds of one step by the wall clock and of CPU time: a block is timed as a whole."""
    synchronise(device)
    start, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    synchronise(device)
    return 1000 * (time.perf_counter() - start) / steps, 1000 * (time.process_time() - cpu) / steps


def peak_mb(candidate: Candidate, device: str) -> float | None:
    """Return the peak of the memory of a step above what is held before it, in MB.

    On a GPU that is the memory of its tensors. On a CPU it is that of the process; None if the system does not tell it,
    if freed memory stays in the process (`returns_memory`), and below 1 MB, which cannot be told apart from the
    process's own.
    """
    candidate.clear()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        candidate.step()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - held) / 2**20
    gc.collect()
    try:
        is_seen = returns_memory()
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # returns what earlier steps freed
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    except OSError:
        return None
    before = resident_mb("VmRSS")
    candidate.step()
    extra = resident_mb("VmHWM") - before
    return extra if is_seen and extra >= 1 else None


@functools.cache
def returns_memory() -> bool:
    """Whether the allocator of torch returns freed memory to the system at once, so that a step's memory can be seen.

    torch for ARM processors has mimalloc, which keeps it for a while, unless the process is started with
    `MIMALLOC_PURGE_DELAY=0`; that makes steps slower.
    """
    array = torch.ones(16, 2**20)  # 64 MB
    held = resident_mb("VmRSS")
    del array
    array = torch.ones(4, 2**20)
    del array
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return held - resident_mb("VmRSS") > 60


def resident_mb(field: str) -> float:
    """Return VmRSS or VmHWM of this process in MB."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def interleaved(
    candidates: Mapping[str, Candidate],
    device: str,
    *,
    rounds: int = ROUNDS,
    min_steps: int = MIN_STEPS,
    seconds: float = 0.6,
    max_seconds: float | None = None,
) -> dict[str, Timing]:
    """Time candidates in turns: in each round every candidate runs a block of steps, in alternating order.

    A GPU is synchronised before and after a block, not between its steps: launches and Python count where they take
    longer than the GPU's work, as in training.

    Args:
        candidates: what is compared, by name.
        device: "cpu" or "cuda".
        rounds: number of rounds.
        min_steps: steps of each candidate in all rounds, at least.
        seconds: time of each candidate in all rounds, about; short steps are repeated more often than `min_steps`.
        max_seconds: upper limit of that time; a candidate with very long steps then has fewer than `min_steps`, but at
            least one in each of three rounds. None: no limit.

    Returns:
        The measurements of each candidate.
    """
    peaks, steps, longest = {}, {}, 0.0
    for name, candidate in candidates.items():
        for _ in range(WARM_UP_STEPS):
            once, _ = _block(candidate.step, 1, device)
        peaks[name] = peak_mb(candidate, device)
        steps[name] = max(-(-min_steps // rounds), min(round(1000 * seconds / rounds / once), 20 * min_steps // rounds))
        if max_seconds is not None:
            steps[name] = max(1, min(steps[name], int(1000 * max_seconds / rounds / once)))
        longest = max(longest, steps[name] * once / 1000)
    if max_seconds is not None:
        rounds = max(3, min(rounds, int(max_seconds / longest)))
    timings: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in candidates}
    gc.collect()
    for turn in range(rounds):
        for name in list(candidates)[:: 1 if turn % 2 == 0 else -1]:
            for values, value in zip(timings[name], _block(candidates[name].step, steps[name], device), strict=True):
                values.append(value)
            candidates[name].clear()
    return {name: Timing(*timings[name], steps[name], peaks[name]) for name in candidates}


def ratios(one: Timing, other: Timing, *, cpu: bool = False) -> dict[str, Any]:
    """Return the time of one candidate relative to another, round by round, and the ratio of their memory."""
    pairs = zip(one.cpu_rounds, other.cpu_rounds) if cpu else zip(one.rounds, other.rounds)
    found: dict[str, Any] = {"time": spread([mine / theirs for mine, theirs in pairs])}
    found["memory"] = round(one.extra_mb / other.extra_mb, 4) if one.extra_mb and other.extra_mb else None
    return found


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(json.dumps(about("common", "cuda" if torch.cuda.is_available() else "cpu"), indent=2))
