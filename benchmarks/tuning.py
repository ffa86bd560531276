"""One training step of every tuning of a vision transformer, against full fine-tuning in the same run: time and memory.

    python benchmarks/tuning.py                    a tiny ViT on the CPU: does it run
    python benchmarks/tuning.py --device cuda      ViT-S/16, 224 pixels, batches of 32, 64 and 256, bfloat16

A step is the trainer's own: forward under its autocast, backward, optimiser, commit, with images on the device and
random weights. The sides take turns, round by round; times are medians of the rounds, memory is the most that was held
in a step. `checkpointing` keeps only the tokens between blocks for the backward pass. Writes results/tuning-cpu.json or
results/tuning-cuda.json beside this file.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
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
SIDES: dict[str, tuple[str, Any, dict[str, Any], bool]] = {
    FULL: ("proxy-anchor", "full", PLAIN, False),
    "linear": ("proxy-anchor", "linear", PLAIN, False),
    "bitfit": ("proxy-anchor", "bitfit", PLAIN, False),
    "adapter": ("proxy-anchor", "adapter", PLAIN, False),
    "lora": ("proxy-anchor", "lora", PLAIN, False),
    "vpt": ("proxy-anchor", "vpt", PLAIN, False),
    "vptsp-m": ("vptsp-m", "vpt+bitfit", {}, False),
    "vptsp-g": ("vptsp-g", "vpt+bitfit", {}, False),
    "vptsp-g, checkpointing": ("vptsp-g", "vpt+bitfit", {}, True),
}
"""method, tuning, arguments of the method, checkpointing"""


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

    def __init__(self, side: str, setting: Setting, batches: list[Batch], device: torch.device, folder: Path) -> None:
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
                "train": {"lr": 1e-4, "proxy_lr": 1e-2, "warmup": 0, "decay": "none", "clip_value": "none"},
            }
        )
        learner = make_learner(Desk(recipe, device, World(), Silent(), {}), make_encoder(recipe), setting.classes)
        self.trainer = Trainer(learner, Given(batches), recipe.train, folder, Silent(), device=device)
        self.trainer._begin_epoch()
        self._batches = itertools.cycle(batches)

    def step(self) -> None:
        self.trainer._step([next(self._batches)])


def compared(setting: Setting, batch: int, device: torch.device, rounds: int, folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    labels = torch.arange(batch, device=device) // 2 % setting.classes  # two images of a class, as VPTSP has them
    shape = (batch, 3, setting.size, setting.size)
    batches = [Batch(torch.randint(256, shape, dtype=torch.uint8, device=device), labels) for _ in range(2)]
    running = {name: Running(name, setting, batches, device, folder) for name in SIDES}
    for side in running.values():
        for _ in range(4 if device.type == "cuda" else 1):
            side.step()
    spent: dict[str, list[float]] = {name: [] for name in running}
    for _ in range(rounds):
        for name, side in running.items():
            spent[name].append(spent_ms(side.step, device, setting.steps))
    times = {name: statistics.median(found) for name, found in spent.items()}
    memory = {name: extra_mb(side.step, device) for name, side in running.items()}
    found = {
        name: {
            "step_ms": round(times[name], 3),
            "times full": round(times[name] / times[FULL], 4),
            "lowest and highest round": [round(min(spent[name]), 3), round(max(spent[name]), 3)],
            "memory_mb": round(memory[name], 1),
            "memory times full": round(memory[name] / memory[FULL], 4),
            "skipped": side.trainer.skipped,
        }
        for name, side in running.items()
    }
    for name, side in found.items():
        print(f"batch {batch}, {name}: {json.dumps(side)}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=None, help="JSON file to write")
    options = parser.parse_args()
    device, setting = torch.device(options.device), SETTINGS[options.device]
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # as a run has it
    else:
        torch.set_num_threads(1)
    record: dict[str, Any] = {"benchmark": "tuning", "machine": machine(torch.get_num_threads()), **setting._asdict()}
    with tempfile.TemporaryDirectory() as folder:
        record["by batch"] = {
            str(batch): compared(setting, batch, device, options.rounds, Path(folder)) for batch in setting.batches
        }
    out = options.out or Path(__file__).parent / "results" / f"tuning-{options.device}.json"
    out.write_text(json.dumps(record, indent=2) + "\n")
    print(f"written to {out}")


if __name__ == "__main__":
    main()
