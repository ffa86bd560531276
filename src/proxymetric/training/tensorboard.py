"""Curves in TensorBoard, for those who want them there (the extra `track`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class TensorBoard:
    """Writes the records of the log as scalars to `folder`; `begin(step)` forgets what a resumed run will do again."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ValueError("train.track: TensorBoard is not installed: pip install 'proxymetric[track]'") from None
        self._make = SummaryWriter
        self.folder = folder
        self._writer: Any = None

    def begin(self, step: int) -> None:
        # Records from this step on that an interrupted run left behind are purged by TensorBoard itself.
        self._writer = self._make(str(self.folder), purge_step=step + 1 if step else None)

    def __call__(self, record: dict[str, Any]) -> None:
        kind, step = record.get("event"), record.get("step", 0)
        for name, value in record.items():
            if name in ("event", "step", "epoch") or isinstance(value, str):
                continue
            for key, number in value.items() if isinstance(value, dict) else [("", value)]:
                place = {"step": "train", "evaluation": "validation"}.get(str(kind), str(kind))
                self._writer.add_scalar(f"{place}/{name}{f'/{key}' if key else ''}", number, step)
        self._writer.flush()
