"""Files that only grow, in blocks with checksums."""

from __future__ import annotations

import mmap
import os
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

BLOCK_BYTES = 2**20
"""largest block; one that is found damaged is this small part of its file"""


class Block(NamedTuple):
    """A part of a file that was written at once.

    Attributes:
        file: the name of the file.
        start: its first byte.
        length: its bytes.
        crc: their CRC-32.
    """

    file: str
    start: int
    length: int
    crc: int


def append(file: Path, length: int, parts: Iterable[bytes | memoryview]) -> list[Block]:
    """Write to a file after its first bytes, and wait until the disk has it.

    Args:
        file: the file; it is made if `length` is 0.
        length: the bytes that belong to it; what lies behind them, a killed process has left.
        parts: what is appended.

    Returns:
        The new blocks.

    Raises:
        OSError: the disk is full, for instance; the file has its former length again.
        ValueError: the file is shorter than it should be.
    """
    parts = [part for part in parts if len(part)]
    if length and not parts:
        return []
    if length and file.stat().st_size < length:
        raise ValueError(damage(file, f"has {file.stat().st_size:,} bytes, expected at least {length:,}"))
    blocks: list[Block] = []
    file.touch()
    with open(file, "r+b") as opened:
        try:
            opened.truncate(length)
            opened.seek(length)
            start = length
            for part in parts:
                view = memoryview(part).cast("B")
                for place in range(0, len(view), BLOCK_BYTES):
                    piece = view[place : place + BLOCK_BYTES]
                    opened.write(piece)
                    blocks.append(Block(file.name, start, len(piece), zlib.crc32(piece)))
                    start += len(piece)
            opened.flush()
            os.fsync(opened.fileno())
        except BaseException:
            opened.truncate(length)
            raise
    return blocks


def mapped_bytes(file: Path, length: int) -> mmap.mmap | bytes:
    """Map the first bytes of a file into memory; processes share the pages.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is shorter.
    """
    with open(file, "rb") as opened:
        if (size := os.fstat(opened.fileno()).st_size) < length:
            raise ValueError(damage(file, f"has {size:,} bytes, expected at least {length:,}"))
        # Private to the process: PyTorch wants arrays that could be written to.
        return mmap.mmap(opened.fileno(), length, access=mmap.ACCESS_COPY) if length else b""


def mapped_rows(file: Path, rows: int, width: int, dtype: np.dtype) -> np.ndarray:
    """Map the first rows of a file of numbers into memory, (rows, width)."""
    content = mapped_bytes(file, rows * width * dtype.itemsize)
    return np.frombuffer(content, dtype).reshape(rows, width) if len(content) else np.empty((rows, width), dtype)


def damaged_blocks(folder: Path, blocks: Sequence[Block]) -> list[Block]:
    """Return the blocks whose bytes are not what was written, or are missing."""
    wrong: list[Block] = []
    for name in dict.fromkeys(block.file for block in blocks):
        of_file = [block for block in blocks if block.file == name]
        try:
            with open(folder / name, "rb", buffering=0) as opened:
                for block in of_file:
                    opened.seek(block.start)
                    if zlib.crc32(_read(opened, block.length)) != block.crc:
                        wrong.append(block)
        except OSError:
            wrong += of_file
    return wrong


def check_blocks(folder: Path, blocks: Sequence[Block]) -> None:
    """Refuse damaged blocks.

    Raises:
        ValueError: a block is not what was written.
    """
    if wrong := damaged_blocks(folder, blocks):
        raise ValueError(_differs(folder, wrong[0]))


def joined(folder: Path, blocks: Sequence[Block]) -> list[Block]:
    """Join small blocks that follow each other; their bytes are checked before they are signed again.

    Raises:
        ValueError: a block is not what was written.
    """
    groups: list[list[Block]] = []
    for block in sorted(blocks):
        last = groups[-1] if groups else None
        if (
            last is not None
            and last[0].file == block.file
            and last[-1].start + last[-1].length == block.start
            and block.start + block.length - last[0].start <= BLOCK_BYTES
        ):
            last.append(block)
        else:
            groups.append([block])
    result = []
    for group in groups:
        first, length = group[0], sum(block.length for block in group)
        if len(group) > 1:
            with open(folder / first.file, "rb") as opened:
                opened.seek(first.start)
                content = opened.read(length)
            for block in group:
                place = block.start - first.start
                if zlib.crc32(content[place : place + block.length]) != block.crc:
                    raise ValueError(_differs(folder, block))
            first = first._replace(length=length, crc=zlib.crc32(content))
        result.append(first)
    return result


def facts_of(file: Path) -> list[int]:
    """Return the size and the CRC-32 of a file."""
    crc = size = 0
    with open(file, "rb") as opened:
        while block := opened.read(BLOCK_BYTES):
            crc, size = zlib.crc32(block, crc), size + len(block)
    return [size, crc]


def damage(file: Path, fault: str) -> str:
    """The sentence about a file that is not as it was written."""
    return (
        f"index: got {file}, which {fault}: it was damaged after it was written, or copied while it changed; expected "
        "the file as it was written; `proxymetric index --rebuild` makes it anew"
    )


def _differs(folder: Path, block: Block) -> str:
    return damage(folder / block.file, f"differs from what was written, from byte {block.start:,} on")


def _read(opened: object, length: int) -> bytes:
    """Read so many bytes, or all that there are."""
    parts = []
    while length and (part := opened.read(length)):  # type: ignore[attr-defined]
        parts.append(part)
        length -= len(part)
    return b"".join(parts)
