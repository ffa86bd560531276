"""One training step of VCPA (Kim, Guerrero, Pham, Pavlovic, 2022) in plain float64 NumPy, written from its text.

Legend: B queries, C classes, D dim, M Newton steps. Equation numbers and Algorithm 1 are the paper's; its loss is
multiplied by tau, as in its footnote 3: tau * KL + L_PA, with both halves of L_PA divided by C (Eq. 4).
"""

import numpy as np

from oracles.losses import Array, Labels, cosines, proxy_anchor, proxy_anchor_similarity_gradient, unit


def gradient_and_curvature(
    vectors: Array, embeddings: Array, labels: Labels, *, scale: float, margin: float
) -> tuple[Array, Array]:
    """Eqs. 23-25: gradient and diagonal Hessian (C, D) of L_PA in the drawn proxies, their lengths held."""
    C, D = vectors.shape
    f = unit(embeddings)
    g, curvature = np.zeros((C, D)), np.zeros((C, D))
    for j in range(C):
        length = float(np.sqrt((vectors[j] ** 2).sum()))
        for sign, same in ((-1.0, True), (1.0, False)):
            total, first, second = 1.0, np.zeros(D), np.zeros(D)
            for i in range(len(f)):
                if (labels[i] == j) == same:
                    s = float(f[i] @ vectors[j]) / length
                    odds = float(np.exp(scale * (margin + sign * s)))  # h+ of Eq. 23 at sign -1, h- at sign 1
                    total += odds
                    first += odds * f[i]
                    second += odds * f[i] ** 2
            G = first / total
            g[j] += sign * scale / (C * length) * G
            curvature[j] += scale**2 / (C * length**2) * (second / total - G**2)
    return g, curvature


def newton_step(
    mu: Array,
    sigma: Array,
    prior_mu: Array,
    prior_sigma: Array,
    noise: Array,
    embeddings: Array,
    labels: Labels,
    *,
    tau: float,
    scale: float,
    margin: float,
    floor: float = 1e-5,
    halving: bool = False,
) -> tuple[Array, Array]:
    """Eq. 13 with Eqs. 21, 22 and 26-29 times tau; mu and sigma move from their old values, all (C, D)."""
    g, curvature = gradient_and_curvature(mu + sigma * noise, embeddings, labels, scale=scale, margin=margin)
    curvature = np.maximum(curvature, 0.0)  # a variance, which rounding may turn negative

    g_mu = tau * (mu - prior_mu) / prior_sigma**2 + g
    h_mu = tau / prior_sigma**2 + curvature
    g_sigma = tau * (sigma / prior_sigma**2 - 1 / sigma) + noise * g
    h_sigma = tau * (1 / prior_sigma**2 + 1 / sigma**2) + noise**2 * curvature

    moved = np.maximum(sigma - g_sigma / h_sigma, floor)
    if halving:
        moved = np.maximum(moved, sigma / 2)
    return mu - g_mu / h_mu, moved


def step(
    mu: Array,
    sigma: Array,
    embeddings: Array,
    labels: Labels,
    noises: Array,
    *,
    tau: float = 0.01,
    scale: float = 32.0,
    margin: float = 0.1,
    floor: float = 1e-5,
    prior: tuple[Array, Array] | None = None,
) -> tuple[float, Array, Array, Array]:
    """Algorithm 1 for one batch: loss, its slope in the raw embeddings (B, D), and the new mu and sigma (C, D).

    ``noises`` (M + 1, C, D): one for each Newton step, the last for the loss that trains the network. ``prior`` is
    q of the batch before, by default the (mu, sigma) that this one starts from.
    """
    prior_mu, prior_sigma = (mu, sigma) if prior is None else prior
    for noise in noises[:-1]:
        mu, sigma = newton_step(
            mu,
            sigma,
            prior_mu,
            prior_sigma,
            noise,
            embeddings,
            labels,
            tau=tau,
            scale=scale,
            margin=margin,
            floor=floor,
        )
    drawn = mu + sigma * noises[-1]
    loss = proxy_anchor(embeddings, labels, drawn, scale, margin, positive_norm="all")
    s = cosines(embeddings, drawn)
    slope = proxy_anchor_similarity_gradient(s, labels, scale, margin, positive_norm="all")
    u, v = unit(embeddings), unit(drawn)
    grad = np.zeros_like(u)
    for i in range(len(u)):
        for c in range(len(v)):
            grad[i] += slope[i, c] * (v[c] - s[i, c] * u[i]) / np.sqrt((embeddings[i] ** 2).sum())
    return loss, grad, mu, sigma


def kl(mu: Array, sigma: Array, prior_mu: Array, prior_sigma: Array) -> float:
    """Eqs. 15, 16 with the constant, -1 per entry: KL of q from the prior, over all classes and dimensions."""
    ratio = sigma / prior_sigma
    return float(0.5 * (ratio**2 + ((mu - prior_mu) / prior_sigma) ** 2 - 2 * np.log(ratio) - 1).sum())


def uncertainty(mu: Array, sigma: Array, draws: Array) -> Array:
    """Eq. 30: (C,) from standard normal ``draws`` (N, C, D): deviations (N - 1) of unit p, summed over dimensions."""
    N, C, _ = draws.shape
    out = np.zeros(C)
    for j in range(C):
        p = unit(mu[j] + sigma[j] * draws[:, j])
        mean = p.sum(axis=0) / N
        out[j] = np.sqrt(((p - mean) ** 2).sum(axis=0) / (N - 1)).sum()
    return out
