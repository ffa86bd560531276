"""The arguments of `train` that stand for keys of the recipe, and what they are if nobody sets them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from proxymetric.arguments.written import source
from proxymetric.runs import recipe as recipes
from proxymetric.runs.protocol import FOLDS
from proxymetric.training.options import TrainOptions

FLAGS = {
    "data": "data.path",
    "method": "method",
    "backbone": "encoder.backbone",
    "tuning": "encoder.tuning",
    "weights": "encoder.weights",
    "epochs": "train.epochs",
    "batch": "train.batch",
    "size": "view.size",
    "transform": "view.transform",
    "dim": "encoder.dim",
    "nested": "loss.nested",
    "lr": "train.lr",
    "seed": "seed",
    "cache": "data.cache",
    "device": "train.device",
    "frozen": "train.frozen",
    "refit": "train.refit",
    "start": "train.start",
    "whiten": "train.whiten",
    "protocol": "protocol",
}
"""arguments of `train` -> the keys of the recipe that they set"""


def defaults() -> dict[str, Any]:
    """What each argument is if neither it nor a recipe is given, without an import of torch: for a help page.

    Example:
        >>> defaults()["epochs"], defaults()["size"], defaults()["lr"]
        (40, 224, 0.0001)
    """
    tables = {
        "data": asdict(recipes.DataOptions()),
        "encoder": source("encoders/encoder.py").defaults("build"),
        "loss": {"nested": None},
        "train": asdict(TrainOptions()) | {"lr": TrainOptions().base_rates[0]},
        "view": {"size": recipes.SIZE, "transform": None},
    }
    keys = {f"{table}.{key}": value for table, values in tables.items() for key, value in values.items()}
    return {name: (recipes.TOP_DEFAULTS | keys)[key] for name, key in FLAGS.items()} | {"folds": FOLDS, "data": None}
