"""Exact search in vectors of 8-bit numbers."""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from proxymetric.search.engines.exact import top_k

CHUNK_ROWS = 1_024
"""vectors that become floats at once, so that they stay in the cache until they are compared"""


class Int8:
    """Compare every query with every vector, read back from its codes; exact for what is stored.

    Args:
        codes: (N, D) from `search.quantisation.int8_codes`.

    Example:
        >>> similarities, rows = Int8(127 * torch.eye(3, dtype=torch.int8)).search(torch.tensor([[0.0, 0.6, 0.8]]), k=2)
        >>> rows.tolist()
        [[2, 1]]
    """

    name = "exact"

    def __init__(self, codes: Tensor) -> None:
        self.codes = codes

    def search(self, queries: Tensor, k: int, mask: np.ndarray | None = None) -> tuple[Tensor, Tensor]:
        """Find the nearest vectors of each query; see `Engine`."""
        rows = None if mask is None else torch.from_numpy(np.flatnonzero(mask))
        total = len(self.codes) if rows is None else len(rows)
        similarities = torch.empty(len(queries), total)
        floats = torch.empty(min(CHUNK_ROWS, total), self.codes.shape[1])
        for start in range(0, total, CHUNK_ROWS):
            stop = min(start + CHUNK_ROWS, total)
            chunk = floats[: stop - start].copy_(
                self.codes[start:stop] if rows is None else self.codes[rows[start:stop]]
            )
            similarities[:, start:stop] = queries @ chunk.T
        similarities *= self._shrink if rows is None else self._shrink[rows]
        values, places = top_k(similarities, min(k, total))
        return values, places if rows is None else rows[places]

    @functools.cached_property
    def _shrink(self) -> Tensor:
        """(N,) what makes the codes unit vectors: the inverse of their lengths; 0 for a vector of zeros."""
        lengths = [part.float().norm(dim=1) for part in self.codes.split(CHUNK_ROWS)]
        return torch.cat([torch.empty(0), *lengths]).clamp_min(1.0).reciprocal()
