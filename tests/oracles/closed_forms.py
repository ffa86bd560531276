"""Closed forms in plain float64 NumPy, written from the equations, image by image, as a check of the package.

Legend: N images, F features, ``x`` (N, F) and ``y`` (N,) their classes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def covariances(x: Array, y: Array) -> tuple[Array, Array, Array]:
    """The covariance within classes (unbiased), that between classes and that of all images (both over N)."""
    mean, width = x.mean(0), x.shape[1]
    within, between, total = np.zeros((width, width)), np.zeros((width, width)), np.zeros((width, width))
    classes = np.unique(y)
    for c in classes:
        members = x[y == c]
        for row in members:
            within += np.outer(row - members.mean(0), row - members.mean(0))
        between += len(members) * np.outer(members.mean(0) - mean, members.mean(0) - mean)
    for row in x:
        total += np.outer(row - mean, row - mean)
    return within / (len(x) - len(classes)), between / len(x), total / len(x)


def _descending(matrix: Array) -> tuple[Array, Array]:
    values, vectors = np.linalg.eig(matrix)
    order = np.argsort(-values.real)
    return values.real[order], vectors.real[:, order]


def shrunk(within: Array, a: float) -> Array:
    """(1 - a) S + a tr(S)/K I."""
    return (1 - a) * within + a * np.trace(within) / len(within) * np.eye(len(within))


def whitening_metric(x: Array, y: Array, a: float, k: int) -> Array:
    """(F, F) the matrix M of which the vectors are a root: z_i . z_j = (x_i - m)^T M (x_j - m)."""
    within, _, total = covariances(x, y)
    p = _descending(total)[1][:, :k]
    return np.asarray(p @ np.linalg.inv(shrunk(p.T @ within @ p, a)) @ p.T)


def lda_metric(x: Array, y: Array, a: float, k: int, dim: int) -> Array:
    """The same for LDA: the leading solutions of ``B v = l S v``, scaled so that ``v^T S v = 1``."""
    within, between, total = covariances(x, y)
    p = _descending(total)[1][:, :k]
    s, b = shrunk(p.T @ within @ p, a), p.T @ between @ p
    v = _descending(np.linalg.solve(s, b))[1][:, :dim]
    v = v / np.sqrt(np.einsum("fd,fg,gd->d", v, s, v))
    return np.asarray(p @ v @ v.T @ p.T)
