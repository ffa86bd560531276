"""Lengths of rows on an accelerator."""

from __future__ import annotations

import torch
from torch import Tensor

from proxymetric.ops.triton.launch import launch


def lengths(vectors: Tensor) -> Tensor:
    """Of each row, in float32."""
    if not vectors.is_contiguous():
        return torch.linalg.vector_norm(vectors, dim=1, dtype=torch.float32)
    count, dim, tile, block = by_tiles(vectors)
    found = vectors.new_empty(count, dtype=torch.float32)
    launch("measure", (-(-count // tile),), 4, (vectors, found), (count, dim), {"TILE": tile, "BLOCK": block})
    return found


def by_tiles(vectors: Tensor) -> tuple[int, int, int, int]:
    """How many rows and dimensions there are, and how many of each a program holds."""
    (count, dim) = vectors.shape
    block = min(power(dim), 1024)
    return count, dim, max(1, 2048 // block), block


def power(number: int) -> int:
    """The lowest power of two from `number`."""
    return 1 << (number - 1).bit_length()
