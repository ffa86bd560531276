"""Layer norms of which the bias alone is trained.

Asked for a bias's gradient without that of the weight, CUDA's own backward pass has none to give for more than 65,536
rows of few columns, and fails (https://github.com/pytorch/pytorch/pull/193016; seen with torch 2.11). Here it is not
asked: the gradient of the bias is the sum of those of the rows. Results are the same to the last bit, and no more is
kept for the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm


def sum_biases(module: nn.Module) -> None:
    """Have the plain layer norms in `module` sum the gradients of their biases as long as their weights are frozen."""
    norms = [each for each in module.modules() if isinstance(each, nn.LayerNorm)]
    kinds = _kinds() if norms else {}
    for norm in norms:
        if type(norm) in kinds and not getattr(norm, "_fast_norm", False):
            norm.__class__ = kinds[type(norm)]


def _kinds() -> dict[type[nn.LayerNorm], type[SummedBias]]:
    from timm.layers import LayerNorm, LayerNorm2d

    return {nn.LayerNorm: SummedBias, LayerNorm: SummedBias, LayerNorm2d: SummedBias2d}


class SummedBias(nn.LayerNorm):
    """A LayerNorm; parameters and results are those of the class it replaces.

    >>> norm = SummedBias(3)
    >>> _ = norm.weight.requires_grad_(False)
    >>> norm(torch.tensor([[1.0, 2.0, 4.0], [0.0, 5.0, 1.0]])).sum().backward()
    >>> norm.bias.grad
    tensor([2., 2., 2.])
    """

    def forward(self, x: Tensor) -> Tensor:
        alone = self.bias is not None and self.bias.requires_grad and not self.weight.requires_grad
        # A compiler writes a backward pass of its own, into one kernel with what is around it.
        if not alone or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return Shifted.apply(layer_norm(x, self.normalized_shape, self.weight, self.bias.detach(), self.eps), self.bias)


class SummedBias2d(SummedBias):
    """The same over the channels of maps (B, C, H, W)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Shifted(torch.autograd.Function):
    """`y`, in which `bias` was added already: for autograd alone, which keeps nothing for it."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor) -> Tensor:
        ctx.shape, ctx.kind = bias.shape, bias.dtype
        ctx.mark_dirty(y)  # as if it were added in place here: a view would refuse to be changed in place later
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, grad.reshape(-1, *ctx.shape).sum(0, dtype=ctx.kind)
