"""Small vision transformers for the tests of tuning, images for them, and parameters with random offsets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from proxymetric.system import _torchvision  # noqa: F401

ALL = (
    "full", "linear", "bitfit", "adapter", "lora", "vpt", "adapter+bitfit", "lora+bitfit", "vpt+bitfit", "vpt+adapter"
)  # fmt: skip
TINY_VIT: dict[str, Any] = {"backbone": "vit_tiny_patch16_224", "dim": 8, "size": 32, "pretrained": False}


def two_blocks(monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    """Make timm build ViTs with two blocks: the same classes and names of weights in a sixth of the time."""
    import timm

    create = timm.create_model

    def shallow(name: str, **more: Any) -> nn.Module:
        return create(name, **more, **({} if "resnet" in name else {"depth": 2, **options}))

    monkeypatch.setattr(timm, "create_model", shallow)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def stir(module: nn.Module, seed: int = 1) -> None:
    """Move every parameter away from its initial value, so that no zero hides an error."""
    with torch.no_grad():
        for i, parameter in enumerate(module.parameters()):
            parameter.add_(0.2 * drawn(seed + i, *parameter.shape).to(parameter.dtype))


def pictures(count: int = 2, size: int = 32) -> Tensor:
    random = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=random)
