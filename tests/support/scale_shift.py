"""A tuning outside the package: SSF, added by one file and one line, `TUNINGS["ssf"] = ScaleShift`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from proxymetric.encoders.tuning import Tuning


class ScaleShift(Tuning):
    """SSF (Lian et al. 2022) behind the norms: ``y = gamma * norm(x) + beta`` with gamma and beta trained.

    Args:
        backbone: any backbone; each of its LayerNorms gets a gamma and a beta.
        deviation: standard deviation of gamma around 1 and of beta around 0, 0.02 in the paper.
    """

    part = "scales and shifts"

    def __init__(self, backbone: Any, *, deviation: float = 0.02) -> None:
        super().__init__(backbone)
        self.layers = nn.ModuleList()
        for module in backbone.modules():
            if isinstance(module, nn.LayerNorm):
                layer = Affine(module.normalized_shape[0], deviation)
                module.register_forward_hook(layer.hook)
                self.layers.append(layer)


class Affine(nn.Module):
    """`gamma * y + beta` of a norm's output y (..., D)."""

    def __init__(self, width: int, deviation: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(1 + deviation * torch.randn(width))
        self.beta = nn.Parameter(deviation * torch.randn(width))

    def hook(self, norm: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        """A forward hook. It is a method, so a deep copy of the encoder uses the copy's parameters."""
        return output * self.gamma + self.beta
