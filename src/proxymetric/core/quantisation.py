"""Small vectors: unit vectors as 8-bit numbers or as bits, and back.

int8: ``q = round(127 v / max_d |v_d|)`` for each vector v on its own, read back as ``q / |q|``. Only the direction of a
vector counts in a search by cosine, so that no scale is stored: D bytes a vector.

binary: ``b_d = [v_d > 0]``, 64 dimensions in 8 bytes. Two vectors that differ in h of D bits have the similarity
``1 - 2 h / D``, the cosine of their signs.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from proxymetric.arguments.signatures import one_of
from proxymetric.core.normalisation import unit

KINDS = ("float32", "int8", "binary")
"""what the numbers of stored vectors are"""
LARGEST = 127
WORD_BITS = 64
"""bits are stored in whole words, so that a processor compares 64 dimensions at once"""


def check_kind(kind: str) -> None:
    """Refuse an unknown kind of vectors.

    Raises:
        ValueError: the kind is not one of `KINDS`.
    """
    one_of("vectors", kind, KINDS)


def bytes_per_vector(kind: str, dim: int) -> int:
    """The bytes that a vector needs.

    Args:
        kind: one of `KINDS`; the bits of "binary" alone, without vectors that its results are re-ranked with.
        dim: dimensions of the vector.

    Example:
        >>> [bytes_per_vector(kind, 512) for kind in KINDS]
        [2048, 512, 64]
    """
    check_kind(kind)
    return {"float32": 4 * dim, "int8": dim, "binary": -(-dim // WORD_BITS) * (WORD_BITS // 8)}[kind]


def int8_codes(vectors: Tensor) -> Tensor:
    """Round each vector to whole numbers from -127 to 127, its largest number to 127 or -127.

    Args:
        vectors: (N, D).

    Returns:
        (N, D) int8; a vector of zeros stays zero.

    Example:
        >>> int8_codes(torch.tensor([[0.6, -0.8, 0.0]]))
        tensor([[  95, -127,    0]], dtype=torch.int8)
    """
    values = vectors.float()
    largest = values.abs().amax(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return (values * (LARGEST / largest)).round_().clamp_(-LARGEST, LARGEST).to(torch.int8)


def from_int8(codes: Tensor) -> Tensor:
    """The vectors of unit length that codes stand for; their codes are the same again.

    Example:
        >>> from_int8(torch.tensor([[95, -127, 0]], dtype=torch.int8))
        tensor([[ 0.5990, -0.8008,  0.0000]])
    """
    return unit(codes.float())


def bit_codes(vectors: Tensor) -> Tensor:
    """The signs of vectors as bits, the first dimension in the highest bit of the first byte.

    Args:
        vectors: (N, D).

    Returns:
        (N, bytes) uint8; bits beyond the last dimension are 0.

    Example:
        >>> bit_codes(torch.tensor([[0.6, -0.8, 0.1]]))
        tensor([[160,   0,   0,   0,   0,   0,   0,   0]], dtype=torch.uint8)
    """
    packed = np.packbits((vectors > 0).cpu().numpy(), axis=1)
    width = bytes_per_vector("binary", vectors.shape[1])
    return torch.from_numpy(np.pad(packed, ((0, 0), (0, width - packed.shape[1]))))


def rounded(vectors: Tensor, kind: str) -> Tensor:
    """Vectors as a search sees them once they are stored: the same, from their 8-bit codes, or their signs.

    Args:
        vectors: (N, D).
        kind: one of `KINDS`.

    Example:
        >>> rounded(torch.tensor([[0.6, -0.8, 0.1]]), "binary")
        tensor([[ 1., -1.,  1.]])
    """
    check_kind(kind)
    if kind == "float32":
        return vectors
    return from_int8(int8_codes(vectors)) if kind == "int8" else (vectors > 0).float() * 2 - 1
