"""Compares losses with pytorch-metric-learning at the sizes that most people have, and at large ones, on a GPU.

    python benchmarks/peer_cuda.py                       five sizes, float32; about two minutes on an H200
    python benchmarks/peer_cuda.py --dtypes bfloat16     embeddings and proxies in bfloat16
    python benchmarks/peer_cuda.py --compiled            also formula and criterion under torch.compile; minutes
    python benchmarks/peer_cuda.py --all                 B 32 to 4,096 and C 10 to 10 million, where they fit
    python benchmarks/peer_cuda.py --losses proxy-anchor --sizes 128x100 512x11318
    python benchmarks/peer_cuda.py --device cpu --tiny --out FILE      check that the benchmark runs, without a GPU

A cell is one loss at one size: B embeddings of 512 dimensions, C classes. A step computes the loss and its gradients
for embeddings and proxies; ours is the criterion with its `commit`, the peer's is called as its README says, with all
its tensors on the device (`pairs.py`). Before a cell is timed, losses and gradients of both libraries are compared; a
cell whose values differ is recorded as failed. The libraries then take turns, round by round, with at least 50 steps of
each. The time of a round is that of a block of steps by the wall clock: at small sizes launches and Python are
measured, as in training. The ratio is the median of the ratios of the rounds. Float32 products have the highest
precision. The memory is the peak of a step above embeddings, proxies and labels. The peer is a Python package without
compiled parts: where it cannot be installed, put a copy of it on PYTHONPATH. Results are written to
results/peer-cuda.json after every cell; cells that the file has from an earlier run stay, unless they are measured
again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, ROUNDS, about, clock_mhz, release, stamped, write
from pairs import PAIRS, Pair, cell, size_name, table, text

DIM = 512
SIZES = ((128, 100), (128, 11_318), (512, 11_318), (512, 100_000), (512, 1_000_000))
PAIR_BATCHES = (128, 512)
ALL_BATCHES, ALL_CLASSES = (32, 128, 512, 4096), (10, 100, 1_000, 10_000, 100_000, 1_000_000, 10_000_000)
SMALL_SIZES = SIZES[:3]
"""the sizes at which launches and Python take most of the time"""
TARGET, SMALL_TARGET = 1.0, 0.8
"""largest ratio of the times, and that of the small sizes"""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BLOCKS_OF_SIMILARITIES, BLOCKS_OF_PROXIES = 7, 5
"""arrays (B, rows) and (rows, D) that the peer is assumed to hold at its peak, for the check of the memory"""


def too_large(pair: Pair, batch: int, classes: int, itemsize: int, sides: int, device: str) -> str | None:
    """Return why a cell does not fit into the GPU's memory, by an estimate; None: it fits."""
    if device != "cuda":
        return None
    rows = classes * pair.per_class
    needed = itemsize * rows * (BLOCKS_OF_SIMILARITIES * batch + (BLOCKS_OF_PROXIES + sides) * DIM)
    if pair.method == "triplet":
        needed = 60 * 3 * batch * batch  # the peer lists all triplets, several times
    free = torch.cuda.mem_get_info()[0]
    if needed <= 0.9 * free:
        return None
    return f"does not fit: the peer needs about {needed / 2**30:.0f} GiB of {free / 2**30:.0f} GiB that are free"


def measured(name: str, batch: int, classes: int, dtype: torch.dtype, options: argparse.Namespace) -> dict[str, Any]:
    """Return the measurements of one loss at one size."""
    sides = ("ours", "peer", "compiled", "ours, compiled") if options.compiled else ("ours", "peer")
    reason = too_large(PAIRS[name], batch, classes, dtype.itemsize, len(sides), options.device)
    if reason is not None:
        return {"skipped": reason}
    timing = {"rounds": options.rounds, "seconds": options.seconds}
    return cell(PAIRS[name], batch, classes, options.dim, options.device, dtype, sides, **timing)


def targets(record: dict[str, Any]) -> dict[str, Any]:
    """Return the cells that miss their target, and the cells that failed."""
    missed, failed = {}, {}
    small = {size_name(*size) for size in SMALL_SIZES}
    for dtype, losses in record["cells"].items():
        for loss, sizes in losses.items():
            for size, found in sizes.items():
                name = f"{dtype}, {loss}, {size}"
                if "failed" in found:
                    failed[name] = found["failed"]
                if "of the peer's" not in found:
                    continue
                ratio = found["of the peer's"]["time"]["median"]
                if ratio > (SMALL_TARGET if size in small and dtype == "float32" else TARGET):
                    missed[name] = ratio
    return {"at most": {"small sizes, float32": SMALL_TARGET, "others": TARGET}, "missed": missed, "failed": failed}


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--losses", nargs="+", choices=list(PAIRS), default=list(PAIRS))
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=["float32"])
    parser.add_argument("--sizes", nargs="+", default=None, help="BxC of losses with proxies, such as 128x100")
    parser.add_argument("--batches", nargs="+", type=int, default=None, help="B of the pair losses")
    parser.add_argument("--all", action="store_true", help="B 32 to 4,096, C 10 to 10 million")
    parser.add_argument("--compiled", action="store_true", help="also formula and criterion under torch.compile")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seconds", type=float, default=0.5, help="of a side in a cell, about; at least 50 steps")
    parser.add_argument("--limit", type=float, default=None, help="seconds after which no further cell is begun")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to check that the benchmark runs")
    parser.add_argument("--table", action="store_true", help="only print the table of the JSON")
    parser.add_argument("--out", type=Path, default=None, help="JSON file to add to")
    options = parser.parse_args()
    options.dim = 16 if options.tiny else DIM
    options.out = options.out or RESULTS / f"peer-{options.device}.json"
    if options.device == "cuda" and not torch.cuda.is_available() and not options.table:
        parser.error("--device: got cuda, but there is no GPU; expected cpu")
    return options


def plan(options: argparse.Namespace) -> list[tuple[str, int, int]]:
    """Return loss, batch and classes of each cell, smallest sizes first."""
    sizes, batches = SIZES, PAIR_BATCHES
    if options.all:
        sizes, batches = tuple((b, c) for c in ALL_CLASSES for b in ALL_BATCHES), ALL_BATCHES
    if options.tiny:
        sizes, batches = ((8, 6), (16, 40)), (8,)
    if options.sizes is not None:
        sizes = tuple((int(b), int(c)) for b, _, c in (each.partition("x") for each in options.sizes))
    batches = tuple(options.batches or batches)
    proxy = [(name, b, c) for b, c in sizes for name in options.losses if PAIRS[name].has_proxies]
    pair = [(name, b, 0) for b in batches for name in options.losses if not PAIRS[name].has_proxies]
    small = [each for each in proxy if each[2] < 50_000]
    return small + pair + [each for each in proxy if each[2] >= 50_000]


def main() -> None:
    options = parsed()
    record: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    if not options.table:
        begun = time.perf_counter()
        torch.set_float32_matmul_precision("highest")
        record |= about("peer", options.device) | {"dim": options.dim, "rounds": options.rounds}
        cells = record.setdefault("cells", {})
        clocks = record["clock_mhz_during"] = []
        planned = [(dtype, *each) for dtype in options.dtypes for each in plan(options)]
        for index, (dtype, name, batch, classes) in enumerate(planned):
            if options.limit is not None and time.perf_counter() - begun > options.limit:
                print(f"--limit: {len(planned) - index} of {len(planned)} cells are left out", flush=True)
                break
            found = stamped(measured(name, batch, classes, DTYPES[dtype], options))
            release(options.device)
            size = size_name(batch, classes)
            cells.setdefault(dtype, {}).setdefault(name, {})[size] = found
            clocks += [clock_mhz()] if index % 8 == 0 else []
            record["targets"] = targets(record)
            record["seconds"] = round(time.perf_counter() - begun, 1)
            write(options.out, record)
            outcome = found.get("skipped") or found.get("failed") or text(found)
            print(f"{dtype}, {name}, {size}: {outcome}", flush=True)
    for dtype in record.get("cells", {}):
        print(table(record["cells"][dtype], dtype))
        if options.compiled:
            print(table(record["cells"][dtype], dtype, "of the compiled formula's", "compiled"))
            print(table(record["cells"][dtype], dtype, "compiled, of the compiled formula's", "compiled"))
    if record["targets"]["failed"]:
        sys.exit("\n".join(f"{name}: {reason}" for name, reason in record["targets"]["failed"].items()))


if __name__ == "__main__":
    main()
