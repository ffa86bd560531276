"""Training curves in TensorBoard (needs the extra `track`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

EVENTS_SUFFIX = ".proxymetric"
"""the end of the names of the files that proxymetric writes"""


class TensorBoard:
    """Writes the records of the log as scalars.

    Args:
        folder: the folder for TensorBoard's files.

    Raises:
        ValueError: TensorBoard is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ValueError(
                "train.track: got 'tensorboard', which is not installed; expected pip install 'proxymetric[track]'"
            ) from None
        self._writer_class = SummaryWriter
        self.folder = folder
        self._writer: Any = None

    def begin(self, step: int) -> None:
        """Open the files. TensorBoard hides the records after `step`, which a resumed run writes again."""
        self._writer = self._writer_class(
            str(self.folder), purge_step=step + 1 if step else None, filename_suffix=EVENTS_SUFFIX
        )

    def __call__(self, record: dict[str, Any]) -> None:
        """Write the numbers of a record."""
        kind, step = record.get("event"), record.get("step", 0)
        for name, value in record.items():
            if name in ("event", "step", "epoch") or isinstance(value, str):
                continue
            for key, number in value.items() if isinstance(value, dict) else [("", value)]:
                section = {"step": "train", "evaluation": "validation"}.get(str(kind), str(kind))
                self._writer.add_scalar(f"{section}/{name}{f'/{key}' if key else ''}", number, step)
        self._writer.flush()
