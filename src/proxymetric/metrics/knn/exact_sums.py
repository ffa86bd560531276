"""Sums of products without rounding. The results are pairs of float64 with about 106 bits.

A number is split into slices of `bits` bits each. Products of slices are whole multiples of one power of two. They are
so small that a float64 sum of D products is exact in any order, so ordinary reductions and matrix products can be used.
The few partial sums are then added as pairs (high, low) of float64.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

SLICES = 4
"""number of slices; with the 22 bits of 512 dimensions, entries down to 2^-35 times the largest keep all 53 bits"""
Pair = tuple[Tensor, Tensor]
"""a number as the exact sum of two; the second is below half a unit in the last place of the first"""


def power_of_two(largest: Tensor) -> Tensor:
    """The power of two that scales `largest` (>= 0) into [1/2, 1); 1 for zero. Multiplying by it is exact.

    >>> power_of_two(torch.tensor([3.0, 0.5, 0.0], dtype=torch.float64))
    tensor([0.2500, 1.0000, 1.0000], dtype=torch.float64)
    """
    exponent = torch.frexp(largest.double()).exponent.clamp(-1000, 1023)
    return torch.ldexp(torch.ones_like(largest, dtype=torch.float64), -exponent)


def slices(values: Tensor, dim: int) -> list[Tensor]:
    """Split numbers of at most 1 into a sum of slices, coarsest first, for sums of `dim` products."""
    bits = (53 - math.ceil(math.log2(dim)) if dim > 1 else 53) // 2
    parts: list[Tensor] = []
    rest = values
    for number in range(1, SLICES + 1):
        parts.append(torch.round(rest * 2.0 ** (bits * number)) * 2.0 ** (-bits * number))
        rest = rest - parts[-1]
        if not rest.any():
            break
    return parts


def sum_of_products(a: list[Tensor], b: list[Tensor], multiply: Callable[[Tensor, Tensor], Tensor]) -> Pair:
    """The sum of products of two sliced arrays; `multiply` computes it for one slice of each."""
    high: Tensor | None = None
    low: Tensor | float = 0.0
    for i, left in enumerate(a):
        for j, right in enumerate(b):
            if i + j < SLICES:
                term = multiply(left, right)
                if high is None:
                    high = term
                    continue
                high, error = _two_sum(high, term)
                low = low + error
    assert high is not None
    return _two_sum(high, low if isinstance(low, Tensor) else torch.zeros_like(high))


def cosine(product: Pair, q: Pair, g: Pair) -> Pair:
    """product / sqrt(q g); 0 where q or g is 0."""
    high, error = _two_product(q[0], g[0])
    squared = _two_sum(high, error + (q[0] * g[1] + q[1] * g[0]))
    safe = torch.where(squared[0] > 0, squared[0], 1)
    root = safe.sqrt()
    high, error = _two_product(root, root)
    root_low = (((safe - high) - error) + squared[1]) / (2 * root)
    quotient = product[0] / root
    high, error = _two_product(quotient, root)
    rest = (((product[0] - high) - error) + product[1]) - quotient * root_low
    high, low = _two_sum(quotient, rest / root)
    return torch.where(squared[0] > 0, high, 0), torch.where(squared[0] > 0, low, 0)


def squared_distance(a: Tensor, b: Tensor) -> Pair:
    """|a - b|^2 of rows (M, D)."""
    high, low = _two_sum(a, -b)
    factor = power_of_two(high.abs().amax(dim=1))
    high, low = high * factor[:, None], low * factor[:, None]
    parts = slices(high, high.shape[1])
    total, rest = sum_of_products(parts, parts, dot)
    total, rest = _two_sum(total, rest + 2 * dot(high, low))
    return total / factor / factor, rest / factor / factor


def dot(a: Tensor, b: Tensor) -> Tensor:
    """The sum of products of the rows (M, D) and (M, D), shape (M,)."""
    return (a * b).sum(dim=1)


def _two_sum(a: Tensor, b: Tensor) -> Pair:
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def _two_product(a: Tensor, b: Tensor) -> Pair:
    product = a * b
    (x, y), (v, w) = _halves(a), _halves(b)
    return product, ((x * v - product) + x * w + y * v) + y * w


def _halves(a: Tensor) -> Pair:
    spread = a * 134217729.0  # 2^27 + 1
    high = spread - (spread - a)
    return high, a - high
