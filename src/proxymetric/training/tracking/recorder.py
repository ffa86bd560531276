"""From the records of the log to the numbers of a tracker."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from proxymetric.arguments.recipe_keys import flat_keys
from proxymetric.system.files import read_json
from proxymetric.training.tracking.tracker import Tracker, open_tracker

SECTIONS = {"step": "train", "evaluation": "validation"}
"""event of a record -> the first part of the names of its numbers"""


class Recorder:
    """Passes the records of the log to a tracker. If the tracker fails, the training goes on without it.

    Args:
        name: one of `TRACKERS`.
        folder: the folder of the run.
        say: receives the message when the tracker fails.

    Raises:
        ValueError: the name is unknown, or the package is not installed.
    """

    def __init__(self, name: str, folder: Path, say: Callable[[str], None]) -> None:
        self.name = name
        self.folder = folder
        self.say = say
        self.tracker: Tracker | None = open_tracker(name, folder)

    def begin(self, step: int, earlier: Iterable[dict[str, Any]] = ()) -> None:
        """Begin the run, or continue it after `step`.

        Args:
            step: the last step of the checkpoint; 0 for a new run.
            earlier: the records of the log so far, for a tracker that takes them again.

        Raises:
            ValueError: the tracker cannot begin, for example because its server does not answer.
        """
        assert self.tracker is not None
        try:
            self.tracker.begin(step, settings_of(self.folder))
        except Exception as error:
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise ValueError(
                f"train.track: got {self.name!r}, which cannot begin ({reason}); expected a tracker that works, or none"
            ) from error
        if getattr(self.tracker, "takes_earlier_numbers", False):
            for record in earlier:
                self(record)

    def __call__(self, record: dict[str, Any]) -> None:
        """Pass on the numbers of a record."""
        self._try(lambda tracker: tracker.record(record.get("step", 0), numbers_of(record)))

    def end(self) -> None:
        """End the run."""
        self._try(lambda tracker: tracker.end())

    def _try(self, call: Callable[[Tracker], None]) -> None:
        if self.tracker is None:
            return
        try:
            call(self.tracker)
        except Exception as error:  # trackers raise errors of many libraries
            self.tracker = None
            self.say(f"{self.name} failed ({type(error).__name__}: {error}); the training goes on without it")


def numbers_of(record: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a record of the log, with names of two or three parts.

    Example:
        >>> numbers_of({"event": "step", "step": 5, "epoch": 0, "loss": 2.5, "lr": {"head": 0.1}})
        {'train/loss': 2.5, 'train/lr/head': 0.1}
    """
    section = SECTIONS.get(str(record.get("event")), str(record.get("event")))
    numbers = {}
    for name, value in record.items():
        if name in ("event", "step", "epoch") or isinstance(value, str):
            continue
        for key, number in value.items() if isinstance(value, dict) else [("", value)]:
            numbers[f"{section}/{name}{f'/{key}' if key else ''}"] = number
    return numbers


def settings_of(folder: Path) -> dict[str, Any]:
    """Return the recipe of the run in a folder as `table.key` entries; empty if the folder has no `run.json`."""
    if not (folder / "run.json").is_file():
        return {}
    return flat_keys(read_json(folder / "run.json")["recipe"])
