"""What is measured when an index is made: what small vectors lose, and how fast searches are."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from proxymetric.core.normalisation import cut
from proxymetric.core.quantisation import KINDS, bit_codes, int8_codes
from proxymetric.metrics import Ranking, scores
from proxymetric.search.batches import Batch
from proxymetric.search.engines import Engine
from proxymetric.search.engines.binary import Binary
from proxymetric.search.engines.exact import Exact
from proxymetric.search.engines.int8 import Int8
from proxymetric.search.manifest import Manifest
from proxymetric.search.storage.state import stored_bytes

MAX_ROWS, MAX_QUERIES = 20_000, 500
"""vectors among which the loss is measured, and queries; drawn at random from larger indexes"""
FIRST = 10
"""results of which the recall is measured"""
TIMED = 10
"""searches of one query, the shortest of which counts: other programs can only make them longer"""
MANY, TIMED_TOGETHER = 64, 3
"""queries of a search with many, and searches of which the shortest counts"""


def measure_loss(kind: str, originals: Tensor, labels: Sequence[str | None]) -> dict[str, Any]:
    """Compare searches in small vectors with searches in the vectors that they were made from.

    Args:
        kind: how the vectors are stored: "int8" or "binary".
        originals: (N, D) of unit length, drawn by `drawn_rows`.
        labels: N labels; None for a vector without one.

    Returns:
        `among` (vectors compared), `queries`, `recall@10` (the share of the 10 nearest of each query that are found),
        `milliseconds` (time of a search with one query), and with labels `MAP@R` (of the 32-bit vectors) and
        `MAP@R lost`, both as fractions; and `sizes`, see `measure_sizes`.
    """
    sample, codes = Sample(originals, labels), int8_codes(originals)
    engine: Engine = Int8(codes) if kind == "int8" else Binary(bit_codes(originals), codes)
    results = without_itself(engine.search(sample.vectors, sample.depth)[1], sample.queries)
    facts: dict[str, Any] = {
        "among": len(originals),
        "queries": len(sample.queries),
        f"recall@{FIRST}": round(sample.recall(results), 4),
        "milliseconds": milliseconds(engine, sample.vectors),
    }
    before, after = sample.map_at_r(sample.nearest), sample.map_at_r(results)
    if before is not None and after is not None:
        facts |= {"MAP@R": round(before, 4), "MAP@R lost": round(before - after, 4)}
    return facts | {"sizes": measure_sizes(sample, [originals.shape[1]])}


def with_loss(manifest: Manifest, batches: Sequence[Batch]) -> Manifest:
    """The manifest with what small vectors lose, measured while the 32-bit ones exist."""
    kind, count = manifest.vectors["kind"], sum(len(batch.ids) for batch in batches)
    facts: dict[str, Any] = {"kind": kind, "bytes": stored_bytes(kind, manifest.dim)}
    if kind != "float32" and count:
        some = drawn_rows(count)
        originals = np.concatenate([batch.vectors for batch in batches])[some]
        labels = [label for batch in batches for label in batch.labels]
        facts["lost"] = measure_loss(kind, torch.from_numpy(originals), [labels[row] for row in some])
    return replace(manifest, vectors=facts)


def drawn_rows(count: int) -> np.ndarray:
    """The rows among which losses are measured: all, or some of many, in rising order."""
    return np.sort(np.random.default_rng(0).permutation(count)[:MAX_ROWS])


def measure_sizes(sample: Sample, dims: Sequence[int]) -> list[dict[str, Any]]:
    """Measure searches in vectors that are cut to each dimension and stored as each kind of numbers.

    Args:
        sample: 32-bit vectors of an index.
        dims: dimensions that the vectors are cut to.

    Returns:
        For each the `dim`, `vectors` (the kind of numbers), `bytes` of a stored vector, `milliseconds` of a search with
        one query, and `scores` as fractions: `recall@10` against the whole 32-bit vectors and, with labels, `MAP@R`.

    Example:
        >>> sample = Sample(torch.eye(4), ["a", "a", "b", "b"])
        >>> [(each["dim"], each["vectors"], each["bytes"]) for each in measure_sizes(sample, [4])]
        [(4, 'float32', 16), (4, 'int8', 4), (4, 'binary', 12)]
    """
    records = []
    for dim in dims:
        vectors, queries = (cut(each, dim).contiguous() for each in (sample.originals, sample.vectors))
        codes = int8_codes(vectors)
        engines: dict[str, Engine] = {"float32": Exact(vectors), "int8": Int8(codes)}
        engines["binary"] = Binary(bit_codes(vectors), codes)
        for kind in KINDS:
            engine = engines[kind]
            results = without_itself(engine.search(queries, sample.depth)[1], sample.queries)
            values = {f"recall@{FIRST}": round(sample.recall(results), 4)}
            if (score := sample.map_at_r(results)) is not None:
                values["MAP@R"] = round(score, 4)
            records.append({
                "dim": dim,
                "vectors": kind,
                "bytes": stored_bytes(kind, dim),
                "milliseconds": milliseconds(engine, queries),
                "scores": values,
            })  # fmt: skip
    return records


class Sample:
    """Some 32-bit vectors of an index, and what each of some queries should find among them.

    Args:
        originals: (N, D) vectors.
        labels: N labels; None for a vector without one.
    """

    def __init__(self, originals: Tensor, labels: Sequence[str | None]) -> None:
        self.originals = originals
        self.queries = np.sort(np.random.default_rng(1).permutation(len(originals))[:MAX_QUERIES])
        self.vectors = originals[torch.from_numpy(self.queries)]
        known, self._names = np.unique([label or "" for label in labels], return_inverse=True)
        self._labelled = np.array([label is not None for label in labels])
        counts = np.bincount(self._names, self._labelled, len(known)).astype(int)[self._names]
        self._relevant = np.where(self._labelled, counts - 1, 0)
        self._counted = np.flatnonzero(self._relevant[self.queries] > 0) if len(known) > 1 else np.arange(0)
        self.depth = max(FIRST, int(self._relevant[self.queries].max(initial=0))) + 1
        """results that a search must find"""
        self.nearest = without_itself(Exact(originals).search(self.vectors, self.depth)[1], self.queries)
        """what the 32-bit vectors find"""

    def recall(self, results: list[list[int]]) -> float:
        """The share of the first ten of the 32-bit vectors that are found."""
        shares = [
            len(set(ours[:FIRST]) & set(theirs[:FIRST])) / max(1, len(theirs[:FIRST]))
            for theirs, ours in zip(self.nearest, results, strict=True)
        ]
        return float(np.mean(shares))

    def map_at_r(self, results: list[list[int]]) -> float | None:
        """MAP@R of the queries that have something to find; None if there are none."""
        if not len(self._counted):
            return None
        width = min(len(each) for each in results)
        neighbours = np.array([results[number][:width] for number in self._counted])
        rows = self.queries[self._counted]
        hits = (self._names[neighbours] == self._names[rows][:, None]) & self._labelled[neighbours]
        tensors = [torch.from_numpy(each) for each in (hits, self._relevant[rows], neighbours, rows)]
        return scores(Ranking(tensors[0], tensors[1], tensors[2], tensors[3], left_out=0), ["MAP@R"])["MAP@R"]


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


def without_itself(hits: Tensor, queries: np.ndarray) -> list[list[int]]:
    """The rows that each query finds, without its own."""
    return [[row for row in rows if row != query] for rows, query in zip(hits.tolist(), queries.tolist(), strict=True)]
