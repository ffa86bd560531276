"""The log of a run, `log.jsonl`: one JSON object per line, cut back to the checkpoint when the run is resumed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Log:
    """Appends records to a file.

    The checkpoint stores `size`, so that `cut(size)` removes all later records when the run is resumed.

    Args:
        file: path of the log.
        writes: whether records are written; False in all processes but the first.
        on_record: called with each record after it is written.

    Attributes:
        size: number of bytes in the log.

    Example:
        >>> import tempfile
        >>> log = Log(Path(tempfile.mkdtemp()) / "log.jsonl")
        >>> log.add(step=1); mark = log.size; log.add(step=2); log.cut(mark); log.add(step=3)
        >>> [record["step"] for record in log.records()]
        [1, 3]
    """

    def __init__(
        self, file: Path, writes: bool = True, on_record: Callable[[dict[str, Any]], None] | None = None
    ) -> None:
        self.file = file
        self.writes = writes
        self.on_record = on_record
        self.size = file.stat().st_size if file.is_file() else 0

    def add(self, **record: Any) -> None:
        """Append a record."""
        if not self.writes:
            return
        line = (json.dumps(record, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")
        with open(self.file, "ab") as out:
            out.write(line)
        self.size += len(line)
        if self.on_record is not None:
            self.on_record(record)

    def cut(self, size: int) -> None:
        """Remove everything after the first `size` bytes."""
        if self.writes and self.file.is_file():
            # After a power failure the file may be shorter than the size in the checkpoint: never extend it with zeros.
            self.size = min(size, self.file.stat().st_size)
            with open(self.file, "rb+") as out:
                out.truncate(self.size)

    def records(self) -> list[dict[str, Any]]:
        """Return all complete records; an incomplete last line of a killed run is ignored."""
        if not self.file.is_file():
            return []
        *lines, _ = self.file.read_bytes().split(b"\n")
        return [json.loads(line) for line in lines]
