"""Layers of which the bias alone is trained: its gradient is the sum of those of the rows, and torch is not asked.

Asked for a bias's gradient without that of the weight, a layer norm's own backward pass on CUDA has none to give for
more than 65,536 rows of few columns, and fails (https://github.com/pytorch/pytorch/pull/193016; seen with torch 2.11).
And a convolution keeps its input for it, which is not needed. Results are the same to the last bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm


def sum_biases(module: nn.Module) -> None:
    """Have the plain norms and convolutions in `module` sum their biases' gradients while their weights are frozen."""
    layers = [each for each in module.modules() if isinstance(each, (nn.LayerNorm, nn.Conv2d))]
    kinds = _kinds() if layers else {}
    for layer in layers:
        if type(layer) in kinds and not getattr(layer, "_fast_norm", False):
            layer.__class__ = kinds[type(layer)]


def _kinds() -> dict[type[nn.Module], type[SummedNorm] | type[SummedConv2d]]:
    from timm.layers import LayerNorm, LayerNorm2d

    return {nn.LayerNorm: SummedNorm, LayerNorm: SummedNorm, LayerNorm2d: SummedNorm2d, nn.Conv2d: SummedConv2d}


def _alone(layer: nn.LayerNorm | nn.Conv2d) -> bool:
    """Whether the bias is trained and the weight is not."""
    if layer.bias is None or not torch.is_grad_enabled():
        return False
    return layer.bias.requires_grad and not layer.weight.requires_grad


class SummedNorm(nn.LayerNorm):
    """A LayerNorm; parameters and results are those of the class it replaces.

    >>> norm = SummedNorm(3)
    >>> _ = norm.weight.requires_grad_(False)
    >>> norm(torch.tensor([[1.0, 2.0, 4.0], [0.0, 5.0, 1.0]])).sum().backward()
    >>> norm.bias.grad
    tensor([2., 2., 2.])
    """

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or not _alone(self):  # compilers write backward passes of their own
            return layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        y = layer_norm(x, self.normalized_shape, self.weight, self.bias.detach(), self.eps)
        return Shifted.apply(y, self.bias, range(y.ndim - self.bias.ndim))


class SummedNorm2d(SummedNorm):
    """The same over the channels of maps (B, C, H, W)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class SummedConv2d(nn.Conv2d):
    """A convolution that keeps nothing of what has no gradient: a ViT's first, of images, which are in pieces there."""

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad or x.ndim != 4 or not _alone(self):
            return super().forward(x)
        assert self.bias is not None
        y = self._conv_forward(x, self.weight, self.bias.detach())
        if torch.compiler.is_compiling():
            # Nothing is added but a gradient: a compiler's own would keep x as well.
            return y + (self.bias - self.bias.detach()).to(y.dtype).view(-1, 1, 1)
        return Shifted.apply(y, self.bias, (0, 2, 3))


class Shifted(torch.autograd.Function):
    """`y`, to which `bias` was added along all but `others` of its dimensions: for autograd alone. Nothing is kept."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor, others: Any) -> Tensor:
        ctx.others, ctx.kind = tuple(others), bias.dtype
        ctx.mark_dirty(y)  # as if it were added in place here: a view would refuse to be changed in place later
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        of_bias = grad.sum(ctx.others, dtype=ctx.kind) if ctx.others else grad.to(ctx.kind)
        return grad, of_bias, None
