"""What is measured when an index is made: what small vectors lose, and how fast searches are."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from proxymetric.metrics import Ranking, scores
from proxymetric.search.engines import Engine
from proxymetric.search.engines.exact import Exact
from proxymetric.search.stored_vectors import StoredVectors, VectorRows

MAX_ROWS, MAX_QUERIES = 20_000, 500
"""vectors among which the loss is measured, and queries; drawn at random from larger indexes"""
FIRST = 10
"""results of which the recall is measured"""
TIMED = 10
"""searches of one query, the shortest of which counts: other programs can only make them longer"""
MANY, TIMED_TOGETHER = 64, 3
"""queries of a search with many, and searches of which the shortest counts"""


def measure_loss(
    stored: StoredVectors, sources: Sequence[VectorRows], places: np.ndarray, labels: Sequence[str | None]
) -> dict[str, Any]:
    """Compare searches in stored vectors with searches in the vectors that they were made from.

    Args:
        stored: the stored vectors.
        sources: where the 32-bit vectors are.
        places: (N, 2) number of the source, and row in it, of each vector.
        labels: N labels; None for a vector without one.

    Returns:
        `among` (vectors compared), `queries`, `recall@10` (the share of the 10 nearest of each query that are found),
        `milliseconds` (time of a search with one query), and with labels `MAP@R` (of the 32-bit vectors) and
        `MAP@R lost`, both as fractions.
    """
    generator = np.random.default_rng(0)
    rows = np.sort(generator.permutation(len(places))[:MAX_ROWS])
    queries = np.sort(generator.permutation(len(rows))[:MAX_QUERIES])
    originals = np.stack([sources[source][[row]][0] for source, row in places[rows].tolist()])
    engine = stored.engine({"name": "exact"})
    exact, vectors = Exact(torch.from_numpy(originals)), torch.from_numpy(originals[queries])
    some = None if len(rows) == len(places) else torch.from_numpy(rows)
    known, names = np.unique([labels[row] or "" for row in rows], return_inverse=True)
    labelled = np.array([labels[row] is not None for row in rows])
    relevant = np.where(labelled, np.bincount(names, labelled, len(known)).astype(int)[names] - 1, 0)
    depth = max(FIRST, int(relevant[queries].max(initial=0))) + 1
    wanted = without_itself(exact.search(vectors, depth)[1], queries)
    numbers = engine.search(vectors, depth, some)[1]
    found = without_itself(numbers if some is None else torch.searchsorted(some, numbers), queries)
    recalls = [
        len(set(ours[:FIRST]) & set(theirs[:FIRST])) / max(1, len(theirs[:FIRST]))
        for theirs, ours in zip(wanted, found, strict=True)
    ]
    facts: dict[str, Any] = {
        "among": len(rows),
        "queries": len(queries),
        f"recall@{FIRST}": round(float(np.mean(recalls)), 4),
        "milliseconds": milliseconds(engine, vectors),
    }
    counted = np.flatnonzero(relevant[queries] > 0)
    if len(counted) and len(known) > 1:
        before, after = (_map_at_r(lists, queries, counted, names, labelled, relevant) for lists in (wanted, found))
        facts |= {"MAP@R": round(before, 4), "MAP@R lost": round(before - after, 4)}
    return facts


def milliseconds(engine: Engine, queries: Tensor, at_a_time: int = 1) -> float:
    """The time of a query in a search for the ten nearest vectors, the shortest of several, in milliseconds.

    Args:
        engine: what searches.
        queries: (Q, D), of which some are used.
        at_a_time: queries of one search.
    """
    seconds = []
    for number in range(TIMED if at_a_time == 1 else TIMED_TOGETHER):
        rows = (torch.arange(at_a_time) + number) % len(queries)
        together = queries[rows]
        start = time.perf_counter()
        engine.search(together, FIRST)
        seconds.append(time.perf_counter() - start)
    return float(f"{1000 * min(seconds) / at_a_time:.2g}")


def advice_on_speed(engine: Engine, vectors: Tensor) -> str:
    """Say how fast an approximate engine is beside the exact one, with one query and with many at a time.

    An exact search compares all vectors with many queries by one product of matrices; an approximate one goes through
    its lists or links for each query. Where an engine needs many of them for its recall, the exact one is faster.
    """
    exact, cells, faster = Exact(vectors), [], []
    for at_a_time, name in ((1, "one at a time"), (MANY, f"{MANY} at a time")):
        ours, theirs = (milliseconds(each, vectors, at_a_time) for each in (engine, exact))
        cells.append(f"{ours:g} ms a query {name} (exact: {theirs:g} ms)")
        if theirs < ours:
            faster.append(name)
    advice = f"; --engine exact is faster for {' and '.join(faster)}" if faster else ""
    return f"{engine.name}: {', '.join(cells)}{advice}"


def without_itself(found: Tensor, queries: np.ndarray) -> list[list[int]]:
    """The rows that each query finds, without its own."""
    return [[row for row in rows if row != query] for rows, query in zip(found.tolist(), queries.tolist(), strict=True)]


def _map_at_r(
    lists: list[list[int]],
    queries: np.ndarray,
    counted: np.ndarray,
    names: np.ndarray,
    labelled: np.ndarray,
    relevant: np.ndarray,
) -> float:
    """MAP@R of the queries that have something to find."""
    width = min(len(found) for found in lists)
    neighbours = np.array([lists[number][:width] for number in counted])
    rows = queries[counted]
    hits = (names[neighbours] == names[rows][:, None]) & labelled[neighbours]
    tensors = [torch.from_numpy(each) for each in (hits, relevant[rows], neighbours, rows)]
    ranking = Ranking(tensors[0], tensors[1], tensors[2], tensors[3], left_out=0)
    return scores(ranking, ["MAP@R"])["MAP@R"]
