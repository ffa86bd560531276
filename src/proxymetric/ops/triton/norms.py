"""Lengths of rows on a GPU, and the sizes of tiles."""

from __future__ import annotations

import torch
from torch import Tensor

from proxymetric.ops.triton.launch import launch

NUMBERS_PER_TILE = 2048
MAX_DIM_BLOCK = 1024


def row_norms(vectors: Tensor) -> Tensor:
    """The length of each row, in float32."""
    if not vectors.is_contiguous():
        return torch.linalg.vector_norm(vectors, dim=1, dtype=torch.float32)
    count, dim = vectors.shape
    tile, block = tile_shape(dim)
    norms = vectors.new_empty(count, dtype=torch.float32)
    launch("row_norms", (-(-count // tile),), 4, (vectors, norms), (count, dim), {"TILE": tile, "BLOCK": block})
    return norms


def tile_shape(dim: int) -> tuple[int, int]:
    """The rows and dimensions that a program holds at once."""
    block = min(next_power_of_two(dim), MAX_DIM_BLOCK)
    return max(1, NUMBERS_PER_TILE // block), block


def next_power_of_two(number: int) -> int:
    """The lowest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()
