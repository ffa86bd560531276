"""One training step of every tuning of a vision transformer, against full fine-tuning in the same run: time and memory.

    python benchmarks/tuning.py                    a tiny ViT on the CPU: does it run
    python benchmarks/tuning.py --device cuda      ViT-S/16, 224 pixels, batches of 32, 64 and 256, bfloat16

A step is the trainer's own: forward under its autocast, backward, optimiser, commit, with images on the device and
random weights. Every side runs as it is ("eager") and with `train.compile` ("recorded": torch.compile, and CUDA graphs
that start all kernels of a pass together); some also with torch.compile alone ("compiled"). The sides take turns, round
by round; times are medians of the rounds; memory is the most that was reserved on the device, beside it for what is not
recorded the most that was in use. "mlp again" computes the hidden layers of the MLPs once more in the backward pass,
"checkpointing" all but the tokens between blocks. Then, memory alone, VPTSP with few and with many classes. What is
compiled is compiled by many processes at once first, so that the one that measures finds it made (--no-warm: it is
not). Writes results/tuning-cpu.json or results/tuning-cuda.json beside this file.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from step import Given, extra_mb, machine, spent_ms

from proxymetric.recipe import check
from proxymetric.seam import Batch
from proxymetric.training.setup import Desk, make_encoder, make_learner
from proxymetric.training.trainer import Trainer
from proxymetric.training.watch import Silent
from proxymetric.training.world import World

FULL = "full"
PLAIN = {"positive_norm": "all"}
TRAIN = {"lr": 1e-4, "proxy_lr": 1e-2, "warmup": 0, "decay": "none", "clip_value": "none"}
SIDES: dict[str, tuple[str, Any, dict[str, Any], bool | str]] = {
    FULL: ("proxy-anchor", "full", PLAIN, False),
    "linear": ("proxy-anchor", "linear", PLAIN, False),
    "bitfit": ("proxy-anchor", "bitfit", PLAIN, False),
    "adapter": ("proxy-anchor", "adapter", PLAIN, False),
    "lora": ("proxy-anchor", "lora", PLAIN, False),
    "vpt": ("proxy-anchor", "vpt", PLAIN, False),
    "vptsp-m": ("vptsp-m", "vpt+bitfit", {}, False),
    "vptsp-g": ("vptsp-g", "vpt+bitfit", {}, False),
    "vptsp-g, mlp again": ("vptsp-g", "vpt+bitfit", {}, "mlp"),
    "vptsp-g, checkpointing": ("vptsp-g", "vpt+bitfit", {}, True),
}
"""method, tuning, arguments of the method, checkpointing"""
AT_ONCE = 13
"""processes that compile"""
MANY = 11_318
"""classes of Stanford Online Products"""


class Setting(NamedTuple):
    """What all sides of a comparison share."""

    backbone: str
    size: int
    dim: int
    classes: int
    batches: tuple[int, ...]
    steps: int
    """in a round"""


SETTINGS = {
    "cuda": Setting("vit_small_patch16_224", 224, 384, 100, (32, 64, 256), 8),
    "cpu": Setting("test_vit", 32, 64, 10, (16,), 2),
}


Side = tuple[str, str]
"""a key of SIDES and one of KINDS"""
KINDS = ("eager", "compiled", "recorded")
ALONE = (FULL, "vpt", "vptsp-g")
"""sides that are also compiled without being recorded"""


class Running:
    """One side, ready to step."""

    def __init__(self, side: Side, setting: Setting, batches: list[Batch], device: torch.device, folder: Path) -> None:
        torch.manual_seed(0)
        name, kind = side
        method, tuning, arguments, checkpointing = SIDES[name]
        recipe = check(
            {
                "method": method,
                "view": {"size": setting.size},
                "encoder": {
                    "backbone": setting.backbone,
                    "dim": setting.dim,
                    "layer_norm": True,
                    "tuning": tuning,
                    "checkpointing": checkpointing,
                    "pretrained": False,
                },
                "loss": arguments,
                "train": TRAIN | {"compile": kind == "recorded"},
            }
        )
        learner = make_learner(Desk(recipe, device, World(), Silent(), {}), make_encoder(recipe), setting.classes)
        if kind == "compiled":
            learner.encoder.compile_steps()
        self.trainer = Trainer(learner, Given(batches), recipe.train, folder, Silent(), device=device)
        self.trainer._begin_epoch()
        self._batches = itertools.cycle(batches)

    def step(self) -> None:
        self.trainer._step([next(self._batches)])


def made(
    side: Side, setting: Setting, batches: list[Batch], device: torch.device, folder: Path
) -> tuple[Running, dict[str, float]]:
    """A side after its first steps, and the most memory in MB that it took, weights and optimiser state and all."""
    if device.type != "cuda":
        running = Running(side, setting, batches, device, folder)
        running.step()
        return running, {"memory_mb": extra_mb(running.step, device)}
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    running = Running(side, setting, batches, device, folder)
    for _ in range(6):
        running.step()
    torch.cuda.synchronize()
    found = {"memory_mb": (torch.cuda.max_memory_reserved() - before[0]) / 2**20}
    if side[1] != "recorded":
        found["in use_mb"] = (torch.cuda.max_memory_allocated() - before[1]) / 2**20
    return running, found


def some_batches(setting: Setting, batch: int, device: torch.device) -> list[Batch]:
    """Two batches on the device, with two images of a class, as VPTSP has them; labels in main memory, as in a run."""
    torch.manual_seed(0)
    shape = (batch, 3, setting.size, setting.size)
    labels = [(torch.arange(batch) + shift) // 2 % setting.classes for shift in (0, batch // 2)]
    return [Batch(torch.randint(256, shape, dtype=torch.uint8, device=device), of) for of in labels]


def compared(
    setting: Setting, batch: int, sides: list[Side], device: torch.device, rounds: int, folder: Path
) -> dict[str, Any]:
    batches = some_batches(setting, batch, device)
    running, memory = {}, {}
    for side in sides:
        begun = time.perf_counter()
        running[side], memory[side] = made(side, setting, batches, device, folder)
        print(f"batch {batch}, {', '.join(side)}: first steps in {time.perf_counter() - begun:.0f} s", flush=True)
    spent: dict[Side, list[float]] = {side: [] for side in running}
    for _ in range(rounds):
        for side, each in running.items():
            spent[side].append(spent_ms(each.step, device, setting.steps))
    times = {side: statistics.median(found) for side, found in spent.items()}
    found = {}
    for side, each in running.items():
        against = [(FULL, kind) for kind in KINDS if (FULL, kind) in running]
        found[", ".join(side)] = {
            "step_ms": round(times[side], 3),
            "lowest and highest round": [round(min(spent[side]), 3), round(max(spent[side]), 3)],
            **{f"times full, {other[1]}": round(times[side] / times[other], 4) for other in against},
            **{key: round(value, 1) for key, value in memory[side].items()},
            "memory times full, eager": round(memory[side]["memory_mb"] / memory[FULL, "eager"]["memory_mb"], 4),
            "skipped": each.trainer.skipped,
        }
    for word, figures in found.items():
        print(f"batch {batch}, {word}: {json.dumps(figures)}", flush=True)
    return found


def warm(batch: int, sides: list[Side]) -> None:
    """Have other processes compile what is compiled: torch keeps it on disk."""
    waiting = [side for side in sides if side[1] != "eager"]
    command = [sys.executable, __file__, "--device", "cuda", "--no-warm", "--batches", str(batch), "--only"]
    while waiting:
        now, waiting = waiting[:AT_ONCE], waiting[AT_ONCE:]
        for process in [subprocess.Popen([*command, *side], stdout=subprocess.DEVNULL) for side in now]:
            process.wait()


def by_classes(setting: Setting, device: torch.device, folder: Path) -> dict[str, Any]:
    """What VPTSP takes of the device for few and for many classes, and what the difference is made of."""
    few, many, batch = setting.classes, MANY, setting.batches[len(setting.batches) // 2]
    memory = {}
    for classes in (few, many):
        sized = setting._replace(classes=classes)
        running, taken = made(("vptsp-g", "eager"), sized, some_batches(sized, batch, device), device, folder)
        memory[classes] = taken.get("in use_mb", taken["memory_mb"])
        prompts = running.trainer.learner.criterion.row_tables()[0].values[0].numel()
        del running
        gc.collect()
    more, number = many - few, 4 / 2**20
    arrays = {"one (C, D) array": more * setting.dim * number, "one (B, C) array": more * batch * number}
    lasting = 5 * arrays["one (C, D) array"]
    return {
        "batch": batch,
        "memory_mb": {str(classes): round(value, 1) for classes, value in memory.items()},
        "difference_mb": round(memory[many] - memory[few], 1),
        "free proxies, their gradient and two moments, stored proxies, mb": round(lasting, 1),
        **{f"{name}, mb": round(value, 1) for name, value in arrays.items()},
        "class prompts, their gradient and two moments, if they lay on the device, mb": round(
            4 * more * prompts * number, 1
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, nargs="*", default=None, help="instead of 32, 64 and 256")
    parser.add_argument("--sides", nargs="*", choices=list(SIDES), default=list(SIDES), help="full always is one")
    parser.add_argument("--only", nargs=2, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--warm", action=argparse.BooleanOptionalAction, default=True, help="compile beforehand")
    parser.add_argument("--out", type=Path, default=None, help="JSON file to write")
    options = parser.parse_args()
    device, setting = torch.device(options.device), SETTINGS[options.device]
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # as a run has it
    else:
        torch.set_num_threads(1)
    batches = options.batches or setting.batches
    kinds = KINDS if device.type == "cuda" else ("eager",)
    sides = [
        (side, kind)
        for kind in kinds
        for side in SIDES
        if side in (FULL, *options.sides) and (kind != "compiled" or side in ALONE)
    ]
    record: dict[str, Any] = {"benchmark": "tuning", "machine": machine(torch.get_num_threads()), **setting._asdict()}
    with tempfile.TemporaryDirectory() as folder:
        if options.only:
            made(tuple(options.only), setting, some_batches(setting, batches[0], device), device, Path(folder))
            return
        record["by batch"] = {}
        for batch in batches:
            if options.warm and device.type == "cuda":
                warm(batch, sides)
            record["by batch"][str(batch)] = compared(setting, batch, sides, device, options.rounds, Path(folder))
            gc.collect()
        record["by classes"] = by_classes(setting, device, Path(folder))
        print(json.dumps(record["by classes"]), flush=True)
    out = options.out or Path(__file__).parent / "results" / f"tuning-{options.device}.json"
    out.write_text(json.dumps(record, indent=2) + "\n")
    print(f"written to {out}")


if __name__ == "__main__":
    main()
