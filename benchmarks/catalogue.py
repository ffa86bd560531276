"""Measures what a change of a catalogue costs, and a search with conditions, beside pgvector and LanceDB.

    python benchmarks/catalogue.py                           100,000 images of 512 dimensions
    python benchmarks/catalogue.py --images 1000000 --engines exact

One item is added, gets another label, or is removed: CPU time (of the server too) and bytes that were written, the
median of some changes; first in a new catalogue, then after --changes of them (or as many
as an engine makes in --seconds). Searches are exact in all engines (no
index of pgvector or LanceDB), of one query at a time: among all items, and among 1, 10 and 50 % of them. The engines
take turns, search by search. pgvector is asked through `psycopg` in the PostgreSQL that the package `pgserver` carries,
LanceDB in the process; an engine whose package is not installed is left out. Results are written to
results/catalogue-<images>.json.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from common import RESULTS, about, spread, write

DIM = 512
CLASSES, BRANDS, PRICES = 500, 100, 1_000
CHUNK = 20_000
"""items that are added at once"""
CHANGES = 20
"""changes of a kind of which the median is taken"""
CONDITIONS: dict[str, tuple[str, int] | None] = {"all": None, "1 %": ("=", 7), "10 %": ("<", 100), "50 %": ("<", 500)}
"""what is searched: all items, those of a brand, those below a price"""
THUMBNAIL = bytes(5_000)


class Catalogue(Protocol):
    """A catalogue under test."""

    processes: list[int]
    """the processes that do the work"""

    def add(self, numbers: range, vectors: np.ndarray) -> None: ...
    def relabel(self, number: int, label: str) -> None: ...
    def remove(self, number: int) -> None: ...
    def search(self, query: np.ndarray, condition: tuple[str, int] | None) -> list[str]: ...
    def open(self) -> None: ...


def name_of(number: int) -> str:
    return f"{number:09d}.jpg"


class Ours:
    """An index of proxymetric with the exact engine."""

    def __init__(self, folder: Path) -> None:
        from proxymetric.search import Index

        self.folder = folder / "ours.index"
        self.index = Index.create(self.folder, DIM, map="none")
        self.processes = [os.getpid()]

    def add(self, numbers: range, vectors: np.ndarray) -> None:
        self.index.add(
            [name_of(number) for number in numbers],
            vectors,
            labels=[f"class {number % CLASSES}" for number in numbers],
            metadata=[{"brand": number % BRANDS, "price": number % PRICES} for number in numbers],
            thumbnails=[THUMBNAIL] * len(numbers) if len(numbers) == 1 else None,
        )

    def relabel(self, number: int, label: str) -> None:
        self.index.update([name_of(number)], labels=[label])

    def remove(self, number: int) -> None:
        self.index.delete([name_of(number)])

    def search(self, query: np.ndarray, condition: tuple[str, int] | None) -> list[str]:
        where = (
            None
            if condition is None
            else [f"{'brand' if condition[0] == '=' else 'price'}{condition[0]}{condition[1]}"]
        )
        return [hit.id for hit in self.index.search(query[None], 10, where)[0]]

    def open(self) -> None:
        from proxymetric.search import Index

        Index(self.folder)


class PgVector:
    """A table of PostgreSQL with pgvector, asked by SQL."""

    def __init__(self, folder: Path) -> None:
        import pgserver
        import psycopg

        self.server = pgserver.get_server(str(folder / "postgres"))
        self.connect: Callable[[], Any] = lambda: psycopg.connect(self.server.get_uri(), autocommit=True)
        self.connection = self.connect()
        self.connection.execute("CREATE EXTENSION vector")
        self.connection.execute(
            f"CREATE TABLE items (id text PRIMARY KEY, label text, brand int, price int, thumbnail bytea, "
            f"vector vector({DIM}))"
        )
        self.connection.execute("CREATE INDEX ON items (brand)")
        self.connection.execute("CREATE INDEX ON items (price)")
        self.processes = [os.getpid(), *_family(self.server.get_pid())]

    def add(self, numbers: range, vectors: np.ndarray) -> None:
        picture = THUMBNAIL if len(numbers) == 1 else None
        with self.connection.cursor() as cursor, cursor.copy("COPY items FROM STDIN") as copy:
            for number, vector in zip(numbers, vectors, strict=True):
                text = "[" + ",".join(map(repr, vector.tolist())) + "]"
                copy.write_row((
                    name_of(number), f"class {number % CLASSES}", number % BRANDS, number % PRICES, picture, text
                ))  # fmt: skip

    def relabel(self, number: int, label: str) -> None:
        self.connection.execute("UPDATE items SET label = %s WHERE id = %s", (label, name_of(number)))

    def remove(self, number: int) -> None:
        self.connection.execute("DELETE FROM items WHERE id = %s", (name_of(number),))

    def search(self, query: np.ndarray, condition: tuple[str, int] | None) -> list[str]:
        where = ""
        if condition is not None:
            where = f"WHERE {'brand' if condition[0] == '=' else 'price'} {condition[0]} {condition[1]}"
        text = "[" + ",".join(map(repr, query.tolist())) + "]"
        rows = self.connection.execute(f"SELECT id FROM items {where} ORDER BY vector <#> %s LIMIT 10", (text,))
        return [row[0] for row in rows]

    def open(self) -> None:
        self.connect().close()


class Lance:
    """A table of LanceDB."""

    def __init__(self, folder: Path) -> None:
        import lancedb

        self.folder = folder / "lance"
        self.database = lancedb.connect(self.folder)
        self.table: Any = None
        self.processes = [os.getpid()]

    def add(self, numbers: range, vectors: np.ndarray) -> None:
        import pyarrow as pa

        picture = THUMBNAIL if len(numbers) == 1 else None
        values = pa.array(np.ascontiguousarray(vectors).reshape(-1), pa.float32())
        table = pa.table({
            "id": [name_of(number) for number in numbers],
            "label": [f"class {number % CLASSES}" for number in numbers],
            "brand": [number % BRANDS for number in numbers],
            "price": [number % PRICES for number in numbers],
            "thumbnail": pa.array([picture] * len(numbers), pa.binary()),
            "vector": pa.FixedSizeListArray.from_arrays(values, DIM),
        })  # fmt: skip
        if self.table is None:
            self.table = self.database.create_table("items", table)
        else:
            self.table.add(table)

    def relabel(self, number: int, label: str) -> None:
        self.table.update(where=f"id = '{name_of(number)}'", values={"label": label})

    def remove(self, number: int) -> None:
        self.table.delete(f"id = '{name_of(number)}'")

    def search(self, query: np.ndarray, condition: tuple[str, int] | None) -> list[str]:
        search = self.table.search(query).metric("dot")
        if condition is not None:
            column = "brand" if condition[0] == "=" else "price"
            search = search.where(f"{column} {condition[0]} {condition[1]}", prefilter=True)
        return search.limit(10).select(["id", "_distance"]).to_arrow()["id"].to_pylist()

    def open(self) -> None:
        import lancedb

        lancedb.connect(self.folder).open_table("items")


ENGINES: dict[str, tuple[Callable[[Path], Catalogue], tuple[str, ...]]] = {
    "exact": (Ours, ()),
    "pgvector": (PgVector, ("pgserver", "psycopg")),
    "lancedb": (Lance, ("lancedb",)),
}
"""name -> how it is made, and the packages that it needs"""


def _family(process: int) -> list[int]:
    """A process and its children."""
    children = Path(f"/proc/{process}/task/{process}/children")
    found = [int(number) for number in children.read_text().split()] if children.exists() else []
    return [process, *found]


def cpu_seconds(processes: list[int]) -> float:
    """The CPU time of some processes so far; this one is counted more finely."""
    ticks = os.sysconf("SC_CLK_TCK")
    total = 0.0
    for process in processes:
        if process == os.getpid():
            times = os.times()
            total += times.user + times.system
            continue
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / ticks
    return total


def written_bytes(processes: list[int]) -> int:
    """The bytes that some processes have written so far."""
    total = 0
    for process in processes:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{process}/io").read_text().splitlines()
            total += int(next(line for line in lines if line.startswith("wchar")).split()[1])
    return total


def changes(catalogue: Catalogue, vectors: np.ndarray, first: int) -> dict[str, Any]:
    """The cost of adding, relabelling and removing one item."""
    actions: dict[str, Callable[[int], None]] = {
        "add": lambda number: catalogue.add(range(first + number, first + number + 1), vectors[number : number + 1]),
        "relabel": lambda number: catalogue.relabel(2 * number, "another class"),
        "remove": lambda number: catalogue.remove(first // 2 + number),
    }
    record = {}
    for name, action in actions.items():
        seconds, cpu, before = [], cpu_seconds(catalogue.processes), written_bytes(catalogue.processes)
        for number in range(CHANGES):
            start = time.perf_counter()
            action(number)
            seconds.append(time.perf_counter() - start)
        record[name] = {
            "cpu_ms": round(1_000 * (cpu_seconds(catalogue.processes) - cpu) / CHANGES, 2),
            "ms": spread([1_000 * each for each in seconds], 2),
            "bytes": (written_bytes(catalogue.processes) - before) // CHANGES,
        }
    return record


def searches(catalogues: dict[str, Catalogue], queries: np.ndarray) -> dict[str, Any]:
    """The time of a search among all items and among some, the engines in turn."""
    record: dict[str, Any] = {name: {} for name in catalogues}
    found: dict[str, dict[str, list[list[str]]]] = {name: {} for name in catalogues}
    for title, condition in CONDITIONS.items():
        seconds: dict[str, list[float]] = {name: [] for name in catalogues}
        cpu = dict.fromkeys(catalogues, 0.0)
        for round_number, query in enumerate(queries):
            for name, catalogue in catalogues.items():
                before, start = cpu_seconds(catalogue.processes), time.perf_counter()
                ids = catalogue.search(query, condition)
                if round_number:
                    seconds[name].append(time.perf_counter() - start)
                    cpu[name] += cpu_seconds(catalogue.processes) - before
                found[name].setdefault(title, []).append(ids)
        for name in catalogues:
            milliseconds = spread([1_000 * each for each in seconds[name]], 2)
            record[name][title] = {"ms": milliseconds, "cpu_ms": round(1_000 * cpu[name] / (len(queries) - 1), 2)}
    for name in catalogues:
        for title, lists in found[name].items():
            theirs = next(iter(found.values()))[title]
            shared = [len(set(ours) & set(others)) / 10 for ours, others in zip(lists, theirs, strict=True)]
            record[name][title]["same_results"] = round(statistics.mean(shared), 3)
    return record


def chunks(images: int) -> Iterator[tuple[range, np.ndarray]]:
    """The items of the catalogue, some at a time: vectors around the centres of their classes."""
    generator = np.random.default_rng(0)
    centres = generator.standard_normal((CLASSES, DIM), dtype=np.float32)
    for start in range(0, images, CHUNK):
        numbers = range(start, min(start + CHUNK, images))
        noise = generator.standard_normal((len(numbers), DIM), dtype=np.float32)
        vectors = centres[np.arange(numbers.start, numbers.stop) % CLASSES] + 1.5 * noise
        yield numbers, vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=100_000)
    parser.add_argument("--changes", type=int, default=10_000, help="changes after which the costs are measured again")
    parser.add_argument("--seconds", type=float, default=400.0, help="at most for them, in each engine")
    parser.add_argument("--queries", type=int, default=21)
    parser.add_argument("--engines", default=",".join(ENGINES), help="with commas between them")
    parser.add_argument("--folder", type=Path, help="a disk with room; default: the folder for temporary files")
    parser.add_argument("--out", type=Path, default=RESULTS)
    words = parser.parse_args()
    torch.set_num_threads(1)
    place = Path(tempfile.mkdtemp(prefix="catalogue-", dir=words.folder))
    catalogues: dict[str, Catalogue] = {}
    record = about("catalogue", "cpu", threads=1) | {"images": words.images, "dim": DIM, "engines": {}}
    try:
        for name in words.engines.split(","):
            make, packages = ENGINES[name]
            if missing := [package for package in packages if importlib.util.find_spec(package) is None]:
                print(f"{name}: left out, {', '.join(missing)} is not installed")
                continue
            catalogue = catalogues[name] = make(place)
            start, cpu = time.perf_counter(), cpu_seconds(catalogue.processes)
            for numbers, vectors in chunks(words.images):
                catalogue.add(numbers, vectors)
            record["engines"][name] = {
                "filled": {
                    "s": round(time.perf_counter() - start, 1),
                    "cpu_s": round(cpu_seconds(catalogue.processes) - cpu, 1),
                }
            }
            print(name, record["engines"][name], flush=True)
        generator = np.random.default_rng(1)
        vectors = generator.standard_normal((2 * CHANGES, DIM), dtype=np.float32)
        queries = generator.standard_normal((words.queries, DIM), dtype=np.float32)
        for name, found in searches(catalogues, queries / np.linalg.norm(queries, axis=1, keepdims=True)).items():
            record["engines"][name]["searches"] = found
        for name, catalogue in catalogues.items():
            of_engine = record["engines"][name]
            of_engine["changes"] = changes(catalogue, vectors[:CHANGES], words.images)
            cpu, start = cpu_seconds(catalogue.processes), time.perf_counter()
            count = 0
            while count < words.changes and time.perf_counter() - start < words.seconds:
                catalogue.relabel(100 + count, f"class {count % 7}")
                count += 1
            of_engine["many"] = {
                "changes": count,
                "cpu_ms": round(1_000 * (cpu_seconds(catalogue.processes) - cpu) / max(1, count), 2),
                "ms": round(1_000 * (time.perf_counter() - start) / max(1, count), 2),
            }
            of_engine["changes_after"] = changes(catalogue, vectors[CHANGES:], words.images + 1_000)
            seconds = []
            for _ in range(3):
                cpu = cpu_seconds([os.getpid()])
                catalogue.open()
                seconds.append(cpu_seconds([os.getpid()]) - cpu)
            of_engine["opened_cpu_s"] = spread(seconds)
            print(name, of_engine, flush=True)
            write(words.out / f"catalogue-{words.images}.json", record)
    finally:
        shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    main()
