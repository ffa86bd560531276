"""Load the model of a run, or of a slim file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from proxymetric.files import read_json
from proxymetric.models.model import Model
from proxymetric.signatures import one_of

MAX_RUNS_NAMED = 5


def read_run(run: str | Path) -> dict[str, Any]:
    """Read `run.json`, the description of a run.

    Raises:
        ValueError: the folder holds no run, or the file lacks keys.
    """
    run = Path(run)
    if not (run / "run.json").is_file():
        files = [*run.glob("*/run.json"), *run.parent.glob("*/run.json")]
        nearby = sorted(str(file.parent) for file in files)[:MAX_RUNS_NAMED]
        hint = f"; there are runs at {', '.join(nearby)}" if nearby else ""
        raise ValueError(f"run: {run} holds no run (no run.json), expected the folder of a run{hint}")
    about = read_json(run / "run.json")
    missing = {"recipe", "encoder", "normalise", "view", "classes", "data"} - set(about)
    if missing:
        raise ValueError(f"{run / 'run.json'}: got no {', '.join(sorted(missing))}, expected a file that `train` wrote")
    return about


def is_refitted(run: str | Path, which: str = "best") -> bool:
    """Whether `which` names a model that was refitted on all classes."""
    return which != "chosen" and (Path(run) / "refit" / "result.json").is_file()


def load(
    run: str | Path,
    which: str = "best",
    device: str | torch.device | None = None,
    weights: str | Path | None = None,
) -> Model:
    """Load the model of a run or of a slim file.

    Args:
        run: folder of a run, or a file that `export --slim` wrote, which holds only the trained parameters.
        which: "best" (the chosen epoch; the refitted model if there is one), "last", or "chosen" (the chosen epoch,
            also if there is a refitted model).
        device: where the model computes; None or "auto" means a GPU if there is one.
        weights: a safetensors file with weights for the backbone. For a run they replace its own. For a slim file they
            must be the weights that the training started from; None takes those of the hub.

    Returns:
        The model.

    Raises:
        ValueError: there is no such run or checkpoint, or the weights do not fit.
    """
    from proxymetric.checkpoint import Checkpoint
    from proxymetric.device import pick_device
    from proxymetric.encoders import build, load_weights

    target_device = pick_device(str(device or "auto"))
    run = Path(run)
    if run.is_file():
        from proxymetric.models.slim import load_slim

        if which != "best":
            raise ValueError(f"which: got {which!r}, but {run} holds a single model; expected 'best'")
        return load_slim(run, weights, target_device)
    about = read_run(run)
    files = {"best": "best.safetensors", "last": "last.safetensors", "chosen": "best.safetensors"}
    one_of("which", which, files)
    if is_refitted(run, which):
        run, which = run / "refit", "last"
        about = read_run(run)
    file = run / files[which]
    if not file.is_file() and which == "best":
        file = run / files["last"]
    if not file.is_file():
        raise ValueError(f"run: {run} has no checkpoint (no {files[which]}), expected a run that was trained")
    try:
        encoder = build(**about["encoder"])
    except TypeError as error:
        raise ValueError(f"{run / 'run.json'} cannot be used, expected a file that `train` wrote: {error}") from None
    Checkpoint.read(file).load_into(encoder, "encoder.", what=f"the encoder of {run} ({about['encoder']['backbone']})")
    if weights is not None:
        load_weights(encoder, weights)
    return Model(encoder.to(target_device), normalise=about["normalise"], classes=about["classes"], view=about["view"])
