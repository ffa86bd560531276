"""Compares the exact engine with NumPy, faiss (flat, HNSW, IVF) and milvus-lite on clustered vectors.

    python benchmarks/search.py                     60,000 vectors of 512 dimensions; some minutes
    python benchmarks/search.py --size large        1,000,000 vectors; needs about 10 GB of memory and hours

For each engine: time to build, bytes of the built structure, added memory, seconds for one query and for 64 at a time,
and recall@10 against the exact answer, for new queries. Each group of engines (`GROUPS`) has a process of its own, with
the exact engine in each, so that no more than one large structure is in memory. In a group the engines take turns,
query by query; numbers are medians. Searches use one thread. Times are CPU seconds of this process, which other
programs on the machine disturb little, and wall time beside them. Structures are built with all cores, in wall time.
The first group is measured once more with all cores, as people search: there the wall time counts.

A single query reads all vectors once, so that memory decides. The ratio of the same two programs was 0.93 to 1.09
between processes on a busy machine; where a process gets its pages may be the reason, which was not tested. The group
with the ratios is therefore measured in several processes: their median counts, and the ratio of each is recorded.

Results are written to results/search-cpu.json after each group.

The faiss-cpu wheel contains an old OpenBLAS, which treats newer processors as processors without AVX; the benchmark
tells it which kernels the processor supports, as benchmarks/metrics.py does. NumPy has an OpenBLAS of its own, which
chooses by itself: with the kernels that suit faiss, its product with one vector was 7 % slower.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import commit, machine

from proxymetric.search.engines import faiss as faiss_engine
from proxymetric.search.engines.exact import Exact

RESULTS = Path(__file__).parent / "results" / "search-cpu.json"
DIM, K = 512, 10
# Vectors and classes; noise is the length of the part of a vector that its class does not share, relative to the class.
SIZES = {"small": (60_000, 6_000), "large": (1_000_000, 50_000)}
NOISE = 1.5
MAX_RATIO = 1.05
"""what the exact engine may take, relative to the faster of NumPy and faiss flat"""
PARTS = {"1 at a time": 1, "64 at a time": 64}
GROUPS = {
    "exact": ("NumPy", "exact", "faiss flat"),
    "HNSW": ("exact", "faiss HNSW"),
    "IVF": ("exact", "faiss IVF"),
    "milvus": ("exact", "milvus-lite"),
}
PROCESSES = {("exact", "small"): 5, ("exact", "large"): 2}
"""processes in which a group of a size is measured, if more than one"""
Search = Callable[[np.ndarray], np.ndarray]
Built = tuple[Search, int, dict[str, Any]]
"""how to search, bytes of the structure, and what was chosen"""


def clustered(count: int, classes: int, queries: int) -> tuple[np.ndarray, np.ndarray]:
    """Unit vectors around class centres, and queries of the same classes."""
    random = np.random.default_rng(0)
    centres = random.standard_normal((classes, DIM), dtype=np.float32)

    def draw(number: int) -> np.ndarray:
        vectors = aligned(number)
        np.take(centres, random.integers(0, classes, number), axis=0, out=vectors)
        for start in range(0, number, 8192):
            part = vectors[start : start + 8192]
            part += NOISE * random.standard_normal(part.shape, dtype=np.float32)
            part /= np.linalg.norm(part, axis=1, keepdims=True)
        return vectors

    return draw(count), draw(queries)


def aligned(number: int) -> np.ndarray:
    """Vectors that begin at a multiple of 64 bytes, as those in the files of an index do; not yet filled."""
    memory = np.empty(number * DIM + 16, np.float32)
    start = -memory.ctypes.data % 64 // 4
    return memory[start : start + number * DIM].reshape(number, DIM)


def by_numpy(vectors: np.ndarray) -> Built:
    def search(queries: np.ndarray) -> np.ndarray:
        scores = queries @ vectors.T
        found = np.argpartition(-scores, K, axis=1)[:, :K]
        order = np.argsort(-np.take_along_axis(scores, found, 1), axis=1)
        return np.take_along_axis(found, order, 1)

    return search, vectors.nbytes, {}


def by_exact(vectors: np.ndarray) -> Built:
    engine = Exact(torch.from_numpy(vectors))
    return lambda queries: engine.search(torch.from_numpy(queries), K)[1].numpy(), vectors.nbytes, {}


def by_flat(vectors: np.ndarray) -> Built:
    import faiss

    index = faiss.IndexFlatIP(DIM)
    index.add(vectors)
    return lambda queries: index.search(queries, K)[1], vectors.nbytes, {}


def by_faiss(kind: str) -> Callable[[np.ndarray], Built]:
    def build(vectors: np.ndarray) -> Built:
        with tempfile.TemporaryDirectory() as folder:
            facts, files = faiss_engine.build({"kind": kind}, vectors, Path(folder))
            engine = faiss_engine.Faiss.open(facts, torch.from_numpy(vectors), Path(folder))
            size = sum((Path(folder) / file).stat().st_size for file in files)
        if kind == "ivf":
            facts["lists"] = engine.index.nlist
        return lambda queries: engine.search(torch.from_numpy(queries), K)[1].numpy(), size, facts

    return build


def by_milvus(vectors: np.ndarray) -> Built:
    from proxymetric.search import Index

    folder = Path(tempfile.mkdtemp())
    settings = {"name": "milvus", "uri": str(folder / "a.db")}
    index = Index.create(folder / "a.index", DIM, engine=settings, map="none")
    index.add([str(row) for row in range(len(vectors))], vectors)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return lambda queries: index.engine.search(torch.from_numpy(queries), K)[1].numpy(), size, {}


ENGINES: dict[str, Callable[[np.ndarray], Built]] = {
    "NumPy": by_numpy,
    "exact": by_exact,
    "faiss flat": by_flat,
    "faiss HNSW": by_faiss("hnsw"),
    "faiss IVF": by_faiss("ivf"),
    "milvus-lite": by_milvus,
}


def measure(size: str, group: str, rounds: int, threads: int) -> dict[str, Any]:
    """Build the engines of a group, then let them take turns."""
    import_faiss()
    count, classes = SIZES[size]
    vectors, queries = clustered(count, classes, 64 * rounds)
    clock = 0 if threads == 1 else 1  # CPU seconds add up over threads
    rows: dict[str, dict[str, Any]] = {}
    searches: dict[str, Search] = {}
    for name in GROUPS[group]:
        use_threads(os.cpu_count() or 1)
        before, started = resident(), time.perf_counter()
        searches[name], size_in_bytes, chosen = ENGINES[name](vectors)
        rows[name] = {"build_seconds": time.perf_counter() - started, "bytes": size_in_bytes, "chosen": chosen}
        use_threads(threads)
        searches[name](queries[:64])
        rows[name]["memory_bytes"] = max(0, resident() - before)
        print(f"{name}: built in {rows[name]['build_seconds']:.1f} s", file=sys.stderr, flush=True)
    expected = np.concatenate([searches["exact"](queries[start : start + 64]) for start in range(0, len(queries), 64)])
    for part, batch in PARTS.items():
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in searches}
        shared: dict[str, list[float]] = {name: [] for name in searches}
        for turn in range(len(queries) // batch if batch > 1 else min(len(queries), 20 * rounds)):
            start = turn * batch
            for name in np.random.default_rng(turn).permutation(list(searches)):
                wall, cpu = time.perf_counter(), time.process_time()
                found = searches[name](queries[start : start + batch])
                times[name].append((time.process_time() - cpu, time.perf_counter() - wall))
                right = [len(set(a) & set(b)) / K for a, b in zip(found, expected[start : start + batch])]
                shared[name].append(statistics.mean(right))
        for name in searches:
            cpu_seconds, wall_seconds = (statistics.median(values) for values in zip(*times[name]))
            # Neighbouring turns are compared: the machine was in the same state.
            pairs = zip(times["exact"], times[name])
            rows[name][part] = {
                "cpu_seconds": cpu_seconds,
                "wall_seconds": wall_seconds,
                "queries_per_second": batch / wall_seconds,
                "recall@10": statistics.mean(shared[name]),
                "exact_relative_to_it": statistics.median(exact[clock] / other[clock] for exact, other in pairs),
            }
    return rows


def ratios(rows: dict[str, dict[str, Any]]) -> dict[str, float]:
    """The time of the exact engine relative to the faster of NumPy and faiss flat."""
    return {part: max(rows[name][part]["exact_relative_to_it"] for name in ("NumPy", "faiss flat")) for part in PARTS}


def median_of(processes: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of each number over processes; what is not a number is that of the first process."""
    first = processes[0]
    if isinstance(first, dict):
        return {key: median_of([each[key] for each in processes]) for key in first}
    return statistics.median(processes) if isinstance(first, int | float) else first


def use_threads(count: int) -> None:
    """Set the threads of PyTorch and faiss; the environment of the process sets those of OpenBLAS."""
    import faiss

    torch.set_num_threads(count)
    faiss.omp_set_num_threads(count)


def resident() -> int:
    """The memory of this process and of those that it started, in bytes."""
    page, total, family = resource.getpagesize(), 0, {os.getpid()}
    for status in sorted(Path("/proc").glob("[0-9]*/stat"), key=lambda file: int(file.parent.name)):
        try:
            fields = status.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue  # it has ended
        number = int(status.parent.name)
        if number in family or int(fields[1]) in family:
            family.add(number)
            total += page * int(fields[21])
    return total


def import_faiss() -> None:
    """Import faiss with the right kernels. A library reads the environment once, when it is loaded."""
    processor = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    if "avx2" in processor:
        os.environ["OPENBLAS_CORETYPE"] = "SKYLAKEX" if "avx512vl" in processor else "HASWELL"
    import faiss  # noqa: F401


def record(size: str, rounds: int, group: str, threads: int, processes: list[dict[str, Any]]) -> dict[str, Any]:
    """Add the results of a group to the file, and return those of its size and its number of threads.

    The results of a size are those of one machine: those of another one are removed.
    """
    rows = median_of(processes)
    content = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {"benchmark": "search", "dim": DIM, "sizes": {}}
    count, classes = SIZES[size]
    facts = {key: machine()[key] for key in ("processor", "architecture", "cores")}
    facts["versions"] = {name: version(name) for name in ("torch", "numpy", "faiss-cpu", "milvus-lite")}
    if content["sizes"].get(size, {}).get("machine") != facts:
        content["sizes"][size] = {"machine": facts, "engines": {}}
    result = content["sizes"][size]
    result |= {"vectors": count, "classes": classes, "noise": NOISE}
    if threads > 1:
        result = result.setdefault("all cores", {"engines": {}})
        result["threads"] = threads
    for name, row in rows.items():
        if name != "exact" or group == "exact":  # in the other groups it is the yardstick
            result["engines"][name] = row | {"rounds": rounds, "processes": len(processes)}
    if group == "exact":
        result["ratios of processes"] = [ratios(each) for each in processes]
        result["ratios"] = median_of(result["ratios of processes"])
    result["measured"] = result.get("measured", {}) | {group: commit()}
    RESULTS.write_text(json.dumps(content, indent=2) + "\n")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--measure", choices=GROUPS, help=argparse.SUPPRESS)  # in a process of its own
    parser.add_argument("--threads", type=int, default=1, help=argparse.SUPPRESS)  # of that process
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.size, options.measure, options.rounds, options.threads)))
        return
    cores = os.cpu_count() or 1
    for group in options.groups:
        for threads in (1, cores) if group == "exact" and cores > 1 else (1,):
            words = [sys.executable, __file__, "--size", options.size, "--rounds", str(options.rounds)]
            words += ["--measure", group, "--threads", str(threads)]
            environment = os.environ | {"OPENBLAS_NUM_THREADS": str(threads)}
            processes = []
            for _ in range(PROCESSES.get((group, options.size), 1)):
                answer = subprocess.run(words, env=environment, stdout=subprocess.PIPE, check=True)
                processes.append(json.loads(answer.stdout.splitlines()[-1]))
            result = record(options.size, options.rounds, group, threads, processes)
            print(f"threads: {threads}")
            for name, row in median_of(processes).items():
                cells = [f"{row[part]['queries_per_second']:9,.0f}/s" for part in PARTS]
                print(f"{name:11} {' '.join(cells)}  recall {row['64 at a time']['recall@10']:.3f}", flush=True)
            if group == "exact":
                print({part: round(value, 3) for part, value in result["ratios"].items()}, f"at most {MAX_RATIO}")


if __name__ == "__main__":
    main()
