"""The encoder as a training step calls it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class StepEncoder:
    """The bound encoder in the precision of the training step; autocast is off around it. Implements `Encode`."""

    def __init__(self, encoder: Any, precision: torch.dtype | None) -> None:
        self.encoder = encoder
        self.precision = precision

    def __call__(self, images: Tensor, /) -> Tensor:
        with self._autocast(images):
            embeddings: Tensor = self.encoder(images)
        return embeddings

    def features(self, images: Tensor, prompts: Sequence[Tensor | None] | None = None, shared: bool = False) -> Tensor:
        with self._autocast(images):
            features: Tensor = self.encoder.features(images, prompts=prompts, shared=shared)
        return features

    def _autocast(self, images: Tensor) -> torch.autocast:
        return torch.autocast(images.device.type, self.precision, enabled=self.precision is not None)
