"""Measures how time and memory grow with classes, batch, dimensions and images, and fits the exponents.

    python benchmarks/growth.py                       on the CPU, one thread; some minutes
    python benchmarks/growth.py --device cuda         about a minute
    python benchmarks/growth.py --curves classes      some curves

A point of a loss is a step as in training: forward and backward pass of the criterion, and its commit. A point of the
metrics is P@1, P@R and MAP@R of clustered images, each a query against all others; a point of the search is one query
against all images. The points of a curve take turns, round by round. The time is the median of the rounds: wall-clock
time on a GPU, CPU time on a CPU. The memory is the peak of a step above inputs, proxies and vectors. The exponent is
the slope of a line through the upper half of the points, in logarithms: with exponent 1, twice the size takes twice the
time. A curve ends where a step takes longer than --point-seconds or does not fit. Results are written to
results/growth-cpu.json or growth-cuda.json after every curve; curves of the file that are not measured again stay. The
performance pages show the plots.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import RESULTS, Candidate, about, clock_mhz, interleaved, release, spread, stamped, synchronise, write
from torch import Tensor

BATCH, CLASSES, DIM = 128, 11_318, 512
"""the sizes that a curve holds fixed"""
IMAGES_PER_CLASS = 6
MIN_FIT_POINTS = 3


class Curve(NamedTuple):
    """One curve: what grows, and what is measured."""

    over: str
    """classes, batch, dimensions or images"""
    what: str
    expected: float
    """the exponent of the operations"""
    sizes: dict[str, tuple[int, ...]]
    """device -> sizes"""
    build: Callable[[int, str], Candidate]


def loss(method: str, **fixed: int) -> Callable[[int, str], Candidate]:
    """Return a function that builds a step of a method where one size is free: batch, classes or dim."""

    def build(size: int, device: str) -> Candidate:
        import proxymetric as pm

        sizes = {name: size if value == 0 else value for name, value in fixed.items()}
        generator = torch.Generator(device).manual_seed(0)
        x = torch.randn(sizes["batch"], sizes["dim"], generator=generator, device=device).requires_grad_()
        y = torch.randint(sizes["classes"], (sizes["batch"],), generator=generator, device=device)
        with torch.device(device):
            criterion = pm.method(method, classes=sizes["classes"], dim=sizes["dim"]).to(device)
        leaves = [x, *criterion.parameters()]

        def clear() -> None:
            for leaf in leaves:
                leaf.grad = None

        def step() -> None:
            clear()
            criterion(x, y).backward()
            criterion.commit()

        return Candidate(step, clear)

    return build


def clustered(images: int, device: str) -> tuple[Tensor, Tensor]:
    """Return vectors of images around the centres of their classes, and labels."""
    generator = torch.Generator(device).manual_seed(0)
    y = torch.arange(images, device=device) // IMAGES_PER_CLASS
    centres = torch.randn(int(y.max()) + 1, DIM, generator=generator, device=device)
    return centres[y] + 2.2 * torch.randn(images, DIM, generator=generator, device=device), y


def metrics(images: int, device: str) -> Candidate:
    from proxymetric.metrics import evaluate

    vectors, labels = clustered(images, device)
    return Candidate(lambda: evaluate(vectors, labels, ("P@1", "P@R", "MAP@R")), lambda: None)


def search(images: int, device: str) -> Candidate:
    from proxymetric.search.engines.exact import Exact

    vectors, _ = clustered(images, device)
    engine, query = Exact(vectors), vectors[:1].clone()
    return Candidate(lambda: engine.search(query, k=10), lambda: None)


OVER_CLASSES = {
    "cpu": (1_000, 3_000, 10_000, 30_000, 100_000),
    "cuda": (1_000, 10_000, 30_000, 100_000, 300_000, 1_000_000, 3_000_000),
}
OVER_BATCH = {"cpu": (32, 64, 128, 256, 512, 1024), "cuda": (32, 128, 512, 1024, 2048, 4096, 8192)}
OVER_DIM = {"cpu": (64, 128, 256, 512, 1024, 2048), "cuda": (64, 256, 1024, 2048, 4096)}
OVER_IMAGES = {"cpu": (1_000, 2_000, 4_000, 8_000, 16_000), "cuda": (4_000, 8_000, 16_000, 32_000, 64_000, 128_000)}
OVER_INDEX = {
    "cpu": (4_000, 8_000, 16_000, 32_000, 64_000, 128_000),
    "cuda": (16_000, 64_000, 128_000, 256_000, 512_000, 1_024_000),
}
OVER_TRIPLES = {"cpu": (100, 300, 1_000, 3_000, 10_000), "cuda": (100, 1_000, 3_000, 10_000, 30_000, 100_000)}
CURVES = {
    "proxy-anchor": Curve(
        "classes", "`proxy-anchor`", 1, OVER_CLASSES, loss("proxy-anchor", batch=BATCH, classes=0, dim=DIM)
    ),
    "norm-softmax": Curve(
        "classes", "`norm-softmax`", 1, OVER_CLASSES, loss("norm-softmax", batch=BATCH, classes=0, dim=DIM)
    ),
    "soft-triple": Curve(
        "classes", "`soft-triple`", 1, OVER_TRIPLES, loss("soft-triple", batch=BATCH, classes=0, dim=DIM)
    ),
    "proxy-anchor, batch": Curve(
        "batch", "`proxy-anchor`", 1, OVER_BATCH, loss("proxy-anchor", batch=0, classes=CLASSES, dim=DIM)
    ),
    "triplet, batch": Curve("batch", "`triplet`", 2, OVER_BATCH, loss("triplet", batch=0, classes=25, dim=DIM)),
    "multi-similarity, batch": Curve(
        "batch", "`multi-similarity`", 2, OVER_BATCH, loss("multi-similarity", batch=0, classes=25, dim=DIM)
    ),
    "proxy-anchor, dimensions": Curve(
        "dimensions", "`proxy-anchor`", 1, OVER_DIM, loss("proxy-anchor", batch=BATCH, classes=CLASSES, dim=0)
    ),
    "norm-softmax, dimensions": Curve(
        "dimensions", "`norm-softmax`", 1, OVER_DIM, loss("norm-softmax", batch=BATCH, classes=CLASSES, dim=0)
    ),
    "metrics, images": Curve("images", "metrics of all images", 2, OVER_IMAGES, metrics),
    "search, images": Curve("images", "search for one image", 1, OVER_INDEX, search),
}


def exponent(points: list[tuple[float, float]]) -> float | None:
    """Return the slope of a line through the upper half of the points in logarithms; None: there are too few.

    >>> exponent([(1, 5.0), (2, 5.0), (4, 16.0), (8, 64.0), (16, 256.0)])
    2.0
    """
    upper = sorted(points)[-max(MIN_FIT_POINTS, -(-len(points) // 2)) :]
    if len(upper) < MIN_FIT_POINTS:
        return None
    x, y = ([math.log(pair[axis]) for pair in upper] for axis in (0, 1))
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)
    return round(slope, 3)


def candidates(curve: Curve, sizes: tuple[int, ...], device: str, limit: float) -> tuple[dict[int, Candidate], str]:
    """Return the points of a curve by size, and why it ends early; "" if it does not."""
    found: dict[int, Candidate] = {}
    for size in sizes:
        try:
            candidate = curve.build(size, device)
            candidate.step()  # loads modules and kernels
            synchronise(device)
            begun = time.perf_counter()
            candidate.step()
            synchronise(device)
            seconds = time.perf_counter() - begun
        except torch.OutOfMemoryError:
            return found, f"{size} does not fit"
        candidate.clear()
        release(device)
        if seconds > limit:
            return found, f"a step of {size} takes longer than {limit:.1f} s"
        found[size] = candidate
    return found, ""


def measured(curve: Curve, options: argparse.Namespace) -> dict[str, Any]:
    """Return the points of a curve, measured in turns, and the exponents."""
    device, sizes = options.device, curve.sizes[options.device]
    sizes = tuple(range(8, 8 * len(sizes) + 1, 8)) if options.tiny else sizes
    points, ended = candidates(curve, sizes, device, options.point_seconds)
    timings = interleaved(
        {str(size): candidate for size, candidate in points.items()}, device, rounds=options.rounds,
        min_steps=options.rounds, seconds=0.0 if options.tiny else options.point_seconds / 4,
    )  # fmt: skip
    found: dict[str, Any] = {"over": curve.over, "what": curve.what, "operations": curve.expected, "points": []}
    for size, timing in timings.items():
        times = timing.rounds if device == "cuda" else timing.cpu_rounds
        memory = None if timing.extra_mb is None else round(timing.extra_mb, 2)
        line = {"size": int(size), "ms": spread(times), "steps": timing.steps * len(times), "extra_mb": memory}
        found["points"].append(line)
    times = [(each["size"], each["ms"]["median"]) for each in found["points"]]
    memory = [(each["size"], each["extra_mb"]) for each in found["points"] if each["extra_mb"]]
    found["exponent"] = {"time": exponent(times), "memory": exponent(memory)}
    return found | ({"ended": ended} if ended else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--curves", nargs="+", choices=["classes", "batch", "dimensions", "images"], default=None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="number of CPU threads, with --device cpu")
    parser.add_argument("--point-seconds", type=float, default=None, help="default: 6 on a CPU, 1 on a GPU")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to check that the benchmark runs")
    parser.add_argument("--out", type=Path, default=None, help="JSON file to add to")
    options = parser.parse_args()
    options.point_seconds = options.point_seconds or (6.0 if options.device == "cpu" else 1.0)
    if options.device == "cpu":
        torch.set_num_threads(options.threads)
    torch.set_float32_matmul_precision("highest")
    out = options.out or RESULTS / f"growth-{options.device}.json"
    record: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    record |= about("growth", options.device) | {"batch": BATCH, "classes": CLASSES, "dim": DIM}
    curves, begun = record.setdefault("curves", {}), time.perf_counter()
    for name, curve in CURVES.items():
        if options.curves is not None and curve.over not in options.curves:
            continue
        curves[name] = stamped(measured(curve, options))
        release(options.device)
        record["clock_mhz_during"] = clock_mhz()
        record["seconds"] = round(time.perf_counter() - begun, 1)
        write(out, record)
        times = [(each["size"], each["ms"]["median"], each["extra_mb"]) for each in curves[name]["points"]]
        print(f"{name}: exponents {json.dumps(curves[name]['exponent'])}, size ms MB {times}", flush=True)


if __name__ == "__main__":
    main()
