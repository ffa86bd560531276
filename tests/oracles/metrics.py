"""Retrieval metrics by loops over their definitions; scores in rational arithmetic. Shares no code with the package.

Scores count as equal if they are equal after rounding to 72 binary places (cosine) or digits (squared distance).
"""

import itertools
import math
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np

PLACES = 2**72


def similarity(query: np.ndarray, item: np.ndarray, distance: str) -> Fraction:
    """The similarity of two vectors; larger is nearer."""
    q, g = ([Fraction(float(x)) for x in vector] for vector in (query, item))
    if distance == "euclidean":
        squared = sum(((a - b) ** 2 for a, b in zip(q, g)), Fraction(0))
        unit = Fraction(2) ** math.frexp(float(squared))[1] / PLACES
        return -round(squared / unit) * unit
    dot = sum(a * b for a, b in zip(q, g))
    lengths = sum(a * a for a in q) * sum(b * b for b in g)
    if not dot:
        return Fraction(0)
    squared = dot * dot / lengths
    with localcontext(prec=150):
        cosine = (Decimal(squared.numerator) / Decimal(squared.denominator)).sqrt()
        places = int((cosine * PLACES).to_integral_value())
    return Fraction(places if dot > 0 else -places, PLACES)


def results(
    embeddings: np.ndarray,
    gallery: np.ndarray | None = None,
    distance: str = "cosine",
) -> list[list[int]]:
    """All items for each query, nearest first, equal ones by index; the query itself is left out of its own list."""
    items = embeddings if gallery is None else gallery
    lists = []
    for q, query in enumerate(embeddings):
        places = [j for j in range(len(items)) if gallery is not None or j != q]
        near = {j: similarity(query, items[j], distance) for j in places}
        lists.append(sorted(places, key=lambda j: (-near[j], j)))
    return lists


def one(name: str, hits: list[bool], relevant: int) -> float:
    """One metric of one query, from the hits in its whole list of results."""
    kind, _, cutoff = name.partition("@")
    k = len(hits) if not cutoff else relevant if cutoff == "R" else int(cutoff)
    first = [bool(hit) for hit in hits[:k]]
    if kind == "R":
        return float(True in first)
    if kind == "P":
        return first.count(True) / k
    if kind in ("MAP", "AP"):
        total = 0.0
        for i in range(1, len(first) + 1):
            if first[i - 1]:
                total += first[:i].count(True) / i
        return total / (k if kind == "MAP" else min(k, relevant))
    if kind == "MRR":
        return 1 / (first.index(True) + 1) if True in first else 0.0
    if kind == "nDCG":
        dcg = sum((2 ** int(hit) - 1) / math.log2(i + 2) for i, hit in enumerate(first))
        ideal = sum(1 / math.log2(i + 2) for i in range(min(relevant, k)))
        return dcg / ideal
    raise KeyError(name)


def all_queries(
    names: list[str],
    lists: list[list[int]],
    labels: np.ndarray,
    gallery_labels: np.ndarray | None = None,
) -> tuple[dict[str, list[float]], int]:
    """Each metric for each query with a relevant item, and the number of other queries; `lists` come from `results`."""
    item_labels = labels if gallery_labels is None else gallery_labels
    values: dict[str, list[float]] = {name: [] for name in names}
    left_out = 0
    for q, ranked in enumerate(lists):
        hits = [item_labels[j] == labels[q] for j in ranked]
        relevant = sum(hits)
        if relevant == 0:
            left_out += 1
            continue
        for name in names:
            values[name].append(one(name, hits, relevant))
    return values, left_out


def adjusted_mutual_information(a: list[int], b: list[int]) -> float:
    """(I - E[I]) / (mean entropy - E[I]), where E[I] is the mean over every order of b, each of them tried."""

    def entropy(labels: list) -> float:
        shares = [labels.count(label) / len(labels) for label in set(labels)]
        return -sum(share * math.log(share) for share in shares)

    def information(b: tuple[int, ...]) -> float:
        return entropy(a) + entropy(list(b)) - entropy(list(zip(a, b)))

    orders = [information(order) for order in itertools.permutations(b)]
    expected, average = sum(orders) / len(orders), (entropy(a) + entropy(b)) / 2
    return (information(tuple(b)) - expected) / (average - expected)


def _distance(a: np.ndarray, b: np.ndarray, distance: str) -> float:
    if distance == "cosine":
        a, b = a / np.linalg.norm(a), b / np.linalg.norm(b)
    return float(np.linalg.norm(a - b))


def covering_radius(points: np.ndarray, labels: np.ndarray, distance: str) -> float:
    """Greedy k-center for k = 1..n in each class, the mean of the radii, the mean over classes."""
    means = []
    for label in np.unique(labels):
        members = points[labels == label]
        d = [[_distance(a, b, distance) for b in members] for a in members]
        n = len(members)
        chosen = [min(range(n), key=lambda i: max(d[i]))]
        radii = []
        while True:
            cover = [min(d[i][p] for p in chosen) for i in range(n)]
            radii.append(max(cover))
            if len(chosen) == n:
                break
            chosen.append(max(range(n), key=lambda i: cover[i]))
        means.append(sum(radii) / n)
    return float(np.mean(means))


def inter_class_distance(points: np.ndarray, labels: np.ndarray, distance: str) -> float:
    """Mean over pairs of items of different classes."""
    return float(
        np.mean(
            [
                _distance(points[i], points[j], distance)
                for i in range(len(points))
                for j in range(i)
                if labels[i] != labels[j]
            ]
        )
    )


def confusions(lists: list[list[int]], labels: np.ndarray, item_labels: np.ndarray) -> dict[tuple[int, int], int]:
    """How often the first R results of class a's queries are of another class b."""
    counts: dict[tuple[int, int], int] = {}
    for query, items in enumerate(lists):
        relevant = sum(item_labels[j] == labels[query] for j in items)
        for j in items[:relevant]:
            if item_labels[j] != labels[query]:
                pair = (int(labels[query]), int(item_labels[j]))
                counts[pair] = counts.get(pair, 0) + 1
    return counts
