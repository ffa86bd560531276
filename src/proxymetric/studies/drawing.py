"""Plots of a study: scores over the epochs, differences to the baselines as measured and as claimed, small vectors."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxymetric.studies.inference import student
from proxymetric.studies.ranges import SEARCH
from proxymetric.studies.scores import printed_number
from proxymetric.studies.search import chosen, short
from proxymetric.system.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from proxymetric.studies.ranges import Draw, Group, Range
    from proxymetric.studies.scores import Results
    from proxymetric.studies.spec import Cell

COLOURS = ("#3157d5", "#b4530a", "#0f7f86", "#8a3ffc", "#147a4b", "#c2293d", "#6b7280", "#c58a00", "#0072c3", "#d02670")
MAX_ROWS_WITH_BANDS = 4
"""most rows for which intervals are drawn: with more rows, the bands would hide each other"""
MAX_LEGEND_COLUMNS = 4
MAX_PANELS = 4
"""panels beside each other in the picture of a search"""
LEGEND_LINES_WITHIN, LEGEND_LINE_INCHES = 3, 0.18
"""lines of a legend for which the picture has room, and the height of a further line"""
SOFTWARE = "proxymetric study"
"""value of the PNG field `Software`, by which the plots of studies are recognised"""
INK, GRID = "#16181d", "#e3e6eb"
SCORED_ON = {"papers": "test half", "held-out": "held-out training classes", "last": "held-out training classes"}


def draw(results: Results, heading: str, cells: list[Cell], folder: Path) -> list[Path]:
    """Write the plots of one group of rows as PNG files and return the files. A plot without data is not written."""
    first = cells[0]
    older = short(results.identities[first.data]) if results.mark else ""
    stem = "-".join(filter(None, (first.data, first.backbone, first.protocol, older)))
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


def draw_search(results: Results, data: str, backbone: str, folder: Path) -> list[Path]:
    """Write the picture of the draws of each searched row as PNG files and return the files."""
    files = []
    for group, draws in results.draws.items():
        if group[1:] == (data, backbone) and any(draw.score is not None for draw in draws):
            file = folder / f"{SEARCH}-{'-'.join(filter(None, group))}.png"
            with replacing(file) as temporary:
                metadata = {"Software": SOFTWARE}
                _draws(results, group, draws).savefig(temporary, format="png", dpi=150, metadata=metadata)
            files.append(file)
    return files


def _draws(results: Results, group: Group, draws: list[Draw]) -> Figure:
    """The score of each draw over each of its numbers, a panel for each number; the best draw is marked."""
    study, (name, data, backbone) = results.study, group
    row, best = study.rows[name], chosen(study, draws).get(group)
    ranges = row.ranges or {}
    columns = min(MAX_PANELS, len(ranges))
    lines = math.ceil(len(ranges) / columns)
    figure = _figure(max(6.4, 1.0 + 2.9 * columns), 1.5 + 2.7 * lines)
    grid = figure.subplots(lines, columns, squeeze=False, sharey=True)
    scored = [draw for draw in draws if draw.score is not None]
    for number, axes in enumerate(grid.flat):
        if number >= len(ranges):
            axes.axis("off")
            continue
        key, each = list(ranges.items())[number]
        for trained, fill, label in ((True, "full", "draw"), (False, "none", "draw, best before training")):
            some = [draw for draw in scored if bool(draw.epoch) == trained]
            heights = [100 * abs(draw.score or 0.0) for draw in some]
            if some:
                axes.plot(
                    _places(each, some, key), heights, "o", color=COLOURS[0], markersize=6, fillstyle=fill, label=label
                )
        for draw in draws:
            if draw.score is None:
                axes.plot(_places(each, [draw], key), 0.03, "x", color=COLOURS[5], markersize=7, label="no score",
                          transform=axes.get_xaxis_transform())  # fmt: skip
        if best is not None:
            height = 100 * abs(best.score or 0.0)
            axes.plot(_places(each, [best], key), height, "o", color=COLOURS[1], markersize=9, label="best draw")
        _mark_printed(axes, each, printed_number(study, group, key))
        style(axes, "")
        axes.set_xlabel(key, fontsize=9, color=INK)
        if number % columns == 0:
            axes.set_ylabel(f"{scored[0].metric}, %", fontsize=9, color=INK)
    figure.align_xlabels()
    titles = ", ".join(filter(None, (study.data[data].title, study.backbones[backbone].title)))
    assert study.search is not None
    what = f"{len(draws)} of {study.search.draws} draws of {study.search.epochs} epochs, scored on held-out classes"
    figure.suptitle(f"{row.title}, {titles}\n{what}", fontsize=10, color=INK)
    _legend_below(figure)
    return figure


def _places(each: Range, draws: list[Draw], key: str) -> list[Any]:
    """Where draws are on the axis of a number; the entries of a choice are numbered."""
    values = [draw.values[key] for draw in draws]
    return [each.ends.index(value) for value in values] if each.kind == "choice" else values


def log_ticks(low: float, high: float) -> list[float]:
    """Ticks of a logarithmic axis: one to three in each power of ten, fewer the longer the axis is.

    >>> log_ticks(2e-5, 5e-4), log_ticks(0.02, 2.0), log_ticks(1e-5, 0.1)
    ([2e-05, 5e-05, 0.0001, 0.0002, 0.0005], [0.03, 0.1, 0.3, 1.0], [1e-05, 0.0001, 0.001, 0.01, 0.1])
    """
    powers = math.log10(high / low)
    steps = (1, 2, 5) if powers < 1.6 else (1, 3) if powers < 3 else (1,)
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [float(f"{step}e{exponent}") for exponent in exponents for step in steps]
    return [tick for tick in ticks if low <= tick <= high]


def _mark_printed(axes: Axes, each: Range, value: Any) -> None:
    """Set the axis of a number, with a dashed line at the number as printed if it is inside."""
    from matplotlib.ticker import MaxNLocator

    if each.kind == "choice":
        axes.set_xticks(range(len(each.ends)), list(map(str, each.ends)))
        axes.set_xlim(-0.5, len(each.ends) - 0.5)
        place = each.ends.index(value) if value in each.ends else None
    else:
        low, high = each.ends
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        place = value if is_number and low <= value <= high else None
        if each.kind == "log":
            axes.set_xscale("log")
            ticks = log_ticks(low, high)
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axes.set_xticks([], minor=True)
            edge = (high / low) ** 0.06
            axes.set_xlim(low / edge, high * edge)
        else:
            edge = 0.06 * (high - low)
            axes.set_xlim(low - edge, high + edge)
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=each.kind == "integer"))
    if place is not None:
        axes.axvline(place, color=INK, linewidth=1, linestyle="--", zorder=1.5, label="as printed")


PLOTS: dict[str, Callable[[Results, str, list[Cell]], Figure | None]] = {
    "curves": _curves,
    "differences": _differences,
    "small-vectors": _small_vectors,
}
"""first part of the name of a plot's file -> the function that draws it"""
