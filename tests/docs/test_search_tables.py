"""The tables of search fill up with the record: parts that were not measured yet are missing, not wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "docs"))

from generator import search  # noqa: E402


def engine(rate: float, ratio: float = 1.0, **chosen: object) -> dict:
    def part(batch: int) -> dict:
        return {
            "cpu_seconds": batch / rate,
            "wall_seconds": batch / rate,
            "queries_per_second": rate,
            "recall@10": 0.975,
            "exact_relative_to_it": ratio,
        }

    parts = {"1 at a time": part(1), "64 at a time": part(64)}
    return {"build_seconds": 12.4, "bytes": 2_000_000_000, "memory_bytes": 1e6, "chosen": chosen, **parts}


def group() -> dict:
    return {
        "engines": {"NumPy": engine(10), "exact": engine(20), "faiss flat": engine(5)},
        "ratios": {"1 at a time": 1.02, "64 at a time": 0.5},
        "ratios of processes": [{"1 at a time": value, "64 at a time": 0.5} for value in (1.04, 1.02, 0.99)],
    }


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setattr(search, "BENCHMARKS", tmp_path)

    def write(sizes: dict) -> None:
        machine = {"processor": "X1", "architecture": "x", "cores": 4, "versions": {"numpy": "2"}}
        sizes = {name: {"machine": machine, **found} for name, found in sizes.items()}
        (tmp_path / search.RECORD).write_text(json.dumps({"dim": 512, "sizes": sizes}))

    return write


def test_a_size_that_was_not_measured_says_so(store):
    store({})
    assert (
        search.engines_table("large")
        == "No results of the size `large` are stored in `benchmarks/results/search-cpu.json`."
    )
    assert search.ratios_table() == "No ratios are stored in `benchmarks/results/search-cpu.json`."


def test_a_size_of_which_only_a_group_was_measured(store):
    ivf = {"faiss IVF": engine(40, effort=1850, lists=3919)}
    store({"large": {"vectors": 1_000_000, "classes": 50_000, "engines": ivf}})
    text = search.engines_table("large")
    assert "1,000,000 vectors of 50,000 classes" in text
    assert "| faiss IVF | 12 s | 2,000 MB | 1 MB | 40/s | 40/s | 0.975 | 1,850 of 3,919 lists |" in text
    assert "NumPy |" not in text
    assert "fastest" not in text, "without the exact engine nothing is said about the fastest"
    assert "No ratios" in search.ratios_table()


def test_ratios_with_one_thread_and_with_all_cores(store):
    small = {"vectors": 60_000, "classes": 6_000, **group()}
    store({"small": small})
    rows = search.ratios_table().splitlines()[2:]
    assert len(rows) == 2
    assert rows[0] == (
        "| 60,000 | 1 | one query | 50.0 ms | 100.0 ms | 200.0 ms | 1.020 | 0.990 1.020 1.040 | 40.0 GB/s |"
    )
    store({"small": {**small, "all cores": group() | {"threads": 4}}})
    rows = search.ratios_table().splitlines()[2:]
    assert [row.split(" | ")[1] for row in rows] == ["1", "1", "4", "4"]


def test_the_fastest_engine_is_named_for_one_query_and_for_many(store):
    hnsw = engine(100, effort=365)
    hnsw["64 at a time"]["queries_per_second"] = 6
    store({"small": {"vectors": 60_000, "classes": 6_000, "engines": {**group()["engines"], "faiss HNSW": hnsw}}})
    text = search.engines_table("small")
    assert "2 engines of this package that were measured: one query: **faiss HNSW** (recall 0.975); 64" in text
    assert "queries: **exact** (recall 0.975)" in text.replace("\n", " ")
    assert "| 365 candidates |" in text
