"""Norms and GELUs that keep less for the backward pass where a step computes in 16 bits.

Autocast keeps the 32-bit tokens before each norm and the 16-bit numbers before each GELU.

Of the tokens before the second norm of a block, the sum of those before the first and what attention adds to them, the
two parts are enough: the first is kept already, and the other has 16 bits. They are added once more, to the last bit.

A compiled step can do with less still: a norm with its own unit result in 16 bits, and a GELU with its slope in a byte,
which adds little to the rounding of 16 bits (`tests/encoders/test_low_memory.py` has the bound). Both are kept as whole
numbers: a compiler that sees a float shortened and made long again may do neither (torch before 2.13) and keep it long.
The forward pass is that of the modules. A compiler makes one kernel of each; without one they would be many, so the
modules themselves are run then, and where nothing is computed in 16 bits.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import gelu

LOW, HIGH = -0.13, 1.13
"""between which the slope of a GELU lies"""


def short(x: Tensor) -> torch.dtype | None:
    """The 16-bit type in which a compiled step with gradients computes what `x` goes through; None: there is none."""
    if not torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return None
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def normed(norm: Any, x: Tensor, kind: torch.dtype | None) -> Tensor:
    """`norm(x)`; kind: of 16 bits, in which a compiled step computes. None: the module is run."""
    if kind is None or not _is_plain_layer_norm(norm):
        return norm(x)
    return Norm.apply(x, norm.weight, norm.bias, norm.eps, kind)


def in_parts(norm: Any, x: Tensor, change: Tensor) -> bool:
    """Whether `x` and `change` are less to keep than their sum, which `norm` is to see, and that is not compiled."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not _is_plain_layer_norm(norm):
        return False
    # A gradient of x means that the norm before has kept it.
    return x.requires_grad and x.dtype == norm.weight.dtype == torch.float32 and change.dtype.itemsize == 2


def added(norm: Any, x: Tensor, change: Tensor, kind: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """`x + change` and `norm(x + change)`; kind: as in `normed`."""
    if in_parts(norm, x, change):
        return Added.apply(x, change, norm.weight, norm.bias, norm.eps)
    total = x + change
    return total, normed(norm, total, kind)


def has_hooks(module: nn.Module) -> bool:
    """Whether calling `module` also runs hooks, which a function in place of the call would leave out."""
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    return any(hooks)


def _is_plain_layer_norm(norm: Any) -> bool:
    """Whether `norm` is a LayerNorm over the last dimension, with a bias and without hooks."""
    if not isinstance(norm, nn.LayerNorm) or norm.bias is None:
        return False
    return len(norm.normalized_shape) == 1 and not has_hooks(norm)


def activated(act: nn.Module, x: Tensor, kind: torch.dtype | None) -> Tensor:
    """`act(x)`; kind: as in `normed`."""
    if kind is None or not isinstance(act, nn.GELU) or act.approximate != "none" or has_hooks(act):
        return act(x)
    return Gelu.apply(x)


class Norm(torch.autograd.Function):
    """`w u + b` in a type of fewer bits, u the tokens at mean 0 and variance 1, in 16 bits where it is kept.

    The D numbers of u lie within sqrt(D) of 0 and are kept to sqrt(D) / 65534, nearer than bfloat16 has those near 1.
    With g the gradient of `w u + b` times w, the tokens have `(g - mean(g) - u mean(g u)) / deviation`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, kind: torch.dtype) -> Tensor:
        variance, mean = torch.var_mean(x.float(), -1, correction=0, keepdim=True)
        scale = (variance + eps).rsqrt()
        unit = (x.float() - mean) * scale
        ctx.save_for_backward((unit * Norm.parts(x)).round().to(torch.int16), scale, weight)
        ctx.given = x.dtype
        return (unit * weight + bias).to(kind)

    @staticmethod
    def parts(tokens: Tensor) -> float:
        """How many steps of what is kept make 1 of u."""
        return 32767 / math.sqrt(tokens.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        kept, scale, weight = ctx.saved_tensors
        grad, unit = grad.float(), kept.float() / Norm.parts(kept)
        back = grad * weight
        of_x = scale * (back - back.mean(-1, keepdim=True) - unit * (back * unit).mean(-1, keepdim=True))
        of_weight = (grad * unit).flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        of_bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return of_x.to(ctx.given), of_weight, of_bias, None, None


class Added(torch.autograd.Function):
    """The sum of two and its norm by torch's own kernels; the two are kept, not the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + change
        y, mean, scale = torch.native_layer_norm(total, weight.shape, weight, bias, eps)
        ctx.save_for_backward(x, change, weight, bias, mean, scale)
        return total, y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_total: Tensor, of_y: Tensor) -> Any:
        x, change, weight, bias, mean, scale = ctx.saved_tensors
        _, _, by_weight, by_bias, _ = ctx.needs_input_grad
        # Without the weight's gradient, CUDA may have none for the bias: tuning/bias_gradients.py.
        of_x, of_weight, of_bias = torch.ops.aten.native_layer_norm_backward(
            of_y, x + change, weight.shape, mean, scale, weight, bias, [True, by_weight, by_weight and by_bias]
        )
        if by_bias and not by_weight:
            of_bias = of_y.flatten(0, -2).sum(0)
        of_x += of_total
        return of_x, of_x.to(change.dtype), of_weight, of_bias, None


class Gelu(torch.autograd.Function):
    """`x Phi(x)`, Phi the normal distribution; its slope `Phi(x) + x phi(x)` is kept in a byte, to 1/400."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        wide = x.float()
        share = 0.5 * (1 + torch.erf(wide * math.sqrt(0.5)))
        slope = share + wide * torch.exp(-0.5 * wide * wide) / math.sqrt(2 * math.pi)
        ctx.save_for_backward(((slope - LOW) * (255 / (HIGH - LOW))).round().to(torch.uint8))
        return gelu(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (kept,) = ctx.saved_tensors
        return (grad.float() * (kept.float() * ((HIGH - LOW) / 255) + LOW)).to(grad.dtype)
