"""Retrieval metrics by loops over their definitions, in NumPy float64; shares no code with the package."""

import math

import numpy as np


def similarity(query: np.ndarray, item: np.ndarray, distance: str) -> float:
    """Larger is nearer."""
    if distance == "euclidean":
        return -sum((float(a) - float(b)) ** 2 for a, b in zip(query, item))
    lengths = math.sqrt(sum(float(a) ** 2 for a in query)) * math.sqrt(sum(float(b) ** 2 for b in item))
    dot = sum(float(a) * float(b) for a, b in zip(query, item))
    return dot / lengths if lengths else 0.0


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
    """One metric of one query, hits of its whole list."""
    kind, cutoff = name.split("@")
    k = relevant if cutoff == "R" else int(cutoff)
    first = [bool(hit) for hit in hits[:k]]
    if kind == "R":
        return float(True in first)
    if kind == "P":
        return first.count(True) / k
    if kind == "MAP":
        total = 0.0
        for i in range(1, len(first) + 1):
            if first[i - 1]:
                total += first[:i].count(True) / i
        return total / k
    if kind == "nDCG":
        dcg = sum((2 ** int(hit) - 1) / math.log2(i + 2) for i, hit in enumerate(first))
        ideal = sum(1 / math.log2(i + 2) for i in range(min(relevant, k)))
        return dcg / ideal
    raise KeyError(name)


def all_queries(
    names: list[str],
    embeddings: np.ndarray,
    labels: np.ndarray,
    gallery: np.ndarray | None = None,
    gallery_labels: np.ndarray | None = None,
    distance: str = "cosine",
) -> tuple[dict[str, list[float]], int]:
    """Each metric for each query that has something to find, and how many have not."""
    lists = results(embeddings, gallery, distance)
    item_labels = labels if gallery_labels is None else gallery_labels
    values: dict[str, list[float]] = {name: [] for name in names}
    left_out = 0
    for q, found in enumerate(lists):
        hits = [item_labels[j] == labels[q] for j in found]
        relevant = sum(hits)
        if relevant == 0:
            left_out += 1
            continue
        for name in names:
            values[name].append(one(name, hits, relevant))
    return values, left_out
