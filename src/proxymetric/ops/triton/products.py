"""Matrix products in the type of their factors, summed in float32."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


def write_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """`out = a b`, summed and written in float32."""
    if a.dtype == torch.float32:
        torch.mm(a, b, out=out)
    elif _supports_float32_output(a.device, a.dtype):
        torch.mm(a, b, out_dtype=torch.float32, out=out)
    else:
        torch.mm(a.float(), b.float(), out=out)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """`total += a b`, in float32."""
    if a.dtype == torch.float32:
        total.addmm_(a, b)
    elif _supports_float32_total(a.device, a.dtype):
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    elif _supports_float32_output(a.device, a.dtype):
        total.add_(torch.mm(a, b, out_dtype=torch.float32))
    else:
        total.addmm_(a.float(), b.float())


@cache
def _supports_float32_output(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch.mm can write the product of 16-bit matrices in float32: from torch 2.8, on CUDA."""
    matrix = torch.zeros(16, 16, dtype=dtype, device=device)
    try:
        torch.mm(matrix, matrix, out_dtype=torch.float32, out=torch.empty(16, 16, device=device))
    except (TypeError, RuntimeError):
        return False
    return True


@cache
def _supports_float32_total(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch.addmm can add the product of 16-bit matrices to a float32 total in place."""
    matrix = torch.eye(16, dtype=dtype, device=device)
    total = torch.full((16, 16), 2.0**-20, device=device)
    try:
        torch.addmm(total, matrix, matrix, out_dtype=torch.float32, out=total)
    except (TypeError, RuntimeError):
        return False
    return bool((total.diagonal() == 1 + 2.0**-20).all())
