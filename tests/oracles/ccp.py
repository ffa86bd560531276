"""CCP (Gurbuz, Can, Alatan, 2022) in plain float64 NumPy, written from its text: its loss, picks and stops.

Legend: B queries, C classes, K proxies per class, D dim, F features. Algorithms 1 and 2 are the paper's; the
contrastive loss is its C2, each half averaged over its own non-zero terms.
"""

import math

import numpy as np

from oracles.losses import Array, Labels


def normal(v: Array) -> Array:
    """Section IV-D, row by row: v / max(||v||, 1), so that a vector shorter than 1 does not change."""
    return np.stack([row / max(math.sqrt(float(row @ row)), 1.0) for row in v]) if len(v) else v.copy()


def _normal_slope(v: Array, grad: Array) -> Array:
    """The slope in ``v`` from that in ``normal(v)``: times (I - u u')/||v|| outside the unit ball, the same inside."""
    out = grad.copy()
    for i, row in enumerate(v):
        length = math.sqrt(float(row @ row))
        if length > 1:
            u = row / length
            out[i] = (grad[i] - (grad[i] @ u) * u) / length
    return out


def k_center(pool: Array, converged: Array, picks: int) -> list[int]:
    """Algorithm 2 for one class: always pick the member farthest from its nearest converged or picked vector.

    A member is picked twice only when all have been picked; all distances are then 0, and the first is picked.
    """
    centres = list(converged)
    chosen: list[int] = []
    for _ in range(picks):
        free = [i for i in range(len(pool)) if i not in chosen] or list(range(len(pool)))
        best, radius = -1, -math.inf
        for i in free:
            nearest = min((math.sqrt(float(((pool[i] - v) ** 2).sum())) for v in centres), default=math.inf)
            if nearest > radius:
                best, radius = i, nearest
        chosen.append(best)
        centres.append(pool[best])
    return chosen


def contrastive(
    embeddings: Array, labels: Labels, proxies: Array, proxy_labels: Labels, *, margin: float, positive_margin: float
) -> tuple[float, Array, Array]:
    """C2: mean non-zero (d - m+)+ over own proxies plus mean non-zero (m- - d)+ over the others, and its slopes.

    d = ||normal(x) - normal(p)||; at d = 0 its slope is taken as 0. Slopes are in the raw (B, D) and (C * K, D).
    """
    x, p = normal(embeddings), normal(proxies)
    grad_x, grad_p = np.zeros_like(x), np.zeros_like(p)
    loss = 0.0
    for sign, same, bound in ((1.0, True, positive_margin), (-1.0, False, margin)):
        active = []
        for i in range(len(x)):
            for j in range(len(p)):
                d = math.sqrt(float(((x[i] - p[j]) ** 2).sum()))
                if (labels[i] == proxy_labels[j]) == same and sign * (d - bound) > 0:
                    active.append((i, j, d))
        for i, j, d in active:
            loss += sign * (d - bound) / len(active)
            if d > 0:
                pull = sign * (x[i] - p[j]) / d / len(active)
                grad_x[i] += pull
                grad_p[j] -= pull
    return loss, _normal_slope(embeddings, grad_x), _normal_slope(proxies, grad_p)


def step(
    theta: Array,
    anchor: Array,
    features: Array,
    labels: Labels,
    proxies: Array,
    proxy_labels: Labels,
    *,
    lam: float,
    margin: float,
    positive_margin: float,
) -> tuple[float, Array, Array]:
    """Eq. 14 and Algorithm 1's slopes for the encoder features @ theta: (B, F) @ (F, D), held near ``anchor``."""
    loss, grad_x, grad_p = contrastive(
        features @ theta, labels, proxies, proxy_labels, margin=margin, positive_margin=positive_margin
    )
    away = theta - anchor
    return loss + lam / 2 * float((away**2).sum()), features.T @ grad_x + lam * away, grad_p


class Problems:
    """When one inner problem ends: after ``patience`` evaluations in a row without a gain of 1e-5.

    A gain of at most 1e-5 neither resets the wait nor raises the best score.
    """

    def __init__(self, patience: int = 3) -> None:
        self.patience = patience
        self.best = -math.inf
        self.waited = 0

    def evaluated(self, score: float) -> bool:
        """Record an evaluation; return True if the problem has converged, after a reset for the next problem."""
        if score > self.best + 1e-5:
            self.best, self.waited = score, 0
        else:
            self.waited += 1
        if self.waited < self.patience:
            return False
        self.best, self.waited = -math.inf, 0
        return True
