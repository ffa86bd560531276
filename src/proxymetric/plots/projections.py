"""Alternating projections in the plane: what each problem ended with, and what was picked for the next."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from proxymetric.files import replacing
from proxymetric.plots.style import CSS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Ten that stay apart for every kind of colour vision: Paul Tol's "muted" and a dark grey.
COLOURS = (
    "#332288", "#88ccee", "#117733", "#ddcc77", "#cc6677", "#44aa99", "#882255", "#999933", "#aa4499", "#555555",
)  # fmt: skip
_COLUMNS = 3
_SIDE, _HEAD, _FOOT = 3.0, 0.5, 0.4
"""inches: of a panel, of the titles above it, of the key below all"""


class Stage(NamedTuple):
    """One panel: the plane when a problem had converged."""

    title: str
    points: np.ndarray
    """(N, 2) embeddings as they are compared"""
    labels: np.ndarray
    """(N,) class of each point"""
    proxies: np.ndarray
    """(C, K, 2) converged proxies"""
    picks: np.ndarray | None
    """(C, K, 2) those picked for the next problem; None where none follows"""
    radius: float
    """average covering radius of the points"""
    score: float
    """MAP@R of the points, a fraction"""


def draw_projections(path: str | Path, stages: Sequence[Stage], names: Sequence[str] | None = None) -> None:
    """Write a PNG with one panel per stage: points as dots, converged proxies as boxes, the next ones as circles.

    As the CCP paper's Fig. 2 (Gürbüz et al. 2023). Each panel is titled with covering radius and MAP@R and shows the
    unit circle; classes are named at their centres.

    Args:
        path: of the PNG; its folder is made.
        stages: at least one, all of the same classes.
        names: of the classes, 0 .. C - 1; None writes their numbers.

    >>> import tempfile
    >>> corners = np.array([[0.5, 0.5], [-0.5, -0.5]])
    >>> stage = Stage("before", corners, np.array([0, 1]), corners[:, None], None, radius=0.0, score=1.0)
    >>> file = Path(tempfile.mkdtemp()) / "plane.png"
    >>> draw_projections(file, [stage, stage])
    >>> file.read_bytes()[1:4]
    b'PNG'
    """
    if not stages:
        raise ValueError("stages: got none, expected at least one")
    for stage in stages:
        if stage.points.ndim != 2 or stage.points.shape[1] != 2 or len(stage.points) != len(stage.labels):
            shape = stage.points.shape
            raise ValueError(
                f"stages: {stage.title!r} has points {shape} for {len(stage.labels)} labels, expected (N, 2)"
            )
    names = [str(c) for c in range(len(stages[0].proxies))] if names is None else names
    figure = _figure(stages, names)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=130, facecolor="white", pil_kwargs={"optimize": True})


def _figure(stages: Sequence[Stage], names: Sequence[str]) -> Figure:
    from matplotlib.figure import Figure

    columns = min(_COLUMNS, len(stages))
    rows = -(-len(stages) // columns)
    width, height = columns * _SIDE, rows * (_SIDE + _HEAD) + _FOOT
    figure = Figure(figsize=(width, height))
    for place, stage in enumerate(stages):
        row, column = divmod(place, columns)
        low = height - (row + 1) * (_SIDE + _HEAD)
        axes = figure.add_axes((column * _SIDE / width, low / height, _SIDE / width, _SIDE / height))
        _panel(axes, stage, names)
    _key(figure)
    return figure


def _panel(axes: Any, stage: Stage, names: Sequence[str]) -> None:
    from matplotlib.patches import Circle

    axes.set(xlim=(-1.1, 1.1), ylim=(-1.1, 1.1))
    axes.set_axis_off()
    axes.add_patch(Circle((0, 0), 1, fill=False, edgecolor=_light("line"), linewidth=1, zorder=0))
    numbers = f"covering radius {stage.radius:.4f}, MAP@R {100 * stage.score:.1f} %"
    at = {"transform": axes.transAxes, "va": "bottom", "parse_math": False}
    axes.text(0.045, 1.065, stage.title, fontsize=10, fontweight="bold", color=_light("ink"), **at)
    axes.text(0.045, 1.0, numbers, fontsize=8.5, color=_light("soft"), **at)
    colours = [COLOURS[c % len(COLOURS)] for c in range(len(names))]
    # In an order of its own: classes drawn one after the other would hide each other.
    order = np.random.default_rng(0).permutation(len(stage.points))
    of_points = np.array(colours)[stage.labels[order]]
    axes.scatter(*stage.points[order].T, s=4, c=of_points, alpha=0.55, linewidths=0, zorder=1)
    for c, colour in enumerate(colours):
        if stage.picks is not None:
            axes.scatter(*stage.picks[c].T, s=34, facecolors="none", edgecolors="white", linewidths=2.6, zorder=2)
            axes.scatter(*stage.picks[c].T, s=34, facecolors="none", edgecolors=colour, linewidths=1.3, zorder=3)
        axes.scatter(
            *stage.proxies[c].T, s=26, marker="s", color=colour, edgecolors=_light("ink"), linewidths=0.8, zorder=4
        )
    _name_classes(axes, stage, names, colours)


def _name_classes(axes: Any, stage: Stage, names: Sequence[str], colours: Sequence[str]) -> None:
    """Each name beside the middle of its class, away from the middle of the plane."""
    from matplotlib.patheffects import withStroke

    for c in np.unique(stage.labels):
        x, y = np.median(stage.points[stage.labels == c], axis=0)
        length = float(np.hypot(x, y))
        away = np.array([x, y]) / length if length > 0.05 else np.array([0.0, 1.0])
        # Outside of the circle there is no room, so that a name on its rim goes inwards.
        place = np.array([x, y]) + away * (0.15 if length < 0.9 else -0.15)
        effects = [withStroke(linewidth=2.5, foreground="white")]
        axes.text(
            *place, names[c], color=_darker(colours[c]), fontsize=11, fontweight="bold", ha="center", va="center",
            zorder=5, path_effects=effects, parse_math=False,
        )  # fmt: skip


def _darker(colour: str) -> tuple[float, ...]:
    """The colour as text: sand and light blue are too pale for letters."""
    from matplotlib.colors import to_rgb

    return tuple(0.7 * part for part in to_rgb(colour))


def _key(figure: Figure) -> None:
    from matplotlib.lines import Line2D

    ink = _light("soft")
    marks = [
        Line2D([], [], linestyle="", marker="o", markersize=2.5, color=ink, label="images"),
        Line2D([], [], linestyle="", marker="s", markersize=5.5, color=ink, label="converged proxies"),
        Line2D([], [], linestyle="", marker="o", markersize=6, markerfacecolor="none", color=ink, label="picked next"),
    ]
    figure.legend(handles=marks, loc="lower left", ncols=3, frameon=False, fontsize=8.5, labelcolor=ink)


def _light(name: str) -> str:
    """A colour of the report's page by day."""
    found = re.search(rf"--{name}: (#\w+);", CSS)
    assert found is not None, name
    return found[1]
