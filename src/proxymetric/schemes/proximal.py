"""The proximal term `lam/2 |theta - theta*|^2` over all parameters of a network, in a few kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def proximal(parameters: list[Tensor], anchors: list[Tensor], lam: float) -> Tensor:
    """The proximal term; its gradient is `lam (theta - theta*)`.

    Args:
        parameters: theta.
        anchors: theta*, tensors of the same shapes.
        lam: weight of the term.

    Returns:
        A scalar.

    Example:
        >>> theta = torch.tensor([1.0, 3.0], requires_grad=True)
        >>> term = proximal([theta], [torch.tensor([1.0, 1.0])], lam=0.5)
        >>> term.backward()
        >>> term.item(), theta.grad
        (1.0, tensor([0., 1.]))
    """
    term: Tensor = _Proximal.apply(lam, len(parameters), *parameters, *anchors)
    return term


class _Proximal(torch.autograd.Function):
    """An explicit backward pass: autograd would launch several kernels for each of a network's many parameters."""

    @staticmethod
    def forward(ctx: Any, lam: float, count: int, *tensors: Tensor) -> Tensor:
        ctx.lam, ctx.count = lam, count
        ctx.save_for_backward(*tensors)
        lengths = torch._foreach_norm(torch._foreach_sub(tensors[:count], tensors[count:]))
        return lam / 2 * torch.stack(lengths).square().sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        gaps = torch._foreach_sub(tensors[: ctx.count], tensors[ctx.count :])
        torch._foreach_mul_(gaps, ctx.lam * grad)
        return None, None, *gaps, *(None for _ in gaps)
