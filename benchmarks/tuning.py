"""One training step of every tuning of a vision transformer, against full fine-tuning in the same run: time and memory.

    python benchmarks/tuning.py                    a tiny ViT on the CPU: does it run
    python benchmarks/tuning.py --device cuda      ViT-S/16, 224 pixels, batches of 32, 64 and 256, bfloat16

A step is the trainer's own: forward under its autocast, backward, optimiser, commit, with images on the device and
random weights; every side once as it is and once with `train.compile`. The sides take turns, round by round; times are
medians of the rounds, memory is the most that was held in a step. `checkpointing` keeps only the tokens between blocks
for the backward pass. Then, memory alone, VPTSP with few and with many classes. Writes results/tuning-cpu.json or
results/tuning-cuda.json beside this file.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
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


class Running:
    """One side, ready to step."""

    def __init__(
        self, side: str, compiled: bool, setting: Setting, batches: list[Batch], device: torch.device, folder: Path
    ) -> None:
        torch.manual_seed(0)
        method, tuning, arguments, checkpointing = SIDES[side]
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
                "train": TRAIN | {"compile": compiled},
            }
        )
        learner = make_learner(Desk(recipe, device, World(), Silent(), {}), make_encoder(recipe), setting.classes)
        self.trainer = Trainer(learner, Given(batches), recipe.train, folder, Silent(), device=device)
        self.trainer._begin_epoch()
        self._batches = itertools.cycle(batches)

    def step(self) -> None:
        self.trainer._step([next(self._batches)])


def made(
    side: str, compiled: bool, setting: Setting, batches: list[Batch], device: torch.device, folder: Path
) -> tuple[Running, float]:
    """A side after its first steps, and the most memory in MB that it held in a step, weights and state and all."""
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    running = Running(side, compiled, setting, batches, device, folder)
    for _ in range(4 if device.type == "cuda" else 1):
        running.step()
    if device.type != "cuda":
        return running, extra_mb(running.step, device)
    held = (torch.cuda.memory_allocated() - before) / 2**20
    return running, held + extra_mb(running.step, device)


def some_batches(setting: Setting, batch: int, device: torch.device) -> list[Batch]:
    """Two batches on the device, with two images of a class, as VPTSP has them; labels in main memory, as in a run."""
    torch.manual_seed(0)
    shape = (batch, 3, setting.size, setting.size)
    labels = [(torch.arange(batch) + shift) // 2 % setting.classes for shift in (0, batch // 2)]
    return [Batch(torch.randint(256, shape, dtype=torch.uint8, device=device), of) for of in labels]


def compared(
    setting: Setting, batch: int, sides: list[tuple[str, bool]], device: torch.device, rounds: int, folder: Path
) -> dict[str, Any]:
    batches = some_batches(setting, batch, device)
    torch.compiler.reset()
    running, memory = {}, {}
    for side in sides:
        begun = time.perf_counter()
        running[side], memory[side] = made(*side, setting, batches, device, folder)
        print(f"batch {batch}, {named(*side)}: first steps in {time.perf_counter() - begun:.0f} s", flush=True)
    spent: dict[tuple[str, bool], list[float]] = {name: [] for name in running}
    for _ in range(rounds):
        for name, side in running.items():
            spent[name].append(spent_ms(side.step, device, setting.steps))
    times = {name: statistics.median(found) for name, found in spent.items()}
    found = {}
    for name, side in running.items():
        against = {named(FULL, compiled): (FULL, compiled) for compiled in (False, True) if (FULL, compiled) in running}
        found[named(*name)] = {
            "step_ms": round(times[name], 3),
            "lowest and highest round": [round(min(spent[name]), 3), round(max(spent[name]), 3)],
            **{f"times {word}": round(times[name] / times[other], 4) for word, other in against.items()},
            "memory_mb": round(memory[name], 1),
            **{f"memory times {word}": round(memory[name] / memory[other], 4) for word, other in against.items()},
            "skipped": side.trainer.skipped,
        }
    for word, figures in found.items():
        print(f"batch {batch}, {word}: {json.dumps(figures)}", flush=True)
    return found


def named(side: str, compiled: bool) -> str:
    return f"{side}, compiled" if compiled else side


def by_classes(setting: Setting, device: torch.device, folder: Path) -> dict[str, Any]:
    """What VPTSP takes of the device for few and for many classes, and what the difference is made of."""
    few, many, batch = setting.classes, MANY, setting.batches[-1]
    memory = {}
    for classes in (few, many):
        sized = setting._replace(classes=classes)
        running, memory[classes] = made("vptsp-g", False, sized, some_batches(sized, batch, device), device, folder)
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
    parser.add_argument("--out", type=Path, default=None, help="JSON file to write")
    options = parser.parse_args()
    device, setting = torch.device(options.device), SETTINGS[options.device]
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # as a run has it
    else:
        torch.set_num_threads(1)
    record: dict[str, Any] = {"benchmark": "tuning", "machine": machine(torch.get_num_threads()), **setting._asdict()}
    kinds = (False, True) if device.type == "cuda" else (False,)
    sides = [(side, compiled) for compiled in kinds for side in SIDES if side in (FULL, *options.sides)]
    with tempfile.TemporaryDirectory() as folder:
        record["by batch"] = {
            str(batch): compared(setting, batch, sides, device, options.rounds, Path(folder))
            for batch in options.batches or setting.batches
        }
        record["by classes"] = by_classes(setting, device, Path(folder))
        print(json.dumps(record["by classes"]), flush=True)
    out = options.out or Path(__file__).parent / "results" / f"tuning-{options.device}.json"
    out.write_text(json.dumps(record, indent=2) + "\n")
    print(f"written to {out}")


if __name__ == "__main__":
    main()
