"""Slim files: the trained parameters of a model, without the frozen backbone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from proxymetric.encoders import Encoder, build, load_weights
from proxymetric.models.model import Model
from proxymetric.models.run_folder import build_encoder
from proxymetric.system.checkpoint import Checkpoint
from proxymetric.system.files import replacing
from proxymetric.system.tensor_files import read_header, write_tensors

SLIM = "proxymetric slim 1"
"""the name of the file format and its version"""
OTHER_EXPORTS = (".onnx", ".pt2", ".pt", ".pth")
"""files of networks that are not slim files"""


def write_slim(model: Model, recipe: dict[str, Any], out: Path) -> str:
    """Write a slim file.

    Args:
        model: the model.
        recipe: the recipe of the model's run.
        out: the file to write.

    Returns:
        A description of the file.

    Raises:
        ValueError: the frozen backbone has random weights, which no weights file can restore.
    """
    encoder = model.encoder
    frozen = bool(recipe["train"]["frozen"])
    state = encoder.state_dict()
    stored = _stored_names(encoder, frozen)
    options = recipe["encoder"]
    has_random_backbone = not options["weights"] and (not options["pretrained"] or options["backbone"] == "small")
    if has_random_backbone and len(stored) < len(state):
        raise ValueError(
            "--slim: got a run whose frozen backbone has random weights, which no weights file can restore; "
            "expected --torch, which writes the whole encoder. Nothing is written"
        )
    content = {
        "format": SLIM,
        "encoder": encoder.config,
        "normalise": model.normalise,
        "view": vars(model.view),
        "classes": model.classes,
        "nested": model.nested,
        "held": frozen,
        "weights": Path(options["weights"]).name if options["weights"] else None,
        "backbone_sha256": _hash(state, stored),
    }
    with replacing(out) as temporary:
        write_tensors(temporary, {name: state[name] for name in stored}, {"state": json.dumps(content)})
    size = f"{out.stat().st_size / 1e6:.3g} MB"
    if len(stored) == len(state):
        return f"the whole encoder, {size}, because tuning='full' trained all of it"
    return (
        f"the trained parameters of {encoder.config['backbone']}, {size}; pm.load needs the backbone's weights as well"
    )


def is_slim(file: Path) -> bool:
    """Whether `write_slim` wrote a file."""
    try:
        content = json.loads(read_header(file).get("state", "null"))
    except ValueError:
        return False
    return isinstance(content, dict) and content.get("format") == SLIM


def load_slim(file: Path, weights: str | Path | None, device: torch.device) -> Model:
    """Load the model of a slim file.

    Args:
        file: a file that `write_slim` wrote.
        weights: the file with the frozen backbone's weights; None: the weights from the hub.
        device: the device on which the model computes.

    Raises:
        ValueError: the file is not a slim file, or the weights are not those that the training started from.
    """
    wrong_file = f"run: got {file}, expected the folder of a run, or a file that `export --slim` wrote"
    if file.suffix in OTHER_EXPORTS:
        raise ValueError(wrong_file)
    slim = Checkpoint.read(file)
    header = slim.state
    if header.get("format") != SLIM:
        raise ValueError(wrong_file)
    config = header["encoder"]
    encoder = build_encoder(header, file)
    if set(slim.tensors) != set(_stored_names(encoder, header["held"])):
        raise ValueError(
            f"run: got {file}, whose tensors are not the trained parameters of its encoder; expected an undamaged file "
            "that `export --slim` wrote"
        )
    if len(slim.tensors) < len(encoder.state_dict()):
        encoder, source = _with_backbone(encoder, file, header, weights)
        if _hash(encoder.state_dict(), slim.tensors) != header["backbone_sha256"]:
            name = f" ({header['weights']})" if header["weights"] else ""
            raise ValueError(
                f"weights: got {source}, which are not the weights of {config['backbone']!r} from which the training "
                f"of {file} started{name}: their sha256 differs; expected weights=FILE with those weights"
            )
    elif weights is not None:
        raise ValueError(f"weights: got {weights}, but {file} holds the whole encoder; expected no weights")
    checkpoint = Checkpoint({**encoder.state_dict(), **slim.tensors}, {}, file)
    checkpoint.load_into(encoder, "", what=f"the encoder that its header describes ({config['backbone']})")
    return Model(
        encoder.to(device),
        normalise=header["normalise"],
        classes=header["classes"],
        view=header["view"],
        nested=header.get("nested"),
        pretrained=bool(header["held"]),
    )


def _with_backbone(
    encoder: Encoder, file: Path, header: dict[str, Any], weights: str | Path | None
) -> tuple[Encoder, str]:
    """Return the encoder with the weights of its frozen backbone, and a description of where they come from."""
    if weights is not None:
        load_weights(encoder, weights)
        return encoder, f"the weights in {str(weights)!r}"
    name = f", where FILE was {header['weights']} in training" if header["weights"] else ""
    try:
        return build(**{**header["encoder"], "pretrained": True}), "the hub's weights"
    except ValueError as error:
        raise ValueError(
            f"weights: got none, but {file} holds only the trained parameters of {header['encoder']['backbone']!r}; "
            f"expected weights=FILE (--weights FILE on the command line){name}; "
            f"{str(error).split('; expected')[0]}"
        ) from error


def _stored_names(encoder: Encoder, frozen: bool) -> list[str]:
    """Return the names of the tensors in a slim file: trained parameters, head, pooling, mean and std.

    If the whole encoder was trained, these are the names of all its tensors. Two parts of a frozen backbone are stored
    too: position embeddings, because their last bits after resampling to another image size depend on the version of
    torch, and BatchNorm's counters, because weights files may lack them.

    Args:
        encoder: an encoder that `build` made.
        frozen: whether the run was trained on cached features, so that no parameter of the backbone changed.
    """
    state = encoder.state_dict()
    if encoder.tuning.everything and not frozen:
        return list(state)
    return [
        name
        for name in state
        if not name.startswith("backbone.")
        or (not frozen and encoder.part_of(name) is not None)
        or name == "backbone.pos_embed"
        or name.endswith("num_batches_tracked")
    ]


def _hash(state: Mapping[str, Tensor], stored: Any) -> str:
    """Return the sha256 of the names, types, shapes and bytes of all tensors except those named in `stored`."""
    digest = hashlib.sha256()
    for name in sorted(set(state) - set(stored)):
        value = state[name].detach().cpu().contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
