"""The encoder before its head: the features of the backbone, and the encoder that a run began with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from proxymetric.core.normalisation import NORMALISATIONS
from proxymetric.models.hub_client import on_disk
from proxymetric.models.load import is_run, load, read_run
from proxymetric.models.model import Model
from proxymetric.models.place import Pretrained, RunFolder, SlimFile, place_of
from proxymetric.models.run_folder import model_folder


class FeatureModel(Model):
    """A model whose vectors are the pooled features of the backbone, the input of the head, not normalised.

    Args:
        encoder: the encoder; it is set to evaluation mode.
        normalise: how `vectors` normalises, a key of `core.pieces.NORMALISATIONS`.
        classes: the names of the training classes, by label.
        view: the arguments of `EvalView`, which prepares the images.
        pretrained: the backbone is as it was before training.
    """

    @classmethod
    def of(cls, model: Model) -> FeatureModel:
        """The same encoder, without its head."""
        return cls(
            model.encoder,
            normalise=model.normalise,
            classes=model.classes,
            view=vars(model.view),
            pretrained=model.pretrained,
        )

    @property
    def dim(self) -> int:
        """The number of features."""
        return self.encoder.width

    @torch.inference_mode()
    def vectors(self, features: Tensor, rows: int = 1024) -> Tensor:
        """Apply the head to features (N, F), `rows` at a time: vectors (N, D), normalised, on the CPU."""
        normalise = NORMALISATIONS[self.normalise]
        parts = [normalise(self.encoder.head(part.to(self.device)).float()).cpu() for part in features.split(rows)]
        return torch.cat(parts)

    def _vectors(self, features: Tensor) -> Tensor:
        return features.float().cpu()


def is_frozen(run: str | Path, which: str = "best") -> bool:
    """Whether the backbone of a run, a slim file or a shared model was frozen in training, or not trained at all."""
    place = place_of(run)
    if isinstance(place, RunFolder):
        return bool(read_run(model_folder(place.path, which))["recipe"]["train"]["frozen"])
    if isinstance(place, SlimFile):
        from proxymetric.system.checkpoint import Checkpoint

        return bool(Checkpoint.read(place.path).state.get("held"))
    if isinstance(place, Pretrained):
        return True
    return bool(on_disk(place).config.get("frozen"))


def load_untrained(run: str | Path, device: str | torch.device | None = None) -> FeatureModel:
    """Build the encoder that a run began with, and take its backbone without the new head.

    This is the row "untrained encoder" of a run's result. A backbone that is not pre-trained is initialised again from
    the seed of the run.

    Args:
        run: folder of a run.
        device: where the model computes; None or "auto" means a GPU if there is one.

    Returns:
        The model, whose vectors are the features.

    Raises:
        ValueError: there is no such run, or the weights that it began with are missing.
    """
    from proxymetric.encoders import build
    from proxymetric.system.device import pick_device

    if not is_run(run):
        raise ValueError(
            f"run: got {run}, a slim file or a shared model, which does not hold the backbone before training; "
            "expected the folder of a run"
        )
    description = read_run(run)
    recipe: dict[str, Any] = description["recipe"]
    if recipe["train"]["frozen"]:
        # The backbone was not trained: the checkpoint holds it as it was, and the file of weights is not needed.
        return FeatureModel.of(load(run, device=device))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe["seed"])
        pooling = description["encoder"]["pooling"]  # "auto" may have become "avg+max"
        encoder = build(**recipe["encoder"] | {"pooling": pooling}, size=recipe["view"]["size"])
    return FeatureModel(
        encoder.to(pick_device(str(device or "auto"))),
        normalise=description["normalise"],
        classes=description["classes"],
        view=description["view"],
        pretrained=True,
    )
