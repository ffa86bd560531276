"""Tables of a catalogue that changes: what a change and a search with conditions cost, by engine."""

from __future__ import annotations

from typing import Any

from generator.scores import BENCHMARKS, paragraph, read, table

SIZES = (100_000, 1_000_000)
KINDS = {"add": "add one", "relabel": "change one", "remove": "remove one"}


def catalogue_table() -> str:
    """The recorded runs of benchmarks/catalogue.py."""
    parts = [_of_size(images) for images in SIZES if (BENCHMARKS / f"catalogue-{images}.json").exists()]
    return "\n\n".join(parts)


def _of_size(images: int) -> str:
    record = read(BENCHMARKS / f"catalogue-{images}.json")
    engines: dict[str, Any] = record["engines"]
    conditions = list(next(iter(engines.values()))["searches"])
    rows = []
    for name, engine in engines.items():
        for title, costs in (("at first", engine["changes"]), (_after(engine["many"]), engine["changes_after"])):
            cells = [f"{costs[kind]['cpu_ms']:g} ms, {costs[kind]['bytes'] / 1e3:,.1f} kB" for kind in KINDS]
            searches = [f"{engine['searches'][condition]['cpu_ms']:g} ms" for condition in conditions]
            rows.append([name, title, *cells, *(searches if title == "at first" else [""] * len(conditions))])
    opened = engines["exact"]["opened_cpu_s"]["median"]
    text = (
        f"{images:,} images, {record['dim']} dimensions, one thread, {record['machine']['architecture']}: CPU time of "
        "the process and of its server, and bytes written; then the CPU time of a search for ten results, exact in all "
        "engines, among all images and among a part of them. Opening the index of `exact` after its changes: "
        f"{opened:g} s of CPU time."
    )
    columns = ["engine", "changes", *KINDS.values(), *(f"search, {condition}" for condition in conditions)]
    return f"{paragraph(text)}\n\n{table(columns, rows)}"


def _after(many: dict[str, Any]) -> str:
    return f"after {many['changes']:,}"
