"""The picture of small vectors: bytes of a vector against a metric, a line for each kind of numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from proxymetric.files import replacing
from proxymetric.plots.escaping import escaped

WIDTH, HEIGHT = 640, 340
LEFT, RIGHT, TOP, BOTTOM = 58, 110, 34, 46
COLOURS = ("var(--series-0, #3157d5)", "var(--series-1, #b4530a)", "var(--series-2, #0f7f86)")
INK, GRID = "var(--soft, #5b6270)", "var(--line, #e3e6eb)"


def small_vectors_svg(records: Sequence[Mapping[str, Any]], metric: str = "MAP@R") -> str:
    """Draw bytes of a vector (logarithmic) against a metric in per cent.

    Args:
        records: `dim`, `vectors`, `bytes` and `scores` (fractions) of each kind of vectors.
        metric: a metric of the scores.

    Returns:
        An SVG in the colours of the page; empty without a record that has the metric.

    Example:
        >>> records = [{"dim": 64, "vectors": "int8", "bytes": 64, "scores": {"MAP@R": 0.2}}]
        >>> small_vectors_svg(records).count("<circle")
        1
    """
    points = [
        (str(each["vectors"]), int(each["bytes"]), int(each["dim"]), 100 * each["scores"][metric])
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
    """Write the picture to an SVG file.

    Args:
        file: the file.
        records: see `small_vectors_svg`.
        metric: a metric of the scores.

    Returns:
        The file.
    """
    with replacing(file) as draft:
        draft.write_text(small_vectors_svg(records, metric) + "\n", encoding="utf-8")
    return Path(file)


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
