"""Slim files: only what was trained, without the frozen backbone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from proxymetric.checkpoint import Checkpoint
from proxymetric.encoders import Encoder, build, load_weights
from proxymetric.files import replacing, save_tensors
from proxymetric.models.model import Model

SLIM = "proxymetric slim 1"


def write_slim(model: Model, recipe: dict[str, Any], out: Path) -> str:
    encoder = model.encoder
    held = bool(recipe["train"]["frozen"])
    state = encoder.state_dict()
    kept = _kept(encoder, held)
    told = recipe["encoder"]
    drawn = not told["weights"] and (not told["pretrained"] or told["backbone"] == "small")
    if drawn and len(kept) < len(state):
        raise ValueError(
            "--slim: the backbone of this run is frozen and was drawn at random, so no file could "
            "give it back; --torch holds it whole, and so does the run. Nothing is written"
        )
    content = {
        "format": SLIM,
        "encoder": encoder.config,
        "normalise": model.normalise,
        "view": vars(model.view),
        "classes": model.classes,
        "held": held,
        "weights": Path(told["weights"]).name if told["weights"] else None,
        "backbone_sha256": _hash(state, kept),
    }
    with replacing(out) as temporary:
        save_tensors(
            temporary, {name: state[name].detach().contiguous() for name in kept}, {"state": json.dumps(content)}
        )
    size = f"{out.stat().st_size / 1e6:.3g} MB"
    if len(kept) == len(state):
        return f"the whole encoder, {size}: tuning='full' trained all of it"
    return f"what was trained of {encoder.config['backbone']}, {size}: pm.load takes it with the backbone's weights"


def load_slim(file: Path, weights: str | Path | None, place: torch.device) -> Model:
    """The model of a slim file; the backbone's frozen weights come from the file `weights` or from the hub."""
    slim = Checkpoint.read(file)
    about = slim.state
    if about.get("format") != SLIM:
        raise ValueError(
            f"run: {file} is not what `export --slim` wrote; such a file, or the folder of a run, is expected"
        )
    config = about["encoder"]
    encoder = build(**config)
    if set(slim.tensors) != set(_kept(encoder, about["held"])):
        raise ValueError(f"{file} is damaged: its tensors are not those that its encoder trained")
    if len(slim.tensors) < len(encoder.state_dict()):
        encoder, source = _with_backbone(encoder, file, about, weights)
        if _hash(encoder.state_dict(), slim.tensors) != about["backbone_sha256"]:
            named = f" ({about['weights']})" if about["weights"] else ""
            raise ValueError(
                f"{source} are not the weights of {config['backbone']!r} that {file} was trained on{named}: their "
                f"sha256 differs; weights=FILE with those is expected"
            )
    elif weights is not None:
        raise ValueError(f"weights: {file} holds the whole encoder, backbone included; leave weights= out")
    whole = Checkpoint({**encoder.state_dict(), **slim.tensors}, {}, file)
    whole.load_into(encoder, "", what=f"the encoder that its header describes ({config['backbone']})")
    return Model(encoder.to(place), normalise=about["normalise"], classes=about["classes"], view=about["view"])


def _with_backbone(
    encoder: Encoder, file: Path, about: dict[str, Any], weights: str | Path | None
) -> tuple[Encoder, str]:
    """The encoder with the weights that its backbone started from, and where they come from in words."""
    if weights is not None:
        load_weights(encoder, weights)
        return encoder, f"weights={str(weights)!r}"
    named = f" (it was {about['weights']})" if about["weights"] else ""
    try:
        return build(**{**about["encoder"], "pretrained": True}), "the hub's weights"
    except ValueError as error:
        raise ValueError(
            f"{file} holds only what was trained of {about['encoder']['backbone']!r}: give the backbone's weights, "
            f"weights=FILE (--weights FILE on the command line){named}; {str(error).split('. ')[0]}"
        ) from error


def _kept(encoder: Encoder, held: bool) -> list[str]:
    """The names of a slim file: what the tuning trains, head, pooling, mean and std; all of it where all is trained.

    Of the frozen backbone position embeddings are kept too: at another image size they are resampled ones, whose last
    bits depend on the version of torch. So are BatchNorm's counters, which files of weights may lack.

    Args:
        encoder: as `build` made it.
        held: the run was trained on cached features: nothing of the backbone changed, whatever the tuning.
    """
    state = encoder.state_dict()
    if encoder.tuning.everything and not held:
        return list(state)
    return [
        name
        for name in state
        if not name.startswith("backbone.")
        or (not held and encoder.part_of(name) is not None)
        or name == "backbone.pos_embed"
        or name.endswith("num_batches_tracked")
    ]


def _hash(state: Mapping[str, Tensor], kept: Any) -> str:
    """sha256 of names, types, shapes and bytes of the tensors that are not `kept`."""
    digest = hashlib.sha256()
    for name in sorted(set(state) - set(kept)):
        value = state[name].detach().cpu().contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
