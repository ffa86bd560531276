"""Compares proxy losses over very many classes with those of pytorch-metric-learning, in the same run.

    python benchmarks/losses.py                          1k, 11k, 100k and a million classes on the CPU; half an hour
    python benchmarks/losses.py --classes 1000 11000     some of them

A step computes the loss of 128 embeddings of 512 dimensions on one thread, and its gradients for embeddings and
proxies. Each measurement runs in a separate process; the sides take turns, round by round. The time of a side is the
median of the CPU times of its steps in all rounds. The memory of a side is the peak of its first step above the memory
that the process held before (proxies and libraries), as the median over the rounds; it includes the gradient of the
proxies on every side. Both libraries have the same proxies, and their losses are compared. A side that needs more than
--memory is stopped and recorded as failed.

The sides are: proxymetric with its defaults ("auto"); proxymetric without a budget for similarities, so that they are
recomputed; its plain definition; the peer, pytorch-metric-learning; and only the three matrix products that every side
needs, written to memory that is already allocated. SoftTriple has ten centres for each class and no regulariser in both
libraries; the peer's Proxy-NCA is the Proxy-NCA++ of proxymetric. The results are written to results/losses-cpu.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

BATCH, DIM = 128, 512
SIZES = (1_000, 11_000, 100_000, 1_000_000)
PLAN = {2_000: (5, 30), 20_000: (5, 7), 200_000: (3, 2), 20_000_000: (2, 1)}
"""largest number of proxies -> number of rounds, and of timed steps of one process in a round"""
PLAIN = 200_000
"""largest number of proxies for which the plain definition is measured"""
CHUNK = 1024
"""rows of proxies in one product of the side "products\""""


class Case(NamedTuple):
    """A loss: its name and arguments in proxymetric and in the peer, and the sides that are measured."""

    method: str
    arguments: dict[str, Any]
    peer: str
    peers: dict[str, Any]
    per_class: int = 1
    sides: tuple[str, ...] = ("proxymetric", "proxymetric, recomputed", "proxymetric, plain", "peer", "products")
    largest: int = SIZES[-1]


CASES = {
    "proxy-anchor": Case(
        "proxy-anchor", {}, "ProxyAnchorLoss", {"margin": 0.1, "alpha": 32},
        sides=("proxymetric", "proxymetric, plain", "peer", "products"),
    ),
    "proxy-nca": Case("proxy-nca++", {"temperature": 1 / 18}, "ProxyNCALoss", {"softmax_scale": 9}),
    # Ten centres for each of a million classes are 20 GB, and their gradient is another 20 GB.
    "soft-triple": Case(
        "soft-triple", {"per_class": 10, "tau": 0.0}, "SoftTripleLoss",
        {"centers_per_class": 10, "la": 20, "gamma": 0.1, "margin": 0.01}, per_class=10, largest=100_000,
    ),
}  # fmt: skip
TARGETS = {
    "proxy-anchor": {"time": (0.60, (1_000, 11_000, 100_000)), "memory": (0.25, (100_000,))},
    "proxy-nca": {"time": (0.80, SIZES)},
    "soft-triple": {"time": (0.80, SIZES)},
}
"""the largest share of the peer's time or memory, and the numbers of classes for which it is the target"""


def megabytes(field: str) -> float:
    """Return VmRSS or VmHWM of this process in MB."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def prepared(side: str, case: Case, classes: int) -> tuple[Callable[[], Tensor | None], Tensor]:
    """Return a function that runs a step of one side, and its proxies."""
    torch.manual_seed(0)
    x, y = torch.randn(BATCH, DIM, requires_grad=True), torch.randint(classes, (BATCH,))
    rows = classes * case.per_class
    if side == "products":
        vectors, grad = torch.randn(rows, DIM), torch.zeros(rows, DIM)
        queries, in_queries = x.detach(), torch.zeros(BATCH, DIM)

        def products() -> None:
            for some, out in zip(vectors.split(CHUNK), grad.split(CHUNK), strict=True):
                s = some @ queries.T
                torch.mm(s, queries, out=out)
                in_queries.addmm_(s.T, some)

        return products, vectors
    if side == "peer":
        import pytorch_metric_learning.losses as peers

        module: nn.Module = getattr(peers, case.peer)(classes, DIM, **case.peers)
        proxies = getattr(module, "proxies", None)
        vectors = module.fc.data.T if proxies is None else proxies.data
    else:
        import proxymetric as pm

        module = pm.method(case.method, classes=classes, dim=DIM, **case.arguments)
        vectors = module.objective.source.vectors.data
    for some in range(0, rows, CHUNK):
        vectors[some : some + CHUNK] = torch.randn(min(CHUNK, rows - some), DIM)

    def step() -> Tensor:
        x.grad = None
        module.zero_grad(set_to_none=True)
        loss = module(x, y)
        loss.backward()
        if side != "peer":
            module.discard()
        return loss

    return step, vectors


def child(side: str, name: str, classes: int, steps: int, memory: int) -> dict[str, Any]:
    """Return one measurement."""
    from proxymetric.ops import using

    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    ways = {"proxymetric, recomputed": {"impl": "chunked", "budget": 0}, "proxymetric, plain": {"impl": "plain"}}
    try:
        with using(**ways.get(side, {"impl": "auto"})):
            prepared(side, CASES[name], 8)[0]()  # imports modules and starts thread pools
            step, _ = prepared(side, CASES[name], classes)
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak
            held = megabytes("VmRSS")
            loss = step()
            found: dict[str, Any] = {"extra_mb": megabytes("VmHWM") - held, "seconds": []}
            for _ in range(steps):
                start = time.process_time()
                step()
                found["seconds"].append(time.process_time() - start)
    except RuntimeError as error:
        if "allocate" not in str(error):
            raise
        return {"failed": f"more than {memory / 2**30:.1f} GiB"}
    return found | {"loss": None if loss is None else loss.item()}


def measure(side: str, name: str, classes: int, steps: int, memory: int) -> dict[str, Any]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--child", side, name, str(classes), str(steps), str(memory)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    print(f"{name}, {classes} classes, {side}: {json.dumps(summary([found]))}", flush=True)
    return found


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    failed = [run["failed"] for run in runs if "failed" in run]
    if failed:
        return {"failed": failed[0]}
    seconds = [each for run in runs for each in run["seconds"]]
    return {
        "seconds": round(statistics.median(seconds), 5),
        "lowest and highest": [round(min(seconds), 5), round(max(seconds), 5)],
        "extra_mb": round(statistics.median(run["extra_mb"] for run in runs), 1),
        "loss": runs[0]["loss"],
    }


def compared(name: str, classes: int, rounds: int | None, memory: int) -> dict[str, Any]:
    """Measure all sides of one loss at one size, and compute their ratios."""
    case = CASES[name]
    rows = classes * case.per_class
    planned, steps = next(plan for most, plan in PLAN.items() if rows <= most)
    sides_here = [side for side in case.sides if side != "proxymetric, plain" or rows <= PLAIN]
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in sides_here}
    for _ in range(rounds or planned):
        for side, found in runs.items():
            if not (found and "failed" in found[-1]):
                found.append(measure(side, name, classes, steps, memory))
    sides = {side: summary(found) for side, found in runs.items()}
    result: dict[str, Any] = {"per_class": case.per_class, "rounds": rounds or planned, "steps": steps}
    result |= {"gradient_mb": round(rows * DIM * 4 / 2**20, 1), "sides": sides}
    mine, peer, least = sides["proxymetric"], sides["peer"], sides["products"]
    result["share of the products alone"] = round(least["seconds"] / mine["seconds"], 4)
    if "failed" not in peer:
        difference = abs(mine["loss"] - peer["loss"]) / abs(peer["loss"])
        assert difference < 1e-4, (name, mine["loss"], peer["loss"])
        ratios = {"time": mine["seconds"] / peer["seconds"], "memory": mine["extra_mb"] / peer["extra_mb"]}
        result["of the peer's"] = {what: round(ratio, 4) for what, ratio in ratios.items()}
        result["relative difference of the losses"] = difference
        result["targets met"] = {
            what: bool(ratios[what] <= most) for what, (most, at) in TARGETS[name].items() if classes in at
        }
    return result


def machine() -> dict[str, Any]:
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = re.search(r"model name\s*:\s*(.+)", info)
    versions = {"python": platform.python_version()}
    versions |= {name: version(name) for name in ("torch", "pytorch-metric-learning")}
    return {
        "processor": model[1] if model else platform.processor(),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "threads": 1,
        "versions": versions,
    }


def available() -> int:
    """Return the bytes of memory that are available."""
    found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    assert found is not None
    return int(found[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--losses", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--classes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=None, help="default: 5 to 2, by size")
    parser.add_argument("--memory", type=float, default=None, help="GiB of one process; default: 0.7 of what is free")
    parser.add_argument("--out", type=Path, default=None, help="JSON file to write")
    parser.add_argument("--child", nargs=5, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        side, name, *numbers = options.child
        return print(json.dumps(child(side, name, *map(int, numbers))))
    memory = int(0.7 * available() if options.memory is None else options.memory * 2**30)
    begun = time.perf_counter()
    record: dict[str, Any] = {"benchmark": "losses", "device": "cpu", "batch": BATCH, "dim": DIM}
    record |= {"memory_limit_gib": round(memory / 2**30, 1), "machine": machine()}
    record["targets"] = {
        name: {what: {"at most": most, "classes": at} for what, (most, at) in of.items()}
        for name, of in TARGETS.items()
    }
    record["losses"] = {
        name: {
            f"{classes} classes": compared(name, classes, options.rounds, memory)
            for classes in options.classes
            if classes <= CASES[name].largest
        }
        for name in options.losses
    }
    record["seconds"] = round(time.perf_counter() - begun, 1)
    file = options.out or Path(__file__).parent / "results" / "losses-cpu.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
