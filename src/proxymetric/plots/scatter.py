"""A map of the embeddings in two dimensions."""

import base64
import colorsys
import io
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from proxymetric.plots.escaping import escaped

WIDTH, HEIGHT = 900, 640
"""size of the map in SVG units"""
_MARGIN = 40
"""distance of the points from the edge of the map, in SVG units"""
_SHAPES = {"o": "●", "s": "■", "^": "▲", "D": "◆", "v": "▼", "P": "✚", "X": "✖"}
"""marker of matplotlib -> the same shape as a character, for the class names"""
_LETTER_WIDTH = 7.6
"""average width of a letter of the class names, in SVG units"""


class Scatter(NamedTuple):
    """The points of a map, their classes, and a caption."""

    points: np.ndarray
    """(N, 2)"""
    labels: np.ndarray
    """(N,) indices into `names`"""
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
    """Compute a t-SNE map of unit-length embeddings; the same input and seed give the same map.

    With fewer than 10 points the map shows their two principal axes instead.

    Args:
        embeddings: (N, D).
        labels: (N,) indices into `names`.
        names: names of the classes.
        limit: the largest number of points, at least 1; if there are more, a random subset is shown.
        classes: the largest number of classes, at least 1; if there are more, a random subset is shown.
        seed: seed of the subsets and of t-SNE.

    Raises:
        ValueError: the numbers of embeddings and labels differ, or a number is below 1.

    Example:
        >>> few = tsne(np.eye(4), [0, 0, 7, 7], names=list("abcdefgh"))
        >>> few.points.shape, few.labels.tolist(), few.names
        ((4, 2), [0, 0, 1, 1], ['a', 'h'])
        >>> few.caption
        '4 images of 2 classes'
    """
    vectors = torch.as_tensor(embeddings).detach().cpu().double()
    class_labels = torch.as_tensor(labels).cpu().numpy()
    if vectors.ndim != 2 or len(vectors) == 0 or len(vectors) != len(class_labels):
        raise ValueError(
            f"embeddings: got shape {tuple(vectors.shape)} for {len(class_labels)} labels, expected (N, D) for N labels"
        )
    for name, value in (("limit", limit), ("classes", classes)):
        if value < 1:
            raise ValueError(f"{name}: got {value}, expected a number of at least 1")
    generator = np.random.default_rng(seed)
    present_labels = np.unique(class_labels)
    chosen_labels = np.sort(generator.permutation(present_labels)[:classes])
    rows = np.flatnonzero(np.isin(class_labels, chosen_labels))
    rows = np.sort(generator.permutation(rows)[:limit])
    unit_vectors = torch.nn.functional.normalize(vectors[rows]).numpy()
    total = f" of {len(present_labels):,}" if len(chosen_labels) < len(present_labels) else ""
    caption = f"{len(rows):,} images of {len(chosen_labels):,}{total} classes"
    return Scatter(
        _project(unit_vectors, seed),
        np.searchsorted(chosen_labels, class_labels[rows]),
        [names[int(c)] for c in chosen_labels],
        caption,
    )


def _project(unit_vectors: np.ndarray, seed: int) -> np.ndarray:
    if len(unit_vectors) < 10 or unit_vectors.shape[1] < 2:
        left, sizes, _ = np.linalg.svd(unit_vectors - unit_vectors.mean(axis=0), full_matrices=False)
        axes = (left * sizes)[:, :2]
        return np.pad(axes, ((0, 0), (0, 2 - axes.shape[1])))
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    # With several threads, the order of summation would change from call to call.
    with threadpool_limits(limits=1):
        perplexity = min(30.0, (len(unit_vectors) - 1) / 3)
        return TSNE(perplexity=perplexity, init="pca", learning_rate="auto", random_state=seed).fit_transform(
            unit_vectors
        )


def scatter_svg(scatter: Scatter) -> str:
    """An inline SVG: an image of the points, coloured and shaped by class, with the class names as text."""
    low, high = scatter.points.min(axis=0), scatter.points.max(axis=0)
    extent = np.where(high > low, high - low, 1.0)
    space = np.array([WIDTH, HEIGHT]) - 2 * _MARGIN
    positions = _MARGIN + (scatter.points - low) / extent * space
    positions[:, 1] = HEIGHT - positions[:, 1]
    present_labels = np.unique(scatter.labels)
    styles = [
        (colour, list(_SHAPES)[number % len(_SHAPES)]) for number, colour in enumerate(colours(len(present_labels)))
    ]
    groups = [positions[scatter.labels == label] for label in present_labels]
    short_names = [_shorten(scatter.names[label]) for label in present_labels]
    widths = np.array([_LETTER_WIDTH * (len(name) + 2) for name in short_names])
    texts = "".join(
        f'<text x="{x:.1f}" y="{y:.1f}"><title>{escaped(scatter.names[label])}</title>'
        f'<tspan style="fill:{_hex(colour)}">{_SHAPES[shape]}</tspan> {escaped(name)}</text>'
        for label, name, (colour, shape), (x, y) in zip(
            present_labels,
            short_names,
            styles,
            _separate_labels(np.stack([_densest_point(group) for group in groups]), widths),
        )
    )
    return (
        f'<svg class="map" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="Map of the embedding, by class">'
        f'<image href="{_picture(groups, styles)}" width="{WIDTH}" height="{HEIGHT}"></image>{texts}</svg>'
    )


def colours(count: int) -> list[tuple[float, float, float]]:
    """Colours around the colour circle; neighbours in the list differ, and all are readable on white and black."""
    return [colorsys.hls_to_rgb((number * 0.381966) % 1, 0.52 + 0.08 * (number % 2), 0.62) for number in range(count)]


def _hex(colour: tuple[float, float, float]) -> str:
    return "#" + "".join(f"{round(255 * part):02x}" for part in colour)


def _densest_point(group: np.ndarray) -> np.ndarray:
    """The point of a class with the smallest mean distance to its nearest half; the mean may be far from all points."""
    distances = np.sort(np.linalg.norm(group[:, None] - group[None], axis=2), axis=1)
    return group[distances[:, : len(group) // 2 + 1].mean(axis=1).argmin()]


def _picture(groups: Sequence[np.ndarray], styles: Sequence[tuple[tuple[float, float, float], str]]) -> str:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH / 100, HEIGHT / 100), dpi=200)
    figure.patch.set_alpha(0)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(0, WIDTH)
    axes.set_ylim(HEIGHT, 0)
    size = 24 if sum(map(len, groups)) <= 1200 else 14
    for group, (colour, shape) in zip(groups, styles):
        x, y = group.T
        axes.scatter(x, y, s=size, color=[colour], marker=shape, alpha=0.85, linewidths=0)
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _separate_labels(centres: np.ndarray, widths: np.ndarray, line_height: float = 18) -> np.ndarray:
    """Move labels up and down until none overlap, or until moving does not help; all stay inside the map."""
    x = centres[:, 0].clip(widths / 2, WIDTH - widths / 2)
    y = centres[:, 1].copy()
    same_column = np.abs(x[:, None] - x[None]) < (widths[:, None] + widths[None]) / 2
    np.fill_diagonal(same_column, False)
    order_signs = np.sign(np.subtract.outer(np.arange(len(x)), np.arange(len(x))))
    for _ in range(200):
        gap = y[:, None] - y[None]
        overlap = same_column & (np.abs(gap) < line_height)
        if not overlap.any():
            break
        directions = np.where(gap == 0, order_signs, np.sign(gap))
        push = np.where(overlap, directions * (line_height + 1 - np.abs(gap)) / 2, 0).sum(axis=1)
        y = (y + push.clip(-4, 4)).clip(line_height, HEIGHT - line_height / 2)
    return np.stack([x, y], axis=1)


def _shorten(name: str, max_letters: int = 22) -> str:
    """Cut the middle out of a long name: names of one family often differ only at their end.

    >>> _shorten("Arla-Medium-Fat-Milk-Lactose-Free")
    'Arla-Mediu…actose-Free'
    """
    if len(name) <= max_letters:
        return name
    end = max_letters // 2
    return f"{name[: max_letters - end - 1]}…{name[-end:]}"
