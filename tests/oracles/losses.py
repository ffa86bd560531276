"""Losses in plain float64 NumPy, written only from the equations of the papers, as a check of the package.

Legend: B queries, C classes, K proxies per class, R reference rows, D dim. ``x`` (B, D) queries and ``y`` (B,) their
classes; ``p`` (C, D) proxies, or (C * K, D) with the K rows of a class side by side. Vectors of any
length are normalised here. ``refs=(r, ry)`` compares with labelled rows instead of the batch; no row counts as the
query itself. The exponents in tests stay far below 709, so sums of ``exp`` are written as in the papers.

The equation numbers of SoftTriple and the MPA family are those of the MPA paper (Saeki, Kawahara, Aman, 2023).
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Labels = npt.NDArray[np.int64]
References = tuple[Array, Labels]


def unit(v: Array) -> Array:
    """Each row divided by its Euclidean length."""
    v = np.asarray(v, dtype=np.float64)
    return v / np.sqrt((v**2).sum(axis=1, keepdims=True))


def cosines(a: Array, b: Array) -> Array:
    """(A, D), (B, D) -> (A, B): inner products of the unit rows."""
    return unit(a) @ unit(b).T


def distances(a: Array, b: Array) -> Array:
    """(A, D), (B, D) -> (A, B): Euclidean distances of the unit rows, from their differences."""
    a, b = unit(a), unit(b)
    return np.array([[math.sqrt(float(((u - v) ** 2).sum())) for v in b] for u in a])


def _mean(terms: Sequence[float]) -> float:
    return sum(terms) / len(terms) if terms else 0.0


def gradient(f: Callable[..., float], arrays: Sequence[Array], h: float = 1e-6) -> list[Array]:
    """Central differences (f(a + h) - f(a - h)) / 2h of ``f(*arrays)`` in every entry of every array."""
    arrays = [np.array(a, dtype=np.float64) for a in arrays]
    slopes = [np.zeros_like(a) for a in arrays]
    for a, slope in zip(arrays, slopes):
        for at in np.ndindex(*a.shape):
            value = a[at]
            a[at] = value + h
            above = f(*arrays)
            a[at] = value - h
            below = f(*arrays)
            a[at] = value
            slope[at] = (above - below) / (2 * h)
    return slopes


def proxy_nca(x: Array, y: Labels, p: Array, scale: float = 1.0) -> float:
    """-log(exp(a s_y) / sum over c != y of exp(a s_c)): Movshovitz-Attias 2017, on similarities as Kim 2020."""
    s = cosines(x, p)
    total = 0.0
    for i, own in enumerate(y):
        others = sum(math.exp(scale * s[i, c]) for c in range(len(p)) if c != own)
        total += -scale * s[i, own] + math.log(others)
    return total / len(y)


def proxy_nca_pp(x: Array, y: Labels, p: Array, temperature: float = 1 / 9) -> float:
    """-log of the softmax of -||x - p||^2 / T over all proxies, that of the own class included: Teh 2020."""
    squared = distances(x, p) ** 2
    total = 0.0
    for i, own in enumerate(y):
        odds = [math.exp(-squared[i, c] / temperature) for c in range(len(p))]
        total += -math.log(odds[own] / sum(odds))
    return total / len(y)


def _cross_entropy(logits: Array, y: Labels) -> float:
    total = 0.0
    for i, own in enumerate(y):
        total += math.log(sum(math.exp(z - logits[i, own]) for z in logits[i]))
    return total / len(y)


def balanced_cross_entropy(logits: Array, y: Labels, weights: Sequence[float]) -> float:
    """The mean over queries, weighted by the weights of their classes."""
    terms = [weights[own] * _cross_entropy(logits[i : i + 1], y[i : i + 1]) for i, own in enumerate(y)]
    return sum(terms) / sum(weights[own] for own in y)


def balanced_cosface(
    x: Array, y: Labels, p: Array, scale: float, margins: Sequence[float], weights: Sequence[float]
) -> float:
    """CosFace with a margin for each class (LDAM: Cao 2019, Eq. 13) and a weighted mean."""
    s = cosines(x, p)
    for i, own in enumerate(y):
        s[i, own] -= margins[own]
    return balanced_cross_entropy(scale * s, y, weights)


def balanced_arcface(
    x: Array, y: Labels, p: Array, scale: float, margins: Sequence[float], weights: Sequence[float]
) -> float:
    """ArcFace with a margin for each class and a weighted mean."""
    s = cosines(x, p)
    for i, own in enumerate(y):
        m, theta = margins[own], math.acos(s[i, own])
        s[i, own] = math.cos(theta + m) if theta + m <= math.pi else s[i, own] - m * math.sin(m)
    return balanced_cross_entropy(scale * s, y, weights)


def balanced_proxy_anchor(
    s: Array,
    positive: npt.NDArray[np.bool_],
    scale: float,
    margins: Sequence[float],
    weights: Sequence[float],
    positive_norm: str = "present",
) -> float:
    """Proxy-Anchor of similarities (B, C) and marked positives, any number in a row: weighted means over classes."""
    attract, repel, present = 0.0, 0.0, 0.0
    rows, columns = s.shape
    for c in range(columns):
        m, w = margins[c], weights[c]
        present += w * bool(positive[:, c].any())
        attract += w * math.log1p(sum(math.exp(-scale * (s[i, c] - m)) for i in range(rows) if positive[i, c]))
        repel += w * math.log1p(sum(math.exp(scale * (s[i, c] + m)) for i in range(rows) if not positive[i, c]))
    return attract / {"present": present, "all": sum(weights)}[positive_norm] + repel / sum(weights)


def norm_softmax(x: Array, y: Labels, p: Array, scale: float) -> float:
    """Cross entropy of a * cos: Wang 2017 (NormFace), Zhai and Wu 2019."""
    return _cross_entropy(scale * cosines(x, p), y)


def cosface(x: Array, y: Labels, p: Array, scale: float, margin: float) -> float:
    """Cross entropy of a * (cos - m [own class]): Wang 2018."""
    s = cosines(x, p)
    for i, own in enumerate(y):
        s[i, own] -= margin
    return _cross_entropy(scale * s, y)


def arcface(x: Array, y: Labels, p: Array, scale: float, margin: float) -> float:
    """Cross entropy of a * cos(theta + m [own class]): Deng 2019; past theta + m = pi, cos - m sin m."""
    s = cosines(x, p)
    for i, own in enumerate(y):
        theta = math.acos(min(1.0, max(-1.0, s[i, own])))
        if theta + margin <= math.pi:
            s[i, own] = math.cos(theta + margin)
        else:
            s[i, own] -= margin * math.sin(margin)
    return _cross_entropy(scale * s, y)


def subcentre_arcface(x: Array, y: Labels, p: Array, K: int, scale: float, margin: float) -> float:
    """ArcFace on the greatest cosine to the K centres of each class: Deng 2020, Eqs. 4 and 5."""
    s = class_similarity(x, p, K, "max")
    for i, own in enumerate(y):
        theta = math.acos(min(1.0, max(-1.0, s[i, own])))
        s[i, own] = math.cos(theta + margin) if theta + margin <= math.pi else s[i, own] - margin * math.sin(margin)
    return _cross_entropy(scale * s, y)


def length_scores(x: Array, mean: float, deviation: float, h: float) -> list[float]:
    """Kim 2022, Eq. 13: the length of each embedding, standardised, times h, cut to [-1, 1]; 1e-3 as in its code."""
    lengths = [math.sqrt(float((row**2).sum())) for row in x]
    return [min(1.0, max(-1.0, h * (length - mean) / (deviation + 1e-3))) for length in lengths]


def adaface(x: Array, y: Labels, p: Array, scale: float, margin: float, z: Sequence[float]) -> float:
    """Kim 2022, Eqs. 10, 11 and 16: cos(theta + g_angle) - g_add, g_angle = -m z and g_add = m z + m."""
    s = cosines(x, p)
    for i, own in enumerate(y):
        angle = math.acos(s[i, own]) - margin * z[i]
        s[i, own] = math.cos(min(math.pi, max(0.0, angle))) - (margin * z[i] + margin)
    return _cross_entropy(scale * s, y)


def proxy_anchor_of(
    s: Array, positive: npt.NDArray[np.bool_], scale: float, margin: float, positive_norm: str = "present"
) -> float:
    """Proxy-Anchor of similarities (B, R), each column an anchor with its positives marked: Kim 2020, Eq. 4."""
    attract, repel, present = 0.0, 0.0, 0
    rows, columns = s.shape
    for c in range(columns):
        present += bool(positive[:, c].any())
        attract += math.log1p(sum(math.exp(-scale * (s[i, c] - margin)) for i in range(rows) if positive[i, c]))
        repel += math.log1p(sum(math.exp(scale * (s[i, c] + margin)) for i in range(rows) if not positive[i, c]))
    share = {"present": max(present, 1), "all": columns}[positive_norm]
    return attract / share + repel / columns


def proxy_anchor(
    x: Array,
    y: Labels,
    p: Array | None = None,
    scale: float = 32.0,
    margin: float = 0.1,
    positive_norm: str = "present",
    refs: References | None = None,
) -> float:
    """Kim 2020, Eq. 4 ("present"), or its first term over all C too ("all"); with ``refs`` each row is an anchor."""
    if refs is None:
        assert p is not None
        refs = (p, np.arange(len(p)))
    r, ry = refs
    return proxy_anchor_of(cosines(x, r), np.asarray(y)[:, None] == ry[None, :], scale, margin, positive_norm)


def class_similarity(x: Array, p: Array, K: int, kind: str = "soft", gamma: float = 0.1) -> Array:
    """(B, C) similarity to a class of K proxies: Eq. 1 ("soft"), or the greatest or mean cosine (after Eq. 5)."""
    s = cosines(x, p)
    out = np.zeros((len(x), len(p) // K))
    for i in range(out.shape[0]):
        for c in range(out.shape[1]):
            own = [float(v) for v in s[i, c * K : (c + 1) * K]]
            if kind == "soft":
                weights = [math.exp((v - max(own)) / gamma) for v in own]
                out[i, c] = sum(w * v for w, v in zip(weights, own)) / sum(weights)
            else:
                out[i, c] = {"max": max(own), "mean": sum(own) / K}[kind]
    return out


def spread(p: Array, K: int) -> float:
    """Eq. 3: sum over classes and pairs s < t of sqrt(2 - 2 w_s.w_t), over C K (K - 1); 1e-5 under the root."""
    if K == 1:
        return 0.0
    w = unit(p)
    C = len(w) // K
    total = 0.0
    for c in range(C):
        for t in range(K):
            for s in range(t + 1, K):
                total += math.sqrt(2 + 1e-5 - 2 * float(w[c * K + s] @ w[c * K + t]))
    return total / (C * K * (K - 1))


def soft_triple_of(S: Array, y: Labels, scale: float, margin: float, reduction: str = "mean") -> float:
    """Eq. 2, softmax with the margin subtracted for the own class, summed as in Eq. 4 or averaged over the queries."""
    total = 0.0
    for i, own in enumerate(y):
        plus = math.exp(scale * (S[i, own] - margin))
        minus = sum(math.exp(scale * S[i, c]) for c in range(S.shape[1]) if c != own)
        total += math.log1p(minus / plus)
    return total / {"mean": len(y), "sum": 1}[reduction]


def mpa_of(S: Array, y: Labels, scale: float, margin: float) -> float:
    """Eq. 6; C+ are the classes with a positive in the batch, C- those with a negative."""
    C = S.shape[1]
    attract, repel = [], []
    for c in range(C):
        positives = [S[i, c] for i in range(len(y)) if y[i] == c]
        negatives = [S[i, c] for i in range(len(y)) if y[i] != c]
        if positives:
            attract.append(math.log1p(sum(math.exp(-scale * (v - margin)) for v in positives)))
        if negatives:
            repel.append(math.log1p(sum(math.exp(scale * (v + margin)) for v in negatives)))
    return _mean(attract) + _mean(repel)


def mpa_dw_of(S: Array, y: Labels, scale: float, margin: float) -> float:
    """Eq. 12: per query one soft-plus for its own class and one over all the others."""
    total = 0.0
    for i, own in enumerate(y):
        total += math.log1p(math.exp(-scale * (S[i, own] - margin)))
        total += math.log1p(sum(math.exp(scale * (S[i, c] + margin)) for c in range(S.shape[1]) if c != own))
    return total / len(y)


def mpa_ap_of(S: Array, y: Labels, scale: float, margin: float) -> float:
    """Eq. 16: per query one soft-plus over all classes, of S' of Eq. 15."""
    total = 0.0
    for i, own in enumerate(y):
        marked = [margin - v if c == own else v + margin for c, v in enumerate(S[i])]
        total += math.log1p(sum(math.exp(scale * v) for v in marked))
    return total / len(y)


def soft_triple(
    x: Array,
    y: Labels,
    p: Array,
    K: int,
    scale: float,
    gamma: float,
    tau: float,
    margin: float,
    reduction: str = "mean",
) -> float:
    """Eq. 4: the similarity loss plus tau times the regulariser, which is added once whatever the reduction."""
    return soft_triple_of(class_similarity(x, p, K, "soft", gamma), y, scale, margin, reduction) + tau * spread(p, K)


def mpa(
    x: Array, y: Labels, p: Array, K: int, scale: float, margin: float, gamma: float, tau: float, kind: str = "soft"
) -> float:
    """Eq. 7: Eq. 6 plus tau times Eq. 3."""
    return mpa_of(class_similarity(x, p, K, kind, gamma), y, scale, margin) + tau * spread(p, K)


def mpa_dw(
    x: Array, y: Labels, p: Array, K: int, scale: float, margin: float, gamma: float, tau: float, kind: str = "soft"
) -> float:
    """Eq. 13: Eq. 12 plus tau times Eq. 3."""
    return mpa_dw_of(class_similarity(x, p, K, kind, gamma), y, scale, margin) + tau * spread(p, K)


def mpa_ap(
    x: Array, y: Labels, p: Array, K: int, scale: float, margin: float, gamma: float, tau: float, kind: str = "soft"
) -> float:
    """Eq. 17: Eq. 16 plus tau times Eq. 3."""
    return mpa_ap_of(class_similarity(x, p, K, kind, gamma), y, scale, margin) + tau * spread(p, K)


def _pairs(
    measure: Callable[[Array, Array], Array], x: Array, y: Labels, refs: References | None
) -> list[tuple[list[float], list[float]]]:
    """For each query the measures of its positives and of its negatives; in the batch, without itself."""
    r, ry = (x, y) if refs is None else refs
    pairs = []
    for i, row in enumerate(measure(x, r).tolist()):
        seen = [(v, y[i] == ry[j]) for j, v in enumerate(row) if refs is not None or i != j]
        pairs.append(([v for v, same in seen if same], [v for v, same in seen if not same]))
    return pairs


def contrastive(x: Array, y: Labels, threshold: float = 0.5, refs: References | None = None) -> float:
    """C1 as in XBM (Wang 2020): (1/B) [sum of 1 - s over positives + sum of s over negatives with s > threshold]."""
    total = 0.0
    for positives, negatives in _pairs(cosines, x, y, refs):
        total += sum(1 - s for s in positives) + sum(s for s in negatives if s > threshold)
    return total / len(y)


def margin_contrastive(
    x: Array,
    y: Labels,
    positive_margin: float,
    negative_margin: float,
    averaging: str = "nonzero",
    refs: References | None = None,
) -> float:
    """C2: max(0, d - m+) on positives, max(0, m- - d) on negatives; each half's non-zero mean, or CCP's Alg. 1."""
    pairs = _pairs(distances, x, y, refs)
    attract = [max(0.0, d - positive_margin) for positives, _ in pairs for d in positives]
    repel = [max(0.0, negative_margin - d) for _, negatives in pairs for d in negatives]
    if averaging == "all":
        return _mean(attract + repel)
    assert averaging == "nonzero"
    return _mean([t for t in attract if t > 0]) + _mean([t for t in repel if t > 0])


def triplet(x: Array, y: Labels, margin: float, refs: References | None = None) -> float:
    """Mean of the non-zero max(0, d_ap - d_an + m) over all (anchor, positive, negative): Schroff 2015."""
    terms = []
    for positives, negatives in _pairs(distances, x, y, refs):
        terms += [d_p - d_n + margin for d_p in positives for d_n in negatives]
    return _mean([t for t in terms if t > 0])


def multi_similarity(
    x: Array,
    y: Labels,
    alpha: float = 2.0,
    beta: float = 40.0,
    base: float = 0.5,
    epsilon: float = 0.1,
    refs: References | None = None,
) -> float:
    """Wang 2019 on its mined pairs (s_n > min s_p - eps, s_p < max s_n + eps); an anchor without either gives 0."""
    total = 0.0
    for positives, negatives in _pairs(cosines, x, y, refs):
        if not positives or not negatives:
            continue
        near = [s for s in negatives if s + epsilon > min(positives)]
        far = [s for s in positives if s - epsilon < max(negatives)]
        if near and far:
            total += math.log1p(sum(math.exp(-alpha * (s - base)) for s in far)) / alpha
            total += math.log1p(sum(math.exp(beta * (s - base)) for s in near)) / beta
    return total / len(y)


def supcon(x: Array, y: Labels, temperature: float = 0.1, refs: References | None = None) -> float:
    """Khosla 2020, Eq. 2 (L_out), mean over the queries that have a positive."""
    losses = []
    for positives, negatives in _pairs(cosines, x, y, refs):
        total = sum(math.exp(s / temperature) for s in positives + negatives)
        if positives:
            losses.append(-sum(math.log(math.exp(s / temperature) / total) for s in positives) / len(positives))
    return sum(losses) / len(losses)


def circle_factors(
    x: Array, y: Labels, margin: float = 0.4, refs: References | None = None
) -> list[tuple[list[float], list[float]]]:
    """Eq. 5 of Sun 2020 for each query: [1 + m - s]_+ of its positives and [s + m]_+ of its negatives."""
    return [
        ([max(0.0, 1 + margin - s) for s in positives], [max(0.0, s + margin) for s in negatives])
        for positives, negatives in _pairs(cosines, x, y, refs)
    ]


def circle(
    x: Array,
    y: Labels,
    scale: float = 80.0,
    margin: float = 0.4,
    refs: References | None = None,
    factors: list[tuple[list[float], list[float]]] | None = None,
) -> float:
    """Sun 2020, Eq. 6, mean over queries. Its gradient (Eq. 10) holds the ``factors`` of Eq. 5 as they are at x."""
    factors = circle_factors(x, y, margin, refs) if factors is None else factors
    total = 0.0
    for (positives, negatives), (of_positives, of_negatives) in zip(_pairs(cosines, x, y, refs), factors):
        pull = sum(math.exp(-scale * a * (s - (1 - margin))) for s, a in zip(positives, of_positives))
        push = sum(math.exp(scale * a * (s - margin)) for s, a in zip(negatives, of_negatives))
        total += math.log1p(pull * push)
    return total / len(y)


def circle_similarity_gradient(S: Array, y: Labels, scale: float, margin: float) -> Array:
    """Sun 2020, Eq. 10 in the similarities of queries to one row of each class, divided by B.

    Z = 1 - exp(-L), times the share of the entry in its sum, times scale, times its factor of Eq. 5.
    """
    B, C = S.shape
    out = np.zeros((B, C))
    for i, own in enumerate(y):
        factor = {c: max(0.0, 1 + margin - S[i, c] if c == own else S[i, c] + margin) for c in range(C)}
        pull = math.exp(-scale * factor[own] * (S[i, own] - 1 + margin))
        push = {c: math.exp(scale * factor[c] * (S[i, c] - margin)) for c in range(C) if c != own}
        Z = 1 - math.exp(-math.log1p(pull * sum(push.values())))
        out[i, own] = -Z * scale * factor[own] / B
        for c, value in push.items():
            out[i, c] = Z * value / sum(push.values()) * scale * factor[c] / B
    return out


def proxy_anchor_similarity_gradient(
    S: Array, y: Labels, scale: float, margin: float, positive_norm: str = "present"
) -> Array:
    """Kim 2020, Eq. 5: -+ scale times the entry's share h / (1 + sum of h) of its class's half, over |P+| or |P|."""
    B, C = S.shape
    share = {"present": len(set(y.tolist())), "all": C}[positive_norm]
    out = np.zeros((B, C))
    for c in range(C):
        own = y == c
        attract = np.where(own, np.exp(-scale * (S[:, c] - margin)), 0.0)
        repel = np.where(own, 0.0, np.exp(scale * (S[:, c] + margin)))
        out[:, c] = scale * (repel / (1 + repel.sum()) / C - attract / (1 + attract.sum()) / share)
    return out


def mpa_similarity_gradient(S: Array, y: Labels, scale: float, margin: float) -> Array:
    """Eq. 8 entry by entry; |C-| counts the classes with a negative in the batch."""
    B, C = S.shape
    plus = [[i for i in range(B) if y[i] == c] for c in range(C)]
    minus = [[i for i in range(B) if y[i] != c] for c in range(C)]
    present, opposed = sum(map(bool, plus)), sum(map(bool, minus))
    out = np.zeros((B, C))
    for c in range(C):
        for i in plus[c]:
            others = 1 + sum(math.exp(-scale * (S[j, c] - margin)) for j in plus[c])
            out[i, c] = -scale * math.exp(-scale * (S[i, c] - margin)) / others / present
        for i in minus[c]:
            others = 1 + sum(math.exp(scale * (S[j, c] + margin)) for j in minus[c])
            out[i, c] = scale * math.exp(scale * (S[i, c] + margin)) / others / opposed
    return out


def mpa_dw_similarity_gradient(S: Array, y: Labels, scale: float, margin: float) -> Array:
    """Eq. 14; its S_DR is printed as S(x, c') - S(x, c') = 0 and has to be S(x, c) - S(x, c')."""
    B, C = S.shape
    out = np.zeros((B, C))
    for i, own in enumerate(y):
        for k in range(C):
            if k == own:
                out[i, k] = -scale / (math.exp(-scale * (margin - S[i, own])) + 1) / B
            else:
                relations = sum(math.exp(scale * (S[i, c] - S[i, k])) for c in range(C) if c != own)
                out[i, k] = scale / (math.exp(-scale * (S[i, k] + margin)) + relations) / B
    return out


def mpa_ap_similarity_gradient(S: Array, y: Labels, scale: float, margin: float) -> Array:
    """Eq. 18, which is in S' of Eq. 15, converted to S: the sign of the own class changes, dS'/dS = -1."""
    B, C = S.shape
    out = np.zeros((B, C))
    for i, own in enumerate(y):
        marked = [margin - S[i, c] if c == own else S[i, c] + margin for c in range(C)]
        for k in range(C):
            relations = sum(math.exp(scale * (marked[c] - marked[k])) for c in range(C))
            out[i, k] = (-1 if k == own else 1) * scale / (math.exp(-scale * marked[k]) + relations) / B
    return out


def soft_triple_similarity_gradient(S: Array, y: Labels, scale: float, margin: float, reduction: str = "mean") -> Array:
    """Eq. 5 corrected: both signs change, 1 / sum(1 / l_R+) replaces sum(l_R+), l_R-(c', c) replaces l_R(c, c').

    As printed it is the slope of the log-likelihood, its first case holds for two classes only, and its second has
    the arguments of the ratio in the wrong order.
    """
    B, C = S.shape
    out = np.zeros((B, C))
    for i, own in enumerate(y):
        others = [c for c in range(C) if c != own]
        ratio = {c: math.exp(scale * (S[i, own] - S[i, c] - margin)) for c in others}
        out[i, own] = -scale / (1 / sum(1 / ratio[c] for c in others) + 1)
        for k in others:
            out[i, k] = scale / (ratio[k] + sum(math.exp(scale * (S[i, c] - S[i, k])) for c in others))
    return out / {"mean": B, "sum": 1}[reduction]
