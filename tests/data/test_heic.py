"""HEIC and AVIF: read like other images, and refused before they are decoded where that would take too much."""

from __future__ import annotations

import io
import struct

import numpy as np
import pytest
from PIL import Image

from bombs import encoded
from proxymetric.data import BadImage, EvalFeed, EvalView, decoding, open_data, read_image
from proxymetric.data.heif_structure import held_pixels
from proxymetric.data.image_structure import TooMuchWork, check_structure

HEADER = b"\0\0\0\x18ftypheic\0\0\0\0heicmif1"
KINDS = ["avif", "heif"]


def write(file, kind: str, orientation: int = 1, size: tuple[int, int] = (64, 48)) -> None:
    """A red image whose left upper quarter is blue, as it is stored."""
    if kind == "heif":
        pytest.importorskip("pillow_heif", reason="the extra `heic` is not installed").register_heif_opener()
    elif not decoding.READS_AVIF:
        pytest.skip("this Pillow reads no AVIF")
    image, exif = Image.new("RGB", size, "red"), Image.Exif()
    image.paste((0, 0, 255), (0, 0, size[0] // 2, size[1] // 2))
    exif[decoding.ORIENTATION] = orientation
    buffer = io.BytesIO()
    image.save(buffer, kind, exif=exif.tobytes())
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(buffer.getvalue())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("orientation", range(1, 9))
def test_upright_in_every_orientation(tmp_path, kind, orientation):
    write(tmp_path / "a", kind, orientation)
    write(tmp_path / "b", kind, 1)
    stored = read_image(tmp_path / "b")
    exif = Image.Exif()
    exif[decoding.ORIENTATION] = orientation
    stored.info["exif"] = exif.tobytes()
    stored.getexif().load(exif.tobytes())
    expected = decoding.ImageOps.exif_transpose(stored)
    found = read_image(tmp_path / "a")
    with open(tmp_path / "a", "rb") as file:
        assert decoding.upright_sizes(file, "a") == [found.size]
    assert found.size == expected.size
    assert found.mode == "RGB"
    assert np.abs(np.asarray(found, dtype=int) - np.asarray(expected, dtype=int)).max() < 40


@pytest.mark.parametrize("kind", KINDS)
def test_folders_and_worker_processes_read_them(tmp_path, kind):
    ending = "HEIC" if kind == "heif" else "avif"
    for name in ("cat/1", "cat/2", "dog/1", "dog/2"):
        write(tmp_path / f"{name}.{ending}", kind)
    images = open_data(tmp_path)
    assert len(images) == 4
    assert not any("not read" in note for note in images.notes)
    feed = EvalFeed(images, EvalView(32), batch=2, workers=2)
    squares = np.concatenate([batch.images.numpy() for batch in feed])
    assert feed.bad == {}
    assert (squares[:, 2, 4, 4] > 200).all()
    assert (squares[:, 0, -4, -4] > 200).all()


def test_without_the_extra_the_images_are_counted_and_the_extra_is_named(tmp_path, without_heic):
    for name in ("cat/1.jpg", "dog/1.jpg"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(encoded("jpeg"))
    (tmp_path / "dog" / "2.HEIC").write_bytes(HEADER)
    note = "left out, images of types that are not read: 1 .heic; to read .heic, pip install 'proxymetric[heic]'"
    assert any(note in each for each in open_data(tmp_path).notes)
    table = tmp_path / "a.csv"
    table.write_text("file,class\ncat/1.jpg,cat\ndog/1.jpg,dog\ndog/2.HEIC,dog\n")
    images = open_data(table)
    assert any("1 .heic; to read .heic, pip install 'proxymetric[heic]'" in each for each in images.notes)
    with pytest.raises(BadImage, match=r"2\.HEIC: got a HEIC image, .* expected pip install 'proxymetric\[heic\]'"):
        images.read(2)


def test_the_limit_on_pixels_holds_before_decoding(tmp_path, monkeypatch):
    monkeypatch.setenv(decoding.LIMIT_VARIABLE, "3000")
    for kind in KINDS:
        write(tmp_path / kind, kind)
        with pytest.raises(BadImage, match="got 64 x 48 = 3,072 pixels, expected at most 3,000"):
            read_image(tmp_path / kind)


def test_a_heic_that_holds_more_than_it_declares_is_refused(tmp_path):
    write(tmp_path / "a.heic", "heif", size=(600, 600))
    content = bytearray((tmp_path / "a.heic").read_bytes())
    struct.pack_into(">LL", content, content.index(b"ispe") + 8, 16, 16)
    (tmp_path / "a.heic").write_bytes(content)
    with pytest.raises(BadImage, match="exceeds the maximum image size"):
        read_image(tmp_path / "a.heic")


def part(name: bytes, content: bytes) -> bytes:
    return struct.pack(">L", 8 + len(content)) + name + content


def heic(sizes: list[tuple[int, int]], references: dict[bytes, dict[int, list[int]]], primary: int = 1) -> bytes:
    """A HEIC without pixels: image k + 1 has the size k."""
    spatial = b"".join(part(b"ispe", struct.pack(">LLL", 0, *size)) for size in sizes)
    owners = b"".join(struct.pack(">HBB", k, 1, k) for k in range(1, len(sizes) + 1))
    properties = part(b"ipco", spatial) + part(b"ipma", struct.pack(">LL", 0, len(sizes)) + owners)
    listed = b"".join(
        part(name, struct.pack(f">HH{len(others)}H", item, len(others), *others))
        for name, items in references.items()
        for item, others in items.items()
    )
    content = part(b"pitm", struct.pack(">LH", 0, primary)) + part(b"iprp", properties)
    return HEADER + part(b"meta", bytes(4) + content + part(b"iref", bytes(4) + listed))


REFUSED = {
    "tiles": (heic([(100, 100), (8000, 8000)], {b"dimg": {1: [2] * 60_000}}), "images and tiles that decode 3,84"),
    "tiles of tiles": (heic([(9, 9)] * 12, {b"dimg": {k: [k + 1] * 9 for k in range(1, 12)}}), "more than 8 deep"),
    "a circle": (heic([(9, 9)] * 2, {b"dimg": {1: [2], 2: [1]}}), "more than 8 deep"),
    "a large mask": (heic([(9, 9), (9000, 9000)], {b"auxl": {2: [1]}}), "a mask of 9000 x 9000"),
    "many parts": (HEADER + part(b"free", b"") * 30_000, "more than 20,000 parts"),
    "many references": (heic([(9, 9)], {b"cdsc": {k: [1] for k in range(30_000)}}), "more than 20,000 parts"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_much_work_is_refused(name):
    content, reason = REFUSED[name]
    with pytest.raises(TooMuchWork, match=reason):
        check_structure("HEIF", io.BytesIO(content))


def test_a_photograph_of_many_tiles_and_a_damaged_file_pass():
    tiles = {b"dimg": {1: list(range(2, 194))}, b"thmb": {194: [1]}, b"auxl": {195: [1]}}
    content = heic([(8064, 6048)] + [(512, 512)] * 192 + [(320, 240), (4032, 3024)], tiles)
    check_structure("HEIF", io.BytesIO(content))
    random = np.random.default_rng(0)
    for _ in range(200):
        damaged = np.frombuffer(content, np.uint8)[: random.integers(1, len(content))].copy()
        damaged[random.integers(0, len(damaged), 3)] = random.integers(0, 256, 3)
        try:
            check_structure("HEIF", io.BytesIO(damaged.tobytes()))
        except TooMuchWork as error:
            assert "expected" in str(error)


def test_all_frames_of_an_av1_stream_are_counted():
    header = bytes.fromhex("0a0918157fbda2021a0d08")  # 64 x 48, as Pillow writes it
    assert held_pixels(header) == 64 * 48
    assert held_pixels(header + bytes.fromhex("320100") * 1000) == 1000 * 64 * 48
