"""The figure of the CCP paper: the 2-D embedding after each problem, with its proxies and those of the next problem."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from proxymetric.plots.style import CSS
from proxymetric.system.files import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = (
    "#332288",
    "#88ccee",
    "#117733",
    "#ddcc77",
    "#cc6677",
    "#44aa99",
    "#882255",
    "#999933",
    "#aa4499",
    "#555555",
)
"""ten colours that differ for every kind of colour vision: Paul Tol's "muted" and a dark grey"""
MAX_COLUMNS = 3
PANEL_INCHES = 3.0
TITLE_INCHES = 0.5
LEGEND_INCHES = 0.4


class CcpStage(NamedTuple):
    """One panel: the embedding when a problem has converged."""

    title: str
    points: np.ndarray
    """(N, 2) the embeddings"""
    labels: np.ndarray
    """(N,) class of each point"""
    proxies: np.ndarray
    """(C, K, 2) the converged proxies"""
    picks: np.ndarray | None
    """(C, K, 2) the proxies picked for the next problem; None for the last problem"""
    radius: float
    """the average covering radius of the points"""
    score: float
    """the MAP@R of the points, a fraction"""


def draw_ccp_stages(path: str | Path, stages: Sequence[CcpStage], names: Sequence[str] | None = None) -> None:
    """Write a PNG with one panel per stage: points are dots, converged proxies squares, the next proxies circles.

    It follows Fig. 2 of the CCP paper (Gürbüz et al. 2023). Each panel shows the unit circle; its title states the
    covering radius and MAP@R. Class names are written at the centres of the classes.

    Args:
        path: path of the PNG; its folder is created.
        stages: at least one stage; all stages have the same classes.
        names: names of the classes 0 .. C - 1; None: their numbers.

    Raises:
        ValueError: there is no stage, or the numbers of points and labels of a stage differ.

    Example:
        >>> import tempfile
        >>> corners = np.array([[0.5, 0.5], [-0.5, -0.5]])
        >>> stage = CcpStage("before", corners, np.array([0, 1]), corners[:, None], None, radius=0.0, score=1.0)
        >>> file = Path(tempfile.mkdtemp()) / "plane.png"
        >>> draw_ccp_stages(file, [stage, stage])
        >>> file.read_bytes()[1:4]
        b'PNG'
    """
    if not stages:
        raise ValueError("stages: got none, expected at least one")
    for stage in stages:
        if stage.points.ndim != 2 or stage.points.shape[1] != 2 or len(stage.points) != len(stage.labels):
            shape = stage.points.shape
            raise ValueError(
                f"stages: got points {shape} for {len(stage.labels)} labels in {stage.title!r}, expected (N, 2) "
                "for N labels"
            )
    names = [str(c) for c in range(len(stages[0].proxies))] if names is None else names
    figure = _figure(stages, names)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=130, facecolor="white", pil_kwargs={"optimize": True})


def _figure(stages: Sequence[CcpStage], names: Sequence[str]) -> Figure:
    from matplotlib.figure import Figure

    columns = min(MAX_COLUMNS, len(stages))
    rows = -(-len(stages) // columns)
    width, height = columns * PANEL_INCHES, rows * (PANEL_INCHES + TITLE_INCHES) + LEGEND_INCHES
    figure = Figure(figsize=(width, height))
    for number, stage in enumerate(stages):
        row, column = divmod(number, columns)
        left, bottom = column * PANEL_INCHES, height - (row + 1) * (PANEL_INCHES + TITLE_INCHES)
        axes = figure.add_axes((left / width, bottom / height, PANEL_INCHES / width, PANEL_INCHES / height))
        _panel(axes, stage, names)
    _legend(figure)
    return figure


def _panel(axes: Any, stage: CcpStage, names: Sequence[str]) -> None:
    from matplotlib.patches import Circle

    axes.set(xlim=(-1.1, 1.1), ylim=(-1.1, 1.1))
    axes.set_axis_off()
    axes.add_patch(Circle((0, 0), 1, fill=False, edgecolor=_page_colour("line"), linewidth=1, zorder=0))
    numbers = f"covering radius {stage.radius:.4f}, MAP@R {100 * stage.score:.1f} %"
    position = {"transform": axes.transAxes, "va": "bottom", "parse_math": False}
    axes.text(0.045, 1.065, stage.title, fontsize=10, fontweight="bold", color=_page_colour("ink"), **position)
    axes.text(0.045, 1.0, numbers, fontsize=8.5, color=_page_colour("soft"), **position)
    colours = [COLOURS[c % len(COLOURS)] for c in range(len(names))]
    # The order is random, because classes drawn one after the other would hide each other.
    order = np.random.default_rng(0).permutation(len(stage.points))
    point_colours = np.array(colours)[stage.labels[order]]
    axes.scatter(*stage.points[order].T, s=4, c=point_colours, alpha=0.55, linewidths=0, zorder=1)
    for c, colour in enumerate(colours):
        if stage.picks is not None:
            axes.scatter(*stage.picks[c].T, s=34, facecolors="none", edgecolors="white", linewidths=2.6, zorder=2)
            axes.scatter(*stage.picks[c].T, s=34, facecolors="none", edgecolors=colour, linewidths=1.3, zorder=3)
        axes.scatter(
            *stage.proxies[c].T,
            s=26,
            marker="s",
            color=colour,
            edgecolors=_page_colour("ink"),
            linewidths=0.8,
            zorder=4,
        )
    _name_classes(axes, stage, names, colours)


def _name_classes(axes: Any, stage: CcpStage, names: Sequence[str], colours: Sequence[str]) -> None:
    """Write each name beside the median of its class, away from the centre of the plane."""
    from matplotlib.patheffects import withStroke

    for c in np.unique(stage.labels):
        x, y = np.median(stage.points[stage.labels == c], axis=0)
        length = float(np.hypot(x, y))
        direction = np.array([x, y]) / length if length > 0.05 else np.array([0.0, 1.0])
        # There is no room outside the circle, so a name near its edge is placed inwards.
        position = np.array([x, y]) + direction * (0.15 if length < 0.9 else -0.15)
        effects = [withStroke(linewidth=2.5, foreground="white")]
        axes.text(
            *position,
            names[c],
            color=_darken(colours[c]),
            fontsize=11,
            fontweight="bold",
            ha="center",
            va="center",
            zorder=5,
            path_effects=effects,
            parse_math=False,
        )


def _darken(colour: str) -> tuple[float, ...]:
    """A darker shade of the colour for text: light blue and sand are too pale for letters."""
    from matplotlib.colors import to_rgb

    return tuple(0.7 * part for part in to_rgb(colour))


def _legend(figure: Figure) -> None:
    from matplotlib.lines import Line2D

    ink = _page_colour("soft")
    marks = [
        Line2D([], [], linestyle="", marker="o", markersize=2.5, color=ink, label="images"),
        Line2D([], [], linestyle="", marker="s", markersize=5.5, color=ink, label="converged proxies"),
        Line2D([], [], linestyle="", marker="o", markersize=6, markerfacecolor="none", color=ink, label="picked next"),
    ]
    figure.legend(handles=marks, loc="lower left", ncols=3, frameon=False, fontsize=8.5, labelcolor=ink)


def _page_colour(name: str) -> str:
    """A colour of the report in its light mode."""
    match = re.search(rf"--{name}: (#\w+);", CSS)
    assert match is not None, name
    return match[1]
