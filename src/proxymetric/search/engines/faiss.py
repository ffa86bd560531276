"""The faiss engine (needs the extra `index`): approximate search beyond about 200,000 vectors."""

from __future__ import annotations

import errno
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from proxymetric.arguments.signatures import one_of
from proxymetric.search.array_files import load_array
from proxymetric.search.engines.earlier import Earlier
from proxymetric.search.engines.exact import Exact

FILE, ROWS_FILE = "engine.faiss", "engine-rows.npy"
KINDS = ("auto", "hnsw", "ivf")
FACTS = ("built", "built_for", "effort", "recall")
"""what `build` adds to the settings"""
MAX_HNSW = 500_000
"""up to this many vectors `auto` takes HNSW, which is faster to search; beyond IVF, which is faster to build"""
HNSW_LINKS, HNSW_BUILD = 32, 80
MIN_IVF = 4_000
"""with fewer vectors, the lists of IVF would be too short to be trained"""
LISTS_PER_ROOT, MAX_LISTS, MIN_PER_LIST = 16, 8_192, 15
"""lists of IVF: this many times the root of the number of vectors, within these limits; many short lists need fewer
comparisons for the same recall, but the time to train them grows with their square"""
POINTS_PER_LIST = 40
"""vectors for each list of IVF that k-means is trained with, at most"""
TARGET_RECALL = 0.97
"""recall on a sample for which the effort of a search is chosen: a little above the 0.95 that new queries shall have"""
FIRST_EFFORT, GROWTH = 32, 1.5
"""the first effort that is tried (lists that IVF looks at, candidates that HNSW keeps), and the factor to the next"""
MAX_HNSW_EFFORT = 2_048
SAMPLE, SAMPLE_K = 200, 10
"""queries of which the recall is measured"""
EQUAL = 1e-5
"""similarities that differ by less are equal: engines add their products in different orders"""
MAX_DEAD_SHARE, MAX_GROWN_SHARE = 0.1, 1.0
"""built anew when more than this share of its vectors is deleted or replaced, or when it has grown by this share"""


def build(
    settings: dict[str, Any], vectors: np.ndarray, folder: Path, earlier: Earlier | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Build the faiss index of vectors and write it to a folder; choose the effort of a search by its recall.

    New vectors are added to the faiss index of the earlier state where there is one, and vectors that are gone are
    masked. It is built anew when too many are masked or were added.

    Args:
        settings: `kind`, one of `KINDS`.
        vectors: (N, D) of unit length.
        folder: where the files are written.
        earlier: the state before; None: there is none.

    Returns:
        The settings with `built`, the kind that was chosen; `effort`; `recall`, measured with that effort on a sample;
        and `built_for`, the number of vectors when it was built anew. The names of the files that were written.

    Raises:
        ValueError: the kind is unknown, or faiss is not installed.
    """
    faiss = _faiss()
    kind = settings.get("kind", "auto")
    one_of("kind", kind, KINDS)
    chosen = ("hnsw" if len(vectors) <= MAX_HNSW else "ivf") if kind == "auto" else kind
    if chosen == "ivf" and len(vectors) < MIN_IVF:
        chosen = "hnsw"
    built_for = len(vectors)
    extended = None if earlier is None else _extended(earlier, chosen, vectors)
    if extended is not None and earlier is not None:
        index, rows = extended
        built_for = earlier.settings["built_for"]
    else:
        index, rows = _empty(chosen, vectors), np.arange(len(vectors))
        _add(index, vectors, rows)
    faiss.write_index(index, str(folder / FILE))
    np.save(folder / ROWS_FILE, rows)
    effort, recall = _chosen_effort(Faiss(index, torch.from_numpy(vectors), rows))
    facts = {"name": "faiss", "kind": kind, "built": chosen, "built_for": built_for, "effort": effort, "recall": recall}
    return facts, [FILE, ROWS_FILE]


def _empty(kind: str, vectors: np.ndarray) -> Any:
    """A faiss index without vectors; that of IVF is trained."""
    faiss, (count, dim) = _faiss(), vectors.shape
    if kind == "hnsw":
        index = faiss.IndexHNSWFlat(dim, HNSW_LINKS, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = HNSW_BUILD
        return index
    lists = min(int(LISTS_PER_ROOT * count**0.5), MAX_LISTS, count // MIN_PER_LIST)
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(dim), dim, lists, faiss.METRIC_INNER_PRODUCT)
    index.cp.min_points_per_centroid = 1  # otherwise it warns
    index.cp.max_points_per_centroid = POINTS_PER_LIST
    sample = np.sort(np.random.default_rng(0).permutation(count)[: POINTS_PER_LIST * lists])
    index.train(np.ascontiguousarray(vectors[sample]))
    return index


def _extended(earlier: Earlier, kind: str, vectors: np.ndarray) -> tuple[Any, np.ndarray] | None:
    """The faiss index of an earlier state with the new vectors, and the row of each of its vectors; -1: it is gone.

    None if it has to be built anew.
    """
    if earlier.settings.get("name") != "faiss" or earlier.settings.get("built") != kind:
        return None
    if len(vectors) > (1 + MAX_GROWN_SHARE) * earlier.settings.get("built_for", 0):
        return None
    old_numbers = load_array(earlier.folder / ROWS_FILE)
    new_row = np.full(int(old_numbers.max(initial=-1)) + 2, -1)  # of an old row; the last place stands for -1
    kept = np.flatnonzero(earlier.rows >= 0)
    new_row[earlier.rows[kept]] = kept
    added = np.flatnonzero(earlier.rows < 0)
    rows = np.concatenate([new_row[old_numbers], added])
    if (rows < 0).sum() > MAX_DEAD_SHARE * len(rows):
        return None
    index = _faiss().read_index(str(earlier.folder / FILE))
    if index.ntotal != len(old_numbers) or index.d != vectors.shape[1]:
        return None
    _add(index, vectors, added)
    return index, rows


def _add(index: Any, vectors: np.ndarray, rows: np.ndarray) -> None:
    for start in range(0, len(rows), 65_536):
        index.add(np.ascontiguousarray(vectors[rows[start : start + 65_536]]))


class Faiss:
    """Approximate search by faiss; searches among some rows, and of queries for which too little is found, are exact.

    Args:
        index: a faiss index.
        vectors: (N, D) of unit length.
        rows: the row in `vectors` of each vector of the faiss index; -1: it was deleted.
        effort: lists that IVF looks at, candidates that HNSW keeps.

    Example:
        >>> import pytest, tempfile
        >>> faiss = pytest.importorskip("faiss")
        >>> vectors, folder = np.eye(4, dtype=np.float32), Path(tempfile.mkdtemp())
        >>> facts, _ = build({}, vectors, folder)
        >>> engine = Faiss.open(facts, torch.from_numpy(vectors), folder)
        >>> facts["built"], engine.search(torch.eye(4)[:1], k=1)[1].tolist()
        ('hnsw', [[0]])
    """

    name = "faiss"

    def __init__(self, index: Any, vectors: Tensor, rows: np.ndarray, effort: int = FIRST_EFFORT) -> None:
        self.index, self.vectors, self.effort = index, vectors, effort
        self.max_effort = index.nlist if hasattr(index, "nlist") else max(FIRST_EFFORT, min(MAX_HNSW_EFFORT, len(rows)))
        self._exact = Exact(vectors)
        self._rows = torch.from_numpy(rows)
        self._selector: Any = None
        if (rows < 0).any():
            self._mask = np.packbits(rows >= 0, bitorder="little")
            self._selector = _faiss().IDSelectorBitmap(self._mask)

    @classmethod
    def open(cls, settings: dict[str, Any], vectors: Tensor, folder: Path) -> Faiss:
        """Open the files that `build` wrote; they are mapped into memory, so that processes share them.

        Raises:
            ValueError: faiss is not installed, or a file is damaged.
        """
        faiss = _faiss()
        try:
            index = faiss.read_index(str(folder / FILE), faiss.IO_FLAG_MMAP_IFC | faiss.IO_FLAG_READ_ONLY)
            rows = load_array(folder / ROWS_FILE)
        except (RuntimeError, ValueError, EOFError) as error:
            if not (folder / FILE).exists():  # another process has replaced the generation
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder / FILE)) from None
            raise ValueError(f"index: got {folder}, where a file of faiss cannot be read ({error})") from None
        if index.ntotal != len(rows) or (rows >= 0).sum() != len(vectors):
            raise ValueError(f"index: got {folder / FILE} of {index.ntotal} vectors, expected {len(vectors)}")
        return cls(index, vectors, rows, settings["effort"])

    def search(self, queries: Tensor, k: int, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Find the nearest vectors of each query; see `Engine`."""
        if rows is not None:
            return self._exact.search(queries, k, rows)
        k = min(k, len(self.vectors))
        if k == 0:
            return self._exact.search(queries, k)
        # faiss.contrib.torch_utils, which other libraries import, replaces `search` by one without `params`.
        search = getattr(self.index, "search_numpy", self.index.search)
        values, positions = search(queries.numpy(), k, params=self._parameters(k))
        similarities, places = torch.from_numpy(values), torch.from_numpy(positions)
        lacking = (places < 0).any(dim=1)
        numbers = self._rows[places.clamp_min(0)]
        if lacking.any():
            similarities[lacking], numbers[lacking] = self._exact.search(queries[lacking], k)
        # Equal similarities come in the order of the rows, as from every engine.
        numbers, order = numbers.sort(dim=1)
        similarities, order = similarities.gather(1, order).sort(dim=1, descending=True, stable=True)
        return similarities, numbers.gather(1, order)

    def _parameters(self, k: int) -> Any:
        faiss, options = _faiss(), {} if self._selector is None else {"sel": self._selector}
        if hasattr(self.index, "nprobe"):
            return faiss.SearchParametersIVF(nprobe=self.effort, **options)
        return faiss.SearchParametersHNSW(efSearch=max(self.effort, 2 * k), **options)


def _chosen_effort(engine: Faiss) -> tuple[int, dict[str, float]]:
    """The smallest effort that reaches the target, and its recall: the share of the exact results that it finds.

    The queries are vectors of the index, so that the recall is measured where images are.
    """
    count = len(engine.vectors)
    if not count:
        return FIRST_EFFORT, {"queries": 0, "k": SAMPLE_K, "value": 1.0}
    rows = np.sort(np.random.default_rng(0).permutation(count)[:SAMPLE])
    queries = engine.vectors[torch.from_numpy(rows)]
    k = SAMPLE_K + 1  # a vector finds itself, or one that equals it, first
    expected = engine._exact.search(queries, k)[0]
    engine.effort = min(FIRST_EFFORT, engine.max_effort)
    while True:
        # Of vectors that are equally near, such as copies of an image, any may be found.
        hits = engine.search(queries, k)[0] >= expected[:, -1:] - EQUAL
        recall = hits[:, 1:].float().mean().item() if hits.shape[1] > 1 else 1.0
        if recall >= TARGET_RECALL or engine.effort >= engine.max_effort:
            return engine.effort, {"queries": len(rows), "k": SAMPLE_K, "value": round(recall, 4)}
        engine.effort = min(math.ceil(GROWTH * engine.effort), engine.max_effort)


def _faiss() -> Any:
    try:
        import faiss
    except ImportError:
        raise ValueError(
            "engine: faiss is not installed; expected the extra `index`: pip install 'proxymetric[index]'"
        ) from None
    return faiss
