"""Compares the time and memory of a training step of every tuning of a vision transformer with full fine-tuning.

    python benchmarks/tuning.py                    a tiny ViT on the CPU, to check that the benchmark runs
    python benchmarks/tuning.py --device cuda      ViT-S/16, 224 pixels, batches of 32, 64 and 256, bfloat16

A step is that of the trainer: forward pass under its autocast, backward pass, optimiser, commit. The images are on the
device, and the weights are random. Every side runs without compilation ("eager") and with `train.compile` ("recorded":
torch.compile, and CUDA graphs that launch all kernels of a pass together); some sides also run with torch.compile alone
("compiled"). "mlp again" recomputes the hidden layers of the MLPs in the backward pass; "checkpointing" recomputes
everything but the tokens between blocks.

Each side runs in a separate process. The processes prepare their sides at the same time and then run their steps one at
a time, in turns, round by round. Times are medians over the rounds. Memory is the peak of the memory reserved on the
device and, for sides that are not recorded, also the peak of the memory in use. Both are measured twice: from the first
step on, including compilation and the trial of kernels, and in later steps ("settled"), after unused memory was freed.
In addition, the memory of VPTSP is measured with few and with many classes.

The results are written to results/tuning-cpu.json or results/tuning-cuda.json, again after each batch size.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import statistics
import tempfile
import time
import traceback
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import RESULTS, about, clock_mhz, write
from step import Given, extra_mb, spent_ms

from proxymetric.core.pieces import Batch
from proxymetric.runs.assemble import RunContext, make_encoder, make_learner
from proxymetric.runs.recipe import check
from proxymetric.system.watcher import Silent
from proxymetric.training.lookahead import Lookahead
from proxymetric.training.process_group import ProcessGroup
from proxymetric.training.trainer import Trainer

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
"""number of training classes of Stanford Online Products"""


class Setting(NamedTuple):
    """The settings that all sides of a comparison share."""

    backbone: str
    size: int
    dim: int
    classes: int
    batches: tuple[int, ...]
    steps: int
    """steps in a round"""


SETTINGS = {
    "cuda": Setting("vit_small_patch16_224", 224, 384, 100, (32, 64, 256), 8),
    "cpu": Setting("test_vit", 32, 64, 10, (16,), 2),
}


Side = tuple[str, str]
"""a key of SIDES and one of KINDS"""
KINDS = ("eager", "compiled", "recorded")
ALONE = (FULL, "vpt", "vptsp-g", "vptsp-g, mlp again", "vptsp-g, checkpointing")
"""sides that are also compiled without being recorded"""


class Running:
    """One side of the comparison: a trainer with its batches."""

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
        learner = make_learner(
            RunContext(recipe, device, ProcessGroup(), Silent(), {}), make_encoder(recipe), [2] * setting.classes
        )
        if kind == "compiled":
            learner.encoder.compile_steps()
        self.trainer = Trainer(learner, Given(batches), recipe.train, folder, Silent(), device=device)
        self.trainer._begin_epoch()
        self._batches = Lookahead(itertools.cycle(batches), learner.criterion)

    def step(self) -> None:
        self.trainer._count(self.trainer.stepper.advance([next(self._batches)], self._batches.announce))


def made(
    side: Side, setting: Setting, batches: list[Batch], device: torch.device, folder: Path
) -> tuple[Running, dict[str, float]]:
    """Return a side after its first steps, and its peak memory in MB, including weights and optimiser state."""
    if device.type != "cuda":
        running = Running(side, setting, batches, device, folder)
        running.step()
        return running, {"memory_mb": extra_mb(running.step, device)}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    running = Running(side, setting, batches, device, folder)
    found = {}
    for when in ("", "settled "):
        for _ in range(6):
            running.step()
        torch.cuda.synchronize()
        found[f"{when}memory_mb"] = (torch.cuda.max_memory_reserved() - before[0]) / 2**20
        if side[1] != "recorded":
            found[f"{when}in use_mb"] = (torch.cuda.max_memory_allocated() - before[1]) / 2**20
        release(device)
        torch.cuda.reset_peak_memory_stats()
    return running, found


def some_batches(setting: Setting, batch: int, device: torch.device) -> list[Batch]:
    """Return two batches with two images per class, as for VPTSP: images on the device, labels in main memory."""
    torch.manual_seed(0)
    shape = (batch, 3, setting.size, setting.size)
    labels = [(torch.arange(batch) + shift) // 2 % setting.classes for shift in (0, batch // 2)]
    return [Batch(torch.randint(256, shape, dtype=torch.uint8, device=device), of) for of in labels]


def serve(line: Connection, side: Side, setting: Setting, device: torch.device) -> None:
    """Run the process of one side.

    A request with a batch size prepares the side and is answered with its memory. Any other request runs the steps of a
    round and is answered with their time in ms. The request None ends the process.
    """
    settle(device)
    running: Running | None = None
    with tempfile.TemporaryDirectory() as folder:
        while (asked := line.recv()) is not None:
            try:
                if "batch" in asked:
                    running = None
                    torch.compiler.reset()
                    release(device)
                    batches, begun = some_batches(setting, asked["batch"], device), time.perf_counter()
                    running, found = made(side, setting, batches, device, Path(folder))
                    line.send(found | {"seconds": round(time.perf_counter() - begun, 1)})
                else:
                    assert running is not None
                    spent_ms(running.step, device, 2)
                    line.send({"ms": spent_ms(running.step, device, setting.steps), "skipped": running.trainer.skipped})
            except Exception:
                running = None
                line.send({"failed": traceback.format_exc(limit=-3)})
            if side[1] != "recorded":
                release(device)  # so that the next side can use the memory


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # as in a run
    else:
        torch.set_num_threads(1)


def release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def answered(line: Connection) -> dict[str, Any]:
    """Return the answer of a side, or a failure if its process has died."""
    try:
        return line.recv()
    except EOFError:
        return {"failed": "the process died"}


def ready(lines: dict[Side, Connection], batch: int) -> dict[Side, dict[str, Any]]:
    """Prepare all sides and return their memory.

    Sides that are compiled are prepared at the same time. Eager sides, which are fast, are prepared one by one, because
    they need the memory of the device.
    """
    asked = sorted(lines, key=lambda side: side[1] == "eager")
    found = {}
    for side in asked:
        lines[side].send({"batch": batch})
        if side[1] == "eager":
            found[side] = answered(lines[side])
    return {side: found.get(side) or answered(line) for side, line in lines.items()}


def compared(lines: dict[Side, Connection], batch: int, rounds: int) -> dict[str, Any]:
    """Measure all sides at one batch size, and compute their ratios to full fine-tuning."""
    memory = ready(lines, batch)
    for side, found in memory.items():
        print(f"batch {batch}, {', '.join(side)}: ready, {json.dumps(found)}", flush=True)
    spent: dict[Side, list[float]] = {side: [] for side, found in memory.items() if "failed" not in found}
    skipped = {}
    for side in list(spent) * rounds:
        if "failed" in memory[side]:
            continue
        lines[side].send({})
        answer = answered(lines[side])
        if "failed" in answer:
            memory[side] = answer
        else:
            spent[side].append(answer["ms"])
            skipped[side] = answer["skipped"]
    times = {side: statistics.median(spent[side]) for side, found in memory.items() if "failed" not in found}
    figures: dict[str, Any] = {}
    for side, found in memory.items():
        if "failed" in found:
            figures[", ".join(side)] = found
            continue
        against = [(FULL, kind) for kind in KINDS if (FULL, kind) in times]
        figures[", ".join(side)] = {
            "step_ms": round(times[side], 3),
            "lowest and highest round": [round(min(spent[side]), 3), round(max(spent[side]), 3)],
            **{f"times full, {other[1]}": round(times[side] / times[other], 4) for other in against},
            **{key: round(value, 1) for key, value in found.items()},
            **{
                f"{key.removesuffix('_mb')} times full, eager": round(value / memory[FULL, "eager"][key], 4)
                for key, value in found.items()
                if key.endswith("_mb")
            },
            "skipped": skipped[side],
        }
    for word, each in figures.items():
        print(f"batch {batch}, {word}: {json.dumps(each)}", flush=True)
    return figures


def by_classes(setting: Setting, device: torch.device, folder: Path) -> dict[str, Any]:
    """Measure the memory of VPTSP for few and for many classes, and explain the difference."""
    few, many, batch = setting.classes, MANY, setting.batches[len(setting.batches) // 2]
    memory = {}
    for classes in (few, few, many):  # the first run also pays for the libraries' own memory, so `few` runs twice
        sized = setting._replace(classes=classes)
        running, taken = made(("vptsp-g", "eager"), sized, some_batches(sized, batch, device), device, folder)
        memory[classes] = taken.get("in use_mb", taken["memory_mb"])
        prompts = running.trainer.learner.criterion.row_tables()[0].values[0].numel()
        del running
        release(device)
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
    parser.add_argument(
        "--sides", nargs="*", choices=list(SIDES), default=list(SIDES), help="default: all; full is always included"
    )
    parser.add_argument("--out", type=Path, default=None, help="JSON file to write")
    parser.add_argument("--add", action="store_true", help="keep the results of other batches and sides in that file")
    options = parser.parse_args()
    device, setting = torch.device(options.device), SETTINGS[options.device]
    settle(device)
    kinds = KINDS if device.type == "cuda" else ("eager",)
    sides = [
        (side, kind)
        for kind in kinds
        for side in SIDES
        if side in (FULL, *options.sides) and (kind != "compiled" or side in ALONE)
    ]
    out = options.out or RESULTS / f"tuning-{options.device}.json"
    record: dict[str, Any] = {**about("tuning", options.device), **setting._asdict()}

    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")  # threads of each of the many processes
    context, lines, processes = get_context("spawn"), {}, []
    for side in sides:
        lines[side], theirs = context.Pipe()
        processes.append(context.Process(target=serve, args=(theirs, side, setting, device)))
        processes[-1].start()
        theirs.close()
    with tempfile.TemporaryDirectory() as folder:
        record["by classes"] = by_classes(setting, device, Path(folder))
        print(json.dumps(record["by classes"]), flush=True)
    release(device)
    known = json.loads(out.read_text()) if options.add and out.exists() else {}
    record["by batch"] = known.get("by batch", {})
    batches = options.batches or setting.batches
    full_by_batch: dict[str, Any] = {}
    named = list(dict.fromkeys(side for side, _ in sides))
    record["runs"] = [*known.get("runs", []), {"batches": batches, "sides": named, FULL: full_by_batch}]
    for batch in batches:
        found, before = compared(lines, batch, options.rounds), record["by batch"].get(str(batch), {})
        full = {side: each for side, each in found.items() if side.startswith(f"{FULL}, ")}
        full_by_batch[str(batch)] = full  # the ratios of a side refer to full fine-tuning in the same run
        if before and len(named) < len(SIDES):
            found = {side: each for side, each in found.items() if side not in full}
        record["by batch"][str(batch)] = before | found
        record["by batch"] = dict(sorted(record["by batch"].items(), key=lambda item: int(item[0])))
        record["clock_mhz_during"] = clock_mhz()
        write(out, record)
    for line in lines.values():
        line.send(None)
    for process in processes:
        process.join()
    print(f"written to {out}")


if __name__ == "__main__":
    main()
