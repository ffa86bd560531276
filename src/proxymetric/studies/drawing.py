"""Plots of a study: scores over the epochs, differences to the baselines as measured and as claimed, small vectors."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxymetric.files import replacing
from proxymetric.studies.inference import student

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from proxymetric.studies.scores import Results
    from proxymetric.studies.spec import Cell

COLOURS = ("#3157d5", "#b4530a", "#0f7f86", "#8a3ffc", "#147a4b", "#c2293d", "#6b7280", "#c58a00", "#0072c3", "#d02670")
MAX_ROWS_WITH_BANDS = 4
"""most rows for which intervals are drawn: with more rows, the bands would hide each other"""
MAX_LEGEND_COLUMNS = 4
LEGEND_LINES_WITHIN, LEGEND_LINE_INCHES = 3, 0.18
"""lines of a legend for which the picture has room, and the height of a further line"""
SOFTWARE = "proxymetric study"
"""value of the PNG field `Software`, by which the plots of studies are recognised"""
INK, GRID = "#16181d", "#e3e6eb"
SCORED_ON = {"papers": "test half", "held-out": "held-out training classes", "last": "held-out training classes"}


def draw(results: Results, heading: str, cells: list[Cell], folder: Path) -> list[Path]:
    """Write the plots of one group of rows as PNG files and return the files. A plot without data is not written."""
    first = cells[0]
    stem = "-".join(filter(None, (first.data, first.backbone, first.protocol)))
    files = []
    for kind, make in PLOTS.items():
        figure = make(results, heading, cells)
        if figure is not None:
            file = folder / f"{kind}-{stem}.png"
            with replacing(file) as temporary:
                figure.savefig(temporary, format="png", dpi=150, metadata={"Software": SOFTWARE})
            files.append(file)
    return files


def mean_curve(runs: list[list[dict[str, Any]]], metric: str) -> tuple[list[float], list[float], list[float]]:
    """The epochs common to all runs, the mean scores in per cent, and half the 95 % intervals (0 for one run).

    Example:
        >>> mean_curve([[{"epoch": 1, "R@1": 0.5}, {"epoch": 2, "R@1": 0.6}], [{"epoch": 1, "R@1": 0.7}]], "R@1")[:2]
        ([1], [60.0])
    """
    scores = [{record["epoch"]: 100 * record[metric] for record in run if metric in record} for run in runs]
    common = sorted(set.intersection(*(set(by_epoch) for by_epoch in scores))) if scores else []
    means = [student([by_epoch[epoch] for by_epoch in scores]) for epoch in common]
    return common, [mean.value for mean in means], [mean.half or 0.0 for mean in means]


def size_records(results: Results, cells: list[Cell], metric: str) -> list[dict[str, Any]]:
    """The scores of smaller vectors as points of `plots.small_vectors_figure`: means over the seeds with intervals.

    Runs that were trained at one dimension are points of one line, beside the line of each run that can be cut.
    """
    records = []
    for cell in cells:
        sizes = results.sizes(cell, metric)
        is_alone = len({dim for dim, *_ in sizes}) == 1
        name = "trained at each dimension" if is_alone else results.study.rows[cell.row].title
        for (dim, kind, size), values in sizes.items():
            mean = student(list(values.values()))
            point = {"dim": dim, "vectors": kind, "bytes": size, "series": name}
            records.append(point | {"scores": {metric: mean.value / 100}, "half": (mean.half or 0.0) / 100})
    return records


def _small_vectors(results: Results, heading: str, cells: list[Cell]) -> Figure | None:
    from proxymetric.plots import small_vectors_figure

    metric = "MAP@R" if "MAP@R" in results.study.metrics else results.study.metrics[0]
    records = size_records(results, cells, metric)
    title = f"{heading}\nsmaller vectors, mean over the seeds with 95 % intervals"
    return small_vectors_figure(records, metric, title) if records else None


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def style(axes: Axes, title: str) -> None:
    """Give a plot the look of all plots of studies."""
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=9, length=0, colors=INK)
    for side in axes.spines.values():
        side.set_visible(False)


def _curves(results: Results, heading: str, cells: list[Cell]) -> Figure | None:
    metrics = results.study.metrics
    figure = _figure(5.2 * len(metrics), 4.2)
    curves = 0
    for axes, metric in zip(figure.subplots(1, len(metrics), squeeze=False)[0], metrics):
        for number, cell in enumerate(cells):
            runs = [run.curve for run in results.runs[cell].values()]
            epochs, means, halves = mean_curve(runs, metric)
            if not epochs:
                continue
            curves += 1
            colour, title = COLOURS[number % len(COLOURS)], results.study.rows[cell.row].title
            dashes = ("-", "--", ":")[number // len(COLOURS) % 3]
            axes.plot(epochs, means, dashes, color=colour, linewidth=1.8, label=f"{title} ({len(runs)})")
            if len(cells) > MAX_ROWS_WITH_BANDS:
                continue
            low, high = ([min(100, max(0, m + sign * h)) for m, h in zip(means, halves)] for sign in (-1, 1))
            axes.fill_between(epochs, low, high, color=colour, alpha=0.12, linewidth=0)
        style(axes, f"{metric} on the {SCORED_ON[cells[0].protocol]}, %")
        axes.set_xlabel("epoch", fontsize=9, color=INK)
    if not curves:
        return None
    band = ", band: 95 % interval" if len(cells) <= MAX_ROWS_WITH_BANDS else ""
    figure.suptitle(f"{heading}\nmean over the seeds (their number){band}", fontsize=10, color=INK)
    _legend_below(figure)
    return figure


def _legend_below(figure: Figure) -> None:
    """Add a legend of all plots below them, in as many columns as fit into the picture, and make room for its lines."""
    marks = {label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels())}
    columns = min(MAX_LEGEND_COLUMNS, len(marks))
    while True:
        legend = figure.legend(
            list(marks.values()), list(marks), loc="outside lower center", ncols=columns, frameon=False, fontsize=8
        )
        if columns == 1 or legend.get_window_extent().width <= figure.bbox.width:
            break
        legend.remove()
        columns -= 1
    lines = math.ceil(len(marks) / columns)
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + LEGEND_LINE_INCHES * max(0, lines - LEGEND_LINES_WITHIN))


def draw_claim(axes: Any, claim: float, place: float) -> None:
    """Mark the difference that a paper claims; one without a figure (inf or -inf) is a triangle beside zero."""
    if math.isinf(claim):
        marker, value, label = (">", 0.25, "paper: higher") if claim > 0 else ("<", -0.25, "paper: lower")
    else:
        marker, value, label = "D", claim, "paper"
    axes.plot(value, place, marker, color=COLOURS[1], markersize=6, fillstyle="none", label=label)


def _differences(results: Results, heading: str, cells: list[Cell]) -> Figure | None:
    metrics = results.study.metrics
    paired = [cell for cell in cells if any(results.difference(cell, metric) for metric in metrics)]
    if not paired:
        return None
    figure = _figure(2.0 + 3.8 * len(metrics), 1.9 + 0.42 * len(paired))
    for axes, metric in zip(figure.subplots(1, len(metrics), squeeze=False, sharey=True)[0], metrics):
        axes.axvline(0, color=INK, linewidth=1)
        for row, cell in enumerate(paired):
            measured, claim = results.difference(cell, metric), results.claim(cell, metric)
            if measured is not None:
                axes.errorbar(
                    measured.value, row, xerr=measured.half or 0.0, fmt="o", color=COLOURS[0], capsize=3,
                    label=None if row else "measured, 95 % interval",
                )  # fmt: skip
            if claim is not None:
                draw_claim(axes, claim, row)
        rows = results.study.rows
        names = [f"{rows[cell.row].title}\nagainst {rows[rows[cell.row].baseline or ''].title}" for cell in paired]
        axes.set_yticks(range(len(paired)), names)
        axes.set_ylim(len(paired) - 0.5, -0.5)
        style(axes, f"{metric}, points")
    figure.suptitle(f"{heading}\ndifference to the baseline, paired by seed", fontsize=10, color=INK)
    _legend_below(figure)
    return figure


PLOTS: dict[str, Callable[[Results, str, list[Cell]], Figure | None]] = {
    "curves": _curves,
    "differences": _differences,
    "small-vectors": _small_vectors,
}
"""first part of the name of a plot's file -> the function that draws it"""
