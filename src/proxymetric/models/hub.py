"""Shared models: a folder that the Hugging Face hub takes, with the whole encoder, its description and a card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from proxymetric.core.normalisation import NORMALISATIONS
from proxymetric.models.hub_client import CARD, WEIGHTS
from proxymetric.models.model import Model
from proxymetric.models.model_card import LIBRARY, card, check_licence
from proxymetric.models.place import CONFIG, HubFolder, hub_config
from proxymetric.models.run_folder import build_encoder, check_version, checked_arguments
from proxymetric.system.checkpoint import Checkpoint
from proxymetric.system.files import check_output, replacing, write_json
from proxymetric.system.tensor_files import write_tensors

FORMAT = "proxymetric hub 1"
"""the name of the format and its version"""
KEYS: dict[str, type] = {"encoder": dict, "normalise": str, "view": dict, "classes": list, "versions": dict}
"""key of `config.json` -> the type of its value"""


def check_folder(folder: Path, overwrite: bool) -> Path:
    """Check, before the work begins, that a folder may be written.

    It is new, or holds only hidden files such as those of git, or what an `export --hub` left that was stopped, or with
    `overwrite` a model that `export --hub` wrote.

    Raises:
        ValueError: the folder holds something else, or cannot be written.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--hub: got {folder}, which is a file; expected a folder to write")
    if folder.is_dir():
        if (folder / "run.json").is_file():
            raise ValueError(f"--hub: got {folder}, which is the folder of a run; expected another folder")
        others = sorted(each.name for each in folder.iterdir() if not each.name.startswith("."))
        config = hub_config(folder)
        if others and config is None:
            raise ValueError(f"--hub: got {folder}, which holds {others[0]}; expected a new or an empty folder")
        if others and not overwrite and not (config or {}).get("unfinished"):
            raise ValueError(f"--hub: got {folder}, which holds a model; expected another folder, or --overwrite")
    for name in (WEIGHTS, CONFIG, CARD):
        check_output("--hub", folder / name, "a file that `proxymetric export` wrote", Path.is_file)
    return folder


def write_hub(
    model: Model, recipe: dict[str, Any], result: dict[str, Any], folder: Path, licence: str | None = None
) -> str:
    """Write a folder for the hub: the weights of the whole encoder, `config.json`, and a card with the results.

    Args:
        model: the model.
        recipe: the recipe of the model's run.
        result: the content of the run's `result.json`; empty if the run is not finished.
        folder: the folder to write; `check_folder` allows it.
        licence: the hub's identifier of the model's licence; None: the card says that it is not stated.

    Returns:
        A description of the folder.

    Raises:
        ValueError: the licence has no form of an identifier.
    """
    from proxymetric.system.version import __version__

    licence = check_licence(licence)
    config = {
        "format": FORMAT,
        "library_name": LIBRARY,
        "versions": {"proxymetric": __version__},
        "encoder": model.encoder.config | {"pretrained": False, "weights": None},
        "normalise": model.normalise,
        "view": vars(model.view),
        "classes": model.classes,
        "nested": model.nested,
        "frozen": bool(recipe["train"]["frozen"]),
    }
    text = card(folder.resolve().name, config, recipe, result, licence)
    # Until the end, the folder says that its files do not belong together yet.
    write_json(folder / CONFIG, {"format": FORMAT, "unfinished": True})
    with replacing(folder / WEIGHTS) as temporary:
        write_tensors(temporary, model.encoder.state_dict(), {"format": "pt"})
    with replacing(folder / CARD) as temporary:
        temporary.write_text(text, encoding="utf-8")
    write_json(folder / CONFIG, config)
    size = f"{(folder / WEIGHTS).stat().st_size / 1e6:.3g} MB"
    return f"the whole encoder, {size}, with {CONFIG} and a card (licence: {licence}); `hf upload` shares the folder"


def load_hub(place: HubFolder, device: torch.device) -> Model:
    """Load the model of a folder that `export --hub` wrote; no code in it is run, and nothing else is read.

    Args:
        place: a local folder, or one in the cache of the hub's client.
        device: the device on which the model computes.

    Raises:
        ValueError: the folder is damaged or incomplete, or a newer version wrote it.
    """
    folder, config = place.path, dict(place.config)
    file, expected = folder / CONFIG, "expected a folder that `export --hub` wrote"
    if config.get("unfinished"):  # its export was stopped before its end
        raise ValueError(f"run: got {folder}, whose export was stopped; expected the same `export --hub` once more")
    check_version(config, file)
    if config["format"] != FORMAT:
        raise ValueError(f"{file}: got the format {config['format']!r}, expected {FORMAT!r}")
    for key, kind in KEYS.items():
        if not isinstance(config.get(key), kind):
            raise ValueError(f"{file}: got {config.get(key)!r:.60} for {key}; {expected}")
    if config["normalise"] not in NORMALISATIONS:
        raise ValueError(f"{file}: got normalise {config['normalise']!r}, expected one of {', '.join(NORMALISATIONS)}")
    if not (folder / WEIGHTS).is_file():
        raise ValueError(f"run: got {folder}, which has no {WEIGHTS}; {expected}")
    # A shared description may not name files of this machine, nor make it fetch others.
    config["encoder"] = config["encoder"] | {"pretrained": False, "weights": None}
    encoder = build_encoder(config, file)
    what = f"the encoder that {CONFIG} describes ({config['encoder'].get('backbone')})"
    Checkpoint.read(folder / WEIGHTS).load_into(encoder, "", what=what)
    return Model(
        encoder.to(device),
        normalise=config["normalise"],
        classes=[str(name) for name in config["classes"]],
        view=checked_view(config, file),
        nested=config.get("nested"),
        pretrained=bool(config.get("frozen")),
    )


def checked_view(config: dict[str, Any], file: Path) -> dict[str, Any]:
    """The arguments of the view, checked."""
    from proxymetric.data.views import EvalView

    return checked_arguments(config, file, "view", EvalView)
