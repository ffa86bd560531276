"""The training curve: loss and validation metrics over the epochs."""

import html
import io
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

# Placeholder colours: `_inline` replaces them with the page's, so that the figure follows light and dark mode.
_INK, _GRID, _LOSS = "#010203", "#040506", "#070809"
_METRICS = ("#0a0b0c", "#0d0e0f", "#101112")
_PAGE = {_INK: "var(--soft)", _GRID: "var(--line)", _LOSS: "var(--second)"} | {
    colour: f"var(--series-{number})" for number, colour in enumerate(_METRICS)
}
_NOT_METRICS = ("epoch", "step", "loss", "mean_cosine", "figures", "chosen")


def metric_columns(curve: Sequence[dict[str, Any]]) -> list[str]:
    """The keys of the records that are metrics, in the order of their first appearance."""
    keys = dict.fromkeys(key for record in curve for key in record)
    return [key for key in keys if key not in _NOT_METRICS]


def curve_svg(curve: Sequence[dict[str, Any]], classes: str = "held-out classes") -> list[str]:
    """Draw the loss and the metrics as inline SVGs.

    Args:
        curve: records such as ``{"epoch": 3, "loss": 1.2, "MAP@R": 0.41, "chosen": True}``. Every key except epoch is
            optional; epoch may be a fraction. Metrics are fractions, drawn in per cent; at most three are drawn.
        classes: the classes that were scored, in words.

    Returns:
        The SVGs of the loss and of the metrics. Values that are not finite are left out, and so is an SVG without a
        point.
    """
    metrics = [key for key in metric_columns(curve) if _points(curve, key)[0]][: len(_METRICS)]
    series = {key: (colour, 100) for key, colour in zip(metrics, _METRICS)}
    pictures = []
    if _points(curve, "loss")[0]:
        pictures.append(_panel(curve, "training loss", {"loss": (_LOSS, 1)}))
    if metrics:
        title = f"{metrics[0]}, %" if len(metrics) == 1 else "%"
        pictures.append(_panel(curve, f"{classes}: {title}", series))
    return pictures


def _panel(curve: Sequence[dict[str, Any]], title: str, series: dict[str, tuple[str, int]]) -> str:
    from matplotlib.ticker import MaxNLocator

    def draw(axes: Any, colours: Sequence[str], ink: str) -> None:
        for key, (colour, factor) in series.items():
            _line(axes, curve, key, colour, factor)
        epochs = [record["epoch"] for record in curve]
        # A short run with evaluations inside its epochs needs fractional ticks; whole ones would leave the axis empty.
        integer_ticks = max(epochs) - min(epochs) >= 4 or all(epoch == int(epoch) for epoch in epochs)
        axes.xaxis.set_major_locator(MaxNLocator(integer=integer_ticks, nbins=8, steps=[1, 2, 5, 10]))
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
        for record in curve:
            if record.get("chosen"):
                axes.axvline(record["epoch"], color=ink, linewidth=1, linestyle=(0, (3, 3)))
        if len(series) > 1:
            axes.legend(frameon=False, fontsize=9, labelcolor=ink)

    return panel_svg(title, "epoch", draw, f"{title} over the epochs")


def panel_svg(
    title: str, x_label: str, draw: Callable[[Any, Sequence[str], str], None], description: str | None = None
) -> str:
    """Draw a small chart as an inline SVG in the colours of the page.

    Args:
        title: text above the chart.
        x_label: text under its horizontal axis.
        draw: draws into the axes; it receives them, the colours of the series, and the colour of text.
        description: what a screen reader says; None: the title.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "proxymetric", "font.family": "sans-serif"}):
        figure = Figure(figsize=(4.6, 2.9), layout="constrained")
        axes = figure.add_subplot()
        axes.set_title(title, loc="left", fontsize=10, color=_INK, parse_math=False)
        axes.set_xlabel(x_label, color=_INK, fontsize=9)
        draw(axes, _METRICS, _INK)
        axes.tick_params(which="both", colors=_INK, labelsize=9, length=0)
        axes.grid(color=_GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        for side in axes.spines.values():
            side.set_visible(False)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return _inline(buffer.getvalue(), re.sub(r"\W+", "-", title).strip("-"), description or title)


def _points(curve: Sequence[dict[str, Any]], key: str) -> tuple[list[float], list[float]]:
    pairs = [(record["epoch"], record[key]) for record in curve if isinstance(record.get(key), int | float)]
    pairs = [(epoch, value) for epoch, value in pairs if math.isfinite(value)]
    return [epoch for epoch, _ in pairs], [value for _, value in pairs]


def _line(axes: Any, curve: Sequence[dict[str, Any]], key: str, colour: str, factor: int) -> None:
    epochs, values = _points(curve, key)
    scaled = [factor * value for value in values]
    marker = "o" if len(epochs) <= 30 else None
    axes.plot(epochs, scaled, color=colour, linewidth=1.8, marker=marker, markersize=3, label=key)
    chosen_epochs, chosen_values = _points([record for record in curve if record.get("chosen")], key)
    chosen_scaled = [factor * value for value in chosen_values]
    axes.plot(chosen_epochs, chosen_scaled, color=colour, linestyle="none", marker="o", markersize=7)


def _inline(svg: str, prefix: str, description: str) -> str:
    """A matplotlib SVG as an element of a page: without prologue, with unique ids, in the page's colours and font."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    svg = re.sub(r'(url\(#|href="#)', rf"\g<1>{prefix}-", svg)
    svg = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", svg)
    for placeholder, colour in _PAGE.items():
        svg = svg.replace(placeholder, colour)
    # The page sets the size; only the proportions are kept.
    svg = re.sub(r'<svg ([^>]*?)\bheight="[^"]*"', r"<svg \1", svg, count=1)
    svg = re.sub(
        r'<svg ([^>]*?)\bwidth="[^"]*"',
        rf'<svg role="img" aria-label="{html.escape(description)}" \1',
        svg,
        count=1,
    )
    return svg.strip()
