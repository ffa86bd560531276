"""Load the model of a run, or of a slim file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from proxymetric.files import read_json
from proxymetric.models.model import Model


def read_run(run: str | Path) -> dict[str, Any]:
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
        from proxymetric.models.slim import load_slim

        if which != "best":
            raise ValueError(f"which: got {which!r}, but {run} holds one model; leave it out")
        return load_slim(run, weights, place)
    about = read_run(run)
    files = {"best": "best.safetensors", "last": "last.safetensors", "chosen": "best.safetensors"}
    if which not in files:
        raise ValueError(f"which: got {which!r}, expected 'best', 'last' or 'chosen'")
    if is_refitted(run, which):
        run, which = run / "refit", "last"
        about = read_run(run)
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
