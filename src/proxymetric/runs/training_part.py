"""One training loop of a run: the first one, or the refit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proxymetric.runs.checkpoint_facts import CheckpointFacts
from proxymetric.system.files import read_json
from proxymetric.training.trainer import Trainer


@dataclass
class Training:
    """One training loop of a run: the first one, or the refit.

    Attributes:
        folder: where its checkpoints lie.
        trainer: the training loop.
        facts: what its checkpoints store besides the state of the training.
        first_step: the step at which this process began.
    """

    folder: Path
    trainer: Trainer
    facts: CheckpointFacts
    first_step: int

    def earlier_result(self) -> dict[str, Any]:
        """The content of `result.json` if an earlier process had finished this training; else an empty dictionary."""
        file = self.folder / "result.json"
        if self.trainer.step > self.first_step or not file.is_file():
            return {}
        try:
            content = read_json(file)
        except ValueError:
            content = None
        if not isinstance(content, dict):
            self.trainer.watcher.say(f"{file} is damaged; it is written again")
            return {}
        return content if content.get("steps") == self.trainer.step else {}
