"""Default settings that depend on the backbone; the study `defaults` compares them with others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxymetric.training.options import TrainOptions

WARMUP, MOST_WARMUP_SHARE = 5, 4
"""epochs of warm-up of a pre-trained network, and the part of all epochs that it is at most: a quarter"""
DECAYS, LONGEST_DECAY = 8, 5
"""the rates of a pre-trained network fall so often, after at most so many epochs each"""
SCHEDULE = ("warmup", "decay_every")
"""keys of `[train]` whose default depends on the number of epochs"""


def is_pretrained(encoder: Mapping[str, Any]) -> bool:
    """Whether the backbone of a table `[encoder]` starts from trained weights.

    Example:
        >>> is_pretrained({"backbone": "resnet50"}), is_pretrained({"backbone": "small"})
        (True, False)
    """
    if encoder.get("weights") not in (None, "none"):
        return True
    return encoder.get("pretrained", True) is True and encoder.get("backbone", "resnet50") != "small"


def imply_defaults(tables: Mapping[str, dict[str, Any]]) -> None:
    """Fill in the defaults of a pre-trained network all of whose weights are trained, and those of a cosine.

    Its BatchNorm is fixed, since a batch of few classes has other statistics than all images. New layers get some
    epochs alone, since their first gradients would disturb the trained weights, and the rates fall soon, since such a
    network is near its best after a few epochs.

    Args:
        tables: the tables of a recipe by name; they are changed.

    Example:
        >>> tables = {"encoder": {"backbone": "resnet50"}, "train": {}}
        >>> imply_defaults(tables)
        >>> tables["encoder"]["freeze_bn"], tables["train"]
        ('all', {'warmup': 5, 'decay_every': 5})
        >>> short = {"encoder": {}, "train": {"epochs": 10}}
        >>> imply_defaults(short)
        >>> short["train"]
        {'epochs': 10, 'warmup': 2, 'decay_every': 1}
    """
    encoder, train = tables["encoder"], tables["train"]
    if train.get("decay") == "cosine":
        train.setdefault("decay_every", "none")  # over all epochs
    whole = encoder.get("tuning", "full") == "full" and train.get("frozen") is not True
    if not (whole and is_pretrained(encoder)):
        return
    encoder.setdefault("freeze_bn", "all")
    epochs = train.get("epochs", TrainOptions.epochs)
    if isinstance(epochs, int):
        train.setdefault("warmup", min(WARMUP, epochs // MOST_WARMUP_SHARE))
        if train.get("decay", TrainOptions.decay) == "step":
            train.setdefault("decay_every", max(1, min(LONGEST_DECAY, epochs // DECAYS)))


def earlier_schedule(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The schedule of a run that goes on with another number of epochs, as tables."""
    return {"train": {key: recipe["train"][key] for key in SCHEDULE if recipe["train"].get(key) is not None}}
