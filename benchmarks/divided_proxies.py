"""Measures the main memory of each process with divided proxies (`train.shard`): at the start and for a checkpoint.

    python benchmarks/divided_proxies.py               CPU, a minute

torchrun starts the processes. Each makes the proxies of all classes and then keeps its part (`Criterion.shard`), makes
its part alone (`pm.method(..., shard=...)`), and writes a checkpoint with the others after a step of Adam. The peak of
the memory above what was held before is given as a multiple of the table of all proxies (4 C D bytes); a part is 1 / P
of it, and null is less than 1 MB. Results go to results/divided-proxies.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import common
import torch
from common import RESULTS

import proxymetric as pm
from proxymetric.encoders import build
from proxymetric.system.watcher import Silent
from proxymetric.training.learner import Learner
from proxymetric.training.options import TrainOptions
from proxymetric.training.process_group import ProcessGroup
from proxymetric.training.trainer import Trainer


class NoImages:
    """A feed of no batch: nothing is trained here."""

    def __len__(self) -> int:
        return 1

    def epoch(self, number: int, start: int = 0) -> Iterator[Any]:
        return iter(())


def tables(step: Callable[[], Any], table_mb: float) -> float | None:
    """The peak of the memory of a step above what is held before it, as a multiple of the table."""
    extra = common.peak_mb(common.Candidate(step, lambda: None), "cpu")
    return None if extra is None else round(extra / table_mb, 3)


def measure(classes: int, dim: int) -> None:
    """Measure the stages in this process of torchrun; the first process prints those of all as JSON."""
    torch.distributed.init_process_group("gloo")
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    table_mb = 4 * classes * dim / 2**20
    kept: list[Any] = []

    def make(shard: tuple[int, int] | None) -> None:
        torch.manual_seed(0)
        criterion = pm.method("proxy-anchor", classes=classes, dim=dim, shard=shard)
        kept[:] = [criterion if shard else criterion.shard(rank, size)]

    make((rank, size))  # what is loaded at the first call is not counted
    kept.clear()
    found = {"all proxies, then a part": tables(lambda: make(None), table_mb)}
    kept.clear()
    found["a part alone"] = tables(lambda: make((rank, size)), table_mb)
    with tempfile.TemporaryDirectory() as folder:
        learner = Learner(build("small", dim=dim, size=32), kept[0], world=size)
        options, world = TrainOptions(shard=True, warmup=0), ProcessGroup(rank, size)
        trainer = Trainer(learner, NoImages(), options, Path(folder), Silent(), world=world)
        trainer.curve.append({"epoch": 0, "step": 0})
        for parameter in learner.parameters():
            parameter.grad = torch.zeros_like(parameter)
        trainer.optimizer.step()
        for parameter in learner.parameters():
            parameter.grad = None
        found["a checkpoint"] = tables(trainer.save, table_mb)
        if not rank:
            size_mb = (Path(folder) / "last.safetensors").stat().st_size / 2**20
            found["size of the checkpoint"] = round(size_mb / table_mb, 3)
    everyone: list[Any] = [None] * size
    torch.distributed.all_gather_object(everyone, found)
    if not rank:
        print(json.dumps(everyone), flush=True)
    torch.distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", type=int, default=2_000_000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS / "divided-proxies.json")
    options = parser.parse_args()
    if "RANK" in os.environ:
        measure(options.classes, options.dim)
        return
    words = ["--classes", options.classes, "--dim", options.dim]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.processes}", __file__]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *torchrun, *map(str, words)], capture_output=True, text=True, env=environment
    )
    if done.returncode:
        sys.exit(done.stderr)
    record = common.about("divided_proxies", "cpu", threads=1) | {
        "classes": options.classes, "dim": options.dim,
        "table_mb": round(4 * options.classes * options.dim / 2**20, 1),
        "processes, in tables": json.loads(done.stdout.splitlines()[-1]),
    }  # fmt: skip
    common.write(options.out, record)
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
