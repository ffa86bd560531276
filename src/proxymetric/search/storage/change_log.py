"""The log of an index: what each change since the last merge wrote, one entry a change."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from proxymetric.search.storage.blocks import Block, damage, mapped_bytes

HEAD = struct.Struct("<II")
"""in front of each entry: its bytes, and their CRC-32"""


class Row(NamedTuple):
    """What an index keeps of an item besides its vector."""

    number: int
    """the row of its vector in the file of vectors; a new vector has a new row"""
    id: str
    label: str | None
    metadata: str
    """a JSON object"""
    stamp: str
    """size and time of the file, by which a change is noticed; empty for items that are not files"""
    start: int = 0
    """the first byte of its thumbnail in the file of thumbnails"""
    length: int = 0
    """the bytes of its thumbnail; 0 without one"""
    picture_crc: int = 0
    """the CRC-32 of its thumbnail"""

    def values(self) -> dict[str, Any]:
        """Return the metadata as a table."""
        content: dict[str, Any] = json.loads(self.metadata)
        return content

    def crc(self) -> int:
        """The CRC-32 of all of it."""
        label = "\0" if self.label is None else self.label  # no text has this letter
        texts = (self.id, label, self.metadata, self.stamp)
        numbers = f"\n{self.number} {self.start} {self.length} {self.picture_crc}"
        return zlib.crc32(("\n".join(texts) + numbers).encode())


class Entry(NamedTuple):
    """One change.

    Attributes:
        generation: the number of the state that it made.
        rows: items that are new, or have a new label, metadata or thumbnail.
        dead: row and id of items that were removed, or have a new vector in another row.
        blocks: what was appended to other files.
    """

    generation: int
    rows: list[Row]
    dead: list[tuple[int, str]]
    blocks: list[Block]

    def to_bytes(self) -> bytes:
        """The entry as it is appended to the log."""
        content = json.dumps(self, ensure_ascii=False, separators=(",", ":")).encode()
        return HEAD.pack(len(content), zlib.crc32(content)) + content


def read_log(file: Path, length: int, start: int = 0) -> Iterator[Entry]:
    """Read the entries of a log.

    Args:
        file: the log.
        length: the bytes that belong to it.
        start: the first byte of the first entry that is read.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: an entry is not what was written.
    """
    content = memoryview(mapped_bytes(file, length))
    while start < length:
        size, crc = HEAD.unpack_from(content, start) if start + HEAD.size <= length else (length, 0)
        entry = bytes(content[start + HEAD.size : start + HEAD.size + size])
        if len(entry) < size or zlib.crc32(entry) != crc:
            raise ValueError(damage(file, f"differs from what was written, from byte {start:,} on"))
        generation, rows, dead, blocks = json.loads(entry)
        yield Entry(
            generation,
            [Row(*row) for row in rows],
            [(number, item) for number, item in dead],
            [Block(*b) for b in blocks],
        )
        start += HEAD.size + size
