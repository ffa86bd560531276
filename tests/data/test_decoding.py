"""Decoding: which formats are decoded at all, the limit on pixels, and what a large file may cost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from proxymetric.data import BadImage, ImageSet, decoding, open_data, read_image
from proxymetric.data.batches import Batches
from proxymetric.data.feeds import TrainFeed
from proxymetric.data.views import TrainView
from terminal import proxymetric, refused, train

POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 16 16\n%%EndComments\nshowpage\n%%EOF\n"

PEAK = """
import os, resource, sys
from proxymetric.data import BadImage, read_image
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
for file in sys.argv[1:]:
    if os.fork():
        assert os.wait()[1] == 0
        continue
    before = peak()
    try:
        result = "x".join(map(str, read_image(file).size))
    except BadImage as error:
        result = error.reason
    print(peak() - before, result, flush=True)
    os._exit(0)
"""
SIDE = 4000


@pytest.fixture
def ghostscript(tmp_path, monkeypatch) -> Path:
    """A `gs` on the PATH that leaves a mark when it is started."""
    mark, folder = tmp_path / "started", tmp_path / "bin"
    folder.mkdir()
    (folder / "gs").write_text(f"#!/bin/sh\ntouch {mark}\nexit 1\n")
    (folder / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)
    return mark


def test_postscript_starts_no_program_in_any_verb(tmp_path, photos, ghostscript, only_training):
    from conftest import write_photos

    data = write_photos(tmp_path / "data", classes=6, images=4)
    for k in range(6):
        (data / f"class{k}" / "holiday.jpg").write_bytes(POSTSCRIPT)
    for cache in ("none", "memory", "device"):
        answer = train(data, tmp_path / "run", "--overwrite", "--cache", cache)
        assert answer.code == 0, answer
        assert "holiday.jpg (the image format is not recognised" in answer.err
    assert train(data, tmp_path / "frozen", "--frozen").code == 0
    assert proxymetric("evaluate", tmp_path / "run", "--data", data).code == 0
    assert proxymetric("embed", tmp_path / "run", data, "--out", tmp_path / "x.safetensors").code == 0
    refused(proxymetric("search", tmp_path / "run", "--in", data, data / "class0" / "holiday.jpg"), "holiday.jpg")
    assert not ghostscript.exists()


@pytest.mark.parametrize("ending", [".eps", ".psd", ".ppm", ".tga", ".ico", ".sgi", ".pcx", ".dds", ".im"])
def test_other_formats_are_not_decoded_whatever_their_name(tmp_path, ending):
    Image.new("RGB", (16, 16)).save(tmp_path / f"a{ending}") if ending != ".psd" else (tmp_path / "a.psd").write_bytes(
        b"8BPS\x00\x01" + b"\0" * 6 + b"\0\x03\0\0\0\x10\0\0\0\x10\0\x08\0\x03" + b"\0" * 14 + b"\0" * 768
    )
    (tmp_path / f"a{ending}").rename(tmp_path / "a.jpg")
    with pytest.raises(BadImage, match="format is not recognised, expected JPEG, PNG, WebP, BMP, GIF, TIFF, AVIF or"):
        read_image(tmp_path / "a.jpg")


@pytest.mark.parametrize("kind", ["JPEG", "MPO", "PNG", "WEBP", "BMP", "GIF", "TIFF"])
def test_seven_formats_are_decoded(tmp_path, kind):
    noise = np.random.default_rng(0).integers(0, 256, (9, 7, 3), dtype=np.uint8)
    more = {"append_images": [Image.fromarray(noise)]} if kind == "MPO" else {}
    Image.fromarray(noise).save(tmp_path / "a", kind, **more)
    with Image.open(tmp_path / "a") as image:
        assert image.format == kind
        expected = np.asarray(image.convert("RGB"))
    assert np.array_equal(np.asarray(read_image(tmp_path / "a")), expected)


def limited(monkeypatch, pixels: int | str) -> None:
    monkeypatch.setenv("PROXYMETRIC_MAX_PIXELS", str(pixels))


def test_the_limit_on_pixels_says_file_size_limit_and_how_to_lift_it(tmp_path, monkeypatch):
    Image.new("L", (300, 300)).save(tmp_path / "large.png")
    limited(monkeypatch, 40_000)
    with pytest.raises(BadImage) as caught:
        read_image(tmp_path / "large.png")
    assert str(caught.value) == (
        f"{tmp_path / 'large.png'}: got 300 x 300 = 90,000 pixels, expected at most 40,000; to read it, set the "
        "environment variable PROXYMETRIC_MAX_PIXELS=90000"
    )
    limited(monkeypatch, 90_000)
    assert read_image(tmp_path / "large.png").size == (300, 300)
    monkeypatch.delenv("PROXYMETRIC_MAX_PIXELS")
    assert read_image(tmp_path / "large.png").size == (300, 300)


@pytest.mark.parametrize("value", ["many", "0", "-5", "1e8", ""])
def test_a_limit_that_is_no_number_is_refused_when_data_is_opened(photos, monkeypatch, value):
    limited(monkeypatch, value)
    if value:
        with pytest.raises(ValueError, match=f"PROXYMETRIC_MAX_PIXELS: got '{value}', expected a number of pixels"):
            open_data(photos)
    else:
        open_data(photos)


@pytest.mark.parametrize(("limit", "size"), [(90_000, (300, 200)), (59_999, (150, 100)), (3_800, (75, 50))])
def test_a_larger_jpeg_is_decoded_in_reduced_form(tmp_path, monkeypatch, limit, size):
    gradient = Image.linear_gradient("L").resize((300, 200))
    gradient.save(tmp_path / "a.jpg", quality=95)
    limited(monkeypatch, limit)
    image = read_image(tmp_path / "a.jpg")
    assert image.size == size
    assert (
        np.abs(np.asarray(image.convert("L"), int) - np.asarray(gradient.resize(size, Image.Resampling.BOX))).max() < 9
    )


def test_a_jpeg_that_no_reduction_fits_and_a_progressive_one_are_left_out(tmp_path, monkeypatch):
    Image.new("L", (300, 200)).save(tmp_path / "a.jpg")
    Image.new("L", (300, 200)).save(tmp_path / "b.jpg", progressive=True)
    limited(monkeypatch, 900)
    with pytest.raises(BadImage, match="got 300 x 200 = 60,000 pixels, expected at most 900"):
        read_image(tmp_path / "a.jpg")
    limited(monkeypatch, 59_000)
    assert read_image(tmp_path / "a.jpg").size == (150, 100)
    with pytest.raises(BadImage, match="expected at most 59,000"):
        read_image(tmp_path / "b.jpg")


@pytest.fixture(scope="module")
def peaks(tmp_path_factory) -> dict[str, tuple[int, str]]:
    """By how many MB reading a large file raises the peak memory of a process, and what it gives."""
    folder = tmp_path_factory.mktemp("large")
    Image.new("1", (13_000, 13_000)).save(folder / "bits.png")
    Image.new("L", (13_400, 13_400)).save(folder / "beyond.jpg")
    for mode in ("RGBA", "L", "I;16", "P"):
        Image.new(mode, (SIDE, SIDE)).save(folder / f"{mode}.png", compress_level=1)
    Image.new("F", (SIDE, SIDE)).save(folder / "F.tiff", compression="packbits")
    files = sorted(folder.iterdir())
    command = [sys.executable, "-W", "error", "-c", PEAK, *map(str, files)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (answer.returncode, answer.stderr) == (0, "")
    lines = [line.split(" ", 1) for line in answer.stdout.splitlines()]
    return {file.name: (int(megabytes), result) for file, (megabytes, result) in zip(files, lines, strict=True)}


@pytest.mark.slow
def test_a_png_of_169_megapixels_costs_no_memory(peaks):
    megabytes, result = peaks["bits.png"]
    assert result.startswith("got 13000 x 13000 = 169,000,000 pixels, expected at most 100,000,000; to read it, set")
    assert megabytes < 100


@pytest.mark.slow
def test_a_jpeg_beyond_pillows_own_limit_is_read_in_little_memory(peaks):
    megabytes, result = peaks["beyond.jpg"]
    assert result == "6700x6700"
    assert megabytes < 500


@pytest.mark.slow
@pytest.mark.parametrize("file", ["RGBA.png", "L.png", "I;16.png", "P.png", "F.tiff"])
def test_what_is_below_the_limit_costs_its_pixels_about_twice(peaks, file):
    megabytes, result = peaks[file]
    assert result == f"{SIDE}x{SIDE}"
    assert megabytes < 3 * 4 * SIDE**2 / 2**20


def test_strips_do_not_change_pixels(tmp_path, monkeypatch):
    random = np.random.default_rng(0)
    sources = [
        Image.fromarray(random.integers(0, 256, (37, 11, 4), dtype=np.uint8), "RGBA"),
        Image.fromarray(random.integers(0, 65536, (37, 11)).astype(np.uint16)),
        Image.fromarray(random.normal(100, 80, (37, 11)).astype(np.float32)),
        Image.fromarray(random.integers(0, 256, (37, 11, 2), dtype=np.uint8), "LA"),
    ]
    for source in sources:
        whole = np.asarray(decoding.as_rgb(source))
        monkeypatch.setattr(decoding, "STRIP_PIXELS", 50)
        assert np.array_equal(np.asarray(decoding.as_rgb(source)), whole)
        monkeypatch.undo()


def test_the_warnings_of_pillow_and_numpy_do_not_reach_the_screen(tmp_path):
    values = np.full((8, 8), 40, np.float32)
    values[0, 0], values[0, 1] = np.nan, np.inf
    Image.fromarray(values).save(tmp_path / "nan.tiff")
    file = tmp_path / "tags.tiff"
    Image.new("L", (8, 8), 7).save(file)
    once, twice = (b"\x1c\x01\x03\x00" + bytes([count, 0, 0, 0]) for count in (1, 2))
    assert once in file.read_bytes()
    file.write_bytes(file.read_bytes().replace(once, twice))
    with pytest.warns(UserWarning, match="too many entries"):  # Pillow alone
        Image.open(file).close()
    code = (
        "import sys; from proxymetric.data import read_image; [print(read_image(file).size) for file in sys.argv[1:]]"
    )
    command = [sys.executable, "-W", "default", "-c", code, str(tmp_path / "nan.tiff"), str(file)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    assert answer.stdout == "(8, 8)\n(8, 8)\n"
    assert not [line for line in answer.stderr.splitlines() if "Warning" in line], answer.stderr
    assert read_image(tmp_path / "nan.tiff").getpixel((0, 0)) == (0, 0, 0)
    assert read_image(tmp_path / "nan.tiff").getpixel((1, 0)) == (255, 255, 255)


@pytest.mark.parametrize(
    ("min_side", "size"), [(None, (300, 200)), (101, (300, 200)), (100, (150, 100)), (25, (38, 25))]
)
def test_a_jpeg_is_reduced_on_request(tmp_path, min_side, size):
    """To the smallest size that is large enough; about as the means of its pixels."""
    gradient = Image.linear_gradient("L").resize((300, 200)).convert("RGB")
    gradient.save(tmp_path / "a.jpg", quality=95)
    image = read_image(tmp_path / "a.jpg", min_side=min_side)
    assert image.size == size
    expected = np.asarray(gradient.resize(size, Image.Resampling.BOX), int)
    assert np.abs(np.asarray(image, int) - expected).max() < 9


def test_only_jpegs_are_reduced(tmp_path):
    Image.new("RGB", (300, 200), "red").save(tmp_path / "a.png")
    assert read_image(tmp_path / "a.png", min_side=10).size == (300, 200)


@pytest.mark.parametrize("cache", ["none", "memory"])
def test_a_feed_reduces_only_if_it_is_told_to(tmp_path, cache):
    """Reduced pixels differ a little from full ones; the views are the same."""
    noise = np.random.default_rng(0).integers(256, size=(12, 16, 3), dtype=np.uint8)
    Image.fromarray(noise).resize((320, 240), Image.Resampling.BICUBIC).save(tmp_path / "a.jpg")
    images = ImageSet("one", np.array([0]), ["a"], paths=[tmp_path / "a.jpg"])
    views = {
        decode: next(TrainFeed(images, Batches(images.labels, 1), TrainView(32), cache, decode=decode).epoch(0)).images
        for decode in ("full", "reduced")
    }
    difference = (views["full"].int() - views["reduced"].int()).abs()
    assert 0 < difference.max() < 96
    assert difference.float().mean() < 16
    with pytest.raises(ValueError, match="decode: got 'half', expected"):
        TrainFeed(images, Batches(images.labels, 1), TrainView(32), cache, decode="half")
