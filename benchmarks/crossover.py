"""Finds up to which number of pairs the dense reductions are the fastest: the constants of `ops.reductions`.

    python benchmarks/crossover.py                       on a GPU: dense, plain and triton; half a minute
    python benchmarks/crossover.py --device cpu          on a CPU: dense, plain and chunked
    python benchmarks/crossover.py --device cpu --tiny --out FILE      check that the benchmark runs

A cell is one loss at one size, B embeddings and C classes of 512 dimensions, in float32. Each implementation computes
the loss and its gradients, in turns, as in `peer_cuda.py`. The result names the fastest one of each cell.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, Candidate, about, clock_mhz, interleaved, release, write
from pairs import PAIRS, build, size_name

from proxymetric.ops import using

DIM = 512
LOSSES = ("proxy-anchor", "norm-softmax", "soft-triple")
BATCHES, CLASSES = (128, 512), (1_000, 11_318, 30_000, 100_000, 300_000)
CPU_BATCHES, CPU_CLASSES = (32, 128, 512), (100, 1_000, 4_000, 16_000)
MAX_NUMBERS = 2**31
"""largest (B, rows) matrix"""


def candidates(loss: str, batch: int, classes: int, device: str, impls: tuple[str, ...]) -> dict[str, Candidate]:
    """Return a candidate for each implementation."""
    pair = PAIRS[loss]
    found = {}
    for impl in impls:
        side = build(pair, batch, classes, DIM, device, torch.float32, ("ours",)).candidates["ours"]

        def step(impl: str = impl, side: Candidate = side) -> Any:
            with using(impl):
                return side.step()

        found[impl] = Candidate(step, side.clear)
    return found


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--losses", nargs="+", default=LOSSES)
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to check that the benchmark runs")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_float32_matmul_precision("highest")
    impls = ("dense", "plain", "triton" if given.device == "cuda" else "chunked")
    batches, classes = (BATCHES, CLASSES) if given.device == "cuda" else (CPU_BATCHES, CPU_CLASSES)
    if given.tiny:
        batches, classes = (8,), (10,)
    record: dict[str, Any] = about("crossover", given.device) | {"dim": DIM, "cells": []}
    out = given.out or RESULTS / f"crossover-{given.device}.json"
    for loss in given.losses:
        for batch in batches:
            for count in classes:
                per_class = PAIRS[loss].per_class
                if batch * count * per_class > MAX_NUMBERS // (1 if given.device == "cuda" else 64):
                    continue
                sides = candidates(loss, batch, count, given.device, impls)
                timings = interleaved(sides, given.device, min_steps=20, rounds=5, seconds=0.1, max_seconds=2.0)
                times = {impl: timing.record()["ms"]["median"] for impl, timing in timings.items()}
                cell = {
                    "loss": loss,
                    "batch": batch,
                    "classes": count,
                    "pairs": batch * count * per_class,
                    "fastest": min(times, key=times.__getitem__),
                    "measured": {impl: timing.record() for impl, timing in timings.items()},
                    "clock_mhz": clock_mhz(),
                }
                record["cells"].append(cell)
                texts = "  ".join(f"{impl} {ms:8.3f} ms" for impl, ms in times.items())
                print(f"{loss:14} {size_name(batch, count):>14}  {texts}  {cell['fastest']}", flush=True)
                write(out, record)
                del sides
                release(given.device)


if __name__ == "__main__":
    main()
