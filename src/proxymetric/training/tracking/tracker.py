"""What a tracker does, in three methods, and the list of trackers."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Protocol

from proxymetric.arguments.signatures import one_of

TRACKERS = {
    "tensorboard": "proxymetric.training.tracking.tensorboard.TensorBoard",
    "wandb": "proxymetric.training.tracking.wandb.WeightsAndBiases",
    "mlflow": "proxymetric.training.tracking.mlflow.MLflow",
}
"""value of `train.track` -> the class, which is imported when it is used"""


class Tracker(Protocol):
    """Receives the numbers of a run. A tracker is created with the folder of the run.

    A tracker that loses numbers when its process is killed has a true attribute `takes_earlier_numbers`: when the run
    is continued, it receives the numbers of all earlier steps again, and ignores those that it has.
    """

    def begin(self, step: int, settings: dict[str, Any]) -> None:
        """Begin a run, or continue it after `step`, with the settings of the recipe (`train.lr`, ...)."""

    def record(self, step: int, numbers: dict[str, float]) -> None:
        """Record numbers of a step by name, such as `train/loss` or `validation/R@1`."""

    def end(self) -> None:
        """Write what is not written yet; the run is over or will be continued by another process."""


def open_tracker(name: str, folder: Path) -> Tracker:
    """Create a tracker.

    Args:
        name: one of `TRACKERS`.
        folder: the folder of the run.

    Raises:
        ValueError: the name is unknown, or the package is not installed.

    Example:
        >>> open_tracker("wandv", Path("run"))
        Traceback (most recent call last):
        ValueError: train.track: got 'wandv', expected one of tensorboard, wandb, mlflow; did you mean 'wandb'?
    """
    one_of("train.track", name, TRACKERS)
    module, _, class_name = TRACKERS[name].rpartition(".")
    tracker: Tracker = getattr(importlib.import_module(module), class_name)(folder)
    return tracker


def not_installed(name: str, extra: str) -> ValueError:
    """Return the error for a tracker whose package is missing."""
    return ValueError(f"train.track: got {name!r}, which is not installed; expected pip install 'proxymetric[{extra}]'")
