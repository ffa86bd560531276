"""One training step of Proxy-ISA (Li et al., MMAsia 2022) in plain float64 NumPy, written from the paper's text.

Legend: B queries, C classes, K proxies per class, D dim, T the queue's size. Equation numbers and Algorithm 1 are the
paper's. Vectors are not normalised; similarities are cosines. Weights are constants in the gradient.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from oracles.losses import Array, Labels, class_similarity, cosines, unit


@dataclass
class State:
    """The state between two steps; ``effective`` is Eq. 8 of ``count``, ``hardness`` is S_learned of Eq. 10."""

    count: Labels  # (C,) samples of the class seen so far, outliers left out
    effective: Array  # (C,) E
    hardness: Array  # (C,) h * S_avg
    vectors: Array  # (n, D) the queue, unit rows, oldest first, n <= T
    labels: Labels  # (n,)


def effective_number(count: int, volume: float) -> float:
    """Eq. 8: E = (1 - beta^n) / (1 - beta) with beta = (V - 1) / V."""
    beta = (volume - 1) / volume
    return float((1 - beta**count) / (1 - beta))


def lower_bound(effective: float) -> float:
    """Eq. 14: nu = 1 / (1 + log(1 + E))."""
    return 1 / (1 + math.log(1 + effective))


def search_length(effective: float, hardness: float, k: float, lam: float) -> float:
    """Eq. 15: eta = (1 + k (1 - h S_avg)) nu + lambda."""
    return (1 + k * (1 - hardness)) * lower_bound(effective) + lam


def decay(effective: float, volume: float, tau: float) -> float:
    """Eq. 17: sigma = 1 + (1 + e^-tau) (nu - 1) / (1 + e^(V - E - tau))."""
    top = (1 + math.exp(-tau)) * (lower_bound(effective) - 1)
    return 1 + top / (1 + math.exp(volume - effective - tau))


def weights(
    state: State,
    similarity: Array,
    labels: Labels,
    *,
    volume: float,
    k: float,
    lam: float,
    tau: float,
    filter_on: bool,
) -> Array:
    """Eq. 16: (B, C), omega+ where the class is the query's own, omega- elsewhere; omega+ is 1 before the filter."""
    B, C = similarity.shape
    out = np.ones((B, C))
    for c in range(C):
        E, learned = float(state.effective[c]), float(state.hardness[c])
        outlier = learned - search_length(E, learned, k, lam)
        sigma = decay(E, volume, tau)
        for i in range(B):
            s = similarity[i, c]
            if labels[i] != c:
                out[i, c] = 1 / max(1.0, E) if s < outlier else 1.0
            elif filter_on:
                out[i, c] = 1 + sigma if outlier <= s <= learned else sigma
    return out


def weighted_proxy_anchor(
    similarity: Array, labels: Labels, omega: Array, scale: float, margin: float
) -> tuple[float, Array]:
    """Eq. 13 and its slope in the similarities (B, C), the weights ``omega`` (B, C) held."""
    B, C = similarity.shape
    slope = np.zeros((B, C))
    loss = 0.0
    for sign, same in ((-1.0, True), (1.0, False)):
        members = [[i for i in range(B) if (labels[i] == c) == same] for c in range(C)]
        # a class with no such pair has no mean weight, and log(1 + 0) = 0
        norm = sum(sum(omega[i, c] for i in members[c]) / len(members[c]) for c in range(C) if members[c])
        for c in range(C):
            exp = {i: math.exp(omega[i, c] * scale * (margin + sign * similarity[i, c])) for i in members[c]}
            total = 1 + sum(exp.values())
            if exp:
                loss += math.log(total) / norm
            for i in members[c]:
                slope[i, c] = sign * omega[i, c] * scale * exp[i] / total / norm
    return loss, slope


def _remember(
    state: State,
    embeddings: Array,
    labels: Labels,
    compare: Callable[[Array], Array],
    *,
    volume: float,
    h: float,
    k: float,
    lam: float,
    size: int,
    memory_on: bool,
    filter_on: bool,
) -> State:
    """The rest of Algorithm 1 after the loss; ``compare`` returns similarities of rows to classes, (n, C)."""
    similarity = compare(embeddings)
    counted = []
    for i, own in enumerate(labels):
        learned = float(state.hardness[own])
        outlier = learned - search_length(float(state.effective[own]), learned, k, lam)
        if not (filter_on and similarity[i, own] < outlier):
            counted.append(i)

    vectors, stored = state.vectors.copy(), state.labels.copy()
    if memory_on:
        vectors = np.concatenate([vectors, unit(embeddings)[counted]])
        stored = np.concatenate([stored, labels[counted]])
        surplus = max(len(stored) - size, 0)
        vectors, stored = vectors[surplus:], stored[surplus:]

    count, effective = state.count.copy(), state.effective.copy()
    for i in counted:
        count[labels[i]] += 1
        effective[labels[i]] = effective_number(int(count[labels[i]]), volume)

    hardness = state.hardness.copy()
    if memory_on:
        now = compare(vectors)
        for c in sorted(set(labels.tolist())):
            own = [float(now[j, c]) for j in range(len(stored)) if stored[j] == c]
            if own:
                hardness[c] = h * sum(own) / len(own)  # Eq. 10
    return State(count, effective, hardness, vectors, stored)


def step(
    state: State,
    embeddings: Array,
    labels: Labels,
    proxies: Array,
    *,
    scale: float = 32.0,
    margin: float = 0.1,
    volume: float = 100.0,
    h: float = 0.15,
    k: float = 0.9,
    lam: float = 0.1,
    tau: float = 1.5,
    size: int = 55_000,
    memory_on: bool,
    filter_on: bool,
) -> tuple[float, Array, Array, State]:
    """Algorithm 1: the loss, its slopes in the raw embeddings (B, D) and proxies (C, D), and the state after.

    With unit rows u = x/||x||, v = p/||p||, the cosine s = u.v has ds/dx = (v - s u)/||x|| and ds/dp = (u - s v)/||p||.
    """
    s = cosines(embeddings, proxies)
    omega = weights(state, s, labels, volume=volume, k=k, lam=lam, tau=tau, filter_on=filter_on)
    loss, slope = weighted_proxy_anchor(s, labels, omega, scale, margin)

    u, v = unit(embeddings), unit(proxies)
    grad_embeddings, grad_proxies = np.zeros_like(u), np.zeros_like(v)
    for i in range(len(u)):
        for c in range(len(v)):
            grad_embeddings[i] += slope[i, c] * (v[c] - s[i, c] * u[i]) / np.linalg.norm(embeddings[i])
            grad_proxies[c] += slope[i, c] * (u[i] - s[i, c] * v[c]) / np.linalg.norm(proxies[c])

    after = _remember(
        state,
        embeddings,
        labels,
        lambda rows: cosines(rows, proxies),
        volume=volume,
        h=h,
        k=k,
        lam=lam,
        size=size,
        memory_on=memory_on,
        filter_on=filter_on,
    )
    return loss, grad_embeddings, grad_proxies, after


def step_multi(
    state: State,
    embeddings: Array,
    labels: Labels,
    proxies: Array,
    *,
    per_class: int,
    gamma: float = 0.1,
    scale: float = 32.0,
    margin: float = 0.1,
    volume: float = 100.0,
    h: float = 0.15,
    k: float = 0.9,
    lam: float = 0.1,
    tau: float = 1.5,
    size: int = 55_000,
    memory_on: bool,
    filter_on: bool,
) -> tuple[float, State]:
    """The same for (C * K, D) proxies, class after class: s is the soft class similarity of MPA's Eq. 1.

    It replaces the cosine in the weights, in the loss (MPA's Eq. 6, without its regulariser) and in the hardness.
    """

    def compare(rows: Array) -> Array:
        return class_similarity(rows, proxies, per_class, "soft", gamma)

    s = compare(embeddings)
    omega = weights(state, s, labels, volume=volume, k=k, lam=lam, tau=tau, filter_on=filter_on)
    loss, _ = weighted_proxy_anchor(s, labels, omega, scale, margin)
    after = _remember(
        state,
        embeddings,
        labels,
        compare,
        volume=volume,
        h=h,
        k=k,
        lam=lam,
        size=size,
        memory_on=memory_on,
        filter_on=filter_on,
    )
    return loss, after
