"""Compares the exact engine with NumPy, faiss (flat, HNSW, IVF) and milvus-lite on clustered vectors, in the same run.

    python benchmarks/search.py                     60,000 vectors of 512 dimensions; some minutes
    python benchmarks/search.py --size large        1,000,000 vectors; needs 8 GB and an hour

For each engine: time to build, bytes of the built structure, added memory, seconds for one query and for 64 at a time,
and recall@10 against the exact answer. The engines take turns, query by query; numbers are medians. Times are CPU
seconds of this process on one thread, which other programs on the machine disturb little, and wall time beside them.
milvus-lite may compute in threads of its own, so its wall time counts.
Results are written to results/search-cpu.json.

The faiss-cpu wheel contains an old OpenBLAS, which treats newer processors as processors without AVX; the benchmark
tells it which kernels the processor supports, as benchmarks/metrics.py does.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from proxymetric.search.engines import faiss as faiss_engine
from proxymetric.search.engines.exact import Exact

RESULTS = Path(__file__).parent / "results" / "search-cpu.json"
DIM, K = 512, 10
# Vectors and classes; noise is the length of the part of a vector that its class does not share, relative to the class.
SIZES = {"small": (60_000, 6_000), "large": (1_000_000, 50_000)}
NOISE = 1.5
MAX_RATIO = 1.05
"""what the exact engine may take, relative to the faster of NumPy and faiss flat"""
Search = Callable[[np.ndarray], np.ndarray]


def clustered(count: int, classes: int, queries: int) -> tuple[np.ndarray, np.ndarray]:
    """Unit vectors around class centres, and queries of the same classes."""
    random = np.random.default_rng(0)
    centres = random.standard_normal((classes, DIM), dtype=np.float32)

    def draw(number: int) -> np.ndarray:
        vectors = centres[random.integers(0, classes, number)]
        for start in range(0, number, 8192):
            part = vectors[start : start + 8192]
            part += NOISE * random.standard_normal(part.shape, dtype=np.float32)
            part /= np.linalg.norm(part, axis=1, keepdims=True)
        return vectors

    return draw(count), draw(queries)


def by_numpy(vectors: np.ndarray) -> tuple[Search, int]:
    def search(queries: np.ndarray) -> np.ndarray:
        scores = queries @ vectors.T
        found = np.argpartition(-scores, K, axis=1)[:, :K]
        order = np.argsort(-np.take_along_axis(scores, found, 1), axis=1)
        return np.take_along_axis(found, order, 1)

    return search, vectors.nbytes


def by_exact(vectors: np.ndarray) -> tuple[Search, int]:
    engine = Exact(torch.from_numpy(vectors))
    return lambda queries: engine.search(torch.from_numpy(queries), K)[1].numpy(), vectors.nbytes


def by_faiss(kind: str) -> Callable[[np.ndarray], tuple[Search, int]]:
    def build(vectors: np.ndarray) -> tuple[Search, int]:
        import faiss

        faiss.omp_set_num_threads(1)
        if kind == "flat":
            index = faiss.IndexFlatIP(DIM)
            index.add(vectors)
            return lambda queries: index.search(queries, K)[1], vectors.nbytes
        with tempfile.TemporaryDirectory() as folder:
            facts, _ = faiss_engine.build({"kind": kind.lower()}, vectors, Path(folder))
            engine = faiss_engine.Faiss.open(facts, torch.from_numpy(vectors), Path(folder))
            size = (Path(folder) / faiss_engine.FILE).stat().st_size
        return lambda queries: engine.search(torch.from_numpy(queries), K)[1].numpy(), size

    return build


def by_milvus(vectors: np.ndarray) -> tuple[Search, int]:
    from proxymetric.search.engines import milvus

    folder = Path(tempfile.mkdtemp())
    facts, _ = milvus.build({"uri": str(folder / "a.db")}, vectors, folder)
    engine = milvus.Milvus(facts, torch.from_numpy(vectors))
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return lambda queries: engine.search(torch.from_numpy(queries), K)[1].numpy(), size


ENGINES: dict[str, Callable[[np.ndarray], tuple[Search, int]]] = {
    "NumPy": by_numpy,
    "exact": by_exact,
    "faiss flat": by_faiss("flat"),
    "faiss HNSW": by_faiss("HNSW"),
    "faiss IVF": by_faiss("IVF"),
    "milvus-lite": by_milvus,
}


def measure(size: str, rounds: int) -> dict[str, Any]:
    """Build all engines, then let them take turns."""
    count, classes = SIZES[size]
    vectors, queries = clustered(count, classes, 64 * rounds)
    rows: dict[str, dict[str, Any]] = {}
    searches: dict[str, Search] = {}
    for name, build in ENGINES.items():
        before, started = resident(), time.perf_counter()
        searches[name], size_in_bytes = build(vectors)
        rows[name] = {"build_seconds": time.perf_counter() - started, "bytes": size_in_bytes}
        rows[name]["memory_bytes"] = max(0, resident() - before)
        print(f"{name}: built in {rows[name]['build_seconds']:.1f} s", flush=True)
    reference = np.concatenate([searches["exact"](queries[start : start + 64]) for start in range(0, len(queries), 64)])
    for batch in (1, 64):
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in searches}
        shared: dict[str, list[float]] = {name: [] for name in searches}
        for turn in range(rounds if batch == 64 else 4 * rounds):
            start = turn * batch
            part = queries[start : start + batch]
            for name in np.random.default_rng(turn).permutation(list(searches)):
                wall, cpu = time.perf_counter(), time.process_time()
                found = searches[name](part)
                times[name].append((time.process_time() - cpu, time.perf_counter() - wall))
                right = [len(set(a) & set(b)) / K for a, b in zip(found, reference[start : start + batch])]
                shared[name].append(statistics.mean(right))
        for name in searches:
            cpu_seconds, wall_seconds = (statistics.median(values) for values in zip(*times[name]))
            rows[name][f"{batch} at a time"] = {
                "cpu_seconds": cpu_seconds,
                "wall_seconds": wall_seconds,
                "queries_per_cpu_second": batch / cpu_seconds,
                "recall@10": statistics.mean(shared[name]),
            }
    return {"vectors": count, "classes": classes, "rounds": rounds, "engines": rows, "ratios": ratios(rows)}


def ratios(rows: dict[str, dict[str, Any]]) -> dict[str, float]:
    """The CPU time of the exact engine relative to the faster of NumPy and faiss flat."""
    return {
        part: rows["exact"][part]["cpu_seconds"]
        / min(rows[name][part]["cpu_seconds"] for name in ("NumPy", "faiss flat"))
        for part in ("1 at a time", "64 at a time")
    }


def resident() -> int:
    """The largest memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def set_environment() -> None:
    """Start this program again with one thread and the right kernels: libraries read the environment only once."""
    facts = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    wanted = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    if "avx2" in facts:
        wanted["OPENBLAS_CORETYPE"] = "SKYLAKEX" if "avx512vl" in facts else "HASWELL"
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.environ.update(wanted)
        os.execv(sys.executable, [sys.executable, *sys.argv])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    set_environment()
    torch.set_num_threads(1)
    result = measure(options.size, options.rounds)
    content = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {"benchmark": "search", "dim": DIM, "sizes": {}}
    names = ("torch", "numpy", "faiss-cpu", "milvus-lite")
    content["machine"] = {"architecture": platform.machine(), "versions": {name: version(name) for name in names}}
    content["sizes"][options.size] = result
    RESULTS.write_text(json.dumps(content, indent=2) + "\n")
    for name, row in result["engines"].items():
        cells = [f"{row[part]['queries_per_cpu_second']:9,.0f}/s" for part in ("1 at a time", "64 at a time")]
        print(f"{name:11} {' '.join(cells)}  recall {row['64 at a time']['recall@10']:.3f}")
    print({part: round(value, 3) for part, value in result["ratios"].items()}, f"expected at most {MAX_RATIO}")


if __name__ == "__main__":
    main()
