"""Norms and GELUs that keep less for the backward pass in 16-bit training steps.

Under autocast, torch keeps the 32-bit input of each norm and the 16-bit input of each GELU.

The input of a block's second norm is the sum of the block's input and the output of its attention. Keeping the two
summands is cheaper than keeping the sum: the block's input is kept anyway, and the other summand has 16 bits. The
backward pass adds them again, with the same bits (`AddNorm`).

Compiled steps keep even less: a norm keeps its standardised input in 16 bits (`Norm`), and a GELU keeps its slope in
one byte (`Gelu`). This adds little to the rounding error of 16 bits (`tests/encoders/test_low_memory.py` has the
bound). Both are stored as integers: given a float that is converted to 16 bits and back, a compiler may drop both
conversions and keep 32 bits (torch before 2.13).

The forward pass gives the same result as the modules. A compiler fuses each function into one kernel; without a
compiler there would be many kernels. The modules themselves are therefore called in steps that are not compiled, in
steps that do not compute in 16 bits, and if a module has hooks.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import gelu

MIN_SLOPE, MAX_SLOPE = -0.13, 1.13
"""bounds of the slope of a GELU"""


def compiled_16_bit_dtype(x: Tensor) -> torch.dtype | None:
    """Return autocast's 16-bit type on the device of `x`, in a compiled step with gradients; None in any other step."""
    if not torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return None
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def normed(norm: Any, x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return `norm(x)`; `Norm` computes it if `dtype` is a 16-bit type and `norm` is a plain LayerNorm."""
    if dtype is None or not _is_plain_layer_norm(norm):
        return norm(x)
    return Norm.apply(x, norm.weight, norm.bias, norm.eps, dtype)


def keeps_summands(norm: Any, x: Tensor, change: Tensor) -> bool:
    """Whether keeping `x` and `change` is cheaper than keeping their sum, the input of `norm`, in an eager step."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not _is_plain_layer_norm(norm):
        return False
    # If x requires a gradient, the previous norm has kept x already.
    return x.requires_grad and x.dtype == norm.weight.dtype == torch.float32 and change.dtype.itemsize == 2


def add_and_norm(norm: Any, x: Tensor, change: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """Return `x + change` and `norm(x + change)`; `dtype` as in `normed`."""
    if keeps_summands(norm, x, change):
        return AddNorm.apply(x, change, norm.weight, norm.bias, norm.eps)
    total = x + change
    return total, normed(norm, total, dtype)


def has_hooks(module: nn.Module) -> bool:
    """Whether calling `module` also runs hooks; a function that replaces the call would skip them."""
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    return any(hooks)


def _is_plain_layer_norm(norm: Any) -> bool:
    """Whether `norm` is a LayerNorm over the last dimension, with a bias and without hooks."""
    if not isinstance(norm, nn.LayerNorm) or norm.bias is None:
        return False
    return len(norm.normalized_shape) == 1 and not has_hooks(norm)


def activated(act: nn.Module, x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return `act(x)`; `Gelu` computes it if `dtype` is a 16-bit type and `act` is an exact GELU."""
    if dtype is None or not isinstance(act, nn.GELU) or act.approximate != "none" or has_hooks(act):
        return act(x)
    return Gelu.apply(x)


class Norm(torch.autograd.Function):
    """A LayerNorm `w u + b` in a 16-bit type that keeps only u, the standardised tokens, as 16-bit integers.

    The D numbers of u lie within sqrt(D) of 0 and are stored with an error of at most sqrt(D) / 65534, which is less
    than that of bfloat16 near 1. Let g be w times the gradient of `w u + b`; the gradient of the tokens is then
    `(g - mean(g) - u mean(g u)) / deviation`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        variance, mean = torch.var_mean(x.float(), -1, correction=0, keepdim=True)
        scale = (variance + eps).rsqrt()
        unit = (x.float() - mean) * scale
        ctx.save_for_backward((unit * Norm.steps_per_unit(x)).round().to(torch.int16), scale, weight)
        ctx.input_dtype = x.dtype
        return (unit * weight + bias).to(dtype)

    @staticmethod
    def steps_per_unit(tokens: Tensor) -> float:
        """Return the factor from u to its stored integers."""
        return 32767 / math.sqrt(tokens.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        stored, scale, weight = ctx.saved_tensors
        grad = grad.float()
        unit = stored.float() / Norm.steps_per_unit(stored)
        g = grad * weight
        x_grad = scale * (g - g.mean(-1, keepdim=True) - unit * (g * unit).mean(-1, keepdim=True))
        weight_grad = (grad * unit).flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        bias_grad = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return x_grad.to(ctx.input_dtype), weight_grad, bias_grad, None, None


class AddNorm(torch.autograd.Function):
    """Computes a sum and its LayerNorm with torch's kernels, and keeps the two summands instead of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + change
        y, mean, scale = torch.native_layer_norm(total, weight.shape, weight, bias, eps)
        ctx.save_for_backward(x, change, weight, bias, mean, scale)
        return total, y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, total_grad: Tensor, y_grad: Tensor) -> Any:
        x, change, weight, bias, mean, scale = ctx.saved_tensors
        _, _, needs_weight, needs_bias, _ = ctx.needs_input_grad
        # On CUDA, the bias's gradient without the weight's may fail: see tuning/bias_gradients.py.
        x_grad, weight_grad, bias_grad = torch.ops.aten.native_layer_norm_backward(
            y_grad,
            x + change,
            weight.shape,
            mean,
            scale,
            weight,
            bias,
            [True, needs_weight, needs_weight and needs_bias],
        )
        if needs_bias and not needs_weight:
            bias_grad = y_grad.flatten(0, -2).sum(0)
        x_grad += total_grad
        return x_grad, x_grad.to(change.dtype), weight_grad, bias_grad, None


class Gelu(torch.autograd.Function):
    """A GELU `x Phi(x)` that keeps only its slope `Phi(x) + x phi(x)`, in one byte with an error of at most 1/400.

    Phi is the standard normal distribution function and phi its density.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x32 = x.float()
        probability = 0.5 * (1 + torch.erf(x32 * math.sqrt(0.5)))
        slope = probability + x32 * torch.exp(-0.5 * x32 * x32) / math.sqrt(2 * math.pi)
        ctx.save_for_backward(((slope - MIN_SLOPE) * (255 / (MAX_SLOPE - MIN_SLOPE))).round().to(torch.uint8))
        return gelu(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (stored,) = ctx.saved_tensors
        slope = stored.float() * ((MAX_SLOPE - MIN_SLOPE) / 255) + MIN_SLOPE
        return (grad.float() * slope).to(grad.dtype)
