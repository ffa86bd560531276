"""Small image files that would take minutes or gigabytes to decode, one for each way that is known."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable

from PIL import Image


def encoded(kind: str, size: tuple[int, int] = (64, 48), mode: str = "RGB", **options) -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, size, 128 if mode == "L" else "red").save(buffer, kind, **options)
    return buffer.getvalue()


def jpeg_of_scans(extra: int, side: int = 64) -> bytes:
    """A progressive JPEG whose last scan is repeated."""
    content = encoded("jpeg", (side, side), "L", progressive=True)
    scan, end = content.rfind(b"\xff\xda"), content.rfind(b"\xff\xd9")
    return content[:end] + content[scan:end] * extra + content[end:]


def jpeg_of_colour_scans(extra: int) -> bytes:
    """A sequential JPEG with a scan for each colour, of which one is repeated: not progressive."""
    grey = encoded("jpeg", mode="L")
    frame, scan, end = grey.index(b"\xff\xc0"), grey.rfind(b"\xff\xda"), grey.rfind(b"\xff\xd9")
    length = int.from_bytes(grey[frame + 2 : frame + 4], "big")
    size = grey[frame + 5 : frame + 9]
    colours = b"".join(bytes((number, 0x11, 0)) for number in (1, 2, 3))
    head = b"\xff\xc0" + (17).to_bytes(2, "big") + b"\x08" + size + b"\x03" + colours
    scans = [
        grey[scan:end].replace(b"\xff\xda\x00\x08\x01\x01", b"\xff\xda\x00\x08\x01" + bytes((n,))) for n in (1, 2, 3)
    ]
    tables = grey[frame + 2 + length : scan]
    return grey[:frame] + head + tables + b"".join(scans) + scans[2] * extra + grey[end:]


def exif_of_numbers(count: int, tags: int = 1) -> bytes:
    """EXIF data of a turned image, whose other tags all name the same `count` fractions."""
    first = 8 + 2 + 12 * (tags + 1) + 4
    entries = struct.pack("<HHLHH", 0x0112, 3, 1, 6, 0)
    entries += b"".join(struct.pack("<HHLL", 0x011A + tag, 5, count, first) for tag in range(tags))
    return b"II*\0" + struct.pack("<LH", 8, tags + 1) + entries + bytes(4) + b"\x01\0\0\0" * (2 * count)


def png_chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png_with(chunks: bytes, content: bytes | None = None) -> bytes:
    """A PNG with chunks before its pixels."""
    content = encoded("png") if content is None else content
    return content[:33] + chunks + content[33:]


def tiff(tags: dict[int, tuple[int, list[int]]], after: bytes = b"", strip: bytes = bytes(64 * 48)) -> bytes:
    """A grey TIFF of 64 x 48; `tags` are further ones or others, as number -> (type, values)."""
    common = {256: (4, [64]), 257: (4, [48]), 258: (3, [8]), 259: (3, [1]), 262: (3, [1]), 277: (3, [1])}
    every = dict(sorted((common | {273: (4, [8]), 278: (4, [48]), 279: (4, [len(strip)])} | tags).items()))
    start = 8 + len(strip)
    values_at = start + 2 + 12 * len(every) + 4
    entries, values = b"", b""
    for number, (kind, numbers) in every.items():
        letter = {3: "H", 4: "L", 5: "L"}[kind]
        packed = struct.pack(f"<{len(numbers)}{letter}", *numbers)
        place = packed.ljust(4, b"\0") if len(packed) <= 4 else struct.pack("<L", values_at + len(values))
        values += packed if len(packed) > 4 else b""
        entries += struct.pack("<HHL", number, kind, len(numbers) // (2 if kind == 5 else 1)) + place
    return (
        b"II*\0"
        + struct.pack("<L", start)
        + strip
        + struct.pack("<H", len(every))
        + entries
        + bytes(4)
        + values
        + after
    )


def tiff_of_shared_tags(tags: int, size: int) -> bytes:
    """A TIFF whose tags all name the same bytes."""
    content = bytearray(tiff({}, after=bytes(size)))
    plain = tiff({})
    start = struct.unpack_from("<L", content, 4)[0]
    count = struct.unpack_from("<H", content, start)[0]
    own = bytes(content[start + 2 : start + 2 + 12 * count])
    more = b"".join(struct.pack("<HHLL", 400 + tag, 7, size, len(plain)) for tag in range(tags))
    directory = struct.pack("<H", count + tags) + own + more + bytes(4)
    place = len(content)
    struct.pack_into("<L", content, 4, place)
    return bytes(content) + directory


def webp_of_frames(frames: int) -> bytes:
    """An animated WebP whose frames are one pixel."""
    pixel = encoded("webp", (1, 1), lossless=True)[12:]
    frame = bytes(12) + (1).to_bytes(3, "little") + b"\0" + pixel
    frame = b"ANMF" + struct.pack("<L", len(frame)) + frame + b"\0" * (len(frame) % 2)
    body = b"WEBPVP8X" + struct.pack("<L", 10) + bytes((2,)) + bytes(3) + bytes((63, 0, 0, 47, 0, 0))
    body += b"ANIM" + struct.pack("<LLH", 6, 0, 0) + frame * frames
    return b"RIFF" + struct.pack("<L", len(body)) + body


def bmp_of_runs(width: int, height: int, codes: bytes) -> bytes:
    """A BMP in run-length code."""
    head = struct.pack("<LiiHHLLLLLL", 40, width, height, 1, 8, 1, len(codes), 0, 0, 256, 0)
    return b"BM" + struct.pack("<LHHL", 1078 + len(codes), 0, 0, 1078) + head + bytes(range(256)) * 4 + codes


def before_pixels_of_gif(blocks: bytes) -> bytes:
    content = encoded("gif")
    start = 13 + (3 << ((content[10] & 7) + 1) if content[10] & 128 else 0)
    return content[:start] + blocks + content[start:]


def avif_that_declares(width: int, height: int, side: int) -> bytes:
    """An AVIF of `side` x `side` that declares another size."""
    content = bytearray(encoded("avif", (side, side)))
    struct.pack_into(">LL", content, content.index(b"ispe") + 8, width, height)
    return bytes(content)


BROKEN_TEXT = b"a\0\0" + zlib.compress(bytes(900_000))[:-4] + b"\0\0\0\0"
"""a packed text that unpacks to 0.9 MB and then turns out to be damaged"""

BOMBS: dict[str, tuple[Callable[[], bytes], str]] = {
    "JPEG, repeated scans": (lambda: jpeg_of_scans(5000, 2000), "a JPEG of 5,0.. scans, expected at most 100"),
    "JPEG, repeated scans of 40 megapixels": (lambda: jpeg_of_scans(90, 6400), "9. scans that decode"),
    "JPEG, scans of single colours": (lambda: jpeg_of_colour_scans(5000), "a JPEG of 5,003 scans"),
    "JPEG, empty segments": (lambda: b"\xff\xd8" + b"\xff\xfe\0\x02" * 10**6 + encoded("jpeg")[2:], "tiny parts"),
    "JPEG, fill bytes": (lambda: b"\xff\xd8" + b"\xff" * 4 * 10**6 + encoded("jpeg")[2:], "tiny parts"),
    "JPEG, bytes between segments": (lambda: b"\xff\xd8\xff\xe0\0\x02" + bytes(10**6) + encoded("jpeg")[2:], "tiny"),
    "JPEG, EXIF tags of the same bytes": (
        lambda: encoded("jpeg", exif=b"Exif\0\0" + exif_of_numbers(4000, tags=2000)),
        "EXIF data whose tags name",
    ),
    "PNG, colour profiles": (
        lambda: png_with(png_chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(10**6))) * 5000),
        "a PNG of 101 chunks of packed text or profiles",
    ),
    "PNG, packed texts": (lambda: png_with(png_chunk(b"zTXt", BROKEN_TEXT) * 5000), "101 chunks of packed text"),
    "PNG, packed texts after the pixels": (
        lambda: encoded("png")[:-12] + png_chunk(b"zTXt", BROKEN_TEXT) * 5000 + encoded("png")[-12:],
        "101 chunks of packed text",
    ),
    "PNG, international texts": (
        lambda: png_with(png_chunk(b"iTXt", b"a\0\1\0\0\0" + BROKEN_TEXT[3:]) * 5000),
        "101 chunks of packed text",
    ),
    "PNG, empty chunks": (lambda: png_with(png_chunk(b"tEXt", b"") * 400_000), "a PNG of more than"),
    "PNG, EXIF fractions": (
        lambda: png_with(png_chunk(b"eXIf", exif_of_numbers(500_000))),
        "500,000 numbers in the tag 282, expected at most 200,000",
    ),
    "PNG, EXIF fractions as text": (
        lambda: png_with(
            png_chunk(b"tEXt", b"Raw profile type exif\0\nexif\n1\n" + exif_of_numbers(500_000).hex().encode())
        ),
        "bytes of EXIF data as text",
    ),
    "GIF, empty blocks": (lambda: before_pixels_of_gif(b"!\xfe\x01a\0" * 500_000), "tiny parts"),
    "GIF, a long comment": (lambda: before_pixels_of_gif(b"!\xfe" + b"\x01a" * 10**6 + b"\0"), "tiny parts"),
    "GIF, bytes between blocks": (lambda: before_pixels_of_gif(bytes(4 * 10**6)), "tiny parts"),
    "WebP, frames": (lambda: webp_of_frames(60_000), "a WebP of 10,001 frames, expected at most 10,000"),
    "WebP, EXIF fractions": (
        lambda: encoded("webp", exif=b"Exif\0\0" + exif_of_numbers(500_000)),
        "500,000 numbers in the tag 282",
    ),
    "TIFF, tags of the same bytes": (lambda: tiff_of_shared_tags(4000, 10**6), "a TIFF whose tags name"),
    "TIFF, many tags": (lambda: tiff_of_shared_tags(60_000, 5), "tags, expected at most 4,096"),
    "TIFF, fractions": (lambda: tiff({282: (5, [1, 1] * 500_000)}), "500,000 numbers in the tag 282"),
    "TIFF, strips": (
        lambda: tiff({273: (4, [8] * 10**6), 279: (4, [1] * 10**6), 278: (4, [1])}),
        "1,000,000 numbers in the tag 273",
    ),
    "TIFF, strips that are the whole image": (
        lambda: tiff(
            {256: (4, [2000]), 257: (4, [2000]), 273: (4, [8] * 9999), 279: (4, [1] * 9999), 278: (4, [1999])},
            strip=bytes(4_000_000),
        ),
        "9999 strips or tiles that decode",
    ),
    "TIFF, strips of the same bytes": (
        lambda: tiff(
            {257: (4, [10**5]), 259: (3, [8]), 273: (4, [8] * 10**5), 279: (4, [10**6] * 10**5), 278: (4, [1])},
            strip=zlib.compress(bytes(64)) + bytes(10**6),
        ),
        "strips or tiles of 100,000,000,000 bytes",
    ),
    "TIFF, a JPEG of repeated scans": (
        lambda: tiff({259: (3, [7]), 279: (4, [len(jpeg_of_scans(5000))])}, strip=jpeg_of_scans(5000)),
        "a strip or tile of 5,0.. scans",
    ),
    "AVIF, more pixels than declared": (
        lambda: avif_that_declares(16, 16, 2000),
        "declares 16 x 16 and holds 4,000,000",
    ),
    "AVIF, a film": (
        lambda: encoded("avif", save_all=True, append_images=[Image.new("RGB", (64, 48))]),
        "a film in AVIF, expected a still image",
    ),
    "BMP, a run-length code of nothing": (lambda: bmp_of_runs(7000, 7000, b"\1\7\0\0" * 7000), "49,000,000 pixels"),
    "BMP, moves by nothing": (lambda: bmp_of_runs(16, 16, b"\0\2\0\0" * 10**6), "4,001,078 bytes in run-length code"),
}  # fmt: skip
"""name -> (the file, a part of the reason why it is refused)"""
