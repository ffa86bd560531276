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
from proxymetric.search.engines.exact import LEFT_OUT, Exact
from proxymetric.search.storage.state import State

KINDS = ("auto", "hnsw", "ivf")
FACTS = ("built", "built_for", "effort", "recall", "rows", "size")
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
"""recall of new queries for which the effort of a search is chosen: a little above the 0.95 that is wanted"""
FIRST_EFFORT, GROWTH = 32, 1.5
"""the first effort that is tried (lists that IVF looks at, candidates that HNSW keeps), and the factor to the next"""
MAX_HNSW_EFFORT = 2_048
SAMPLE, SAMPLE_K = 200, 10
"""queries of which the recall is measured"""
EQUAL = 1e-5
"""similarities that differ by less are equal: engines add their products in different orders"""
MAX_DEAD_SHARE, MAX_GROWN_SHARE = 0.1, 1.0
"""built anew when more than this share of its vectors is deleted or replaced, or when it has grown by this share"""
MANY = 8
"""a search among at most this part of the vectors is exact"""
MAX_TAIL_SHARE = 0.05
"""share of newer rows, compared one by one, up to which the faiss index stays as it is"""


def build(
    settings: dict[str, Any], state: State, stem: str, earlier: Earlier | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Build the faiss index of the vectors of a state; choose the effort of a search by its recall.

    The faiss index of the earlier state stays as it is while few vectors were added: these are compared one by one. It
    gets them when there are more, and it is built anew when it has grown by `MAX_GROWN_SHARE`, or too many of its
    vectors are gone.

    Args:
        settings: `kind`, one of `KINDS`.
        state: the state.
        stem: how the names of the files begin.
        earlier: the engine before; None: there is none.

    Returns:
        The settings with `built`, the kind that was chosen; `effort`; `recall`, measured with that effort with vectors
        that were not in the graph yet; `built_for`, the number of vectors when it was built anew; `rows`, the rows of
        the state that it knows; `size`, the vectors that it has. The names of its files.

    Raises:
        ValueError: the kind is unknown, or faiss is not installed.
    """
    kind = settings.get("kind", "auto")
    one_of("kind", kind, KINDS)
    count = len(state.living)
    chosen = ("hnsw" if count <= MAX_HNSW else "ivf") if kind == "auto" else kind
    if chosen == "ivf" and count < MIN_IVF:
        chosen = "hnsw"
    if earlier is not None and (kept := _kept(earlier, settings, chosen, state)) is not None:
        return kept
    vectors, living = state.arrays["float32"], state.living
    extended = None if earlier is None else _extended(earlier, chosen, vectors, living)
    if extended is not None and earlier is not None:
        index, rows = extended
        facts = {key: earlier.settings[key] for key in ("built_for", "effort", "recall")}
    else:
        index = _empty(chosen, vectors, living)
        sample = np.sort(np.random.default_rng(0).permutation(living)[: min(SAMPLE, count // 2)])
        rows = np.setdiff1d(living, sample)
        _add(index, vectors, rows)
        # New queries have no links in the graph: the sample is added after its recall was measured.
        effort, recall = _chosen_effort(index, vectors, rows, sample)
        _add(index, vectors, sample)
        rows = np.concatenate([rows, sample])
        facts = {"built_for": count, "effort": effort, "recall": recall}
    files = [f"{stem}.faiss", f"{stem}.rows.npy"]
    _faiss().write_index(index, str(state.folder / files[0]))
    np.save(state.folder / files[1], rows)
    facts |= {"rows": state.manifest.rows, "size": len(rows)}
    return {"name": "faiss", "kind": kind, "built": chosen, **facts}, files


def _kept(
    earlier: Earlier, settings: dict[str, Any], kind: str, state: State
) -> tuple[dict[str, Any], list[str]] | None:
    """The earlier faiss index, if it is to stay as it is: the rows have their numbers, and few of them are new."""
    before, files = earlier.settings, [name for name in state.manifest.derived if name.startswith("engine-")]
    is_same = before.get("name") == "faiss" and before.get("built") == kind and len(files) == 2
    has_numbers = np.array_equal(earlier.rows[earlier.rows >= 0], state.living[earlier.rows >= 0])
    new = state.manifest.rows - before.get("rows", 0)
    gone = before.get("size", 0) - int((state.living < before.get("rows", 0)).sum())
    few_changes = 0 <= new <= MAX_TAIL_SHARE * before.get("rows", 0) and gone <= MAX_DEAD_SHARE * before.get("size", 0)
    if is_same and has_numbers and few_changes:
        return {**settings, **{key: before[key] for key in FACTS}}, files
    return None


def _empty(kind: str, vectors: np.ndarray, living: np.ndarray) -> Any:
    """A faiss index without vectors; that of IVF is trained."""
    faiss, count, dim = _faiss(), len(living), vectors.shape[1]
    if kind == "hnsw":
        index = faiss.IndexHNSWFlat(dim, HNSW_LINKS, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = HNSW_BUILD
        return index
    lists = min(int(LISTS_PER_ROOT * count**0.5), MAX_LISTS, count // MIN_PER_LIST)
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(dim), dim, lists, faiss.METRIC_INNER_PRODUCT)
    index.cp.min_points_per_centroid = 1  # otherwise it warns
    index.cp.max_points_per_centroid = POINTS_PER_LIST
    sample = np.sort(np.random.default_rng(0).permutation(living)[: POINTS_PER_LIST * lists])
    index.train(np.ascontiguousarray(vectors[sample]))
    return index


def _extended(earlier: Earlier, kind: str, vectors: np.ndarray, living: np.ndarray) -> tuple[Any, np.ndarray] | None:
    """The faiss index of an earlier state with the new vectors, and the row of each of its vectors; -1: it is gone.

    None if it has to be built anew.
    """
    files = _files_of(earlier)
    if earlier.settings.get("name") != "faiss" or earlier.settings.get("built") != kind or files is None:
        return None
    if len(living) > (1 + MAX_GROWN_SHARE) * earlier.settings.get("built_for", 0):
        return None
    old_rows = load_array(files[1])
    is_known = np.isin(earlier.rows, old_rows) & (earlier.rows >= 0)
    new_row = np.full(int(old_rows.max(initial=-1)) + 2, -1)  # of an old row; the last place stands for -1
    new_row[earlier.rows[is_known]] = living[is_known]
    rows = np.concatenate([new_row[old_rows], living[~is_known]])
    if (rows < 0).sum() > MAX_DEAD_SHARE * len(rows):
        return None
    index = _faiss().read_index(str(files[0]))
    if index.ntotal != len(old_rows) or index.d != vectors.shape[1]:
        return None
    _add(index, vectors, living[~is_known])
    return index, rows


def _files_of(earlier: Earlier) -> tuple[Path, Path] | None:
    """The files of an earlier faiss index; None if they are gone."""
    names = sorted(name for name in earlier.files if name.startswith("engine-"))
    files = [earlier.folder / name for name in names]
    return (files[0], files[1]) if len(files) == 2 and all(file.exists() for file in files) else None


def _add(index: Any, vectors: np.ndarray, rows: np.ndarray) -> None:
    for start in range(0, len(rows), 65_536):
        index.add(np.ascontiguousarray(vectors[rows[start : start + 65_536]]))


class Faiss:
    """Approximate search by faiss; vectors that it does not know are compared one by one.

    Searches among few rows, and of queries for which too little is found, are exact.

    Args:
        index: a faiss index.
        vectors: (N, D) of unit length.
        rows: the row in `vectors` of each vector of the faiss index; -1: it is gone.
        known: the faiss index knows the rows before this one; None: all.
        effort: lists that IVF looks at, candidates that HNSW keeps.
    """

    name = "faiss"

    def __init__(
        self, index: Any, vectors: Tensor, rows: np.ndarray, known: int | None = None, effort: int = FIRST_EFFORT
    ) -> None:
        self.index, self.vectors, self.effort = index, vectors, effort
        self.known = len(vectors) if known is None else known
        self.max_effort = index.nlist if hasattr(index, "nlist") else max(FIRST_EFFORT, min(MAX_HNSW_EFFORT, len(rows)))
        self._exact, self._newer = Exact(vectors), Exact(vectors[self.known :])
        self._rows = rows
        self._is_gone = rows < 0

    @classmethod
    def open(cls, settings: dict[str, Any], state: State) -> Faiss | Exact:
        """Open the files that `build` wrote; they are mapped into memory, so that processes share them.

        Raises:
            ValueError: faiss is not installed, or a file is damaged.
        """
        faiss, vectors = _faiss(), torch.from_numpy(state.arrays["float32"])
        files = sorted(state.folder / name for name in state.manifest.derived if name.startswith("engine-"))
        if not files:  # nothing was built yet
            return Exact(vectors)
        try:
            index = faiss.read_index(str(files[0]), faiss.IO_FLAG_MMAP_IFC | faiss.IO_FLAG_READ_ONLY)
            rows = load_array(files[1])
        except (RuntimeError, ValueError, EOFError, IndexError) as error:
            if not files[0].exists():  # another process has replaced it
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(files[0])) from None
            raise ValueError(f"index: got {files[0]}, a file of faiss that cannot be read ({error})") from None
        if index.ntotal != len(rows) or rows.max(initial=-1) >= len(vectors):
            raise ValueError(f"index: got {files[0]} of {index.ntotal} vectors, expected {len(rows)}")
        return cls(index, vectors, rows, settings["rows"], settings["effort"])

    def search(self, queries: Tensor, k: int, mask: np.ndarray | None = None) -> tuple[Tensor, Tensor]:
        """Find the nearest vectors of each query; see `Engine`."""
        count = len(self.vectors) if mask is None else int(np.count_nonzero(mask))
        k = min(k, count)
        if k == 0 or MANY * count <= len(self.vectors):
            return self._exact.search(queries, k, mask)
        # faiss.contrib.torch_utils, which other libraries import, replaces `search` by one without `params`.
        search = getattr(self.index, "search_numpy", self.index.search)
        depth = min(k, self.index.ntotal)
        parameters, _ = self._parameters(depth, mask)
        values, positions = search(queries.numpy(), depth, params=parameters)
        similarities, places = torch.from_numpy(values), torch.from_numpy(positions)
        numbers = torch.from_numpy(self._rows)[places.clamp_min(0)]
        similarities[places < 0] = LEFT_OUT
        if self.known < len(self.vectors):
            newer, rows = self._newer.search(queries, k, None if mask is None else mask[self.known :])
            similarities = torch.cat([similarities, newer], dim=1)
            numbers = torch.cat([numbers, rows + self.known], dim=1)
        # Equal similarities come in the order of the rows, as from every engine.
        numbers, order = numbers.sort(dim=1)
        similarities, order = similarities.gather(1, order).sort(dim=1, descending=True, stable=True)
        numbers = numbers.gather(1, order)[:, :k]
        similarities = similarities[:, :k]
        lacking = (
            (similarities <= LEFT_OUT).any(dim=1)
            if similarities.shape[1] == k
            else torch.ones(len(queries), dtype=torch.bool)
        )
        if lacking.all():
            return self._exact.search(queries, k, mask)
        if lacking.any():
            similarities[lacking], numbers[lacking] = self._exact.search(queries[lacking], k, mask)
        return similarities, numbers

    def found(self, queries: Tensor, k: int) -> Tensor:
        """The similarities (Q, k) of what the faiss index alone finds."""
        search = getattr(self.index, "search_numpy", self.index.search)
        parameters, _ = self._parameters(k, None)
        return torch.from_numpy(search(queries.numpy(), k, params=parameters)[0])

    def _parameters(self, k: int, mask: np.ndarray | None) -> tuple[Any, np.ndarray | None]:
        """The parameters of a search, and the bits of its mask, which must live as long as these."""
        faiss, options, bits = _faiss(), {}, None
        if mask is not None or self._is_gone.any():
            allowed = ~self._is_gone if mask is None else ~self._is_gone & mask[self._rows]
            bits = np.packbits(allowed, bitorder="little")
            options["sel"] = faiss.IDSelectorBitmap(bits)
        if hasattr(self.index, "nprobe"):
            return faiss.SearchParametersIVF(nprobe=self.effort, **options), bits
        return faiss.SearchParametersHNSW(efSearch=max(self.effort, 2 * k), **options), bits


def _chosen_effort(
    index: Any, vectors: np.ndarray, rows: np.ndarray, sample: np.ndarray
) -> tuple[int, dict[str, float]]:
    """The smallest effort that reaches the target, and its recall: the share of the exact results that it finds.

    Args:
        index: a faiss index of some rows.
        vectors: (N, D) all vectors.
        rows: the rows that the faiss index has.
        sample: the rows of queries, which it does not have.
    """
    if not len(sample):
        return FIRST_EFFORT, {"queries": 0, "k": SAMPLE_K, "value": 1.0}
    queries, mask = torch.from_numpy(vectors[sample]), np.zeros(len(vectors), dtype=bool)
    mask[rows] = True
    engine = Faiss(index, torch.from_numpy(vectors), rows)
    expected = engine._exact.search(queries, SAMPLE_K, mask)[0]
    engine.effort = min(FIRST_EFFORT, engine.max_effort)
    while True:
        # Of vectors that are equally near, such as copies of an image, any may be found.
        hits = engine.found(queries, SAMPLE_K) >= expected[:, -1:] - EQUAL
        recall = hits.float().mean().item()
        if recall >= TARGET_RECALL or engine.effort >= engine.max_effort:
            return engine.effort, {"queries": len(sample), "k": SAMPLE_K, "value": round(recall, 4)}
        engine.effort = min(math.ceil(GROWTH * engine.effort), engine.max_effort)


def _faiss() -> Any:
    try:
        import faiss
    except ImportError:
        raise ValueError(
            "engine: faiss is not installed; expected the extra `index`: pip install 'proxymetric[index]'"
        ) from None
    return faiss
