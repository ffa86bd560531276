"""The encoder and the criterion as one module, and the encoder alone as a model to use."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import torch
from torch import Tensor, nn

from proxymetric.criterion import Criterion
from proxymetric.files import read_json
from proxymetric.look import Seen
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
        if frozen:
            # Before the criterion meets it: what copies trainable parameters copies the head alone.
            encoder.set_backbone_trainable(False)
        criterion.bind(encoder)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        here = labels.to(images.device, non_blocking=True)
        if self.world == 1:
            seen = None if self.frozen else self._looked_twice(images, labels)
            if seen is not None:
                return self.criterion(self.encoder.head(seen[0]), here, images=images, seen=seen[1])
            encode = self.encoder.head if self.frozen else self.encoder
            return self.criterion(encode(images), here, images=images)
        return self._of_all_processes(images, here)

    def _of_all_processes(self, images: Tensor, labels: Tensor) -> Tensor:
        counts = counted(len(images), images.device)
        labels = gathered(labels, counts)
        first = sum(counts[: torch.distributed.get_rank()])
        mine = slice(first, first + len(images))
        if not self.frozen and (found := self._looked_twice(images, labels, mine)) is not None:
            features, seen = found
            seen = seen._replace(features=gathered(seen.features, counts))
            return self.criterion(gathered(self.encoder.head(features), counts), labels, seen=seen)
        encode = self.encoder.head if self.frozen else self.encoder
        embeddings = encode(images) if len(images) else _of_no_image(encode, encode, images)
        needed = gathered(images, counts) if "images" in self.criterion.needs else None
        return self.criterion(gathered(embeddings, counts), labels, images=needed)

    def _looked_twice(
        self,
        images: Tensor,
        labels: Tensor,
        mine: slice = slice(None),
    ) -> tuple[Tensor, Seen] | None:
        """Features (B, F) and a second look at the images, if the method wants one, in one pass of the encoder."""
        look = self.criterion.look(labels, mine)
        if look is None:
            return None
        if len(images):
            features, again = self.encoder.features_twice(images, look.prompts, look.shared)
            return features, Seen(look, again)
        features = _of_no_image(self.encoder, self.encoder.features, images)
        return features, Seen(look, features + 0 * look.prompts.rows.sum())


def _of_no_image(module: nn.Module, encode: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    """No rows, but with gradients: the other processes wait for this one's part of them.

    None of its images could be read; so a black one is looked at, which leaves no trace in running averages.
    """
    training = module.training
    module.eval()
    rows = encode(images.new_zeros((1, *images.shape[1:])))[:0]
    module.train(training)
    return rows


def counted(rows: int, device: torch.device) -> list[int]:
    """How many rows each process has: fewer than the others where images could not be read."""
    counts = torch.zeros(torch.distributed.get_world_size(), dtype=torch.int64, device=device)
    counts[torch.distributed.get_rank()] = rows
    torch.distributed.all_reduce(counts)
    return counts.tolist()


def gathered(part: Tensor, counts: list[int]) -> Tensor:
    """The rows of all processes in the order of their ranks; gradients flow to this process's own rows.

    All processes compute the same loss from what is gathered, and their gradients are averaged afterwards: what only
    one of them can know, the gradient through its own rows, is therefore multiplied by their number.
    """
    longest, world = max(counts), len(counts)
    padded = part.new_zeros((longest, *part.shape[1:]))
    padded[: len(part)] = part.detach()
    found = [torch.empty_like(padded) for _ in counts]
    torch.distributed.all_gather(found, padded)
    parts = [rows[:count] for rows, count in zip(found, counts, strict=True)]
    if part.requires_grad:
        own = part.view_as(part)
        own.register_hook(lambda grad: grad * world)
        parts[torch.distributed.get_rank()] = own
    return torch.cat(parts)


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
            raise ValueError(f"errors: got {errors!r}, wanted 'raise' or 'skip'")
        if batch < 1:
            raise ValueError(f"batch: got {batch}, wanted at least 1")
        if isinstance(images, str | Path) or hasattr(images, "convert"):
            raise ValueError("images: got a single one, wanted a list of paths or images: embed([image])")
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


def described(run: str | Path) -> dict[str, Any]:
    """What `run.json` says of a run."""
    run = Path(run)
    if not (run / "run.json").is_file():
        found = [*run.glob("*/run.json"), *run.parent.glob("*/run.json")]
        near = sorted(str(path.parent) for path in found)[:5]
        hint = f"; there are runs at {', '.join(near)}" if near else ""
        raise ValueError(f"run: {run} holds no run (no run.json){hint}")
    about = read_json(run / "run.json")
    lacking = {"recipe", "encoder", "normalise", "view", "classes", "data"} - set(about)
    if lacking:
        raise ValueError(f"{run / 'run.json'} is not as `train` wrote it: it lacks {', '.join(sorted(lacking))}")
    return about


def is_refitted(run: str | Path, which: str = "best") -> bool:
    """Whether the model that `which` names is one that was trained on all classes afterwards."""
    return which != "chosen" and (Path(run) / "refit" / "result.json").is_file()


def load(
    run: str | Path,
    which: str = "best",
    device: str | torch.device | None = None,
    weights: str | Path | None = None,
) -> Model:
    """The model of a run, or of a slim file.

    run: the folder that `train` wrote, or the file that `export --slim` wrote, which holds only what was trained.
    which: "best" (the epoch that the held-out classes chose; the refitted model where the run was refitted), "last",
    "chosen" (the best of the first training, refitted or not). device: where it computes; None or "auto": a GPU if
    there is one. weights: a safetensors file to take the backbone's weights from instead of the run's own; for a slim
    file it must be the one that was trained from, and is fetched from the hub if none is given.
    """
    from proxymetric.checkpoint import Checkpoint
    from proxymetric.device import pick_device
    from proxymetric.encoders import build, load_weights

    place = pick_device(str(device or "auto"))
    run = Path(run)
    if run.is_file():
        from proxymetric.export import load_slim

        if which != "best":
            raise ValueError(f"which: got {which!r}, but {run} holds one model; leave it out")
        return load_slim(run, weights, place)
    about = described(run)
    files = {"best": "best.safetensors", "last": "last.safetensors", "chosen": "best.safetensors"}
    if which not in files:
        raise ValueError(f"which: got {which!r}, wanted 'best', 'last' or 'chosen'")
    if is_refitted(run, which):
        run, which = run / "refit", "last"
        about = described(run)
    file = run / files[which]
    if not file.is_file() and which == "best":
        file = run / files["last"]
    if not file.is_file():
        raise ValueError(f"run: {run} has no checkpoint yet (no {files[which]})")
    try:
        encoder = build(**about["encoder"])
    except TypeError as error:
        raise ValueError(f"{run / 'run.json'} is not as `train` wrote it: {error}") from None
    Checkpoint.read(file).load_into(encoder, "encoder.", what=f"the encoder of {run} ({about['encoder']['backbone']})")
    if weights is not None:
        load_weights(encoder, weights)
    return Model(encoder.to(place), normalise=about["normalise"], classes=about["classes"], view=about["view"])


def _check_pixels(images: Tensor) -> None:
    """Refuse a tensor that is no batch of images as the encoder wants them: it normalises them itself."""
    if images.ndim != 4 or images.shape[1] != 3:
        raise ValueError(f"images: got a tensor of shape {tuple(images.shape)}, wanted (N, 3, H, W)")
    if images.is_floating_point() and len(images):
        low, high = images.min().item(), images.max().item()
        if not -0.25 <= low <= high <= 1.25:  # resizing may overshoot a little
            raise ValueError(f"images: got floats from {low:.3g} to {high:.3g}, wanted them in [0, 1], or uint8")


def embedded(labels: Sequence[int] | np.ndarray, kept: Sequence[int]) -> Tensor:
    """Labels of the images that could be read."""
    return torch.as_tensor(np.asarray(labels)[np.asarray(kept, dtype=np.int64)])
