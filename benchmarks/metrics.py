"""Compares retrieval metrics of clustered points with pytorch-metric-learning and faiss, in the same run.

    python benchmarks/metrics.py                    both sizes on the CPU; some minutes per repeat
    python benchmarks/metrics.py --size small       5,924 points only
    python benchmarks/metrics.py --device cuda      60,502 points on a GPU, compared with the float64 reference only

Each CPU measurement runs in a separate process. It records the CPU time of the process and its children, and the peak
of its memory above what it held after it had loaded the embeddings and imported the libraries. The sides take turns;
results are medians over the repeats, written to results/metrics-cpu.json or results/metrics-cuda.json.

The faiss-cpu wheel contains an old OpenBLAS (0.3.15), which treats newer processors as processors without AVX. This
makes the peer several times slower than necessary. The benchmark therefore tells OpenBLAS which kernels the processor
supports, and the ratios are relative to that. The peer as installed is measured once in addition, and recorded as such.
"""

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RESULTS, about, resident_mb, spread, write
from torch import Tensor

NAMES = ("P@1", "P@R", "MAP@R")
THEIRS = ("precision_at_1", "r_precision", "mean_average_precision_at_r")
# Points, classes and noise; the sizes are those of the test halves of CUB-200-2011 and Stanford Online Products.
SIZES = {"small": (5_924, 100, 3.0), "large": (60_502, 11_316, 2.2)}
TARGETS = {"small": {"cpu": 1.0}, "large": {"cpu": 0.60, "memory": 0.10}}
DIM = 512


def clustered(points: int, classes: int, noise: float) -> tuple[Tensor, Tensor]:
    """Return unit vectors (points, 512) around class centres, at least two per class in random order, and labels."""
    draw = np.random.default_rng(0)
    sizes = 2 + draw.multinomial(points - 2 * classes, np.full(classes, 1 / classes))
    labels = torch.from_numpy(draw.permutation(np.repeat(np.arange(classes), sizes)))
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(classes, DIM, generator=generator)
    vectors = torch.empty(points, DIM)
    for rows in torch.arange(points).split(4096):
        near = centres[labels[rows]] + noise * torch.randn(len(rows), DIM, generator=generator)
        vectors[rows] = torch.nn.functional.normalize(near)
    return vectors, labels


def reference(vectors: Tensor, labels: Tensor) -> dict[str, float]:
    """Return the metrics from float64 products of float64 unit vectors, block by block."""
    unit = torch.nn.functional.normalize(vectors.double())
    relevant = torch.bincount(labels)[labels] - 1
    found = torch.zeros(len(NAMES), len(vectors), dtype=torch.float64, device=vectors.device)
    for rows in torch.arange(len(vectors), device=vectors.device).split(1024):
        scores = unit[rows] @ unit.T
        scores[torch.arange(len(rows), device=rows.device), rows] = -torch.inf
        values, near = scores.topk(int(relevant.max()) + 1, dim=1)
        assert bool((values[:, 1:] < values[:, :-1]).all()), "float64 ties: the reference is ambiguous"
        r = relevant[rows, None].double()
        place = torch.arange(1, near.shape[1] + 1, device=rows.device)
        hits = (labels[near] == labels[rows, None]) & (place <= r)
        precision = hits.cumsum(dim=1) / place.double()
        found[:, rows] = torch.stack([hits[:, 0].double(), hits.sum(1) / r[:, 0], (precision * hits).sum(1) / r[:, 0]])
    return dict(zip(NAMES, found.mean(dim=1).tolist()))


def ours(vectors: Tensor, labels: Tensor) -> dict[str, float]:
    from proxymetric.metrics import evaluate

    return evaluate(vectors, labels, NAMES)


def theirs(vectors: Tensor, labels: Tensor) -> dict[str, float]:
    from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator

    calculator = AccuracyCalculator(include=THEIRS, k="max_bin_count", device=torch.device("cpu"))
    found = calculator.get_accuracy(vectors, labels)
    return {ours: float(found[name]) for ours, name in zip(NAMES, THEIRS)}


def faiss_alone(vectors: Tensor, labels: Tensor) -> dict[str, float]:
    """Run only the exact search of the peer, without metrics, to measure its share of the time."""
    import faiss

    index = faiss.IndexFlatL2(vectors.shape[1])
    index.add(vectors.numpy())
    index.search(vectors.numpy(), int(labels.bincount().max()) + 1)
    return {}


SIDES: dict[str, Callable[[Tensor, Tensor], dict[str, float]]] = {
    "proxymetric": ours,
    "pytorch-metric-learning": theirs,
    "faiss alone": faiss_alone,
    "reference": reference,
}


def kernels() -> str | None:
    """Return the OpenBLAS kernels for this processor; None: OpenBLAS chooses."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    flags = set((re.search(r"flags\s*:\s*(.+)", info) or ["", ""])[1].split())
    if {"avx512f", "avx512dq", "avx512bw", "avx512vl"} <= flags:
        return "SKYLAKEX"
    return "HASWELL" if {"avx2", "fma"} <= flags else None


def blas_of_faiss() -> str | None:
    """Return the version and kernels of the OpenBLAS that faiss uses in this process."""
    from threadpoolctl import threadpool_info

    for library in threadpool_info():
        if "faiss" in library["filepath"] and library["internal_api"] == "openblas":
            return f"OpenBLAS {library['version']} {library['architecture']}"
    return None


def child(side: str, folder: str, threads: int) -> None:
    """Make one measurement and print it as JSON."""
    torch.set_num_threads(threads)
    if side != "reference":
        small = torch.nn.functional.normalize(torch.randn(64, DIM))
        SIDES[side](small, torch.arange(64) % 8)  # imports modules and starts thread pools
    vectors = torch.from_numpy(np.load(f"{folder}/vectors.npy"))
    labels = torch.from_numpy(np.load(f"{folder}/labels.npy"))
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    held = resident_mb("VmRSS")
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    before, start = sum(sum(resource.getrusage(kind)[:2]) for kind in kinds), time.perf_counter()
    values = SIDES[side](vectors, labels)
    seconds = time.perf_counter() - start
    cpu = sum(sum(resource.getrusage(kind)[:2]) for kind in kinds) - before
    found = {"cpu": cpu, "wall": seconds, "extra_mb": resident_mb("VmHWM") - held, "values": values}
    if side in ("pytorch-metric-learning", "faiss alone"):
        found["blas"] = blas_of_faiss()
    print(json.dumps(found))


def measure(side: str, folder: str, threads: int, *, as_installed: bool = False) -> dict[str, Any]:
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    known = kernels()
    if known is not None and not as_installed:
        environment.setdefault("OPENBLAS_CORETYPE", known)
    command = [sys.executable, __file__, "--child", side, folder, str(threads)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    fields = ("cpu", "wall", "extra_mb")
    medians = {name: round(statistics.median(run[name] for run in runs), 3) for name in fields}
    return medians | {"runs": [{name: round(run[name], 3) for name in fields} for run in runs]}


def on_cpu(sizes: list[str], threads: list[int], repeats: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for size in sizes:
        points, classes, noise = SIZES[size]
        with tempfile.TemporaryDirectory() as folder:
            vectors, labels = clustered(points, classes, noise)
            np.save(f"{folder}/vectors.npy", vectors.numpy())
            np.save(f"{folder}/labels.npy", labels.numpy())
            largest = int(labels.bincount().max())
            del vectors, labels
            wanted = measure("reference", folder, max(threads))["values"]
            part: dict[str, Any] = {"points": points, "classes": classes, "largest_class": largest, "reference": wanted}
            for count in threads:
                runs: dict[str, list[dict[str, Any]]] = {
                    side: [] for side in ("proxymetric", "pytorch-metric-learning")
                }
                for _ in range(
                    repeats * (3 if size == "small" else 1)
                ):  # the small size is fast, and its times vary more
                    for side, found in runs.items():
                        found.append(measure(side, folder, count))
                        print(f"{points} points, {count} threads, {side}: {found[-1]}", flush=True)
                mine, peer = (summary(found) for found in runs.values())
                line: dict[str, Any] = {side: summary(found) for side, found in runs.items()}
                line["cpu_ratio"] = round(mine["cpu"] / peer["cpu"], 4)
                line["memory_ratio"] = round(mine["extra_mb"] / peer["extra_mb"], 4)
                line["largest_difference_from_reference"] = {
                    side: max(abs(run["values"][name] - wanted[name]) for run in found for name in NAMES)
                    for side, found in runs.items()
                }
                line["blas_of_the_peer"] = runs["pytorch-metric-learning"][0]["blas"]
                part[f"{count} threads"] = line
            for name, side, as_installed in (
                ("faiss alone", "faiss alone", False),
                ("pytorch-metric-learning as it installs", "pytorch-metric-learning", True),
            ):
                once = measure(side, folder, threads[0], as_installed=as_installed)
                fields = {field: once[field] for field in ("cpu", "wall", "extra_mb", "blas")}
                part[name] = fields | {"threads": threads[0]}
        results[size] = part
    return results


def on_gpu(size: str, repeats: int) -> dict[str, Any]:
    from proxymetric.metrics import evaluate

    points, classes, noise = SIZES[size]
    vectors, labels = clustered(points, classes, noise)
    there, labels_there = vectors.cuda(), labels.cuda()
    wanted = reference(there, labels_there)
    inputs: dict[str, Callable[[], dict[str, float]]] = {
        "on the GPU": lambda: evaluate(there, labels_there, NAMES),
        "from the CPU": lambda: evaluate(vectors, labels, NAMES, device="cuda"),
    }
    result: dict[str, Any] = {"points": points, "classes": classes, "reference": wanted}
    for name, run in inputs.items():
        run()  # loads the kernels
        seconds, differences, peaks = [], [], []
        for _ in range(repeats):
            torch.cuda.synchronize()
            held = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            values = run()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
            peaks.append((torch.cuda.max_memory_allocated() - held) / 2**20)
            differences.append(max(abs(values[each] - wanted[each]) for each in NAMES))
        result[name] = {
            "seconds": round(statistics.median(seconds), 4),
            "spread": spread(seconds),
            "runs": [round(each, 4) for each in seconds],
            "extra_mb": round(max(peaks), 1),
            "largest_difference_from_reference": max(differences),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--size", choices=["small", "large", "both"], default="both")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="thread counts to measure with")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None, help="JSON file to write")
    parser.add_argument("--child", nargs=3, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child(options.child[0], options.child[1], int(options.child[2]))
    record = about("metrics", options.device) | {"dim": DIM, "metrics": NAMES, "repeats": options.repeats}
    if options.device == "cuda":
        record["cuda"] = on_gpu("large" if options.size == "both" else options.size, max(5, options.repeats))
    else:
        sizes = ["small", "large"] if options.size == "both" else [options.size]
        record["targets"] = TARGETS
        record["cpu"] = on_cpu(sizes, options.threads, options.repeats)
    write(options.out or RESULTS / f"metrics-{options.device}.json", record)
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
