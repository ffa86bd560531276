"""The faiss engine (needs the extra `index`): approximate search beyond about 200,000 vectors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from proxymetric.search.engines.exact import Exact
from proxymetric.signatures import one_of

FILE = "engine.faiss"
KINDS = ("auto", "hnsw", "ivf")
MAX_HNSW = 500_000
"""up to this many vectors `auto` takes HNSW, which is faster to search; beyond IVF, which is faster to build"""
HNSW_LINKS, HNSW_BUILD, HNSW_SEARCH = 32, 80, 96
MIN_IVF = 4_000
"""with fewer vectors, the lists of IVF would be too short to be trained"""
POINTS_PER_LIST = 64
"""vectors for each list of IVF that k-means is trained with"""
PROBED_SHARE = 16
"""IVF searches one in this many of its lists"""
SAMPLE, SAMPLE_K = 200, 10
"""queries of which the recall is measured"""


def build(settings: dict[str, Any], vectors: np.ndarray, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Build the faiss index of vectors and write it to a folder; measure its recall against the exact engine.

    Args:
        settings: `kind`, one of `KINDS`.
        vectors: (N, D) of unit length.
        folder: where the file is written.

    Returns:
        The settings with `kind` as it was chosen and `recall`, and the names of the files that were written.

    Raises:
        ValueError: the kind is unknown, or faiss is not installed.
    """
    faiss = _faiss()
    kind = settings.get("kind", "auto")
    one_of("kind", kind, KINDS)
    chosen = ("hnsw" if len(vectors) <= MAX_HNSW else "ivf") if kind == "auto" else kind
    if chosen == "ivf" and len(vectors) < MIN_IVF:
        chosen = "hnsw"
    dim = vectors.shape[1]
    if chosen == "hnsw":
        index = faiss.IndexHNSWFlat(dim, HNSW_LINKS, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = HNSW_BUILD
    else:
        lists = int(4 * len(vectors) ** 0.5)
        index = faiss.IndexIVFFlat(faiss.IndexFlatIP(dim), dim, lists, faiss.METRIC_INNER_PRODUCT)
        index.cp.max_points_per_centroid = POINTS_PER_LIST
        index.train(np.ascontiguousarray(vectors))
    for start in range(0, len(vectors), 65_536):
        index.add(np.ascontiguousarray(vectors[start : start + 65_536]))
    faiss.write_index(index, str(folder / FILE))
    engine = Faiss(index, torch.from_numpy(vectors))
    return {"name": "faiss", "kind": kind, "built": chosen, "recall": _recall(engine)}, [FILE]


class Faiss:
    """Approximate search by faiss; searches among some rows, and of queries for which too little is found, are exact.

    Args:
        index: a faiss index of the vectors.
        vectors: (N, D) of unit length.

    Example:
        >>> import pytest, tempfile
        >>> faiss = pytest.importorskip("faiss")
        >>> vectors, folder = np.eye(4, dtype=np.float32), Path(tempfile.mkdtemp())
        >>> facts, _ = build({}, vectors, folder)
        >>> facts["built"], Faiss.open(folder, torch.from_numpy(vectors)).search(torch.eye(4)[:1], k=1)[1].tolist()
        ('hnsw', [[0]])
    """

    name = "faiss"

    def __init__(self, index: Any, vectors: Tensor) -> None:
        self.index, self.vectors = index, vectors
        self._exact = Exact(vectors)

    @classmethod
    def open(cls, folder: Path, vectors: Tensor) -> Faiss:
        """Open the file that `build` wrote; it is mapped into memory, so that processes share it.

        Raises:
            ValueError: faiss is not installed, or the file is damaged.
        """
        faiss = _faiss()
        try:
            index = faiss.read_index(str(folder / FILE), faiss.IO_FLAG_MMAP_IFC | faiss.IO_FLAG_READ_ONLY)
        except RuntimeError as error:
            raise ValueError(
                f"index: got {folder / FILE}, which cannot be read ({error}); expected a file of faiss"
            ) from None
        if index.ntotal != len(vectors):
            raise ValueError(f"index: got {folder / FILE} of {index.ntotal} vectors, expected {len(vectors)}")
        return cls(index, vectors)

    def search(self, queries: Tensor, k: int, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Find the nearest vectors of each query; see `Engine`."""
        if rows is not None:
            return self._exact.search(queries, k, rows)
        k = min(k, len(self.vectors))
        if k == 0:
            return self._exact.search(queries, k)
        # faiss.contrib.torch_utils, which other libraries import, replaces `search` by one without `params`.
        search = getattr(self.index, "search_numpy", self.index.search)
        values, found = search(queries.numpy(), k, params=self._parameters(k))
        similarities, numbers = torch.from_numpy(values), torch.from_numpy(found)
        if (lacking := (numbers < 0).any(dim=1)).any():
            similarities[lacking], numbers[lacking] = self._exact.search(queries[lacking], k)
        # Equal similarities come in the order of the rows, as from every engine.
        numbers, order = numbers.sort(dim=1)
        similarities, order = similarities.gather(1, order).sort(dim=1, descending=True, stable=True)
        return similarities, numbers.gather(1, order)

    def _parameters(self, k: int) -> Any:
        faiss = _faiss()
        if hasattr(self.index, "nprobe"):
            return faiss.SearchParametersIVF(nprobe=max(1, self.index.nlist // PROBED_SHARE))
        return faiss.SearchParametersHNSW(efSearch=max(HNSW_SEARCH, 2 * k))


def _recall(engine: Faiss) -> dict[str, float]:
    """The share of the exact results that the engine finds, for vectors of the index as queries."""
    count = len(engine.vectors)
    if not count:
        return {"queries": 0, "k": SAMPLE_K, "value": 1.0}
    rows = np.sort(np.random.default_rng(0).permutation(count)[:SAMPLE])
    queries = engine.vectors[torch.from_numpy(rows)]
    k = SAMPLE_K + 1  # a vector finds itself
    expected, found = (tool.search(queries, k)[1].tolist() for tool in (engine._exact, engine))
    shares = [
        len(set(ours) & set(theirs) - {row}) / max(1, len(set(theirs) - {row}))
        for row, theirs, ours in zip(rows.tolist(), expected, found, strict=True)
    ]
    return {"queries": len(rows), "k": SAMPLE_K, "value": round(float(np.mean(shares)), 4)}


def _faiss() -> Any:
    try:
        import faiss
    except ImportError:
        raise ValueError(
            "engine: faiss is not installed; expected the extra `index`: pip install 'proxymetric[index]'"
        ) from None
    return faiss
