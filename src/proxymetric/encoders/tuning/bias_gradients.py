"""Layers whose bias is trained and whose weight is frozen: they sum the bias's gradient over rows themselves.

torch's backward pass of LayerNorm on CUDA fails for more than 65,536 rows of few columns if the bias needs a gradient
and the weight does not (https://github.com/pytorch/pytorch/pull/193016; seen with torch 2.11). torch's convolution
keeps its input in this case, although the bias's gradient does not need it. Results have the same bits as torch's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from proxymetric.encoders.conv_gradients import MatrixConv2d


def sum_biases(module: nn.Module) -> None:
    """Replace the classes of the plain norms and convolutions in `module` by those below, in place."""
    layers = [layer for layer in module.modules() if isinstance(layer, (nn.LayerNorm, nn.Conv2d))]
    replacements = _replacements() if layers else {}
    for layer in layers:
        if type(layer) in replacements and not getattr(layer, "_fast_norm", False):
            layer.__class__ = replacements[type(layer)]


def _replacements() -> dict[type[nn.Module], type[SummedNorm] | type[SummedConv2d]]:
    from timm.layers import LayerNorm, LayerNorm2d

    norms = {nn.LayerNorm: SummedNorm, LayerNorm: SummedNorm, LayerNorm2d: SummedNorm2d}
    return {**norms, nn.Conv2d: SummedConv2d, MatrixConv2d: SummedConv2d}


def _trains_only_bias(layer: nn.LayerNorm | nn.Conv2d) -> bool:
    """Whether the bias is trained and the weight is not."""
    if layer.bias is None or not torch.is_grad_enabled():
        return False
    return layer.bias.requires_grad and not layer.weight.requires_grad


class SummedNorm(nn.LayerNorm):
    """A LayerNorm with the parameters and the results of the class that it replaces.

    Example:
        >>> norm = SummedNorm(3)
        >>> _ = norm.weight.requires_grad_(False)
        >>> norm(torch.tensor([[1.0, 2.0, 4.0], [0.0, 5.0, 1.0]])).sum().backward()
        >>> norm.bias.grad
        tensor([2., 2., 2.])
    """

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or not _trains_only_bias(self):  # a compiler generates its own backward pass
            return layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        y = layer_norm(x, self.normalized_shape, self.weight, self.bias.detach(), self.eps)
        return BiasGradient.apply(y, self.bias, range(y.ndim - self.bias.ndim))


class SummedNorm2d(SummedNorm):
    """A `SummedNorm` over the channels of maps (B, C, H, W)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class SummedConv2d(nn.Conv2d):
    """A convolution that does not keep an input without gradient, such as the images in a ViT's patch embedding."""

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad or x.ndim != 4 or not _trains_only_bias(self):
            return super().forward(x)
        assert self.bias is not None
        y = self._conv_forward(x, self.weight, self.bias.detach())
        if torch.compiler.is_compiling():
            # This adds 0 and gives the bias its gradient; a compiler's own backward pass would keep x as well.
            return y + (self.bias - self.bias.detach()).to(y.dtype).view(-1, 1, 1)
        return BiasGradient.apply(y, self.bias, (0, 2, 3))


class BiasGradient(torch.autograd.Function):
    """Returns `y`, to which `bias` has been added already, and gives `bias` its gradient; it keeps no tensor.

    `dims` are the dimensions of `y` over which the gradient of the bias is summed.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor, dims: Any) -> Tensor:
        ctx.dims = tuple(dims)
        ctx.dtype = bias.dtype
        ctx.mark_dirty(y)  # else y would be returned as a view, which later code could not change in place
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        bias_grad = grad.sum(ctx.dims, dtype=ctx.dtype) if ctx.dims else grad.to(ctx.dtype)
        return grad, bias_grad, None
