"""What decoding a HEIC or AVIF file would cost, read from its parts: sizes that images declare, tiles, hidden frames.

Such a file is a tree of parts, each with a size and a name of four letters. `meta` lists the images ("items"), their
declared sizes, and which image is put together from which tiles.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import IO, NamedTuple

MAX_PARTS = 20_000
"""parts and entries of lists that are followed in one file"""
MAX_DEPTH = 8
"""how deep images may be put together from others"""
LARGER, MORE_PIXELS = 4, 2**20
"""how much larger than declared the pixels of an AVIF may be: this many times, and so many more"""
SEQUENCE_HEADER, FRAME_HEADER, FRAME = 1, 3, 6
"""kinds of blocks of AV1"""


class Refused(Exception):
    """The file has too many parts, or declares less than it holds; the message says which."""


class _Part(NamedTuple):
    name: bytes
    content: bytes


class _Items(NamedTuple):
    """What `meta` says of the images of a file, by their numbers."""

    primary: int | None
    sizes: dict[int, tuple[int, int]]
    tiles: dict[int, list[int]]
    """image -> the images from which it is put together, repeated ones included"""
    masks: dict[int, list[int]]
    """image that is a mask -> the images that it belongs to"""
    kinds: dict[int, bytes]
    places: dict[int, list[tuple[int, int]]]
    """image -> where its bytes are in the file: (start, length)"""


def decoded_pixels(file: IO[bytes], is_avif: bool) -> int:
    """Return the pixels that are decoded for a file, tiles that are decoded repeatedly included.

    Raises:
        Refused: there are too many parts, or an image holds many more pixels than it declares.
        struct.error, IndexError: the file ends early.
    """
    file.seek(8)
    is_film = file.read(4) == b"avis"
    meta = _meta(file)
    items = _Items(None, {}, {}, {}, {}, {}) if meta is None else _read_items(meta)
    if is_avif:
        if is_film or items.primary is None:
            raise Refused("got a film in AVIF, expected a still image")
        _check_frames(file, items)
    for mask, owners in items.masks.items():
        width, height = items.sizes.get(mask, (0, 0))
        if items.primary in owners and width * height > _pixels(items, items.primary or 0):
            raise Refused(f"got a mask of {width} x {height}, expected at most the size of its image")
    counted: dict[int, int] = {}
    return sum(_work(items, item, counted, 0) for item in set(items.sizes) | set(items.tiles))


def _pixels(items: _Items, item: int) -> int:
    width, height = items.sizes.get(item, (0, 0))
    return width * height


def _work(items: _Items, item: int, counted: dict[int, int], depth: int) -> int:
    """Count the pixels that are decoded for an image: its own, or those of all its tiles."""
    if depth > MAX_DEPTH:
        raise Refused(f"got images that are put together from others more than {MAX_DEPTH} deep, expected fewer")
    if item not in counted:
        tiles = items.tiles.get(item, [])
        pixels = sum(_work(items, tile, counted, depth + 1) for tile in tiles)
        counted[item] = pixels if tiles else _pixels(items, item)
    return counted[item]


def _meta(file: IO[bytes]) -> bytes | None:
    """Return the part `meta` of a file without its head; None if it has none."""
    place = 0
    for _ in range(MAX_PARTS):
        file.seek(place)
        head = file.read(16)
        if len(head) < 8:
            return None
        size, begin = struct.unpack(">L", head[:4])[0], 8
        if size == 1:
            size, begin = struct.unpack(">Q", head[8:])[0], 16
        if head[4:8] == b"meta":
            file.seek(place + begin + 4)
            return file.read(size - begin - 4 if size else -1)
        if size < begin:  # 0: this part goes to the end of the file
            return None
        place += size
    raise Refused(f"got a file of more than {MAX_PARTS:,} parts, expected fewer")


def _parts(content: bytes) -> Iterator[_Part]:
    """Return the parts inside another one."""
    place = count = 0
    while len(head := content[place : place + 16]) >= 8:
        size, begin = struct.unpack(">L", head[:4])[0], 8
        if size == 1:
            size, begin = struct.unpack(">Q", head[8:])[0], 16
        if size < begin:
            return
        count += 1
        _limit(count)
        yield _Part(head[4:8], content[place + begin : place + size])
        place += size


def _limit(count: int) -> None:
    if count > MAX_PARTS:
        raise Refused(f"got a file of more than {MAX_PARTS:,} parts, expected fewer")


class _Numbers:
    """Reads whole numbers one after another, the highest byte first."""

    def __init__(self, content: bytes, place: int = 0) -> None:
        self.content, self.place, self.count = content, place, 0

    def next(self, size: int) -> int:
        """Return the next number of `size` bytes; 0 for a size of 0."""
        self.count += 1
        _limit(self.count // 8)  # an entry of a list has up to eight numbers
        if self.place + size > len(self.content):
            raise IndexError("the file ends early")
        self.place += size
        return int.from_bytes(self.content[self.place - size : self.place], "big")


def _read_items(meta: bytes) -> _Items:
    """Read the images of a file."""
    items = _Items(None, {}, {}, {}, {}, {})
    for part in _parts(meta):
        version = part.content[0] if part.content else 0
        numbers = _Numbers(part.content, 4)
        if part.name == b"pitm":
            items = items._replace(primary=numbers.next(4 if version else 2))
        elif part.name == b"iprp":
            items = items._replace(sizes=_sizes(part.content))
        elif part.name == b"iref":
            _read_references(part.content, items)
        elif part.name == b"iinf":
            for entry in _parts(part.content[8 if version else 6 :]):
                wide = entry.content[0] >= 3
                number = _Numbers(entry.content, 4).next(4 if wide else 2)
                items.kinds[number] = entry.content[10:14] if wide else entry.content[8:12]
        elif part.name == b"iloc":
            items = items._replace(places=_places(numbers, version))
    return items


def _sizes(content: bytes) -> dict[int, tuple[int, int]]:
    """Return width and height of each image, from the list of properties and the list of who has which."""
    properties: list[_Part] = []
    sizes: dict[int, tuple[int, int]] = {}
    parts = list(_parts(content))
    for part in parts:
        if part.name == b"ipco":
            properties += _parts(part.content)
    for part in parts:
        if part.name != b"ipma":
            continue
        version, is_wide = part.content[0], part.content[3] & 1
        numbers = _Numbers(part.content, 4)
        for _ in range(numbers.next(4)):
            item = numbers.next(4 if version else 2)
            for _ in range(numbers.next(1)):
                index = numbers.next(2 if is_wide else 1) & (0x7FFF if is_wide else 0x7F)
                if 0 < index <= len(properties) and properties[index - 1].name == b"ispe":
                    size = struct.unpack_from(">LL", properties[index - 1].content, 4)
                    sizes[item] = max(size, sizes.get(item, (0, 0)), key=lambda each: each[0] * each[1])
    return sizes


def _read_references(content: bytes, items: _Items) -> None:
    """Read which images are put together from which, and which are masks of which."""
    size = 4 if content[0] else 2
    for part in _parts(content[4:]):
        numbers = _Numbers(part.content)
        item, count = numbers.next(size), numbers.next(2)
        others = [numbers.next(size) for _ in range(count)]
        if part.name == b"dimg":
            items.tiles.setdefault(item, []).extend(others)
        elif part.name == b"auxl":
            items.masks.setdefault(item, []).extend(others)


def _places(numbers: _Numbers, version: int) -> dict[int, list[tuple[int, int]]]:
    """Return where the bytes of each image are; those that lie in `meta` itself are left out."""
    sizes = [numbers.next(1) for _ in range(2)]
    offset_size, length_size, base_size = sizes[0] >> 4, sizes[0] & 15, sizes[1] >> 4
    index_size = sizes[1] & 15 if version else 0
    places: dict[int, list[tuple[int, int]]] = {}
    for _ in range(numbers.next(4 if version > 1 else 2)):
        item = numbers.next(4 if version > 1 else 2)
        method = numbers.next(2) & 15 if version else 0
        numbers.next(2)
        base = numbers.next(base_size)
        for _ in range(numbers.next(2)):
            numbers.next(index_size)
            start, length = base + numbers.next(offset_size), numbers.next(length_size)
            if method == 0:
                places.setdefault(item, []).append((start, length))
    return places


# AV1


def _check_frames(file: IO[bytes], items: _Items) -> None:
    """Refuse images of an AVIF that hold many more pixels than they declare."""
    for item, kind in items.kinds.items():
        if kind != b"av01":
            continue
        content = b""
        for start, length in items.places.get(item, []):
            file.seek(start)
            content += file.read(length or -1)
        if not content:
            raise Refused("got an AVIF whose pixels are inside its list of images, expected them behind it")
        width, height = items.sizes.get(item, (0, 0))
        held = held_pixels(content)
        if held > LARGER * width * height + MORE_PIXELS:
            raise Refused(f"got an AVIF that declares {width} x {height} and holds {held:,} pixels, expected as many")


def held_pixels(content: bytes) -> int:
    """Return the pixels of all frames of an AV1 stream."""
    place = pixels = total = count = 0
    while place < len(content):
        count += 1
        _limit(count)
        head, place = content[place], place + 1
        place += head >> 2 & 1
        length = len(content) - place
        if head >> 1 & 1:
            length, place = _leb128(content, place)
        kind = head >> 3 & 15
        if kind == SEQUENCE_HEADER:
            width, height = frame_size(content[place : place + length])
            pixels = max(pixels, width * height)
        total += pixels if kind in (FRAME_HEADER, FRAME) else 0
        place += length
    return max(total, pixels)


def _leb128(content: bytes, place: int) -> tuple[int, int]:
    """Read a number of seven bits a byte; return it and the place behind it."""
    number = 0
    for index in range(8):
        byte = content[place + index]
        number |= (byte & 127) << (7 * index)
        if not byte & 128:
            break
    return number, place + index + 1


class _Bits:
    """Reads bits one after another, the highest first."""

    def __init__(self, content: bytes) -> None:
        self.number, self.left = int.from_bytes(content[:512], "big"), 8 * min(len(content), 512)

    def next(self, count: int) -> int:
        """Return the next `count` bits as a number."""
        self.left -= count
        if self.left < 0:
            raise IndexError("the file ends early")
        return self.number >> self.left & ((1 << count) - 1)


def frame_size(content: bytes) -> tuple[int, int]:
    """Return the largest width and height of a frame that a sequence header of AV1 allows (AV1, section 5.5.1).

    Example:
        >>> frame_size(bytes.fromhex("18157fbda2021a0d08"))
        (64, 48)
    """
    bits = _Bits(content)
    bits.next(4)
    if bits.next(1):  # the short header of a still image
        bits.next(5)
    else:
        _skip_operating_points(bits)
    sizes = bits.next(4) + 1, bits.next(4) + 1
    return bits.next(sizes[0]) + 1, bits.next(sizes[1]) + 1


def _skip_operating_points(bits: _Bits) -> None:
    """Skip the times and the operating points of a sequence header."""
    delay_bits = 0
    if bits.next(1):  # times
        bits.next(64)
        if bits.next(1):
            zeros = 0
            while not bits.next(1):
                zeros += 1
            bits.next(zeros)
        if bits.next(1):  # model of the decoder
            delay_bits = bits.next(5) + 1
            bits.next(42)
    has_display_delay = bits.next(1)
    for _ in range(bits.next(5) + 1):
        bits.next(12)
        if bits.next(5) > 7:
            bits.next(1)
        if delay_bits and bits.next(1):
            bits.next(2 * delay_bits + 1)
        if has_display_delay and bits.next(1):
            bits.next(4)
