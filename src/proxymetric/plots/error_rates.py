"""The error rates of pairs over the threshold, with the thresholds that were chosen."""

from collections.abc import Sequence
from typing import Any

from proxymetric.plots.curve import panel_svg


def error_rates_svg(thresholds: dict[str, Any]) -> str:
    """Draw the share of impostor pairs above and of genuine pairs below each threshold, and mark the chosen ones.

    Args:
        thresholds: `roc`, lists of threshold, FMR and FNMR; `points`, each with `asked` and `threshold`.
    """
    places, fmr, fnmr = thresholds["roc"]

    def draw(axes: Any, colours: Sequence[str], ink: str) -> None:
        floor = max(1e-5, min((rate for rate in (*fmr, *fnmr) if rate > 0), default=1e-5))
        for rates, colour, name in ((fmr, colours[0], "false matches"), (fnmr, colours[1], "false non-matches")):
            axes.plot(places, [100 * max(rate, floor / 2) for rate in rates], color=colour, linewidth=1.8, label=name)
        for point in thresholds["points"]:
            value = point["threshold"][0]
            axes.axvline(value, color=ink, linewidth=1, linestyle=(0, (3, 3)))
            axes.annotate(
                f"{100 * point['asked']:g} %", (value, 100), (3, -2), textcoords="offset points", fontsize=8, color=ink,
                va="top", rotation=90,
            )  # fmt: skip
        axes.set_yscale("log")
        axes.set_ylim(100 * floor, 110)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.legend(frameon=False, fontsize=9, labelcolor=ink, loc="center left")

    return panel_svg("pairs that are judged wrongly, %", "threshold of the cosine similarity", draw)


def thresholds_html(thresholds: dict[str, Any]) -> str:
    """The table of the chosen thresholds with their intervals."""
    rows = "".join(
        f'<tr><th scope="row">{100 * point["asked"]:g} %</th>{_cell(point["threshold"], 1, 3)}'
        f"{_cell(point['fnmr'], 100, 1)}</tr>"
        for point in thresholds["points"]
    )
    head = "".join(f'<th scope="col">{name}</th>' for name in ("false matches", "threshold", "false non-matches, %"))
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _cell(estimate: Sequence[float], factor: float, places: int) -> str:
    value, low, high = (f"{factor * number:.{places}f}" for number in estimate)
    return f'<td class="number">{value}<span class="range">{low} – {high}</span></td>'
