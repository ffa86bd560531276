"""A scaled product of two matrices, in as few passes over the result as the processor's library needs."""

from __future__ import annotations

import torch
from torch import Tensor

HAS_MKL = torch.backends.mkl.is_available()
"""torch for ARM processors does not have it: there a product with a factor is computed by OpenBLAS, and one without a
factor by oneDNN, which is faster"""


def scaled_product(queries: Tensor, rows: Tensor, factor: float, plus: Tensor | None = None) -> Tensor:
    """`factor * queries @ rows.T + plus`, without gradients.

    Args:
        queries: (B, D).
        rows: (R, D).
        factor: of the product.
        plus: (B, R) is added; None: nothing.

    Returns:
        (B, R).

    Example:
        >>> scaled_product(torch.eye(2), torch.eye(2), -2.0, torch.ones(2, 2))
        tensor([[-1.,  1.],
                [ 1., -1.]])
    """
    if queries.is_cuda or HAS_MKL:
        added = queries.new_empty(1) if plus is None else plus
        return torch.addmm(added, queries, rows.T, beta=0 if plus is None else 1, alpha=factor)
    product = queries @ rows.T
    return product.mul_(factor) if plus is None else torch.add(plus, product, alpha=factor)
