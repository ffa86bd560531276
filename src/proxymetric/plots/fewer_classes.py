"""The picture of R@1 and MAP@R against the number of classes in the gallery."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from proxymetric.plots.escaping import escaped

WIDTH, HEIGHT = 400, 262
LEFT, RIGHT, TOP, BOTTOM = 38, 16, 34, 44
METRICS = ("R@1", "MAP@R")
COLOURS = ("var(--series-0)", "var(--series-1)", "var(--series-2)")
"""of the lines, from the last row of the table upwards: the first is that of the encoder that the page is about"""
DASHES = ("", "7 4", "2 4")
MARKS = ("circle", "square", "diamond")
INK, GRID = "var(--soft)", "var(--line)"


def fewer_classes_html(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Draw two charts with one legend: a line for each row, which differs from others in colour, dashes and marks.

    The last row has a band from low to high.

    Args:
        rows: by name, records of `classes` and, as fractions, [mean, low, high] of R@1 and MAP@R; at most three rows.

    Returns:
        The legend and an SVG for each metric, in the colours of the page; empty if no row has two records.

    Example:
        >>> records = [{"classes": n, "R@1": [r, r, r]} for n, r in ((2, 0.9), (4, 0.8))]
        >>> html = fewer_classes_html({"trained encoder": records})
        >>> html.count("<svg"), html.count("<title>")
        (2, 2)
    """
    drawn = [(name, records) for name, records in reversed(list(rows.items())) if len(records) > 1][: len(COLOURS)]
    charts = "".join(
        _chart(metric, [(name, records) for name, records in drawn if metric in records[0]]) for metric in METRICS
    )
    if not charts:
        return ""
    keys = "".join(f"<span>{_swatch(number)} {escaped(name)}</span>" for number, (name, _) in enumerate(drawn))
    return f'<p class="key">{keys}</p><div class="chart">{charts}</div>'


def _chart(metric: str, rows: list[tuple[str, Sequence[Mapping[str, Any]]]]) -> str:
    """The chart of a metric; empty without a row."""
    if not rows:
        return ""
    numbers = sorted({each["classes"] for _, records in rows for each in records})
    lowest = 100 * min(min(each[metric]) for _, records in rows for each in records)
    step = 20 if lowest < 50 else 10 if lowest < 80 else 5
    floor = max(0, step * math.floor(lowest / step))
    first, last = math.log2(numbers[0]), math.log2(numbers[-1])

    def x(classes: float) -> float:
        return LEFT + 8 + (math.log2(classes) - first) / (last - first) * (WIDTH - LEFT - RIGHT - 8)

    def y(share: float) -> float:
        return HEIGHT - BOTTOM - (100 * share - floor) / (100 - floor) * (HEIGHT - TOP - BOTTOM)

    parts = [_text(0, 16, f"{metric}, %", "start")]
    for value in range(floor, 101, step):
        place = y(value / 100)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH}" y1="{place:.1f}" y2="{place:.1f}" stroke="{GRID}"/>')
        parts.append(_text(LEFT - 8, place + 4, str(value), "end"))
    parts += [_text(x(number), HEIGHT - BOTTOM + 20, f"{number:,}", "middle") for number in numbers]
    parts.append(_text((LEFT + WIDTH) / 2, HEIGHT - 4, "classes in the gallery", "middle"))
    of_page = rows[0][1]
    upper = [f"{x(each['classes']):.1f},{y(each[metric][2]):.1f}" for each in of_page]
    lower = [f"{x(each['classes']):.1f},{y(each[metric][1]):.1f}" for each in reversed(of_page)]
    parts.append(f'<polygon points="{" ".join(upper + lower)}" fill="{COLOURS[0]}" fill-opacity=".14"/>')
    for number, (name, records) in list(enumerate(rows))[::-1]:  # the first row is drawn above the others
        points = " ".join(f"{x(each['classes']):.1f},{y(each[metric][0]):.1f}" for each in records)
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{COLOURS[number]}" stroke-width="2" '
            f'stroke-dasharray="{DASHES[number]}"/>'
        )
        for each in records:
            mean, low, high = (100 * share for share in each[metric])
            span = f" ({low:.1f} to {high:.1f})" if high > low else ""
            words = f"{name}, {each['classes']} classes: {metric} {mean:.1f} %{span}"
            parts.append(_mark(number, x(each["classes"]), y(each[metric][0]), f"<title>{escaped(words)}</title>"))
    label = f"{metric} against the number of classes in the gallery"
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escaped(label)}" font-size="13">'
        f"{''.join(parts)}</svg>"
    )


def _mark(number: int, x: float, y: float, content: str = "") -> str:
    """The mark of a line: its shape tells the lines apart without colours."""
    paint = f'fill="{COLOURS[number]}" stroke="var(--card)" stroke-width="1.5"'
    if MARKS[number] == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" {paint}>{content}</circle>'
    turn = f' transform="rotate(45 {x:.1f} {y:.1f})"' if MARKS[number] == "diamond" else ""
    return f'<rect x="{x - 4.5:.1f}" y="{y - 4.5:.1f}" width="9" height="9" {paint}{turn}>{content}</rect>'


def _swatch(number: int) -> str:
    """A piece of a line for the legend."""
    line = f'<line x1="0" x2="44" y1="8" y2="8" stroke="{COLOURS[number]}" stroke-width="2" '
    dashes = f'stroke-dasharray="{DASHES[number]}"/>'
    return f'<svg class="swatch" width="44" height="16" aria-hidden="true">{line}{dashes}{_mark(number, 22, 8)}</svg>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{INK}">{escaped(text)}</text>'
