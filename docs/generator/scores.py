"""Read stored results of runs, and format their scores for tables."""

from __future__ import annotations

import json
import statistics
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = ROOT / "results"
BENCHMARKS = ROOT / "benchmarks" / "results"
MIN_INTERVAL_SEEDS = 3
"""with fewer seeds an interval is too wide to be useful"""


def read(file: Path) -> Any:
    """The content of a JSON file."""
    return json.loads(file.read_text(encoding="utf-8"))


def groups(folder: Path) -> dict[str, dict[str, dict]]:
    """The collected results `<name>-seed<seed>` of a folder, by name and seed; empty if there are none."""
    from proxymetric.studies.collected import read_runs

    results: dict[str, dict[str, dict]] = {}
    for run, result in read_runs(folder).items():
        name, found, seed = run.rpartition("-seed")
        if found:
            results.setdefault(name, {})[seed] = result
    return results


def score(run: dict, metric: str) -> float:
    """A score of the trained encoder, as a fraction."""
    return run["rows"]["trained encoder"][metric]


def interval(values: list[float], sign: str = "") -> str:
    """The mean of fractions in per cent, with half the 95 % Student interval if there are three values or more.

    >>> interval([0.5, 0.52, 0.51])
    '51.0 ± 2.5'
    >>> interval([0.01], sign="+")
    '+1.0'
    """
    from proxymetric.studies.inference import student

    mean = f"{100 * statistics.mean(values):{sign}.1f}"
    if len(values) < MIN_INTERVAL_SEEDS:
        return mean
    half = student(values).half
    assert half is not None
    return f"{mean} ± {100 * half:.1f}"


def table(columns: list[str], rows: list[list[str]]) -> str:
    """A Markdown table.

    >>> print(table(["a", "b"], [["1", "2"]]))
    | a | b |
    |---|---|
    | 1 | 2 |
    """
    lines = [f"| {' | '.join(row)} |" for row in (columns, *rows)]
    lines.insert(1, "|" + "---|" * len(columns))
    return "\n".join(lines)


def paragraph(text: str) -> str:
    """Text in lines of at most 118 characters."""
    return textwrap.fill(text, 118, break_on_hyphens=False)


def machine(result: dict) -> str:
    """The GPU of a run, or the number of cores and the processor."""
    facts = result["machine"]
    return facts.get("gpu") or f"{facts['cores']} cores, {facts['processor']}"
