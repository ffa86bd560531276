"""Compares a training step of Proxy-ISA, VCPA and CCP with the same step of Proxy-Anchor, in the same run.

    python benchmarks/step.py                    small sizes on the CPU, one thread; some minutes
    python benchmarks/step.py --device cuda      ResNet-50, 224 pixels, batch 180; about a minute

A step is that of the trainer: forward pass under its autocast, backward pass, clipping, optimiser, commit. The images
are already on the device, and the network has random weights. The sides take turns, round by round. Times are medians
over the rounds: wall-clock time on a GPU, CPU time of the process on a CPU. Each method is in its most expensive phase:
Proxy-ISA with memory and filter on and 55,000 rows in the queue, VCPA with ten Newton steps, CCP after its first picks.
The work of CCP between its problems is timed separately: picking from a pool of given embeddings, and picking including
the pass that embeds the pool. The results are written to results/step-cpu.json or results/step-cuda.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import RESULTS, about, clock_mhz, spread, write
from torch import Tensor, nn

from proxymetric.core.normalisation import unit
from proxymetric.core.pieces import Batch
from proxymetric.runs.assemble import RunContext, make_encoder, make_learner
from proxymetric.runs.recipe import check
from proxymetric.system.watcher import Silent
from proxymetric.training.process_group import ProcessGroup
from proxymetric.training.trainer import Trainer

TARGETS = {"proxy-isa": 1.05, "vcpa": 1.10, "ccp": 1.08}
"""targets: the largest ratio of a step's time to that of Proxy-Anchor; the papers report 1.38 (VCPA) and 1.08 (CCP)"""
MEMORY = 55_000
SEATS, POOL = 8, 12
BETWEEN = 25
"""steps between two evaluations of CCP"""
TOGETHER = 256
"""images of a pool that are embedded in one batch, as in a run"""


class Side(NamedTuple):
    """A method with its arguments, and the sides that its step is compared with."""

    method: str
    arguments: dict[str, Any]
    against: tuple[str, ...] = ()


PAIRS = "margin-contrastive"
SIDES = {
    "proxy-anchor": Side("proxy-anchor", {}),
    "proxy-isa": Side("proxy-isa", {"memory": MEMORY}, ("proxy-anchor",)),
    "vcpa": Side("vcpa", {"newton_steps": 10}, ("proxy-anchor",)),
    PAIRS: Side(PAIRS, {}),
    # With patience 1, one evaluation without a better score ends a problem, which starts the picking.
    "ccp": Side("ccp", {"base": PAIRS, "per_class": SEATS, "pool": POOL, "patience": 1}, ("proxy-anchor", PAIRS)),
    "ccp of proxy-anchor": Side(
        "ccp", {"base": "proxy-anchor", "per_class": SEATS, "pool": POOL, "patience": 1}, ("proxy-anchor",)
    ),
}


class Setting(NamedTuple):
    """The settings that all sides of a comparison share."""

    backbone: str
    size: int
    batch: int
    dim: int
    classes: int
    sides: tuple[str, ...] = tuple(SIDES)
    frozen_bn: bool = True
    pooling: str = "avg+max"
    steps: int = 8
    """steps in a round"""


TWO = ("proxy-anchor", "proxy-isa")
SETTINGS = {
    "cuda": {
        "resnet50, 100 classes": Setting("resnet50", 224, 180, 512, 100),
        "resnet50, 11318 classes": Setting("resnet50", 224, 180, 512, 11_318, TWO),
    },
    "cpu": {
        "resnet50, 100 classes": Setting("resnet50", 64, 16, 512, 100, steps=1),
        "small, 100 classes": Setting("small", 32, 128, 128, 100, frozen_bn=False, pooling="auto", steps=5),
    },
}


class Given:
    """A feed of given batches."""

    advice = ""

    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        return iter(self.batches[start:])


class Running:
    """One side of the comparison: a trainer with its batches."""

    def __init__(self, side: Side, setting: Setting, batches: list[Batch], device: torch.device, folder: Path) -> None:
        torch.manual_seed(0)
        recipe = check(
            {
                "method": side.method,
                "view": {"size": setting.size},
                "encoder": {
                    "backbone": setting.backbone,
                    "dim": setting.dim,
                    "pooling": setting.pooling,
                    "freeze_bn": setting.frozen_bn,
                    "pretrained": False,
                },
                "loss": side.arguments,
                "train": {"batch": setting.batch, "lr": 1e-4, "proxy_lr": 1e-2, "warmup": 0, "decay": "none"},
            }
        )
        encoder = make_encoder(recipe)
        for module in encoder.modules():
            # Residual branches whose last BatchNorm starts at zero would leave most of the network without gradients.
            if isinstance(module, nn.BatchNorm2d) and not bool(module.weight.any()):
                nn.init.constant_(module.weight, 0.25)
        context = RunContext(recipe, device, ProcessGroup(), Silent(), {})
        self.learner = make_learner(context, encoder, [setting.batch] * setting.classes)
        criterion = self.learner.criterion
        self.trainer = Trainer(self.learner, Given(batches), recipe.train, folder, Silent(), device=device)
        self.trainer.epoch = 10  # an epoch in which memory and filter of Proxy-ISA are on
        self.trainer._begin_epoch()
        self._batches = itertools.cycle(batches)
        if side.method == "proxy-isa":
            rows = unit(torch.randn(MEMORY, setting.dim, device=device))
            of = torch.randint(setting.classes, (MEMORY,), device=device)
            weighting: Any = criterion.objective.weighting
            weighting.queue.remember(rows, of)
        if side.method == "ccp":
            criterion.boundary(0.0, lambda count: grouped(setting.classes, count, setting.dim, device))

    def step(self) -> None:
        self.trainer._count(self.trainer.stepper.advance([next(self._batches)]))

    def check(self) -> None:
        """Check that the timed steps were complete: none skipped, a full memory, an active proximal term."""
        criterion = self.learner.criterion
        self.trainer._count(self.trainer.stepper.finish())
        assert self.trainer.skipped == 0
        assert criterion.step == self.trainer.step > 0
        weighting = getattr(criterion.objective, "weighting", None)
        assert weighting is None or len(weighting.queue) == MEMORY
        assert criterion.name != "ccp" or float(criterion.terms["proximal"]) > 0

    def held_mb(self) -> float:
        """Return the MB that the side holds between steps, without gradients: weights, moments, memories."""
        own = [*self.learner.parameters(), *self.learner.buffers()]
        state = self.trainer.optimizer.state.values()
        own += [value for each in state for value in each.values() if isinstance(value, Tensor)]
        return sum(value.numel() * value.element_size() for value in own) / 2**20


def grouped(classes: int, count: int, dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return `count` random embeddings of each class, and their labels."""
    labels = torch.arange(classes, device=device).repeat_interleave(count)
    return torch.randn(len(labels), dim, device=device), labels


def pictures(count: int, setting: Setting, device: torch.device) -> Tensor:
    return torch.randint(256, (count, 3, setting.size, setting.size), dtype=torch.uint8, device=device)


def clock(device: torch.device) -> float:
    """Return the seconds of a clock: CPU time, or on a GPU wall-clock time after synchronising."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def spent_ms(act: Callable[[], object], device: torch.device, times: int = 1) -> float:
    start = clock(device)
    for _ in range(times):
        act()
    return 1000 * (clock(device) - start) / times


def extra_mb(act: Callable[[], object], device: torch.device) -> float:
    """Return the peak of the memory during `act`, in MB above what was held before."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        act()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - held) / 2**20
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        act()
    assert profiler.profiler is not None
    found = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(found, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(changes, initial=0)) / 2**20


def kernels(act: Callable[[], object], device: torch.device) -> int | None:
    """Count the kernels and copies on the GPU; None on a CPU, or if the profiler cannot see them."""
    if device.type != "cuda":
        return None
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profiler:
        act()
        torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA
    return sum(event.device_type == cuda for event in profiler.events() or ()) or None


def projections(running: Running, setting: Setting, device: torch.device, repeats: int) -> dict[str, Any]:
    """Time the picks of CCP: from given embeddings, and including the pass that computes the embeddings."""
    encoder, criterion = running.learner.encoder, running.learner.criterion
    given = grouped(setting.classes, POOL, setting.dim, device)
    images = pictures(TOGETHER, setting, device)

    @torch.no_grad()
    def embedded(count: int) -> tuple[Tensor, Tensor]:
        encoder.eval()
        sizes = [len(part) for part in given[1].split(TOGETHER)]
        vectors = torch.cat([encoder(images[:size]).float() for size in sizes])
        running.trainer._to_training()
        return vectors, given[1]

    def once(pool: Callable[[int], tuple[Tensor, Tensor]]) -> float:
        criterion.boundary(1.0, pool)  # a better score, so nothing is picked
        before = criterion.figures()["problem"]
        spent = spent_ms(lambda: criterion.boundary(0.0, pool), device)
        assert criterion.figures()["problem"] == before + 1
        return spent

    once(lambda count: given)
    ways: dict[str, tuple[Callable[[int], tuple[Tensor, Tensor]], int]] = {
        "given embeddings": (lambda count: given, repeats),
        f"with the embedding of {len(given[1])} images": (embedded, 1 if device.type == "cpu" else repeats),
    }
    if device.type == "cuda":
        once(embedded)  # loads the kernels
    return {name: statistics.median(once(pool) for _ in range(times)) for name, (pool, times) in ways.items()}


def compared(setting: Setting, device: torch.device, rounds: int, folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    batches = [
        Batch(pictures(setting.batch, setting, device), torch.randint(setting.classes, (setting.batch,), device=device))
        for _ in range(4)
    ]
    running = {name: Running(SIDES[name], setting, batches, device, folder) for name in setting.sides}
    precision = str(running["proxy-anchor"].trainer.stepper.precision or torch.float32)
    result: dict[str, Any] = dict(setting._asdict(), rounds=rounds, precision=precision.removeprefix("torch."))
    for side in running.values():
        for _ in range(5 if device.type == "cuda" else 1):
            side.step()
    spent: dict[str, list[float]] = {name: [] for name in running}
    for turn in range(rounds):
        for name in list(running)[:: 1 if turn % 2 == 0 else -1]:
            spent[name].append(spent_ms(running[name].step, device, setting.steps))
    medians = {name: statistics.median(found) for name, found in spent.items()}
    result["sides"] = {}
    for name, side in running.items():
        side.check()
        side.trainer.optimizer.zero_grad(set_to_none=True)
        extra, held = extra_mb(side.step, device), side.held_mb()
        found: dict[str, Any] = {"step_ms": round(medians[name], 3), "rounds_ms": [round(x, 3) for x in spent[name]]}
        found["spread_ms"] = spread(spent[name])
        for other in SIDES[name].against:
            each = sorted(mine / theirs for mine, theirs in zip(spent[name], spent[other], strict=True))
            found[f"times {other}"] = round(medians[name] / medians[other], 4)
            found[f"times {other}, lowest and highest round"] = [round(each[0], 4), round(each[-1], 4)]
        found |= {"held_mb": round(held, 1), "peak_mb": round(held + extra, 1), "kernels": kernels(side.step, device)}
        result["sides"][name] = found
        print(f"{setting.backbone}, {setting.classes} classes, {name}: {json.dumps(found)}", flush=True)
    if "ccp" in running:
        costs = projections(running["ccp"], setting, device, 5)
        result["projection"] = {
            name: {"ms": round(ms, 3), f"share of {BETWEEN} steps": round(ms / (BETWEEN * medians["ccp"]), 4)}
            for name, ms in costs.items()
        }
        print(json.dumps(result["projection"]), flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=None, help="default: 7 on a GPU, 9 on a CPU")
    parser.add_argument("--threads", type=int, default=1, help="number of CPU threads, with --device cpu")
    parser.add_argument("--only", choices=sorted({name for each in SETTINGS.values() for name in each}), default=None)
    parser.add_argument("--batch", type=int, default=None, help="images in a batch; default: that of the setting")
    parser.add_argument(
        "--out", type=Path, default=None, help="JSON file; settings that it has from an earlier run stay"
    )
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # as in a run
    else:
        torch.set_num_threads(options.threads)
    rounds = options.rounds or (7 if device.type == "cuda" else 9)
    begun, file = time.perf_counter(), options.out or RESULTS / f"step-{options.device}.json"
    record = about("step", options.device)
    record["targets"] = {f"{name} times proxy-anchor": most for name, most in TARGETS.items()}
    record["settings"] = json.loads(file.read_text())["settings"] if file.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        for name, setting in SETTINGS[options.device].items():
            if options.only not in (None, name):
                continue
            if options.batch is not None:
                setting, name = setting._replace(batch=options.batch), f"{name}, batches of {options.batch}"
            found = compared(setting, device, rounds, Path(folder))
            record["settings"][name] = {"commit": record["commit"]} | found  # settings of earlier runs stay in the file
            record["clock_mhz_during"] = clock_mhz()
            record["seconds"] = round(time.perf_counter() - begun, 1)
            write(file, record)
    print(f"written to {file}; {record['seconds']} s")


if __name__ == "__main__":
    main()
