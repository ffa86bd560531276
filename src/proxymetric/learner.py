"""The encoder and the criterion as one module, and the encoder alone as a model to use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import torch
from torch import Tensor, nn

from proxymetric.criterion import Criterion
from proxymetric.files import read_json
from proxymetric.seam import NORMALISATIONS

if TYPE_CHECKING:
    from PIL import Image

    from proxymetric.data import ImageSet
    from proxymetric.encoders import Encoder


class Learner(nn.Module):
    """Encoder + criterion: what is trained, what is saved, and what data parallelism wraps.

    `forward(images, labels) -> loss`. With frozen=True `images` are cached features and only the head runs. In a world
    of several processes embeddings and labels of all of them are gathered, so that every rank computes the loss of the
    global batch; averaging gradients over ranks then gives exactly the gradient of one process.
    """

    def __init__(self, encoder: Encoder, criterion: Criterion, frozen: bool = False, world: int = 1) -> None:
        super().__init__()
        self.encoder = encoder
        self.criterion = criterion
        self.frozen = frozen
        self.world = world
        criterion.bind(encoder)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        embeddings = self.encoder.head(images) if self.frozen else self.encoder(images)
        if self.world > 1:
            embeddings, labels, images = (gathered(part) for part in (embeddings, labels, images))
        return self.criterion(embeddings, labels, images=images)


def gathered(part: Tensor) -> Tensor:
    """The rows of all processes in the order of their ranks; gradients flow back to where the rows came from."""
    from torch.distributed.nn.functional import all_gather

    return torch.cat(list(all_gather(part.contiguous())))


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
        images: Sequence[str | Path | Image.Image] | Tensor | ImageSet,
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
            raise ValueError(f"errors: got {errors!r}, wanted 'raise' or 'skip'")
        if isinstance(images, str | Path) or getattr(images, "mode", None) is not None:
            raise ValueError("images: got a single one, wanted a list of paths or images: embed([image])")
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
        from proxymetric.data import BadImage, read_image

        pixels, good = [], []
        for i in rows:
            try:
                image = images.read(i) if hasattr(images, "read") else images[i]
                if isinstance(image, str | Path):
                    image = read_image(image)
                pixels.append(self.view(image.convert("RGB")))
                good.append(i)
            except BadImage:
                if errors == "raise":
                    raise
        return torch.stack(pixels) if pixels else torch.empty(0), good


def load(
    run: str | Path,
    which: str = "best",
    device: str | torch.device | None = None,
    weights: str | Path | None = None,
) -> Model:
    """The model of a run.

    run: the folder that `train` wrote. which: "best" (the epoch that the held-out classes chose; the refitted model
    where the run was refitted), "last", "chosen" (the best of the first training, refitted or not).
    device: where it computes; None: a GPU if there is one. weights: a safetensors file to take the backbone's weights
    from instead of the run's own.
    """
    from proxymetric.encoders import build, load_weights
    from proxymetric.training.checkpoint import Checkpoint

    run = Path(run)
    if not (run / "run.json").is_file():
        near = sorted(str(path.parent) for path in run.parent.glob("*/run.json"))[:5] if run.parent.is_dir() else []
        hint = f"; there are runs at {', '.join(near)}" if near else ""
        raise ValueError(f"run: {run} holds no run (no run.json){hint}")
    files = {"best": "best.safetensors", "last": "last.safetensors", "chosen": "best.safetensors"}
    if which not in files:
        raise ValueError(f"which: got {which!r}, wanted 'best', 'last' or 'chosen'")
    if which != "chosen" and (run / "refit" / "result.json").is_file():
        run, which = run / "refit", "last"
    about = read_json(run / "run.json")
    file = run / files[which]
    if not file.is_file() and which == "best":
        file = run / files["last"]
    if not file.is_file():
        raise ValueError(f"run: {run} has no checkpoint yet (no {files[which]})")
    encoder = build(**about["encoder"])
    Checkpoint.read(file).load_into(encoder, "encoder.", what=f"the encoder of {run} ({about['encoder']['backbone']})")
    if weights is not None:
        load_weights(encoder, weights)
    place = torch.device(device) if device is not None else torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return Model(encoder.to(place), normalise=about["normalise"], classes=about["classes"], view=about["view"])


def embedded(labels: Sequence[int] | np.ndarray, kept: Sequence[int]) -> Tensor:
    """Labels of the images that could be read."""
    return torch.as_tensor(np.asarray(labels)[np.asarray(kept, dtype=np.int64)])
