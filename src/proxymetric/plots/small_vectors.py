"""The picture of small vectors: bytes of a vector against a metric, a line for each kind of numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxymetric.plots.escaping import escaped
from proxymetric.system.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 640, 340
LEFT, RIGHT, TOP, BOTTOM = 58, 110, 34, 46
COLOURS = ("var(--series-0, #3157d5)", "var(--series-1, #b4530a)", "var(--series-2, #0f7f86)")
PNG_COLOURS = ("#3157d5", "#b4530a", "#0f7f86", "#8a3ffc", "#147a4b", "#c2293d")
STYLES: tuple[dict[str, Any], ...] = (
    {"marker": "o", "linestyle": "-"},
    {"marker": "o", "linestyle": "--", "markerfacecolor": "white"},
    {"marker": "s", "linestyle": ":"},
    {"marker": "s", "linestyle": "-.", "markerfacecolor": "white"},
)
"""of the series; the colours are those of the kinds of numbers"""
PNG_INK, PNG_GRID = "#5b6270", "#e3e6eb"
INK, GRID = "var(--soft, #5b6270)", "var(--line, #e3e6eb)"


def small_vectors_svg(records: Sequence[Mapping[str, Any]], metric: str = "MAP@R") -> str:
    """Draw bytes of a vector (logarithmic) against a metric in per cent.

    Args:
        records: `dim`, `vectors`, `bytes` and `scores` (fractions) of each kind of vectors. Points of the same
            `vectors` and `series` (a name, may be absent) are a line.
        metric: a metric of the scores.

    Returns:
        An SVG in the colours of the page; empty without a record that has the metric.

    Example:
        >>> records = [{"dim": 64, "vectors": "int8", "bytes": 64, "scores": {"MAP@R": 0.2}}]
        >>> small_vectors_svg(records).count("<circle")
        1
    """
    points = [
        (", ".join(filter(None, _line_of(each))), int(each["bytes"]), int(each["dim"]), 100 * each["scores"][metric])
        for each in records
        if metric in each["scores"]
    ]
    if not points:
        return ""
    powers = [math.log2(size) for _, size, _, _ in points]
    first, last = math.floor(min(powers)), math.ceil(max(powers))
    last = max(last, first + 1)
    step = _step(max(value for *_, value in points))
    top = step * math.ceil(max(value for *_, value in points) / step) or step

    def x(size: float) -> float:
        return LEFT + (math.log2(size) - first) / (last - first) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - value / top * (HEIGHT - TOP - BOTTOM)

    parts = []
    for number in range(round(top / step) + 1):
        value = number * step
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="{GRID}"/>'
        )
        parts.append(_text(LEFT - 8, y(value) + 4, f"{value:g}", "end"))
    for power in range(first, last + 1):
        parts.append(_text(x(2**power), HEIGHT - BOTTOM + 18, f"{2**power:,}", "middle"))
    parts.append(_text(LEFT + (WIDTH - LEFT - RIGHT) / 2, HEIGHT - 8, "bytes of a vector", "middle"))
    parts.append(_text(LEFT, 18, f"{metric}, %", "start"))
    for number, kind in enumerate(dict.fromkeys(kind for kind, *_ in points)):
        colour = COLOURS[number % len(COLOURS)]
        line = sorted((size, value, dim) for name, size, dim, value in points if name == kind)
        path = " ".join(f"{x(size):.1f},{y(value):.1f}" for size, value, _ in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{x(size):.1f}" cy="{y(value):.1f}" r="4" fill="{colour}">'
            f"<title>{escaped(f'{dim} dimensions, {kind}: {size:,} bytes, {metric} {value:.1f} %')}</title></circle>"
            for size, value, dim in line
        ]
        size, value, _ = line[-1]
        parts.append(_text(x(size) + 10, y(value) + 4, kind, "start", colour))
    label = f"bytes of a vector against {metric}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escaped(label)}" font-family="sans-serif" font-size="12">{"".join(parts)}</svg>'
    )


def write_small_vectors(file: str | Path, records: Sequence[Mapping[str, Any]], metric: str = "MAP@R") -> Path:
    """Write the picture to a file.

    Args:
        file: the file; a name that ends in .png gets a PNG, any other an SVG.
        records: see `small_vectors_svg`; the PNG also draws `half`, half an interval of the metric as a fraction.
        metric: a metric of the scores.

    Returns:
        The file.
    """
    with replacing(file) as draft:
        if Path(file).suffix.lower() == ".png":
            small_vectors_figure(records, metric).savefig(draft, format="png", dpi=130, facecolor="white")
            return Path(file)
        draft.write_text(small_vectors_svg(records, metric) + "\n", encoding="utf-8")
    return Path(file)


def small_vectors_figure(records: Sequence[Mapping[str, Any]], metric: str = "MAP@R", title: str = "") -> Figure:
    """Draw the picture with matplotlib, for a PNG.

    Args:
        records: see `write_small_vectors`.
        metric: a metric of the scores.
        title: text above the picture.

    Example:
        >>> records = [{"dim": d, "vectors": "int8", "bytes": d, "scores": {"MAP@R": d / 999}} for d in (64, 128)]
        >>> [line.get_label() for line in small_vectors_figure(records).axes[0].containers]
        ['int8']
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.subplots()
    drawn = [each for each in records if metric in each["scores"]]
    lines: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for each in sorted(drawn, key=lambda each: each["bytes"]):
        lines.setdefault(_line_of(each), []).append(each)
    series = sorted({name for name, _ in lines})
    kinds = list(dict.fromkeys(str(each["vectors"]) for each in drawn))
    names: dict[tuple[int, int], tuple[str, float, float, str]] = {}
    for (name, kind), points in lines.items():
        values = [100 * each["scores"][metric] for each in points]
        halves = [100 * each.get("half", 0.0) for each in points]
        colour, style = PNG_COLOURS[kinds.index(kind) % len(PNG_COLOURS)], STYLES[series.index(name) % len(STYLES)]
        sizes = [each["bytes"] for each in points]
        axes.errorbar(sizes, values, yerr=halves if any(halves) else None, color=colour, capsize=3, label=kind, **style)
        for each, value in zip(points, values, strict=True):
            place = each["dim"], each["bytes"]
            if place not in names or names[place][2] < value:  # one name for points that lie above each other
                names[place] = f"{each['dim']}-D", each["bytes"], value, colour
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda size, _: f"{size:,.0f}")
    axes.set_xlabel("bytes of a vector", fontsize=9, color=PNG_INK)
    axes.set_title(f"{metric}, %", loc="left", fontsize=9, color=PNG_INK)
    axes.margins(x=0.08)
    axes.set_ylim(0, 1.12 * max((axes.dataLim.y1, 1e-9)))
    _annotate(axes, list(names.values()))
    axes.grid(color=PNG_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=9, length=0, colors=PNG_INK)
    for side in axes.spines.values():
        side.set_visible(False)
    if title:
        figure.suptitle(title, fontsize=10)
    if drawn:
        handles, labels = axes.get_legend_handles_labels()
        by_kind = dict(zip(reversed(labels), reversed(handles), strict=True))
        shown: dict[str, Any] = {kind: by_kind[kind] for kind in kinds}
        if len(series) > 1:
            shown |= {name: Line2D([], [], color=PNG_INK, **STYLES[i % len(STYLES)]) for i, name in enumerate(series)}
        columns = max(1, 115 // (8 + max(map(len, shown))))
        figure.legend(
            shown.values(), shown.keys(), loc="outside lower center", ncols=columns, frameon=False, fontsize=8
        )
    return figure


def _line_of(record: Mapping[str, Any]) -> tuple[str, str]:
    """The line that a point belongs to: its series, "" if it has none, and its kind of numbers."""
    return str(record.get("series", "")), str(record["vectors"])


def _annotate(axes: Axes, names: Sequence[tuple[str, float, float, str]]) -> None:
    """Write names above points, or below if there is no room; a name without room on either side is left out."""
    (low, high), top = axes.get_xlim(), axes.get_ylim()[1]

    def place(size: float, value: float, side: int) -> tuple[float, float]:
        return math.log2(size / low) / math.log2(high / low), value / top + side * 0.04

    taken = [place(size, value, 0) for _, size, value, _ in names]
    for text, size, value, colour in names:
        for side in (1, -1):
            x, y = place(size, value, side)
            if all(abs(x - other) > 0.05 or abs(y - height) > 0.035 for other, height in taken):
                taken.append((x, y))
                offset = (0, 6 if side > 0 else -13)
                axes.annotate(
                    text, (size, value), offset, textcoords="offset points", ha="center", fontsize=7, color=colour
                )
                break


def _step(largest: float) -> float:
    """A round distance between grid lines, about five of which reach the largest value.

    >>> _step(23.0), _step(4.1)
    (5.0, 1.0)
    """
    rough = max(largest, 1e-9) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    return float(next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough))


def _text(x: float, y: float, text: str, anchor: str, colour: str = INK) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escaped(text)}</text>'
