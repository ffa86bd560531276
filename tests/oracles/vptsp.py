"""The semantic proxies of VPTSP (Ren, Chen, Wang, Hua, 2024) in plain float64 NumPy loops, written from its text.

Legend: B samples, C classes, D dim. ``features`` (B, F) are the outputs of the second pass; equation numbers are
the paper's. A "state" is what is stored for a class: its proxy (D,), followed by its cell (D,) for the LSTM.
Weights are a mapping from the paper's names to arrays.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from oracles.losses import Array, Labels, gradient, proxy_anchor

Weights = Mapping[str, Array]
Step = Callable[[Array, Array], Array]


def normal(v: Array) -> Array:
    """One vector divided by its Euclidean length."""
    return v / math.sqrt(sum(float(x) ** 2 for x in v))


def sigmoid(v: Array) -> Array:
    return 1 / (1 + np.exp(-v))


def head(features: Array, w: Weights, eps: float = 1e-5) -> Array:
    """The head of the second pass: LayerNorm (gain, shift), then Linear (W, b): (B, F) -> (B, D)."""
    rows = []
    for f in features:
        centred = f - f.mean()
        normed = centred / math.sqrt(float((centred**2).mean()) + eps)
        rows.append(w["W"] @ (normed * w["gain"] + w["shift"]) + w["b"])
    return np.array(rows)


def ema(P: Array, p: Array, *, lam: float) -> Array:
    """Eq. 3 before its normal(), as a convex sum."""
    return lam * P + (1 - lam) * p


def gru(P: Array, p: Array, w: Weights, *, tanh: bool = False) -> Array:
    """Eqs. 4-7 before the last normal(); Table 7's "GRU with Tanh" differs in the candidate."""
    z = sigmoid(w["Wz"] @ p + w["Uz"] @ P + w["bz"])
    r = sigmoid(w["Wr"] @ p + w["Ur"] @ P + w["br"])
    inside = w["Wh"] @ p + r * (w["Uh"] @ P) + w["bh"]
    candidate = np.tanh(inside) if tanh else np.maximum(inside, 0)
    return (1 - z) * P + z * candidate


def rnn(P: Array, p: Array, w: Weights) -> Array:
    """Table 7's "RNN Unit": no gates."""
    return np.tanh(w["Wh"] @ p + w["Uh"] @ P + w["bh"])


def lstm(state: Array, p: Array, w: Weights) -> Array:
    """Table 7's LSTM; the state is the proxy followed by the cell, (2 D,)."""
    D = len(p)
    P, cell = state[:D], state[D:]
    i = sigmoid(w["Wi"] @ p + w["Ui"] @ P + w["bi"])
    f = sigmoid(w["Wf"] @ p + w["Uf"] @ P + w["bf"])
    o = sigmoid(w["Wo"] @ p + w["Uo"] @ P + w["bo"])
    g = np.tanh(w["Wg"] @ p + w["Ug"] @ P + w["bg"])
    cell = f * cell + i * g
    return np.concatenate([o * np.tanh(cell), cell])


def attention(P: Array, samples: Array, w: Weights) -> Array:
    """Table 7's cross-attention: the proxy is the query; keys and values are the class's samples (n, D)."""
    q = w["Wq"] @ P
    odds = np.array([math.exp(float(q @ (w["Wk"] @ p)) / math.sqrt(len(P))) for p in samples])
    total = np.zeros_like(P)
    for share, p in zip(odds / odds.sum(), samples):
        total = total + share * (w["Wv"] @ p)
    return total


def accumulate(
    stored: Array, samples: Array, labels: Labels, order: Sequence[int], step: Step, *, every: str = "step"
) -> Array:
    """The new states (C, ...): each sample moves the state of its class, one after the other, in this order.

    ``samples`` (B, D) are normalised first. normal() is applied to the proxy, the first D of a state,
    after each step (the paper) or, with ``every="batch"``, once after the last of the class (the released code).
    """
    D = samples.shape[1]
    new = stored.copy()
    touched = set()
    for i in order:
        c = int(labels[i])
        new[c] = step(new[c], normal(samples[i]))
        if every == "step":
            new[c, :D] = normal(new[c, :D])
        touched.add(c)
    if every == "batch":
        for c in touched:
            new[c, :D] = normal(new[c, :D])
    return new


def accumulate_sets(stored: Array, samples: Array, labels: Labels, step: Step) -> Array:
    """As `accumulate`, for a step that takes all samples of its class at once, (n, D)."""
    new = stored.copy()
    for c in sorted(set(labels.tolist())):
        members = np.array([normal(samples[i]) for i in range(len(labels)) if labels[i] == c])
        new[c] = normal(step(stored[c], members))
    return new


def ema_of_mean(P: Array, members: Array, *, lam: float) -> Array:
    """The released code's EMA: one step a batch, towards the mean of the class's samples."""
    return ema(P, members.sum(0) / len(members), lam=lam)


def mix(P: Array, O: Array, a: float, *, normalise_free: bool = False) -> Array:  # noqa: E741 - the paper's letter
    """Eq. 8: (C, D) output proxies from accumulated and free ones, which keep their length or are normalised."""
    free = [normal(o) if normalise_free else o for o in O]
    return np.array([normal((1 - a) * P[c] + a * free[c]) for c in range(len(P))])


def value(
    embeddings: Array,
    labels: Labels,
    states: Array,
    free: Array,
    *,
    a: float,
    scale: float = 32.0,
    margin: float = 0.1,
    positive_norm: str = "all",
    normalise_free: bool = False,
) -> float:
    """Eq. 2 against Eq. 8 with the margin inside the scale, from the accumulated states.

    The released code divides both sums by C; the text divides the first by the classes present ("present").
    """
    D = embeddings.shape[1]
    proxies = mix(states[:, :D], free, a, normalise_free=normalise_free)
    return proxy_anchor(embeddings, labels, proxies, scale, margin, positive_norm=positive_norm)


def slopes(f: Callable[..., float], arrays: Sequence[Array]) -> list[Array]:
    """The gradient of ``f(*arrays)`` in each of them, by central differences."""
    return gradient(f, arrays, h=1e-5)
