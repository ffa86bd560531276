"""Compares losses with those of pytorch-metric-learning on the CPU, in the same run.

    python benchmarks/losses.py                          both parts; an hour
    python benchmarks/losses.py --parts pairs            every loss that both libraries have, at small and middle sizes
    python benchmarks/losses.py --parts many             1k, 11k, 100k and a million classes; half an hour
    python benchmarks/losses.py --parts many --classes 1000 11000     some of them

Part "pairs": all losses of `pairs.py` on one and on two threads, in a process for each number of threads. The libraries
take turns, round by round, with at least 50 steps of each, fewer if a step takes longer than --cell-seconds allows.
The ratio is the median of the ratios of the rounds: of CPU times on one thread, of wall-clock times on more.

Part "many": a step computes the loss of 128 embeddings of 512 dimensions on one thread, and its gradients for
embeddings and proxies. Each measurement runs in a separate process; the sides take turns, round by round. The time of a
side is the median of the CPU times of its steps in all rounds. The memory of a side is the peak of its first step above
the memory that the process held before (proxies and libraries), as the median over the rounds; it includes the gradient
of the proxies on every side. Both libraries have the same proxies, and their losses are compared. A side that needs
more than --memory is stopped and recorded as failed.

The sides are: proxymetric with its defaults ("auto"); proxymetric without a budget for similarities, so that they are
recomputed; its plain definition; the peer, pytorch-metric-learning; and only the three matrix products that every side
needs, written to memory that is already allocated. SoftTriple has ten centres for each class and no regulariser in both
libraries; the peer's Proxy-NCA is the Proxy-NCA++ of proxymetric.

The results are written to results/losses-cpu.json after every loss and size; a part that is not run keeps its results.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import RESULTS, ROUNDS, about, release, resident_mb, stamped, write
from pairs import PAIRS, cell, size_name, table, text
from torch import Tensor, nn

BATCH, DIM = 128, 512
SIZES = (1_000, 11_000, 100_000, 1_000_000)
PLAN = {2_000: (5, 30), 20_000: (5, 7), 200_000: (3, 2), 20_000_000: (2, 1)}
"""largest number of proxies -> number of rounds, and of timed steps of one process in a round"""
PLAIN = 200_000
"""largest number of proxies for which the plain definition is measured"""
PAIR_SIZES = ((32, 10), (32, 1_000), (128, 100), (128, 1_000), (128, 11_318))
PAIR_BATCHES = (32, 128, 512)
PAIR_TARGET = 0.8
"""sizes of part "pairs" (batch and classes; batch of the pair losses), and the largest ratio of the times"""
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
            held = resident_mb("VmRSS")
            loss = step()
            found: dict[str, Any] = {"extra_mb": resident_mb("VmHWM") - held, "seconds": []}
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


def available() -> int:
    """Return the bytes of memory that are available."""
    found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    assert found is not None
    return int(found[1]) * 1024


def pairs(threads: int, options: argparse.Namespace) -> None:
    """Measure the losses of both libraries with that number of threads, and add the results to the file."""
    torch.set_num_threads(threads)
    record = json.loads(options.out.read_text())
    part = record["pairs"]
    cells = part.setdefault(f"{threads} threads", {})
    sizes, batches, dim = (PAIR_SIZES, PAIR_BATCHES, DIM) if not options.tiny else (((8, 6),), (8,), 16)
    timing = {"seconds": 0.0 if options.tiny else 0.5, "max_seconds": options.cell_seconds}
    plan = [(name, *size) for size in sizes for name in options.losses if PAIRS[name].has_proxies]
    plan += [(name, batch, 0) for batch in batches for name in options.losses if not PAIRS[name].has_proxies]
    for name, batch, classes in plan:
        found = cell(
            PAIRS[name], batch, classes, dim, "cpu", torch.float32, ("ours", "peer"), cpu=threads == 1,
            rounds=options.rounds or ROUNDS, **timing,
        )  # fmt: skip
        release("cpu")
        size = size_name(batch, classes)
        cells.setdefault(name, {})[size] = stamped(found)
        part["targets"]["missed"] = missed(part)
        write(options.out, record)
        print(f"{threads} threads, {name}, {size}: {found.get('failed') or text(found)}", flush=True)
    print(table(cells, f"{threads} threads"))


def missed(part: dict[str, Any]) -> dict[str, Any]:
    """Return the ratios above the target, and the cells without a ratio."""
    found = {}
    for threads in (key for key in part if key.endswith(" threads")):
        for name, sizes in part[threads].items():
            for size, one in sizes.items():
                ratio = one["of the peer's"]["time"]["median"] if "of the peer's" in one else None
                if ratio is None or ratio > PAIR_TARGET:
                    found[f"{threads}, {name}, {size}"] = ratio or one
    return found


def run_pairs(record: dict[str, Any], options: argparse.Namespace) -> None:
    """Run part "pairs": a process for each number of threads adds to the file."""
    head = about("losses", "cpu") | {
        "dim": DIM,
        "rounds": options.rounds or ROUNDS,
        "cell_seconds": options.cell_seconds,
    }
    before = record.get("pairs", {})
    is_here = before.get("machine", {}).get("processor") == head["machine"]["processor"]
    cells = {key: value for key, value in before.items() if is_here and key.endswith(" threads")}
    record["pairs"] = head | {"targets": {"at most": PAIR_TARGET, "missed": missed(cells)}} | cells
    write(options.out, record)
    for threads in options.threads:
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        command = [sys.executable, __file__, *sys.argv[1:], "--pairs-child", str(threads)]
        subprocess.run(command, env=environment, check=True)
    record["pairs"] = json.loads(options.out.read_text())["pairs"]


def run_many(record: dict[str, Any], options: argparse.Namespace) -> None:
    """Run part "many"."""
    memory = int(0.7 * available() if options.memory is None else options.memory * 2**30)
    record |= about("losses", "cpu", threads=1) | {"batch": BATCH, "dim": DIM}
    record["memory_limit_gib"] = round(memory / 2**30, 1)
    record["targets"] = {
        name: {what: {"at most": most, "classes": at} for what, (most, at) in of.items()}
        for name, of in TARGETS.items()
    }
    record["losses"] = {}
    for name in options.many_losses:
        for classes in options.classes:
            if classes <= CASES[name].largest:
                found = compared(name, classes, options.rounds, memory)
                record["losses"].setdefault(name, {})[f"{classes} classes"] = found
                write(options.out, record)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=["pairs", "many"], default=["pairs", "many"])
    parser.add_argument("--losses", nargs="+", choices=list(PAIRS), default=list(PAIRS), help='of part "pairs"')
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help='of part "pairs"')
    parser.add_argument(
        "--cell-seconds", type=float, default=10.0, help='of one side in a cell of part "pairs", at most'
    )
    parser.add_argument("--many-losses", nargs="+", choices=list(CASES), default=list(CASES), help='of part "many"')
    parser.add_argument("--classes", type=int, nargs="+", default=list(SIZES), help='of part "many"')
    parser.add_argument("--rounds", type=int, default=None, help=f'default: {ROUNDS}; in part "many" 5 to 2, by size')
    parser.add_argument("--memory", type=float, default=None, help="GiB of one process; default: 0.7 of what is free")
    parser.add_argument("--tiny", action="store_true", help='tiny sizes in part "pairs", to check that it runs')
    parser.add_argument("--out", type=Path, default=RESULTS / "losses-cpu.json", help="JSON file to add to")
    parser.add_argument("--child", nargs=5, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--pairs-child", type=int, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        side, name, *numbers = options.child
        return print(json.dumps(child(side, name, *map(int, numbers))))
    if options.pairs_child is not None:
        return pairs(options.pairs_child, options)
    begun = time.perf_counter()
    record: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    if "pairs" in options.parts:
        run_pairs(record, options)
    if "many" in options.parts:
        run_many(record, options)
    record["seconds"] = round(time.perf_counter() - begun, 1)
    write(options.out, record)
    return None


if __name__ == "__main__":
    main()
