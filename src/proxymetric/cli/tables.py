"""The tables of the verbs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from proxymetric.system.tables import TextTable

if TYPE_CHECKING:
    from proxymetric.runs.comparison import Comparison


def comparison_table(title: str, comparison: Comparison) -> TextTable:
    """Make a table with a row for each metric: each encoder with its interval, and the difference."""
    has_difference = len(comparison.rows) > 1
    table = TextTable(title, ["", *comparison.rows, *(["difference"] if has_difference else [])], left=("",))
    for metric in comparison.metrics:
        cells = []
        for name, scores in comparison.rows.items():
            interval = comparison.intervals.get(name, {}).get(metric)
            span = f" ({100 * interval[0]:.1f} to {100 * interval[1]:.1f})" if interval else ""
            cells.append(f"{100 * scores[metric]:.1f}{span}")
        if has_difference:
            cells.append(str(comparison.differences[metric]))
        table.add(metric, *cells)
    return table


def hits_table(title: str, hits: list[tuple[str, str, float]]) -> TextTable:
    """Make a table of the results of one query (file, class, similarity); long file names are wrapped, not cut."""
    table = TextTable(title, ["", "similarity", "class", "file"], left=("class", "file"))
    for rank, (file, class_name, score) in enumerate(hits, 1):
        table.add(rank, f"{score:.3f}", class_name, file)
    return table


def catalogue_table(rows: dict[str, Any]) -> TextTable:
    """Make a table of methods: name, paper, and when to choose it."""
    headings = ["method", "paper", "choose it"]
    table = TextTable("", headings, left=tuple(headings), box=None, padding=(0, 2, 0, 0))
    table.columns[0].no_wrap = True
    for name, row in rows.items():
        table.add(name, row.paper.split(",")[0], row.choose)
    return table
