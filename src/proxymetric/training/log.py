"""The run's log: one JSON object a line, cut back to the checkpoint when a run goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Log:
    """Appends records to a file; `size` belongs into the checkpoint, so that `cut(size)` forgets what came after.

    also: is told each record too.

    >>> import tempfile
    >>> log = Log(Path(tempfile.mkdtemp()) / "log.jsonl")
    >>> log.add(step=1); mark = log.size; log.add(step=2); log.cut(mark); log.add(step=3)
    >>> [record["step"] for record in log.records()]
    [1, 3]
    """

    def __init__(self, file: Path, writes: bool = True, also: Callable[[dict[str, Any]], None] | None = None) -> None:
        self.file, self.writes, self.also = file, writes, also
        self.size = file.stat().st_size if file.is_file() else 0

    def add(self, **record: Any) -> None:
        if not self.writes:
            return
        line = (json.dumps(record, ensure_ascii=False) + "\n").encode()
        with open(self.file, "ab") as out:
            out.write(line)
        self.size += len(line)
        if self.also is not None:
            self.also(record)

    def cut(self, size: int) -> None:
        if self.writes and self.file.is_file():
            # A machine that lost power may have kept less than the checkpoint knows of: never fill up with zeros.
            self.size = min(size, self.file.stat().st_size)
            with open(self.file, "rb+") as out:
                out.truncate(self.size)

    def records(self) -> list[dict[str, Any]]:
        """All whole records: a last line that a killed run left half written is passed over."""
        if not self.file.is_file():
            return []
        *whole, _ = self.file.read_bytes().split(b"\n")
        return [json.loads(line) for line in whole]
