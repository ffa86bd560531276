"""Load the model of a run, of a slim file or of a shared folder, or a backbone that was not trained."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import torch

from proxymetric.models.hub_client import on_disk
from proxymetric.models.model import Model
from proxymetric.models.place import Place, Pretrained, RunFolder, SlimFile, place_of
from proxymetric.models.run_folder import (
    REFIT,
    SIMPLER,
    build_encoder,
    checked_arguments,
    is_refitted,
    model_file,
    model_folder,
    read_run,
)
from proxymetric.system.files import read_json

UNSAFE = r"[^\w.-]+"
"""characters of a name of data that a file name is better without"""

__all__ = ["is_refitted", "is_run", "load", "load_model", "next_to", "read_run", "unfinished"]


def load(
    run: str | Path | Place,
    which: str = "best",
    device: str | torch.device | None = None,
    weights: str | Path | None = None,
) -> Model:
    """Load the model of a run, of a slim file or of a shared folder, or a backbone with its pre-trained weights.

    Args:
        run: folder of a run, or a file that `export --slim` wrote, which holds only the trained parameters;
            or a folder that `export --hub` wrote, or its address on the Hugging Face hub: "hf://owner/name", or
            "hf://owner/name@revision"; or "backbone:NAME", the pre-trained backbone of this name (of timm, or one of
            this package), whose vectors are its features.
        which: "best" (the simpler model if the run keeps one, the refitted model if there is one, else the model of the
            chosen epoch), "last", or "chosen" (the model of the chosen epoch in any case).
        device: where the model computes; None or "auto" means a GPU if there is one.
        weights: a safetensors file with weights for the backbone. For a run they replace its own. For a slim file they
            must be the weights that the training started from; None takes those of the hub. A backbone takes these
            weights, or those of the hub. A shared folder takes none.

    Returns:
        The model; its `source` says where it was loaded from.

    Raises:
        ValueError: there is no such run, checkpoint or address, a file is damaged, or the weights do not fit.
    """
    from proxymetric.system.device import pick_device

    place, target_device = place_of(run), pick_device(str(device or "auto"))
    if isinstance(place, RunFolder):
        model = _load_run(place.path, which, target_device, weights)
    elif which != "best":
        raise ValueError(f"which: got {which!r}, but {place} holds a single model; expected 'best'")
    elif isinstance(place, SlimFile):
        from proxymetric.models.slim import load_slim

        model = load_slim(place.path, weights, target_device)
    elif isinstance(place, Pretrained):
        from proxymetric.models.pretrained import load_pretrained

        model = load_pretrained(place.name, weights, target_device)
    elif weights is not None:
        raise ValueError(f"weights: got {weights}, but {place} holds the whole encoder; expected no weights")
    else:
        from proxymetric.models.hub import load_hub

        model = load_hub(on_disk(place), target_device)
    model.source = {"run": place.absolute, "which": which}
    if weights is not None:
        model.source["weights"] = os.path.abspath(weights)
    return model


def load_model(
    run: str | Path | Place,
    which: str,
    device: str | torch.device | None,
    weights: str | Path | None,
    say: Callable[[str], None] | None = None,
) -> Model:
    """Load a model for a person: a run has weights of its own, and `say` is told what is loaded, and if a run is not
    finished.

    Raises:
        ValueError: weights are given for a run, or the model cannot be loaded.
    """
    place, tell = place_of(run), say or (lambda sentence: None)
    if weights is not None and isinstance(place, RunFolder) and place.exists():
        raise ValueError(
            f"--weights: got {weights} with the run {run}, which has its own weights; expected it only with a file of "
            "`export --slim`"
        )
    if isinstance(place, Pretrained):
        tell(f"loading {place.name}, only pre-trained, with the weights of {weights or 'the Hugging Face hub'}")
    else:
        tell(f"loading the model of {place}")
    model = load(place, which, device, weights)
    for sentence in unfinished(place):
        tell(sentence)
    return model


def unfinished(run: str | Path | Place) -> list[str]:
    """A sentence about a run that is not finished; an empty list for a finished run and for what is no run."""
    place = place_of(run)
    if not isinstance(place, RunFolder) or place.is_finished():
        return []
    return [f"{place} is not finished: this is its best model so far; `proxymetric train --resume` continues it"]


def is_run(place: str | Path | Place) -> bool:
    """Whether a place is meant as the folder of a run: no slim file, shared folder or backbone.

    Example:
        >>> is_run("runs/birds"), is_run("hf://owner/birds")
        (True, False)
    """
    return isinstance(place_of(place), RunFolder)


def next_to(run: str | Path | Place, verb: str, data: str, suffix: str = "") -> Path:
    """Where output about a run and some data is written by default: next to the run, named after both.

    For an address on the hub, it is the working directory.

    Args:
        run: folder of a run, slim file, shared folder or address.
        verb: the word between the two names.
        data: name of the data.
        suffix: the end of the name.

    Example:
        >>> print(next_to("runs/birds", "on", "new photos", ".html"))
        runs/birds-on-new-photos.html
        >>> print(next_to("hf://owner/birds@v1", "inspects", "photos"))
        birds-inspects-photos
    """
    start = place_of(run).next_to
    return start.with_name(f"{start.name}-{verb}-{re.sub(UNSAFE, '-', data).strip('-.') or 'data'}{suffix}")


def _load_run(run: Path, which: str, device: torch.device, weights: str | Path | None) -> Model:
    """Load the model of a run."""
    from proxymetric.data.views import EvalView
    from proxymetric.encoders import load_weights
    from proxymetric.system.checkpoint import Checkpoint

    read_run(run)
    folder = model_folder(run, which)
    if folder != run:
        which = "best"
    elif which == "best":
        _check_parts(run)
    description = read_run(folder)
    checkpoint, description_file = model_file(folder, which), folder / "run.json"
    encoder = build_encoder(description, description_file)
    view = checked_arguments(description, description_file, "view", EvalView)
    what = f"the encoder of {folder} ({description['encoder']['backbone']})"
    Checkpoint.read(checkpoint).load_into(encoder, "encoder.", what=what)
    if weights is not None:
        load_weights(encoder, weights)
    return Model(
        encoder.to(device),
        normalise=description["normalise"],
        classes=description["classes"],
        view=view,
        nested=description["recipe"]["loss"].get("nested"),
        pretrained=bool(description["recipe"]["train"].get("frozen")),
    )


def _check_parts(run: Path) -> None:
    """Refuse a run whose refitted or simpler model is missing: the model of the chosen epoch is not the same."""
    result = read_json(run / "result.json") if (run / "result.json").is_file() else None
    if not isinstance(result, dict):
        return
    if result.get("refit"):
        raise ValueError(
            f"run: {run / REFIT / 'result.json'} is missing, though the run was refitted; expected that file, or "
            "--which chosen for the model before the refit"
        )
    kept = result.get("kept")
    if isinstance(kept, dict) and kept.get("name") != "trained":
        raise ValueError(
            f"run: {run / SIMPLER / 'result.json'} is missing, though the run keeps the model {kept.get('name')!r}; "
            "expected that file, or --which chosen for the trained model"
        )
