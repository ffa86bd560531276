"""Compares the engines of an index on a live catalogue: one item added, relabelled, deleted, and searches with filters.

    python benchmarks/engines.py                                        100,000 vectors of 128 dimensions; some minutes
    python benchmarks/engines.py --engines exact pgvector --count 20000
    python benchmarks/engines.py --milvus http://127.0.0.1:19530 --milvus-pid PID

pgvector is the embedded PostgreSQL of the extra. Milvus is measured where its address is given; the process of its
server is named so that its CPU seconds count too. Each number is the mean of several calls of `Index`, in milliseconds:
CPU of this process and of the server together, and wall time beside it. Searches ask for ten results of one query, and
their recall is against NumPy. The same vectors, metadata and queries for all, one engine after the other.

Results are written to results/engines-cpu.json.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RESULTS, commit, machine

from proxymetric.search import Index

K, SEED = 10, 0
FILTERS = {"1 %": "brand=b7", "10 %": "price<100", "50 %": "kind=k1"}
"""the share of the items that match -> the condition"""


def clustered(count: int, dim: int, queries: int) -> tuple[np.ndarray, np.ndarray]:
    """Vectors in clusters of twenty, as embeddings of classes are, and new vectors of the same clusters."""
    draws = np.random.default_rng(SEED)
    centres = draws.normal(size=(max(1, count // 20), dim))
    rows = draws.integers(0, len(centres), count + queries)
    made = (centres[rows] + 0.5 * draws.normal(size=(count + queries, dim))).astype(np.float32)
    made /= np.linalg.norm(made, axis=1, keepdims=True)
    return made[:count], made[count:]


def server_seconds(root: int | None) -> float:
    """The CPU seconds of a process and of all that it has started, those that have ended too."""
    if root is None:
        return 0.0
    stats, total = {}, 0.0
    for place in Path("/proc").iterdir():
        if place.name.isdecimal():
            try:
                fields = (place / "stat").read_text().rpartition(") ")[2].split()
            except OSError:
                continue
            stats[int(place.name)] = int(fields[1]), sum(map(int, fields[11:15]))
    for process, (_, ticks) in stats.items():
        parent = process
        while parent in stats and parent != root:
            parent = stats[parent][0]
        total += ticks if parent == root else 0
    return total / os.sysconf("SC_CLK_TCK")


def measured(do: Callable[[int], Any], times: int, root: int | None) -> dict[str, float]:
    """The mean of several calls, in milliseconds."""
    do(0)
    cpu, server, wall = time.process_time(), server_seconds(root), time.perf_counter()
    for number in range(1, times + 1):
        do(number)
    spent = time.process_time() - cpu + server_seconds(root) - server
    return {"cpu": round(1e3 * spent / times, 2), "wall": round(1e3 * (time.perf_counter() - wall) / times, 2)}


def pid_of(index: Index, given: int | None) -> int | None:
    """The process of the server that an index asks; None for a local engine."""
    if index.engine.name == "milvus":
        return given
    if index.engine.name != "pgvector":
        return None
    return int((index.folder / "engine-postgres" / "postmaster.pid").read_text().split()[0])


def measure(engine: dict[str, Any], folder: Path, count: int, dim: int, times: int, pid: int | None) -> dict[str, Any]:
    """Measure one engine."""
    vectors, queries = clustered(count, dim, 2 * times)
    metadata = [{"brand": f"b{row % 100}", "price": row % 1_000, "kind": f"k{row % 2}"} for row in range(count)]
    index = Index.create(folder / "a.index", dim, engine=engine, map="none")
    root = pid_of(index, pid)
    cpu, server, wall = time.process_time(), server_seconds(root), time.perf_counter()
    index.add([f"{row}" for row in range(count)], vectors, metadata=metadata)
    index.renew()
    spent = time.process_time() - cpu + server_seconds(root) - server
    result: dict[str, Any] = {
        "add all, seconds": {"cpu": round(spent, 1), "wall": round(time.perf_counter() - wall, 1)}
    }
    query = torch.from_numpy(queries)
    for name, where in {"unfiltered": None, **FILTERS}.items():
        mask = np.ones(count, bool)
        if where is not None:
            column, operator, value = where.partition("<") if "<" in where else where.partition("=")
            values = [str(each[column]) for each in metadata]
            mask = np.array([float(each) < float(value) if operator == "<" else each == value for each in values])
        shares = []
        for row, hits in enumerate(index.search(query, K, where)):
            scores = np.where(mask, vectors @ queries[row], -2)
            shares.append(np.mean([hit.similarity >= np.partition(scores, -K)[-K] - 1e-5 for hit in hits]))
        found = measured(lambda n, where=where: index.search(query[n : n + 1], K, where), times, root)
        result[f"search, {name}"] = {**found, "recall": round(float(np.mean(shares)), 4)}
    few = min(times, 20)
    result["add one"] = measured(lambda n: index.add([f"new{n}"], query[n : n + 1]), few, root)
    result["relabel one"] = measured(lambda n: index.update([f"{n}"], labels=["new"]), few, root)
    result["delete one"] = measured(lambda n: index.delete([f"new{n}"]), few, root)
    if (recall := index.manifest.engine.get("recall")) is not None:
        result["promised recall"] = recall["value"]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=["exact", "faiss", "pgvector"])
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--milvus", help="address of a Milvus")
    parser.add_argument("--milvus-pid", type=int, help="the process of its server")
    parser.add_argument("--out", type=Path, default=RESULTS / "engines-cpu.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    content: dict[str, Any] = {
        "about": {**commit(), "machine": machine(), "count": options.count, "dim": options.dim, "times": options.times}
    }
    engines = {name: {"name": name} for name in options.engines}
    if options.milvus:
        engines["milvus"] = {"name": "milvus", "uri": options.milvus}
    for name, engine in engines.items():
        with tempfile.TemporaryDirectory() as folder:
            content[name] = measure(engine, Path(folder), options.count, options.dim, options.times, options.milvus_pid)
        print(name, json.dumps(content[name], indent=1), flush=True)
        options.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
