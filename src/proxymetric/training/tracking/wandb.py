"""Training curves in Weights & Biases (needs the extra `wandb`)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from proxymetric.training.tracking.run_id import read_id, write_id
from proxymetric.training.tracking.tracker import Tracker, not_installed

PROJECT = "proxymetric"
"""the project of the runs; the environment variable WANDB_PROJECT overrides it"""


class WeightsAndBiases(Tracker):
    """Logs to Weights & Biases with its own settings: `WANDB_MODE=offline` writes to the folder `wandb` of the run.

    A resumed run continues its curves. A killed process loses what an offline folder has not written yet, and each
    process has an offline folder of its own, so the new folder receives the earlier steps too. A server has them
    already, and they are not sent again.

    Args:
        folder: the folder of the run.

    Raises:
        ValueError: wandb is not installed.
    """

    takes_earlier_numbers = True

    def __init__(self, folder: Path) -> None:
        try:
            import wandb
        except ImportError:
            raise not_installed("wandb", "wandb") from None
        self._wandb = wandb
        self.folder = folder
        self._run: Any = None
        self._last_step = -1

    def begin(self, step: int, settings: dict[str, Any]) -> None:
        """Start the run, or continue the run that this folder had."""
        run_id = read_id(self.folder, "wandb") if step else None
        self._run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=self.folder.resolve().name,
            dir=str(self.folder),
            config=settings,
            id=run_id,
            resume="allow" if run_id else None,
        )
        write_id(self.folder, "wandb", self._run.id)
        self._last_step = int(self._run.step) - 1 if run_id else -1

    def record(self, step: int, numbers: dict[str, float]) -> None:
        """Log the numbers of a step."""
        if step >= self._last_step:  # Weights & Biases refuses earlier steps, which a resumed run repeats
            self._run.log(numbers, step=step)

    def end(self) -> None:
        """Finish the run."""
        self._run.finish()
