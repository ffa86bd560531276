"""A map of the embedding in two dimensions."""

import base64
import colorsys
import html
import io
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

WIDTH, HEIGHT = 900, 640
_MARGIN = 40
_SHAPES = {"o": "●", "s": "■", "^": "▲", "D": "◆", "v": "▼", "P": "✚", "X": "✖"}  # in the picture and in the text
_LETTER = 7.6  # width of a letter of the labels


class Scatter(NamedTuple):
    """Points of a map, their classes, and a sentence on what they are."""

    points: np.ndarray  # (N, 2)
    labels: np.ndarray  # (N,) into names
    names: list[str]
    caption: str


def tsne(
    embeddings: Tensor | np.ndarray,
    labels: Tensor | np.ndarray | Sequence[int],
    names: Sequence[str],
    limit: int = 2000,
    classes: int = 30,
    seed: int = 0,
) -> Scatter:
    """A t-SNE map of unit-length embeddings: the same input and seed give the same map.

    Args:
        embeddings: (N, D).
        labels: (N,) into `names`.
        names: of the classes.
        limit: points at most, from 1; drawn by seed.
        classes: classes at most, from 1; drawn by seed.
        seed: of the draws and of t-SNE.

    With fewer than 10 points t-SNE has nothing to do: their two principal axes are drawn.

    >>> few = tsne(np.eye(4), [0, 0, 7, 7], names=list("abcdefgh"))
    >>> few.points.shape, few.labels.tolist(), few.names
    ((4, 2), [0, 0, 1, 1], ['a', 'h'])
    >>> few.caption
    '4 images of 2 classes'
    """
    vectors = torch.as_tensor(embeddings).detach().cpu().double()
    marks = torch.as_tensor(labels).cpu().numpy()
    if vectors.ndim != 2 or len(vectors) == 0 or len(vectors) != len(marks):
        raise ValueError(
            f"embeddings: got shape {tuple(vectors.shape)} for {len(marks)} labels, expected a row for each label"
        )
    for name, value in (("limit", limit), ("classes", classes)):
        if value < 1:
            raise ValueError(f"{name}: got {value}, expected a number from 1")
    draw = np.random.default_rng(seed)
    present = np.unique(marks)
    chosen = np.sort(draw.permutation(present)[:classes])
    places = np.flatnonzero(np.isin(marks, chosen))
    places = np.sort(draw.permutation(places)[:limit])
    unit = torch.nn.functional.normalize(vectors[places]).numpy()
    of = f" of {len(present):,}" if len(chosen) < len(present) else ""
    caption = f"{len(places):,} images of {len(chosen):,}{of} classes"
    return Scatter(
        _project(unit, seed), np.searchsorted(chosen, marks[places]), [names[int(c)] for c in chosen], caption
    )


def _project(unit: np.ndarray, seed: int) -> np.ndarray:
    if len(unit) < 10 or unit.shape[1] < 2:
        left, sizes, _ = np.linalg.svd(unit - unit.mean(axis=0), full_matrices=False)
        axes = (left * sizes)[:, :2]
        return np.pad(axes, ((0, 0), (0, 2 - axes.shape[1])))
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    # Several threads add up in an order that changes from call to call.
    with threadpool_limits(limits=1):
        perplexity = min(30.0, (len(unit) - 1) / 3)
        return TSNE(perplexity=perplexity, init="pca", learning_rate="auto", random_state=seed).fit_transform(unit)


def scatter_svg(scatter: Scatter) -> str:
    """Inline SVG: points coloured and shaped by class as one picture, class names as text at their centres."""
    low, high = scatter.points.min(axis=0), scatter.points.max(axis=0)
    span = np.where(high > low, high - low, 1.0)
    room = np.array([WIDTH, HEIGHT]) - 2 * _MARGIN
    placed = _MARGIN + (scatter.points - low) / span * room
    placed[:, 1] = HEIGHT - placed[:, 1]
    present = np.unique(scatter.labels)
    looks = [(colour, list(_SHAPES)[number % len(_SHAPES)]) for number, colour in enumerate(colours(len(present)))]
    groups = [placed[scatter.labels == label] for label in present]
    shown = [_short(scatter.names[label]) for label in present]
    widths = np.array([_LETTER * (len(name) + 2) for name in shown])
    texts = "".join(
        f'<text x="{x:.1f}" y="{y:.1f}"><title>{html.escape(scatter.names[label])}</title>'
        f'<tspan style="fill:{_hex(colour)}">{_SHAPES[shape]}</tspan> {html.escape(name)}</text>'
        for label, name, (colour, shape), (x, y) in zip(
            present, shown, looks, _apart(np.stack([_heart(group) for group in groups]), widths)
        )
    )
    return (
        f'<svg class="map" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="Map of the embedding, by class">'
        f'<image href="{_picture(groups, looks)}" width="{WIDTH}" height="{HEIGHT}"></image>{texts}</svg>'
    )


def colours(count: int) -> list[tuple[float, float, float]]:
    """`count` colours around the circle, neighbours in the list far apart, readable on white and on black."""
    return [colorsys.hls_to_rgb((number * 0.381966) % 1, 0.52 + 0.08 * (number % 2), 0.62) for number in range(count)]


def _hex(colour: tuple[float, float, float]) -> str:
    return "#" + "".join(f"{round(255 * part):02x}" for part in colour)


def _heart(group: np.ndarray) -> np.ndarray:
    """The point of a class with most of its own class around it: a mean may lie where no point is."""
    distances = np.sort(np.linalg.norm(group[:, None] - group[None], axis=2), axis=1)
    return group[distances[:, : len(group) // 2 + 1].mean(axis=1).argmin()]


def _picture(groups: Sequence[np.ndarray], looks: Sequence[tuple[tuple[float, float, float], str]]) -> str:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH / 100, HEIGHT / 100), dpi=200)
    figure.patch.set_alpha(0)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(0, WIDTH)
    axes.set_ylim(HEIGHT, 0)
    size = 24 if sum(map(len, groups)) <= 1200 else 14
    for group, (colour, shape) in zip(groups, looks):
        x, y = group.T
        axes.scatter(x, y, s=size, color=[colour], marker=shape, alpha=0.85, linewidths=0)
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _apart(centres: np.ndarray, widths: np.ndarray, down: float = 18) -> np.ndarray:
    """Move labels up and down until no two cover each other, or until moving does not help; all stay inside."""
    x = centres[:, 0].clip(widths / 2, WIDTH - widths / 2)
    y = centres[:, 1].copy()
    near = np.abs(x[:, None] - x[None]) < (widths[:, None] + widths[None]) / 2
    np.fill_diagonal(near, False)
    earlier = np.sign(np.subtract.outer(np.arange(len(x)), np.arange(len(x))))
    for _ in range(200):
        gap = y[:, None] - y[None]
        close = near & (np.abs(gap) < down)
        if not close.any():
            break
        away = np.where(gap == 0, earlier, np.sign(gap))
        push = np.where(close, away * (down + 1 - np.abs(gap)) / 2, 0).sum(axis=1)
        y = (y + push.clip(-4, 4)).clip(down, HEIGHT - down / 2)
    return np.stack([x, y], axis=1)


def _short(name: str, most: int = 18) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"
