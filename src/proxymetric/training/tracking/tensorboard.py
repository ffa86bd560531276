"""Training curves in TensorBoard (needs the extra `track`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from proxymetric.training.tracking.tracker import Tracker, not_installed

EVENTS_SUFFIX = ".proxymetric"
"""the end of the names of the files that proxymetric writes"""


class TensorBoard(Tracker):
    """Writes scalars to the folder `tensorboard` of the run.

    Args:
        folder: the folder of the run.

    Raises:
        ValueError: TensorBoard is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise not_installed("tensorboard", "track") from None
        self._writer_class = SummaryWriter
        self.folder = folder / "tensorboard"
        self._writer: Any = None

    def begin(self, step: int, settings: dict[str, Any]) -> None:
        """Open the files. TensorBoard hides the records after `step`, which a resumed run writes again."""
        self._writer = self._writer_class(
            str(self.folder), purge_step=step + 1 if step else None, filename_suffix=EVENTS_SUFFIX
        )

    def record(self, step: int, numbers: dict[str, float]) -> None:
        """Write the numbers of a step."""
        for name, number in numbers.items():
            self._writer.add_scalar(name, number, step)
        self._writer.flush()

    def end(self) -> None:
        """Close the files."""
        self._writer.close()
