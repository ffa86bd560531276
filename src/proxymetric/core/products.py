"""Products of matrices in the form that is fast with the processor's library."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

HAS_MKL = torch.backends.mkl.is_available()
"""torch for ARM processors does not have it: there a product with a factor is computed by OpenBLAS, and one without a
factor by oneDNN, which is faster"""

MAX_COPIED_PRODUCT = 2**21
"""multiplications up to which a copy of the transposed factor takes less time than what oneDNN does before a product
with a transposed factor; for processors without MKL"""


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
    if len(queries) * rows.numel() > MAX_COPIED_PRODUCT:
        product = queries @ rows.T
    elif len(rows) <= len(queries):
        product = queries @ rows.T.contiguous()
    else:
        product = (rows @ queries.T.contiguous()).T.contiguous()
    if plus is None and factor == 1:
        return product
    return product.mul_(factor) if plus is None else torch.add(plus, product, alpha=factor)


def products_in_groups(groups: Tensor) -> Tensor:
    """The products of the vectors of each group with each other, with gradients.

    Args:
        groups: (N, K, D).

    Returns:
        (N, K, K).

    Example:
        >>> products_in_groups(torch.tensor([[[1.0, 0.0], [2.0, 1.0]]]))
        tensor([[[1., 2.],
                 [2., 5.]]])
    """
    if torch.compiler.is_compiling():
        return groups @ groups.mT
    products: Tensor = _ProductsInGroups.apply(groups)
    return products


class _ProductsInGroups(torch.autograd.Function):
    """`G = W W^T` with the gradient `(dG + dG^T) W`: one product instead of two, and none with a transposed factor.

    On ARM processors oneDNN multiplies many small matrices much more slowly if one factor is transposed.
    """

    @staticmethod
    def forward(ctx: Any, groups: Tensor) -> Tensor:
        ctx.save_for_backward(groups)
        transposed = groups.mT
        return groups @ (transposed if groups.is_cuda or HAS_MKL else transposed.contiguous())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (groups,) = ctx.saved_tensors
        return (gradient + gradient.mT) @ groups
