"""Load the model of a run, of a slim file, or of a shared folder."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from proxymetric.arguments.signatures import one_of
from proxymetric.models.hub_client import fetch, is_address, parse
from proxymetric.models.model import Model
from proxymetric.models.run_folder import (
    FILES,
    build_encoder,
    checked_arguments,
    is_refitted,
    model_file,
    read_run,
)
from proxymetric.system.files import read_json

UNSAFE = r"[^\w.-]+"
"""characters of a name of data that a file name is better without"""

__all__ = ["is_refitted", "is_run", "load", "load_model", "next_to", "read_run", "unfinished"]


def load(
    run: str | Path,
    which: str = "best",
    device: str | torch.device | None = None,
    weights: str | Path | None = None,
) -> Model:
    """Load the model of a run, of a slim file or of a shared folder.

    Args:
        run: folder of a run, or a file that `export --slim` wrote, which holds only the trained parameters;
            or a folder that `export --hub` wrote, or its address on the Hugging Face hub: "hf://owner/name", or
            "hf://owner/name@revision".
        which: "best" (the refitted model if there is one, else the model of the chosen epoch), "last", or "chosen" (the
            model of the chosen epoch, also if there is a refitted one).
        device: where the model computes; None or "auto" means a GPU if there is one.
        weights: a safetensors file with weights for the backbone. For a run they replace its own. For a slim file they
            must be the weights that the training started from; None takes those of the hub. A shared folder takes none.

    Returns:
        The model.

    Raises:
        ValueError: there is no such run, checkpoint or address, a file is damaged, or the weights do not fit.
    """
    from proxymetric.data.views import EvalView
    from proxymetric.encoders import load_weights
    from proxymetric.system.checkpoint import Checkpoint
    from proxymetric.system.device import pick_device

    target_device = pick_device(str(device or "auto"))
    if is_address(run):
        return _load_shared(fetch(str(run)), str(run), which, weights, target_device)
    run = Path(run)
    if not is_run(run):
        if run.is_dir():
            return _load_shared(run, str(run), which, weights, target_device)
        from proxymetric.models.slim import load_slim

        if which != "best":
            raise ValueError(f"which: got {which!r}, but {run} holds a single model; expected 'best'")
        return load_slim(run, weights, target_device)
    description = read_run(run)
    one_of("which", which, FILES)
    if is_refitted(run, which):
        run, which = run / "refit", "best"
        description = read_run(run)
    elif which == "best":
        _check_refit(run)
    checkpoint, description_file = model_file(run, which), run / "run.json"
    encoder = build_encoder(description, description_file)
    view = checked_arguments(description, description_file, "view", EvalView)
    what = f"the encoder of {run} ({description['encoder']['backbone']})"
    Checkpoint.read(checkpoint).load_into(encoder, "encoder.", what=what)
    if weights is not None:
        load_weights(encoder, weights)
    return Model(
        encoder.to(target_device),
        normalise=description["normalise"],
        classes=description["classes"],
        view=view,
        nested=description["recipe"]["loss"].get("nested"),
    )


def load_model(run: str | Path, which: str, device: str | torch.device | None, weights: str | Path | None) -> Model:
    """Load a model; a run has weights of its own.

    Raises:
        ValueError: weights are given for a run, or the model cannot be loaded.
    """
    if weights is not None and Path(run).is_dir() and is_run(run):
        raise ValueError(
            f"--weights: got {weights} with the run {run}, which has its own weights; expected it only with a file of "
            "`export --slim`"
        )
    return load(run, which, device, weights)


def unfinished(run: str | Path) -> list[str]:
    """A sentence about a run that is not finished; an empty list for a finished run, a slim file or a shared model."""
    if not is_run(run) or (Path(run) / "result.json").is_file():
        return []
    return [f"{run} is not finished: this is its best model so far; `proxymetric train --resume` continues it"]


def is_run(place: str | Path) -> bool:
    """Whether a place is meant as the folder of a run: neither a slim file nor a shared folder.

    Example:
        >>> is_run("runs/birds"), is_run("hf://owner/birds")
        (True, False)
    """
    from proxymetric.models.hub import is_hub_folder

    if is_address(place) or Path(place).is_file():
        return False
    return (Path(place) / "run.json").is_file() or not is_hub_folder(place)


def next_to(run: str | Path, verb: str, data: str, suffix: str = "") -> Path:
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
    ending = f"-{verb}-{re.sub(UNSAFE, '-', data).strip('-.') or 'data'}{suffix}"
    if is_address(run):
        return Path(parse(str(run))[0].split("/")[1] + ending)
    place = Path(run)
    place = place.resolve() if place.name in ("", "..") else place
    return place.with_name(f"{place.stem if place.is_file() else place.name}{ending}")


def _load_shared(folder: Path, name: str, which: str, weights: str | Path | None, device: torch.device) -> Model:
    """Load the model of a folder that `export --hub` wrote; `name` is what the user called it."""
    from proxymetric.models.hub import load_hub

    if which != "best":
        raise ValueError(f"which: got {which!r}, but {name} holds a single model; expected 'best'")
    if weights is not None:
        raise ValueError(f"weights: got {weights}, but {name} holds the whole encoder; expected no weights")
    return load_hub(folder, device)


def _check_refit(run: Path) -> None:
    """Refuse a run whose refitted model is missing: the model of the chosen epoch is not the same."""
    result = read_json(run / "result.json") if (run / "result.json").is_file() else None
    if isinstance(result, dict) and result.get("refit"):
        raise ValueError(
            f"run: {run / 'refit' / 'result.json'} is missing, though the run was refitted; expected that file, or "
            "--which chosen for the model before the refit"
        )
