"""What decoding an image would cost, read from the structure of its file: a file that is small and takes minutes or
gigabytes is refused before it is decoded.

A limit on pixels is not enough. A progressive JPEG may go over all its pixels thousands of times, a PNG may hold
thousands of compressed texts, a TIFF may name the same bytes in each of its tags, and each header may be a chain of
millions of empty parts that Pillow follows one by one.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import struct
from collections.abc import Callable, Iterator
from typing import IO, Any, NamedTuple

from proxymetric.data import heif_structure

MAX_SCANS = 100
"""scans of a JPEG; encoders write about ten"""
MAX_DECODED_PIXELS = 1_500_000_000
"""pixels that all scans or strips of an image decode together, those that are decoded repeatedly included"""
MAX_PACKED_CHUNKS = 100
"""chunks of compressed text and colour profiles of a PNG, of which each may unpack to a megabyte"""
MAX_FRAMES = 10_000
"""frames of a WebP, which are listed before the first one is decoded"""
MAX_TAGS = 4096
"""tags of a directory of a TIFF or of EXIF data"""
MAX_NUMBERS = 200_000
"""numbers of a tag, such as places of strips; the largest table of colours has 196,608"""
MAX_RLE_PIXELS = 2_000_000
"""pixels of a BMP in run-length code, which Pillow decodes in Python"""
MAX_READS = 20_000
"""parts of a header, which Pillow reads one by one"""
BYTES_OF_A_READ = 32
"""further reads are allowed while the pixels are decoded: one for so many bytes of the file"""
MAX_RAW_PROFILE_BYTES = 1_000_000
"""a text chunk of a PNG with EXIF data in hexadecimal digits"""
BLOCK_BYTES = 2**20
SHORT_TAG, LONG_TAG, LONG8_TAG = 3, 4, 16
TYPE_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8}
"""type of a tag -> bytes of a value; others are ignored, as Pillow does"""
TEXT_TYPES = (1, 2, 7)
"""types whose values are bytes, not numbers that become objects one by one"""
WIDTH, HEIGHT, COMPRESSION, STRIPS, SAMPLES, STRIP_ROWS, STRIP_SIZES, PLANES = 256, 257, 259, 273, 277, 278, 279, 284
TILE_WIDTH, TILE_HEIGHT, TILES, TILE_SIZES = 322, 323, 324, 325
INNER_DIRECTORIES = (34665, 34853, 40965)
"""tags with the place of a further directory: EXIF, GPS and interoperability"""
OLD_JPEG, JPEG = 6, 7
"""kinds of compression of a TIFF whose strips are JPEGs"""
SOS, EOI = 0xDA, 0xD9
FRAMES_OF_JPEG = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
PROGRESSIVE = {0xC2, 0xC6, 0xCA, 0xCE}
WITH_LENGTH = {*range(0xC0, 0xC8), *range(0xC9, 0xD0), *range(0xDA, 0xF0), 0xFE}
"""markers of a JPEG that Pillow reads with their content"""
MARKER_IN_SCANS = re.compile(rb"\xff+[\xc0-\xcf\xd8-\xfe]")
"""a marker after the pixels of a scan; \xff00 and restarts belong to the pixels, and the decoder skips unknown ones"""


class TooMuchWork(Exception):
    """Decoding an image would take too long or too much memory; the message says why.

    Not a `ValueError`: the modules of Pillow catch those and go on.
    """


class BoundedFile:
    """An open file whose reads are counted: more than the allowed number is `TooMuchWork`.

    Args:
        file: the file.
        allowed: number of reads.

    Example:
        >>> file = BoundedFile(io.BytesIO(b"abc"), allowed=1)
        >>> file.read(1)
        b'a'
        >>> file.read(1)
        Traceback (most recent call last):
        proxymetric.data.image_structure.TooMuchWork: got a file of more than 1 tiny parts, expected fewer
    """

    def __init__(self, file: IO[bytes], allowed: int = MAX_READS) -> None:
        self.file, self.reads, self.allowed = file, 0, allowed

    def read(self, size: int = -1) -> bytes:
        """Read, and count it."""
        self.reads += 1
        if self.reads > self.allowed:
            raise TooMuchWork(f"got a file of more than {self.allowed:,} tiny parts, expected fewer")
        return self.file.read(size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def check_structure(kind: str, file: IO[bytes]) -> None:
    """Refuse a file whose decoding would take much longer or more memory than its pixels do.

    A damaged file passes: the decoder says what is wrong.

    Args:
        kind: the format as Pillow calls it, such as "JPEG".
        file: the open file.

    Raises:
        TooMuchWork: a count is above its limit.

    Example:
        >>> scan = bytes.fromhex("ffda0008010100013f00")
        >>> frame = bytes.fromhex("ffc2000b080010001001011100")
        >>> check_structure("JPEG", io.BytesIO(bytes.fromhex("ffd8") + frame + 101 * scan + bytes.fromhex("ffd9")))
        Traceback (most recent call last):
        proxymetric.data.image_structure.TooMuchWork: got a JPEG of 101 scans, expected at most 100
    """
    file.seek(0)
    try:
        CHECKS[kind](file)
    except (struct.error, IndexError, OverflowError):  # the file ends early
        return


def reads_of_pixels(kind: str, file: IO[bytes]) -> int:
    """How often the decoder of a format may read a file: in proportion to its bytes."""
    return _size(file) // (1 if kind == "BMP" and _is_run_length_coded(file) else BYTES_OF_A_READ)


def _size(file: IO[bytes]) -> int:
    here = file.tell()
    end = file.seek(0, os.SEEK_END)
    file.seek(here)
    return end


def _u16(content: bytes, place: int) -> int:
    return int.from_bytes(content[place : place + 2], "big")


def _u32(content: bytes, place: int) -> int:
    """A number of 32 bits of a BMP, WebP or GIF, whose lowest byte comes first."""
    return int.from_bytes(content[place : place + 4], "little")


def _count(name: str, number: int, most: int) -> None:
    if number > most:
        raise TooMuchWork(f"got {name.format(f'{number:,}')}, expected at most {most:,}")


def _check_pixels(what: str, pixels: int) -> None:
    if pixels > MAX_DECODED_PIXELS:
        raise TooMuchWork(f"got {what} that decode {pixels:,} pixels together, expected at most {MAX_DECODED_PIXELS:,}")


# JPEG


def _check_jpeg(file: IO[bytes]) -> None:
    """Follow the header as Pillow does, then count the scans."""
    bounded = BoundedFile(file)
    pixels, layers, several_passes, exif = 0, 0, False, b""
    bounded.read(2)
    while byte := bounded.read(1):
        if byte != b"\xff":
            continue
        while (code := bounded.read(1)) == b"\xff":
            pass
        if not code or 0 < code[0] < 0xC0:
            return
        if code[0] not in WITH_LENGTH:
            continue
        part = bounded.read(max(0, _u16(bounded.read(2), 0) - 2))
        if code[0] in FRAMES_OF_JPEG or code[0] == 0xDE:
            pixels, layers = _u16(part, 1) * _u16(part, 3), part[5]
            several_passes = several_passes or code[0] in PROGRESSIVE
        elif code[0] == 0xE1 and part.startswith(b"Exif\0\0"):
            exif += part[6:]
        elif code[0] == 0xE2 and part.startswith(b"MPF\0"):
            check_tags(part[4:])
        elif code[0] == SOS:
            several_passes = several_passes or part[:1] < bytes([layers])
            break
    check_tags(exif)
    if several_passes:  # a JPEG whose first scan has all colours is decoded in a single pass
        scans = _scans(file)
        _count("a JPEG of {} scans", scans, MAX_SCANS)
        _check_pixels(f"{scans} scans", scans * pixels)


def _scans(file: IO[bytes]) -> int:
    """Count the scans of a JPEG; the file stands behind the head of the first one."""
    start, scans, last = file.tell(), 1, b""
    while block := file.read(BLOCK_BYTES):
        scans += (last + block).count(b"\xff\xda")
        last = block[-1:]
    if scans <= MAX_SCANS:
        return scans  # or fewer: the two bytes also occur in what follows the image, such as a film
    file.seek(start)
    content, scans, place = file.read(), 1, 0
    while match := MARKER_IN_SCANS.search(content, place):
        code, place = content[match.end() - 1], match.end()
        if code == EOI:
            break
        scans += code == SOS
        if code in WITH_LENGTH:
            place += max(2, _u16(content, place))
    return scans


# PNG


def _check_png(file: IO[bytes]) -> None:
    """Count the chunks, and those that are unpacked."""
    most, chunks, packed = MAX_READS + _size(file) // (8 * BYTES_OF_A_READ), 0, 0
    file.seek(8)
    while len(head := file.read(8)) == 8 and head[4:] != b"IEND":
        length, chunks = int.from_bytes(head[:4], "big"), chunks + 1
        packed += head[4:] in (b"zTXt", b"iTXt", b"iCCP")
        _count("a PNG of more than {} chunks", chunks, most)
        _count("a PNG of {} chunks of packed text or profiles", packed, MAX_PACKED_CHUNKS)
        here = file.tell()
        if head[4:] == b"eXIf":
            check_tags(file.read(length))
        elif head[4:] in (b"tEXt", b"iTXt") and file.read(21) == b"Raw profile type exif":
            _count("a PNG of {} bytes of EXIF data as text", length, MAX_RAW_PROFILE_BYTES)
        file.seek(here + length + 4)


# GIF, WebP, BMP


def _check_gif(file: IO[bytes]) -> None:
    """Nothing: Pillow reads the first frame only, and `BoundedFile` counts what comes before it."""


def _check_webp(file: IO[bytes]) -> None:
    """Count the frames, which the decoder lists before it decodes the first one."""
    most, chunks, frames = MAX_READS + _size(file) // (8 * BYTES_OF_A_READ), 0, 0
    file.seek(12)
    while len(head := file.read(8)) == 8:
        length, chunks = _u32(head, 4), chunks + 1
        frames += head[:4] == b"ANMF"
        _count("a WebP of {} frames", frames, MAX_FRAMES)
        _count("a WebP of more than {} chunks", chunks, most)
        here = file.tell()
        if head[:4] == b"EXIF":
            check_tags(file.read(length).removeprefix(b"Exif\0\0"))
        file.seek(here + length + length % 2)


def _check_bmp(file: IO[bytes]) -> None:
    """Limit the pixels and the bytes of run-length code."""
    if not _is_run_length_coded(file):
        return
    file.seek(0)
    width, height = struct.unpack_from("<ii", file.read(26), 18)
    pixels = abs(width) * abs(height)
    _count("a BMP of {} pixels in run-length code", pixels, MAX_RLE_PIXELS)
    _count("a BMP of {} bytes in run-length code", _size(file), 4 * pixels + 4 * abs(height) + BLOCK_BYTES)


def _is_run_length_coded(file: IO[bytes]) -> bool:
    """Whether a BMP is one that Pillow decodes in Python, byte by byte."""
    file.seek(0)
    head = file.read(34)
    return len(head) == 34 and _u32(head, 14) >= 40 and _u32(head, 30) in (1, 2)


# TIFF and EXIF


class _Tag(NamedTuple):
    """A tag of a directory."""

    number: int
    kind: int
    values: int
    """how many there are"""
    place: int
    """where its values are in the file"""


def check_tags(content: bytes) -> None:
    """Refuse EXIF data whose tags name more bytes than it has, or very many numbers.

    Args:
        content: the data, as a TIFF.

    Raises:
        TooMuchWork: a count is above its limit.
    """
    if content:
        try:
            _check_directory(io.BytesIO(content), "EXIF data", is_big=False)
        except (struct.error, IndexError, OverflowError):
            return


def _check_tiff(file: IO[bytes]) -> None:
    """Check the tags of the first image, then its strips or tiles."""
    if (head := file.read(4)) == b"MM\0+":  # Pillow reads this as a TIFF with numbers of 32 bits, libtiff as it is
        with contextlib.suppress(struct.error, IndexError, OverflowError):
            _check_directory(file, "a TIFF", is_big=False)
    _check_strips(file, _check_directory(file, "a TIFF", is_big=43 in head[2:]))


def _check_directory(file: IO[bytes], name: str, is_big: bool) -> dict[int, _Tag]:
    """Check the first directory, and those that it names; return its tags by number."""
    file.seek(0)
    head = file.read(16)
    order = "<" if head[:2] == b"II" else ">"
    first = struct.unpack_from(order + ("Q" if is_big else "L"), head, 8 if is_big else 4)[0]
    size, first_tags = _size(file), dict[int, _Tag]()
    todo, named = [(first, True)], 0
    while todo:
        place, is_first = todo.pop()
        tags = list(_tags(file, place, order, is_big, name))
        for tag in tags:
            bytes_named = tag.values * TYPE_BYTES[tag.kind]
            # Values behind the end of the file cannot be read: editors leave such tags.
            named += min(bytes_named, max(0, size - tag.place))
            if tag.kind not in TEXT_TYPES:
                _count(f"{name} with {{}} numbers in the tag {tag.number}", tag.values, MAX_NUMBERS)
            if is_first and tag.number in INNER_DIRECTORIES:
                todo += [(number, False) for number in _numbers(file, tag, order)[:1]]
        if is_first:
            first_tags = {tag.number: tag for tag in reversed(tags)}
    if named > size:
        raise TooMuchWork(f"got {name} whose tags name {named:,} bytes, expected at most its {size:,}")
    return first_tags


def _tags(file: IO[bytes], place: int, order: str, is_big: bool, name: str) -> Iterator[_Tag]:
    """Return the tags of a directory."""
    start, entry, inline = ("Q", "HHQ8s", 8) if is_big else ("H", "HHL4s", 4)
    file.seek(place)
    count = struct.unpack(order + start, file.read(struct.calcsize(order + start)))[0]
    _count(f"{name} with {{}} tags", count, MAX_TAGS)
    step = struct.calcsize(order + entry)
    content, here = file.read(count * step), place + struct.calcsize(order + start)
    for row in range(len(content) // step):
        number, kind, values, data = struct.unpack_from(order + entry, content, row * step)
        if kind not in TYPE_BYTES:
            continue
        is_inline = values * TYPE_BYTES[kind] <= inline
        offset = struct.unpack(order + ("Q" if is_big else "L"), data)[0]
        yield _Tag(number, kind, values, here + (row + 1) * step - inline if is_inline else offset)


def _numbers(file: IO[bytes], tag: _Tag | None, order: str) -> list[int]:
    """Read the whole numbers of a tag; none if there is no such tag, or the file ends before them."""
    letter = {SHORT_TAG: "H", LONG_TAG: "L", 13: "L", LONG8_TAG: "Q"}.get(tag.kind) if tag else None
    if tag is None or letter is None:
        return []
    file.seek(tag.place)
    content = file.read(tag.values * TYPE_BYTES[tag.kind])
    whole = len(content) // TYPE_BYTES[tag.kind]
    return list(struct.unpack_from(f"{order}{whole}{letter}", content))


def _check_strips(file: IO[bytes], tags: dict[int, _Tag]) -> None:
    """Refuse strips or tiles that decode the image repeatedly, or that are read from the same bytes."""
    file.seek(0)
    order = "<" if file.read(2) == b"II" else ">"

    def first(number: int, default: int) -> int:
        return next(iter(_numbers(file, tags.get(number), order)), default)

    width, height = first(WIDTH, 0), first(HEIGHT, 0)
    if TILES in tags and STRIPS not in tags:
        offsets, sizes = (_numbers(file, tags.get(number), order) for number in (TILES, TILE_SIZES))
        part = min(width, first(TILE_WIDTH, width)) * min(height, first(TILE_HEIGHT, height))
    else:
        offsets, sizes = (_numbers(file, tags.get(number), order) for number in (STRIPS, STRIP_SIZES))
        part = width * min(height, first(STRIP_ROWS, height))
    passes = len(offsets)
    _check_pixels(f"{passes} strips or tiles", passes * part)
    if sum(sizes) > 2 * _size(file):
        raise TooMuchWork(f"got strips or tiles of {sum(sizes):,} bytes, expected at most the file's {_size(file):,}")
    if first(COMPRESSION, 1) in (OLD_JPEG, JPEG):
        for offset, length in zip(offsets, sizes):
            file.seek(offset)
            scans = file.read(length).count(b"\xff\xda")
            _count("a strip or tile of {} scans", scans, MAX_SCANS)
            passes += scans
        _check_pixels(f"{passes} scans", passes * part)


def _check_heif(file: IO[bytes], is_avif: bool = False) -> None:
    """Count the pixels of all images and tiles."""
    try:
        pixels = heif_structure.decoded_pixels(file, is_avif)
    except heif_structure.Refused as error:
        raise TooMuchWork(str(error)) from None
    _check_pixels("images and tiles", pixels)


CHECKS: dict[str, Callable[[IO[bytes]], None]] = {
    "JPEG": _check_jpeg, "PNG": _check_png, "GIF": _check_gif, "WEBP": _check_webp, "BMP": _check_bmp,
    "TIFF": _check_tiff, "HEIF": _check_heif, "AVIF": functools.partial(_check_heif, is_avif=True),
}  # fmt: skip
"""format -> what is counted before it is decoded"""
