"""Convolutions whose gradients are matrix products, for processors on which oneDNN has no fast ones.

On ARM processors oneDNN's forward pass is as fast as a matrix product, and its gradients are much slower than one.
Results of the forward pass have the same bits as torch's; gradients differ by rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from proxymetric.core.products import HAS_MKL

ONEDNN_HAS_SLOW_GRADIENTS = torch.backends.mkldnn.is_available() and not HAS_MKL
"""whether torch was built with oneDNN and without MKL, as it is for ARM processors"""

MAX_PATCH_VALUES = 2**22
"""values of the patches that the backward pass copies at a time: 16 MiB"""


def speed_up_gradients(network: nn.Module) -> None:
    """Replace the class of the plain convolutions in `network` by `MatrixConv2d` where that is faster, in place."""
    if ONEDNN_HAS_SLOW_GRADIENTS:
        for layer in network.modules():
            if type(layer) is nn.Conv2d and is_plain(layer):
                layer.__class__ = MatrixConv2d


def is_plain(layer: nn.Conv2d) -> bool:
    """Whether the layer connects all inputs with all outputs, has no dilation, and pads with zeros."""
    is_dense = layer.groups == 1 and set(layer.dilation) == {1}
    return is_dense and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)


class MatrixConv2d(nn.Conv2d):
    """A convolution with the parameters and results of `nn.Conv2d`; its gradients on a CPU are matrix products.

    Example:
        >>> layer = MatrixConv2d(1, 1, 2, bias=False)
        >>> layer(torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]])).sum().backward()
        >>> layer.weight.grad
        tensor([[[[1., 2.],
                  [3., 4.]]]])
    """

    def forward(self, input: Tensor) -> Tensor:
        if self._is_usual(input):
            return super().forward(input)
        return _Convolution.apply(input, self.weight, self.bias, self.stride, self.padding)

    def _is_usual(self, images: Tensor) -> bool:
        """Whether torch's own convolution is used: for inference, on a GPU, in half precision, in a compiled graph."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return True
        has_float32 = images.dtype == self.weight.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
        needs_gradients = images.requires_grad or self.weight.requires_grad
        return not (has_float32 and needs_gradients and images.device.type == "cpu" and images.ndim == 4)

    def _get_name(self) -> str:
        return "Conv2d"


class _Convolution(torch.autograd.Function):
    """`conv2d`. Patches (n H' W', kh kw C) of a few images at a time are multiplied with the output's gradients."""

    @staticmethod
    def forward(
        ctx: Any, images: Tensor, weight: Tensor, bias: Tensor | None, stride: tuple[int, int], padding: tuple[int, int]
    ) -> Tensor:
        ctx.save_for_backward(images, weight)
        ctx.stride, ctx.padding = stride, padding
        return functional.conv2d(images, weight, bias, stride, padding)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        images, weight = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative is wanted: torch's own gradients have one
            options = [len(weight)], ctx.stride, ctx.padding, (1, 1), False, (0, 0), 1, ctx.needs_input_grad[:3]
            return *torch.ops.aten.convolution_backward(gradient, images, weight, *options), None, None
        (down, right), (top, left) = ctx.stride, ctx.padding
        _, _, height, width = images.shape
        outputs, channels, rows, columns = weight.shape
        pixels = gradient.permute(0, 2, 3, 1).contiguous()  # (B, H', W', outputs)
        _, new_height, new_width, _ = pixels.shape
        kernels = weight.permute(0, 2, 3, 1).reshape(outputs, -1)  # (outputs, kh kw C)
        padded = functional.pad(images.permute(0, 2, 3, 1), (0, 0, left, left, top, top)).contiguous()
        images_gradient = torch.zeros_like(padded) if ctx.needs_input_grad[0] else None
        kernels_gradient = torch.zeros_like(kernels) if ctx.needs_input_grad[1] else None
        image, row, column, channel = padded.stride()
        steps = (image, row * down, column * right, row, column, channel)
        at_a_time = max(1, MAX_PATCH_VALUES // (new_height * new_width * kernels.shape[1]))
        for start in range(0, len(images), at_a_time):
            chosen = slice(start, start + at_a_time)
            flat = pixels[chosen].view(-1, outputs)
            shape = (len(pixels[chosen]), new_height, new_width, rows, columns, channels)
            if kernels_gradient is not None:
                patches = padded[chosen].as_strided(shape, steps).reshape(len(flat), -1)
                kernels_gradient.addmm_(flat.T, patches)
            if images_gradient is not None:
                of_patches = (flat @ kernels).view(shape)
                target = images_gradient[chosen]
                for i in range(rows):
                    for j in range(columns):
                        place = target[:, i : i + new_height * down : down, j : j + new_width * right : right]
                        place += of_patches[:, :, :, i, j]
        if images_gradient is not None:
            images_gradient = images_gradient[:, top : top + height, left : left + width].permute(0, 3, 1, 2)
        if kernels_gradient is not None:
            # In the layout of the weight, as DistributedDataParallel wants it.
            by_channel = kernels_gradient.view(outputs, rows, columns, channels).permute(0, 3, 1, 2)
            kernels_gradient = torch.empty_like(weight).copy_(by_channel)
        bias_gradient = gradient.sum((0, 2, 3)) if ctx.needs_input_grad[2] else None
        return images_gradient, kernels_gradient, bias_gradient, None, None
