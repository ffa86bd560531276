"""Plots and tables of growth: time and memory against classes, batch, dimensions and images."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING

from generator.scores import BENCHMARKS, paragraph, read, table
from proxymetric.plots.style import CSS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DEVICES = ("cpu", "cuda")
INK, GRID = "#7b8291", "#8a91a033"
"""readable on the light and on the dark page: a picture cannot follow the page's mode"""
AXES = {"classes": "classes, C", "batch": "batch, B", "dimensions": "dimensions, D", "images": "images, N"}


def _colours() -> list[str]:
    """The colours of series in reports, in light mode."""
    return re.findall(r"--series-\d: (#\w+);", CSS.partition("@media")[0])


def growth_table(device: str) -> str:
    """The recorded run of benchmarks/growth.py on a device: fitted exponents, and the plots."""
    study = read(BENCHMARKS / f"growth-{device}.json")
    rows = []
    for curve in study["curves"].values():
        points = curve["points"]
        first, last = points[0], points[-1]
        measured = [
            "-" if curve["exponent"][kind] is None else f"{curve['exponent'][kind]:.2f}" for kind in ("time", "memory")
        ]
        largest = f"{last['ms']['median']:,.1f} ms" + (f", {last['extra_mb']:,.0f} MB" if last["extra_mb"] else "")
        ends = f"{first['size']:,} to {last['size']:,}"
        rows.append([curve["what"], curve["over"], ends, f"{curve['operations']:g}", *measured, largest])
    columns = ["what", "grows with", "sizes", "operations", "time", "memory", "at the largest size"]
    facts = study["machine"]
    where = facts["gpu"] or f"{facts['processor']}, {facts['threads']} thread" + "s" * (facts["threads"] > 1)
    text = paragraph(
        f"{where}. Fixed sizes: batch {study['batch']}, {study['classes']:,} classes, {study['dim']} dimensions, "
        f"float32. The columns operations, time and memory are exponents."
    )
    return (
        f"{text}\n\n{table(columns, rows)}\n\n![Time and memory against sizes, {device}](../images/growth-{device}.svg)"
    )


def growth_pictures() -> dict[str, bytes]:
    """The plots of all devices with results: path in the site -> SVG."""
    files = {device: BENCHMARKS / f"growth-{device}.json" for device in DEVICES}
    return {f"images/growth-{device}.svg": growth_svg(read(file)) for device, file in files.items() if file.exists()}


def growth_svg(study: dict) -> bytes:
    """Draw time (above) and memory (below) against each size, on logarithmic axes, with the fitted exponents."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    overs = [over for over in AXES if any(curve["over"] == over for curve in study["curves"].values())]
    style = {"svg.fonttype": "none", "svg.hashsalt": "proxymetric", "font.family": "sans-serif", "font.size": 9}
    with rc_context(style):
        figure = Figure(figsize=(3.1 * len(overs), 5.4), layout="constrained")
        grid = figure.subplots(2, len(overs), squeeze=False)
        for column, over in enumerate(overs):
            curves = [curve for curve in study["curves"].values() if curve["over"] == over]
            for axes, kind in zip(grid[:, column], ("time", "memory"), strict=True):
                _draw(axes, curves, kind)
                axes.set_title({"time": "ms a step", "memory": "MB beyond the inputs"}[kind], loc="left", color=INK)
                axes.set_xlabel(AXES[over], color=INK)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return buffer.getvalue()


def _draw(axes: Axes, curves: list[dict], kind: str) -> None:
    from matplotlib.ticker import NullFormatter

    for colour, curve in zip(_colours(), curves, strict=False):
        points = [
            (each["size"], each["ms"]["median"] if kind == "time" else each["extra_mb"]) for each in curve["points"]
        ]
        points = [(size, value) for size, value in points if value]
        if not points:
            continue
        fitted = curve["exponent"][kind]
        label = curve["what"].replace("`", "") + ("" if fitted is None else f", exponent {fitted:.2f}")
        axes.plot(*zip(*points, strict=True), color=colour, linewidth=1.8, marker="o", markersize=3, label=label)
    axes.set(xscale="log", yscale="log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_formatter(NullFormatter())
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * (high / low) ** (0.13 * len(axes.lines)))  # room for the legend
    axes.tick_params(which="both", colors=INK, length=0)
    axes.grid(color=GRID, linewidth=0.8)
    for side in axes.spines.values():
        side.set_visible(False)
    if axes.lines:
        axes.legend(loc="upper left", frameon=False, fontsize=8, labelcolor=INK)
