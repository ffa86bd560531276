"""A trained encoder as a model to use: images in, vectors out."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import torch
from torch import Tensor

from proxymetric.core.pieces import NORMALISATIONS

if TYPE_CHECKING:
    from PIL import Image

    from proxymetric.data import ImageSet
    from proxymetric.encoders import Encoder


class Model:
    """A trained encoder with its class names: images in, vectors out.

    >>> import proxymetric as pm
    >>> model = pm.load("runs/demo")                           # doctest: +SKIP
    >>> model.embed(["a.jpg", "b.jpg"]).shape                  # doctest: +SKIP
    torch.Size([2, 128])
    """

    def __init__(self, encoder: Encoder, *, normalise: str, classes: Sequence[str], view: dict[str, Any]) -> None:
        from proxymetric.data.views import EvalView

        self.encoder = encoder.eval()
        self.normalise = normalise
        self.classes = list(classes)
        """names of the classes it was trained on, by label"""
        self.view = EvalView(**view)

    @property
    def dim(self) -> int:
        return self.encoder.dim

    def fingerprint(self) -> str:
        """sha256 of all that makes its vectors what they are: weights, normalisation, view."""
        digest = hashlib.sha256(repr((self.normalise, vars(self.view))).encode())
        for name, value in self.encoder.state_dict().items():
            digest.update(name.encode())
            digest.update(value.detach().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    @property
    def device(self) -> torch.device:
        return next(self.encoder.parameters()).device

    @overload
    def embed(
        self,
        images: Any,
        *,
        batch: int = ...,
        errors: Literal["raise"] = ...,
        progress: Callable[[int, int], None] | None = ...,
    ) -> Tensor: ...
    @overload
    def embed(
        self, images: Any, *, batch: int = ..., errors: str, progress: Callable[[int, int], None] | None = ...
    ) -> Any: ...

    @torch.inference_mode()
    def embed(
        self,
        images: Iterable[str | Path | Image.Image] | Tensor | ImageSet,
        *,
        batch: int = 64,
        errors: str = "raise",
        progress: Callable[[int, int], None] | None = None,
    ) -> Tensor | tuple[Tensor, list[int]]:
        """Vectors (N, dim), float32 on the CPU, normalised as the method did in training.

        images: paths, PIL images, an `ImageSet`, or a tensor (N, 3, H, W), uint8 or float in [0, 1], taken as it is.
        errors: "raise" stops at a file that is no image; "skip" leaves it out and returns (vectors, kept indices).
        progress: called with (done, total).
        """
        if errors not in ("raise", "skip"):
            raise ValueError(f"errors: got {errors!r}, expected 'raise' or 'skip'")
        if batch < 1:
            raise ValueError(f"batch: got {batch}, expected at least 1")
        if isinstance(images, str | Path) or hasattr(images, "convert"):
            raise ValueError("images: got a single one, expected a list of paths or images: embed([image])")
        if isinstance(images, Tensor):
            _check_pixels(images)
        elif not isinstance(images, Sized):
            images = list(images)  # a generator of paths, say
        total = len(images)
        vectors, kept = [torch.empty(0, self.dim)], []
        for start in range(0, total, batch):
            rows = range(start, min(start + batch, total))
            pixels, good = self._read(images, rows, errors)
            if good:
                vectors.append(self._encode(pixels))
                kept += good
            if progress is not None:
                progress(rows.stop, total)
        found = torch.cat(vectors)
        return found if errors == "raise" else (found, kept)

    def _encode(self, pixels: Tensor) -> Tensor:
        raw = self.encoder(pixels.to(self.device)).float()
        return NORMALISATIONS[self.normalise](raw).cpu()

    def _read(self, images: Any, rows: range, errors: str) -> tuple[Tensor, list[int]]:
        if isinstance(images, Tensor):
            return images[rows.start : rows.stop], list(rows)
        from proxymetric.data import BadImage, upright

        pixels, good = [], []
        for i in rows:
            try:
                pixels.append(
                    self.view(images.read(i) if hasattr(images, "read") else upright(images[i], f"images[{i}]"))
                )
                good.append(i)
            except BadImage:
                if errors == "raise":
                    raise
        return torch.stack(pixels) if pixels else torch.empty(0), good


def _check_pixels(images: Tensor) -> None:
    """Refuse a tensor that is no batch of images as the encoder wants them: it normalises them itself."""
    if images.ndim != 4 or images.shape[1] != 3:
        raise ValueError(f"images: got a tensor of shape {tuple(images.shape)}, expected (N, 3, H, W)")
    if images.is_floating_point() and len(images):
        low, high = images.min().item(), images.max().item()
        if not -0.25 <= low <= high <= 1.25:  # resizing may overshoot a little
            raise ValueError(f"images: got floats from {low:.3g} to {high:.3g}, expected them in [0, 1], or uint8")


def embedded(labels: Sequence[int] | np.ndarray, kept: Sequence[int]) -> Tensor:
    """Labels of the images that could be read."""
    return torch.as_tensor(np.asarray(labels)[np.asarray(kept, dtype=np.int64)])
