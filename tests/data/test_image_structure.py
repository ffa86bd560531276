"""Small files that would take minutes to decode are refused before they are decoded; ordinary files are not."""

from __future__ import annotations

import io
import re
import struct

import numpy as np
import pytest
from PIL import Image

from bombs import BOMBS, before_pixels_of_gif, bmp_of_runs, encoded, jpeg_of_scans, png_chunk, png_with, tiff
from proxymetric.data import BadImage, decoding, image_bytes, read_image


@pytest.fixture
def undecoded(monkeypatch):
    """No pixel may be decoded."""

    def reached(image, title):
        raise AssertionError(f"{title} was decoded")

    for module in (decoding, image_bytes):
        monkeypatch.setattr(module, "load_upright", reached)


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_before_it_is_decoded(name, tmp_path, undecoded):
    make, reason = BOMBS[name]
    file = tmp_path / "bomb.jpg"
    file.write_bytes(make())
    with pytest.raises(BadImage) as caught:
        read_image(file)
    assert caught.value.path == str(file)
    assert re.search(reason, caught.value.reason)
    with pytest.raises(BadImage) as caught:
        image_bytes.decode_image(file.read_bytes(), 100_000_000, "upload")
    assert caught.value.path == "upload"
    assert re.search(reason, caught.value.reason)


def noise(kind: str, **options) -> bytes:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (60, 90, 3), dtype=np.uint8)
    frames = [Image.fromarray(np.roll(pixels, k)) for k in range(options.pop("frames", 1))]
    frames[0].save(buffer, kind, append_images=frames[1:], save_all=len(frames) > 1, **options)
    return buffer.getvalue()


GOOD = {
    "progressive": lambda: noise("jpeg", progressive=True),
    "many scans": lambda: jpeg_of_scans(90),
    # a film after the photo holds the two bytes of a scan by chance
    "film after the photo": lambda: noise("jpeg", progressive=True) + b"\xff\xda\0\x08" * 500,
    "camera": lambda: encoded("jpeg", exif=b"Exif\0\0" + tiff({0x0112: (3, [6])})),
    "two photos": lambda: noise("mpo", frames=2),
    "texts": lambda: png_with(png_chunk(b"iTXt", b"a\0\0\0\0\0b") * 50),
    "small chunks": lambda: png_with(png_chunk(b"tEXt", b"a\0b") * 5000),
    "animated gif": lambda: noise("gif", frames=5),
    "comment": lambda: before_pixels_of_gif(b"!\xfe" + b"\xff" + b"a" * 255 + b"\0"),
    "animated webp": lambda: noise("webp", frames=5, quality=20),
    "strips": lambda: noise("tiff", tiffinfo={278: 1}),
    "packed strips": lambda: noise("tiff", compression="tiff_lzw", tiffinfo={278: 2}),
    "jpeg in tiff": lambda: noise("tiff", compression="jpeg"),
    "run-length code": lambda: bmp_of_runs(3, 2, b"\3\7\0\0\3\x09\0\1"),
    "avif": lambda: noise("avif", quality=60),
    "moved pages": lambda: noise("tiff", frames=3, compression="tiff_adobe_deflate"),
}


@pytest.mark.parametrize("name", GOOD)
def test_an_ordinary_file_is_decoded(name, tmp_path):
    content = GOOD[name]()
    (tmp_path / "a").write_bytes(content)
    with Image.open(io.BytesIO(content)) as image:
        expected = decoding.as_rgb(decoding.ImageOps.exif_transpose(image))
    assert np.array_equal(np.asarray(read_image(tmp_path / "a")), np.asarray(expected))


def test_a_damaged_file_is_left_to_the_decoder(tmp_path):
    """Counting never fails on a file that ends early or is changed: the decoder says what is wrong."""
    random = np.random.default_rng(1)
    for make in GOOD.values():
        content = np.frombuffer(make(), np.uint8)
        for _ in range(8):
            damaged = content[: random.integers(1, len(content))].copy()
            damaged[random.integers(0, len(damaged), 3)] = random.integers(0, 256, 3)
            (tmp_path / "a").write_bytes(damaged.tobytes())
            try:
                read_image(tmp_path / "a")
            except BadImage as error:
                assert "the image is damaged: unpack" not in error.reason


def test_a_png_of_tiny_chunks_of_pixels_is_refused_while_it_is_decoded(tmp_path):
    content = encoded("png", (2000, 2000))
    start = content.index(b"IDAT") - 4
    length = struct.unpack_from(">I", content, start)[0]
    packed = content[start + 8 : start + 8 + length].ljust(20_000, b"\0")
    chunks = b"".join(png_chunk(b"IDAT", packed[k : k + 1]) for k in range(len(packed)))
    (tmp_path / "a.png").write_bytes(content[:start] + chunks + content[start + 12 + length :])
    with pytest.raises(BadImage, match="tiny parts"):
        read_image(tmp_path / "a.png")
