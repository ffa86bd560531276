"""Search by the signs of vectors: the bits of all vectors first, then the nearest ones again by their 8-bit numbers."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from proxymetric.core.quantisation import bit_codes, from_int8
from proxymetric.search.engines.exact import top_k

MIN_CANDIDATES = 100
CANDIDATES_PER_RESULT = 10
"""so many vectors are compared again for each result that is wanted, and at least `MIN_CANDIDATES`"""
BIT_COUNTS = np.array([number.bit_count() for number in range(256)], dtype=np.uint8)


class Binary:
    """Rank all vectors by the number of bits that differ, and the first of them again by their 8-bit codes.

    Args:
        bits: (N, bytes) from `search.quantisation.bit_codes`.
        codes: (N, D) from `search.quantisation.int8_codes`.

    Example:
        >>> vectors = torch.tensor([[0.6, 0.8], [0.8, 0.6], [-1.0, 0.0]])
        >>> from proxymetric.core.quantisation import int8_codes
        >>> engine = Binary(bit_codes(vectors), int8_codes(vectors))
        >>> engine.search(torch.tensor([[1.0, 0.0]]), k=2)[1].tolist()
        [[1, 0]]
    """

    name = "exact"

    def __init__(self, bits: Tensor, codes: Tensor) -> None:
        self.bits, self.codes = bits, codes

    def search(self, queries: Tensor, k: int, mask: np.ndarray | None = None) -> tuple[Tensor, Tensor]:
        """Find the nearest vectors of each query; see `Engine`."""
        rows = None if mask is None else torch.from_numpy(np.flatnonzero(mask))
        bits = self.bits if rows is None else self.bits[rows]
        total = len(bits)
        k = min(k, total)
        if not k:
            return queries.new_empty(len(queries), 0), torch.empty(len(queries), 0, dtype=torch.long)
        count = min(total, max(MIN_CANDIDATES, CANDIDATES_PER_RESULT * k))
        similarities, nearest_rows = [], []
        for query, query_bits in zip(queries, bit_codes(queries), strict=True):
            nearest = _fewest(differing_bits(bits.numpy(), query_bits.numpy()), count)
            candidates = torch.from_numpy(nearest) if rows is None else rows[torch.from_numpy(nearest)]
            values, places = top_k((from_int8(self.codes[candidates]) @ query)[None], k)
            similarities.append(values[0])
            nearest_rows.append(candidates[places[0]])
        return torch.stack(similarities), torch.stack(nearest_rows)


def differing_bits(bits: np.ndarray, query: np.ndarray) -> np.ndarray:
    """The number of bits in which each row differs from the query, (N,).

    Args:
        bits: (N, bytes) uint8, a multiple of 8 bytes.
        query: (bytes,) uint8.

    Example:
        >>> differing_bits(np.array([[0] * 8, [255] * 8], np.uint8), np.array([1] + [0] * 7, np.uint8)).tolist()
        [1, 63]
    """
    if hasattr(np, "bitwise_count"):
        words = np.ascontiguousarray(bits).view(np.uint64) ^ np.ascontiguousarray(query).view(np.uint64)
        return np.bitwise_count(words).sum(axis=1, dtype=np.int32)
    counts: np.ndarray = BIT_COUNTS[bits ^ query].sum(axis=1, dtype=np.int32)  # NumPy before 2.0
    return counts


def _fewest(distances: np.ndarray, count: int) -> np.ndarray:
    """The sorted rows of the smallest distances; of equal ones the first rows."""
    if count >= len(distances):
        return np.arange(len(distances))
    limit = np.partition(distances, count - 1)[count - 1]
    nearer = np.flatnonzero(distances < limit)
    equal = np.flatnonzero(distances == limit)[: count - len(nearer)]
    return np.sort(np.concatenate([nearer, equal]))
