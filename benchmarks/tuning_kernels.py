"""Profiles a recorded training step of VPTSP, VPT and full fine-tuning of a ViT: the time of its kernels, by kind.

    python benchmarks/tuning_kernels.py --device cuda                        ViT-S/16, 224 pixels, batches of 64 and 256
    python benchmarks/tuning_kernels.py --device cuda --batches 256 --sides full
    python benchmarks/tuning_kernels.py --out FILE                           a tiny ViT on the CPU: check that it runs

The sides and their steps are those of benchmarks/tuning.py. A side first runs steps without the profiler, whose time is
recorded, and then some with it. Kernels are grouped by their names (`KINDS`). Where the time of the kernels is close to
the time of the step, the GPU bounds the step; where it is much smaller, launching the kernels does. Results are added
to results/tuning-kernels-cuda.json after every side.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, about, clock_mhz, stamped, write
from step import spent_ms
from torch.profiler import ProfilerActivity, profile
from tuning import FULL, SETTINGS, SIDES, Running, Setting, release, settle, some_batches

KINDS = {
    "attention": ("flash", "fmha", "attention", "scaled_dot_product"),
    "matrix products": ("nvjet", "gemm", "cutlass", "splitk", "xmma", "mm", "linear", "convolution"),
    "elementwise": ("triton_poi",),
    "reductions": ("triton_per", "triton_red"),
    "optimiser": ("multi_tensor", "adam"),
    "copies": ("memcpy", "memset", "copy"),
}
"""kinds of kernels, and words in the names of their kernels; the first kind with a word in a name counts"""
OTHER = "other"
WARM_UP = 24
"""steps before the first that is timed; by then everything is compiled and recorded"""


def kind_of(kernel: str) -> str:
    """Return the kind of a kernel.

    >>> kind_of("nvjet_sm90_tst_192x192_64x4_1x2_h_bz_coopB_bias_TNN"), kind_of("triton_red_fused__to_copy_add_mul_sum")
    ('matrix products', 'reductions')
    """
    name = kernel.lower()
    if name.startswith("triton_"):  # such names list the operations that were fused
        name = name[: len("triton_xxx")]
    return next((kind for kind, words in KINDS.items() if any(word in name for word in words)), OTHER)


def profiled(side: str, setting: Setting, batch: int, device: torch.device, folder: Path, steps: int) -> dict[str, Any]:
    """Return the time of a step, and the time and number of its kernels of each kind."""
    on_gpu = device.type == "cuda"
    kind = "recorded" if on_gpu else "eager"
    running = Running((side, kind), setting, some_batches(setting, batch, device), device, folder)
    for _ in range(WARM_UP if on_gpu else 1):
        running.step()
    step_ms = spent_ms(running.step, device, 5 * steps)
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as watch:
        for _ in range(steps):
            running.step()
        if on_gpu:
            torch.cuda.synchronize()
    kinds: dict[str, dict[str, float]] = defaultdict(lambda: {"ms": 0.0, "launches": 0.0})
    for event in watch.key_averages():
        microseconds = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        found = kinds[kind_of(event.key)]
        found["ms"] += microseconds / 1000 / steps
        found["launches"] += event.count / steps
    ordered = sorted(kinds.items(), key=lambda item: -item[1]["ms"])
    return {
        "step_ms": round(step_ms, 2),
        "kernels_ms": round(sum(found["ms"] for found in kinds.values()), 2),
        "kinds": {kind: {key: round(value, 2) for key, value in found.items()} for kind, found in ordered},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--batches", type=int, nargs="+", default=None)
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=[FULL, "vpt", "vptsp-g"])
    parser.add_argument("--steps", type=int, default=4, help="profiled steps")
    parser.add_argument("--out", type=Path, default=None, help="JSON file to add to")
    options = parser.parse_args()
    device, setting = torch.device(options.device), SETTINGS[options.device]
    settle(device)
    out = options.out or RESULTS / f"tuning-kernels-{options.device}.json"
    known = json.loads(out.read_text()) if out.is_file() else {}
    record: dict[str, Any] = {**about("tuning_kernels", options.device), **setting._asdict()}
    record["by batch"] = known.get("by batch", {})
    for batch in options.batches or ((64, 256) if device.type == "cuda" else setting.batches):
        for side in options.sides:
            with tempfile.TemporaryDirectory() as folder:
                found = stamped(profiled(side, setting, batch, device, Path(folder), options.steps))
            record["by batch"].setdefault(str(batch), {})[side] = found
            record["clock_mhz_during"] = clock_mhz()
            print(f"batch {batch}, {side}: {json.dumps(found)}", flush=True)
            write(out, record)
            torch.compiler.reset()
            release(device)


if __name__ == "__main__":
    main()
