"""The vectors of an index on disk: 32-bit numbers, 8-bit numbers, or bits with 8-bit numbers for re-ranking."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.lib.format import header_data_from_array_1_0, write_array_header_1_0
from torch import Tensor

from proxymetric.core.quantisation import bit_codes, bytes_per_vector, from_int8, int8_codes
from proxymetric.search.array_files import load_array
from proxymetric.search.engines import Engine, open_engine
from proxymetric.search.engines.binary import Binary
from proxymetric.search.engines.int8 import Int8

FLOATS, CODES, BITS = "vectors.npy", "vectors.int8.npy", "vectors.bits.npy"
FILES: dict[str, tuple[str, ...]] = {"float32": (FLOATS,), "int8": (CODES,), "binary": (BITS, CODES)}
"""kind of vectors -> the files of a generation that hold them"""
COPY_ROWS = 8_192
"""vectors that are copied at once"""


class VectorRows(Protocol):
    """Rows of float32 vectors: an array, or stored vectors that are read back."""

    def __getitem__(self, rows: Any, /) -> np.ndarray: ...


def stored_bytes(kind: str, dim: int) -> int:
    """The bytes of a vector on disk; "binary" keeps the 8-bit numbers too.

    Example:
        >>> [stored_bytes(kind, 512) for kind in FILES]
        [2048, 512, 576]
    """
    return bytes_per_vector(kind, dim) + (bytes_per_vector("int8", dim) if kind == "binary" else 0)


def check_engine(kind: str, engine: dict[str, Any]) -> None:
    """Refuse small vectors for an engine that keeps 32-bit numbers of its own.

    Raises:
        ValueError: the engine is not the exact one.
    """
    if kind != "float32" and engine.get("name") != "exact":
        raise ValueError(
            f"vectors: got {kind!r} with the engine {engine.get('name')!r}, which keeps 32-bit numbers of its own; "
            "expected the engine 'exact', or vectors 'float32'"
        )


def write_vectors(folder: Path, kind: str, sources: Sequence[VectorRows], places: np.ndarray, dim: int) -> None:
    """Write vectors in their order.

    The files are written, not mapped into memory: on a full disk a write raises an error, but a store to a mapped page
    kills the process (SIGBUS).

    Args:
        folder: where the files are written.
        kind: "float32", "int8" or "binary".
        sources: where the vectors come from.
        places: (N, 2) number of the source, and row in it.
        dim: dimensions.

    Raises:
        OSError: a file could not be written.
    """
    shapes = {FLOATS: (np.float32, dim), CODES: (np.int8, dim), BITS: (np.uint8, bytes_per_vector("binary", dim))}
    empty_rows = {name: np.empty((0, shapes[name][1]), shapes[name][0]) for name in FILES[kind]}
    encode = {FLOATS: lambda vectors: vectors, CODES: int8_codes, BITS: bit_codes}
    with contextlib.ExitStack() as opened:
        files = {name: opened.enter_context(open(folder / name, "wb")) for name in FILES[kind]}
        for name, empty in empty_rows.items():
            write_array_header_1_0(
                files[name], header_data_from_array_1_0(empty) | {"shape": (len(places), empty.shape[1])}
            )
        for start in range(0, len(places), COPY_ROWS):
            part = places[start : start + COPY_ROWS]
            blocks = {name: np.empty((len(part), empty.shape[1]), empty.dtype) for name, empty in empty_rows.items()}
            for source in np.unique(part[:, 0]):
                chosen = np.flatnonzero(part[:, 0] == source)
                vectors = torch.from_numpy(np.ascontiguousarray(sources[source][part[chosen, 1]]))
                for name, block in blocks.items():
                    block[chosen] = encode[name](vectors).numpy()
            for name, block in blocks.items():
                files[name].write(block.data)


class StoredVectors:
    """Vectors that `write_vectors` wrote, mapped into memory: processes that open the same files share their pages.

    Args:
        folder: the folder of the files.
        kind: "float32", "int8" or "binary".
        count: N.
        dim: D.

    Raises:
        ValueError: a file cannot be read or has another shape.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> places = np.array([[0, 0], [0, 1]])
        >>> write_vectors(folder, "int8", [np.array([[0.6, 0.8], [1.0, 0.0]], np.float32)], places, dim=2)
        >>> StoredVectors(folder, "int8", count=2, dim=2)[[1]]
        array([[1., 0.]], dtype=float32)
    """

    def __init__(self, folder: Path, kind: str, count: int, dim: int) -> None:
        self.kind, self.dim = kind, dim
        shapes = {FLOATS: ("float32", dim), CODES: ("int8", dim), BITS: ("uint8", bytes_per_vector("binary", dim))}
        self._folder = folder
        self._files = {
            name: mapped(folder / name, (count, shapes[name][1]), np.dtype(shapes[name][0])) for name in FILES[kind]
        }

    def __getitem__(self, rows: Any) -> np.ndarray:
        """Some vectors, (M, D) float32 of unit length."""
        if self.kind == "float32":
            return self._files[FLOATS][rows]
        return from_int8(torch.from_numpy(self._files[CODES][rows])).numpy()

    @functools.cached_property
    def floats(self) -> np.ndarray:
        """All vectors, (N, D) float32; those of another kind are read back into memory when they are first wanted."""
        return self._files[FLOATS] if self.kind == "float32" else self[:]

    @property
    def tensor(self) -> Tensor:
        """The same as a tensor."""
        return torch.from_numpy(self.floats)

    def engine(self, settings: dict[str, Any]) -> Engine:
        """Open the engine that searches the vectors.

        Args:
            settings: its settings with facts, as `build_engine` returned them.
        """
        if self.kind == "float32":
            return open_engine(settings, self.tensor, self._folder)
        codes = torch.from_numpy(self._files[CODES])
        return Int8(codes) if self.kind == "int8" else Binary(torch.from_numpy(self._files[BITS]), codes)


def mapped(file: Path, shape: tuple[int, int], dtype: np.dtype = np.dtype(np.float32)) -> np.ndarray:  # noqa: B008
    """Map an array into memory; pages are shared between processes as long as nobody writes to them.

    Raises:
        ValueError: the file cannot be read, or has another shape or type.
    """
    if shape[0] == 0:
        return np.empty(shape, dtype)
    try:
        array = load_array(file, mmap_mode="c")
    except (ValueError, EOFError) as error:
        raise ValueError(f"index: got {file}, which cannot be read ({error}), expected an array") from None
    if array.shape != shape or array.dtype != dtype:
        raise ValueError(f"index: got {file} of shape {array.shape} and {array.dtype}, expected {shape} and {dtype}")
    return array
