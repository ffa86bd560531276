"""The map of an index: a point in the plane for each item, so that similar items are close to each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from proxymetric.arguments.signatures import one_of
from proxymetric.core.normalisation import unit
from proxymetric.plots.scatter import tsne
from proxymetric.search.engines.exact import Exact

METHODS = ("tsne", "pca", "none")
LANDMARKS = 5_000
"""items of which t-SNE is computed; the others are placed by their neighbours among them"""
NEIGHBOURS = 3
MAX_PLACED_SHARE = 0.2
"""a map is made anew when more than this share of its points was placed since it was made"""
PLACED_AT_ONCE = 256
DRAWS = 32
"""random vectors by which the width of a Gaussian on the map is measured"""
MAX_DRAWS, MIN_DRAWS = 8_192, 4
"""limit on the random vectors of all Gaussians together, and the least for each of them"""
MIN_TSNE = 10
"""with fewer items, t-SNE is not defined well: the map shows the principal axes"""


def update_map(
    facts: dict[str, Any], vectors: np.ndarray, old_rows: np.ndarray, old_points: np.ndarray | None
) -> tuple[np.ndarray | None, dict[str, Any]]:
    """Make the map of an index, or extend the earlier map by its new items.

    Args:
        facts: `method` and, of the earlier map, `placed`: how many points were placed since it was made.
        vectors: (N, D) of unit length.
        old_rows: (N,) the row of each item in the earlier map; -1 for a new item.
        old_points: (M, 2) the earlier map; None if there is none.

    Returns:
        The points (N, 2), None for the method `none`; and the facts of the new map.

    Example:
        >>> points, facts = update_map({"method": "pca"}, np.eye(3, dtype=np.float32), np.full(3, -1), None)
        >>> points.shape, facts
        ((3, 2), {'method': 'pca', 'placed': 0})
    """
    method = facts["method"]
    one_of("map", method, METHODS)
    if method == "none":
        return None, {"method": method}
    is_new = old_rows < 0
    placed = int(facts.get("placed", 0)) + int(is_new.sum())
    if old_points is None or is_new.all() or placed > MAX_PLACED_SHARE * len(vectors):
        return _make(vectors, method), {"method": method, "placed": 0}
    points = np.empty((len(vectors), 2), np.float32)
    points[~is_new] = old_points[old_rows[~is_new]]
    known = landmarks_of(np.flatnonzero(~is_new))
    points[is_new] = place(vectors[is_new], vectors[known], points[known])
    return points, {"method": method, "placed": placed}


def place(vectors: np.ndarray, landmarks: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Place vectors on a map: at the mean of their nearest landmarks, weighted by similarity.

    Args:
        vectors: (N, D) of unit length.
        landmarks: (L, D) of unit length, L at least 1.
        points: (L, 2) where the landmarks are.

    Returns:
        (N, 2).

    Example:
        >>> axes = np.eye(2, dtype=np.float32)
        >>> place(axes[:1], axes, np.array([[5.0, 1.0], [0.0, 0.0]], np.float32)).round(1)
        array([[5., 1.]], dtype=float32)
    """
    engine, placed = Exact(torch.from_numpy(np.ascontiguousarray(landmarks))), []
    for start in range(0, len(vectors), PLACED_AT_ONCE):
        queries = torch.from_numpy(np.ascontiguousarray(vectors[start : start + PLACED_AT_ONCE]))
        similarities, rows = engine.search(queries, NEIGHBOURS)
        # A near neighbour counts much more than the next one: the weights fall with the squared distance.
        weights = 1 / (2 - 2 * similarities.double()).clamp_min(1e-6)
        weights = weights / weights.sum(dim=1, keepdim=True)
        placed.append(np.einsum("nk,nkc->nc", weights.numpy(), points[rows.numpy()]))
    return np.concatenate([np.empty((0, 2)), *placed]).astype(np.float32)


def place_proxies(mean: Tensor, sigma: Tensor | None, vectors: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Place proxies on a map, as items are placed: at the mean of their nearest items, weighted by similarity.

    A map of t-SNE has no formula by which a Gaussian could be projected. Its width is measured instead: random vectors
    are drawn from it, normalised and placed like any vector. The radius is their standard deviation on the map: the
    root of the mean squared distance from the place of the mean, divided by the root of 2, because the map has two
    axes. The draws are always the same.

    Args:
        mean: (P, D) the proxies; of Gaussians, their means.
        sigma: (P, D) the standard deviations of Gaussians; None for points.
        vectors: (N, D) the items, of unit length.
        points: (N, 2) the map.

    Returns:
        (P, 3): x, y and radius; 0 for points.

    Example:
        >>> axes, points = np.eye(2, dtype=np.float32), np.array([[5.0, 1.0], [0.0, 0.0]], np.float32)
        >>> place_proxies(torch.tensor([[3.0, 0.0]]), None, axes, points).round(1)
        array([[5., 1., 0.]], dtype=float32)
    """
    if not len(mean) or not len(points):
        return np.empty((0, 3), np.float32)
    known = landmarks_of(np.arange(len(points)))
    landmarks, known_points = np.array(vectors[known]), points[known]
    placed = np.zeros((len(mean), 3), np.float32)
    placed[:, :2] = place(unit(mean.float()).numpy(), landmarks, known_points)
    if sigma is None:
        return placed
    draws = max(MIN_DRAWS, min(DRAWS, MAX_DRAWS // len(mean)))
    random = torch.Generator().manual_seed(0)
    squares = np.zeros(len(mean))
    for _ in range(draws):
        drawn = mean + sigma * torch.randn(mean.shape, generator=random)
        there = place(unit(drawn.float()).numpy(), landmarks, known_points)
        squares += ((there - placed[:, :2]) ** 2).sum(axis=1)
    placed[:, 2] = np.sqrt(squares / draws / 2)
    return placed


def _make(vectors: np.ndarray, method: str) -> np.ndarray:
    if not len(vectors):
        return np.empty((0, 2), np.float32)
    if method == "pca" or len(vectors) < MIN_TSNE:
        return _axes(vectors)
    rows = landmarks_of(np.arange(len(vectors)))
    landmarks = np.array(vectors[rows])
    layout = tsne(landmarks, np.zeros(len(rows), int), ["all"], limit=len(rows), classes=1).points.astype(np.float32)
    points = np.empty((len(vectors), 2), np.float32)
    points[rows] = layout
    others = np.setdiff1d(np.arange(len(vectors)), rows)
    points[others] = place(vectors[others], landmarks, layout)
    return points


def _axes(vectors: np.ndarray) -> np.ndarray:
    """The two principal axes of the vectors; their signs are fixed, so that equal input gives equal maps."""
    mean = vectors.mean(axis=0, dtype=np.float64)
    covariance = np.zeros((vectors.shape[1], vectors.shape[1]))
    for start in range(0, len(vectors), 8192):
        part = vectors[start : start + 8192].astype(np.float64) - mean
        covariance += part.T @ part
    axes = np.linalg.eigh(covariance)[1][:, ::-1][:, :2]
    axes = axes * np.where(axes[np.abs(axes).argmax(axis=0), range(axes.shape[1])] < 0, -1, 1)
    points = vectors @ axes.astype(np.float32) - (mean @ axes).astype(np.float32)
    return np.pad(points, ((0, 0), (0, 2 - points.shape[1]))).astype(np.float32)


def landmarks_of(rows: np.ndarray) -> np.ndarray:
    """At most `LANDMARKS` rows, always the same ones, sorted."""
    return np.sort(np.random.default_rng(0).permutation(rows)[:LANDMARKS])
