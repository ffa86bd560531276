"""Boxes of a CSV: only the object is seen, by every feed and cache, and two boxes of one file are two images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from proxymetric.data import BadImage, Batches, EvalFeed, EvalView, ImageSet, TrainFeed, TrainView, decoding, open_data
from proxymetric.data.decoded_cache import keep_decoded
from proxymetric.data.photographs import describe_photographs
from proxymetric.encoders import build
from proxymetric.features.cache import cached_features
from proxymetric.inspection.contents import digest_of

COLOURS = {"red": (250, 0, 0), "blue": (0, 0, 250)}
BOXES = {"red": (8, 16, 40, 56), "blue": (56, 0, 96, 32)}
"""where the colours are in an image of 96 x 64; the rest is green"""


def photo(turned: bool = False) -> Image.Image:
    """The image; turned: as a camera stores it that was held upright."""
    image = Image.new("RGB", (96, 64), (0, 250, 0))
    for name, box in BOXES.items():
        image.paste(COLOURS[name], box)
    return image.transpose(Image.Transpose.ROTATE_90) if turned else image


def table(folder: Path, *rows: str, header: str = "file,class,x1,y1,x2,y2") -> Path:
    (folder / "a.csv").write_text("\n".join([header, *rows]) + "\n")
    return folder / "a.csv"


@pytest.fixture
def images(tmp_path: Path) -> ImageSet:
    """Both colours of two files, of which one says by EXIF that it is turned."""
    exif = Image.Exif()
    exif[decoding.ORIENTATION] = 6
    photo().save(tmp_path / "plain.png")
    photo(turned=True).save(tmp_path / "turned.jpg", exif=exif, quality=95, subsampling=0)
    corners = {name: ",".join(map(str, box)) for name, box in BOXES.items()}
    return open_data(
        table(tmp_path, *(f"{file},{name},{corners[name]}" for file in ("plain.png", "turned.jpg") for name in COLOURS))
    )


def assert_only_the_object(images: ImageSet, squares: torch.Tensor, labels: torch.Tensor) -> None:
    assert len(squares) == len(labels) == 4
    for square, label in zip(squares.float(), labels.tolist()):
        expected = torch.tensor(COLOURS[images.classes[label]]).view(3, 1, 1)
        assert (square - expected).abs().max() < 20


def test_an_image_is_its_box_in_the_upright_photograph(images):
    for row in range(4):
        image, label = images[row]
        colour = images.classes[label]
        left, top, right, bottom = BOXES[colour]
        assert image.size == (right - left, bottom - top)
        assert np.abs(np.asarray(image, dtype=int) - COLOURS[colour]).max() < 20
        assert images.title(row).endswith(f" [{left},{top},{right},{bottom}]")
    assert "the columns x1, y1, x2, y2 are boxes" in " ".join(images.notes)
    assert images.columns == {}
    assert describe_photographs(images)["shorter_side"] == 32
    assert images.subset([3]).box(0) == BOXES["blue"]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("cache", ["none", "memory", "device"])
@pytest.mark.parametrize("shared", [False, True])
def test_views_show_the_object_only(images, cache, workers, shared):
    view = TrainView(12, scale=(0.3, 1.0))
    train = TrainFeed(images, Batches(images.labels, batch=4), view, cache, workers=workers, decode="reduced")
    with keep_decoded(2**20 if shared else 0) as kept:
        for _ in range(2):
            for batch in train.epoch(0):
                assert_only_the_object(images, batch.images, batch.labels)
            batch = next(iter(EvalFeed(images, EvalView(12), cache=cache, workers=workers)))
            assert_only_the_object(images, batch.images, batch.labels)
    assert not shared or cache == "none" or kept.decodings == 8


def test_a_reduced_jpeg_has_the_same_part(tmp_path):
    large = photo(turned=True).resize((640, 960), Image.Resampling.NEAREST)
    exif = Image.Exif()
    exif[decoding.ORIENTATION] = 6
    large.save(tmp_path / "a.jpg", exif=exif, quality=95, subsampling=0)
    box = tuple(10 * corner for corner in BOXES["blue"])
    image = decoding.read_image(tmp_path / "a.jpg", min_side=40, box=box)
    assert image.size == (50, 40), "an eighth, whose shorter side is 40"
    assert np.abs(np.asarray(image, dtype=int)[2:-2, 2:-2] - COLOURS["blue"]).max() < 20
    assert decoding.read_image(tmp_path / "a.jpg", min_side=41, box=box).size == (100, 80)


def test_caches_and_identities_tell_boxes_of_one_file_apart(images, tmp_path):
    encoder = build("small", dim=8, size=32).eval()
    passes: list[int] = []
    encoder.backbone.stages.register_forward_pre_hook(lambda _, args: passes.append(len(args[0])))
    view = EvalView(32, resize=32)
    vectors = cached_features(encoder, images, view, folder=tmp_path / "cache").vectors
    assert torch.equal(cached_features(encoder, images, view, folder=tmp_path / "cache").vectors, vectors)
    assert passes == [4]
    assert not torch.allclose(vectors[0], vectors[1])
    moved = table(tmp_path, *(f"plain.png,{name},{x},0,{x + 30},30" for name in COLOURS for x in (0, 1)))
    cached_features(encoder, open_data(moved), view, folder=tmp_path / "cache")
    assert passes == [4, 4], "other boxes of known files are computed"
    whole = open_data(table(tmp_path, "plain.png,red", "turned.jpg,blue", header="file,class"))
    cached_features(encoder, whole, view, folder=tmp_path / "cache")
    assert passes == [4, 4, 2]
    assert len({digest_of(images, row) for row in range(4)} | {digest_of(whole, row) for row in range(2)}) == 6
    one, other = (
        open_data(table(tmp_path, "plain.png,red,0,0,9,9", f"plain.png,blue,0,0,9,{y}")).identity() for y in (8, 9)
    )
    assert one != other


@pytest.mark.parametrize(
    ("box", "reason"),
    [
        ("0,0,97,64", "of plain.png, which is 96 x 64 pixels when upright; expected x1,y1,x2,y2 in pixels"),
        ("-1,0,5,5", "expected x1,y1,x2,y2 in pixels of the upright image with 0 <= x1 < x2 <= width"),
        ("5,5,5,9", "expected x1,y1,x2,y2 in pixels"),
        ("40,0,8,20", "are the corners swapped"),
        ("nan,0,5,5", "expected four finite numbers"),
        ("0,0,inf,5", "expected four finite numbers"),
        ("a,0,5,5", "expected four numbers"),
        (",,,", "expected four numbers"),
        ("1,2,3", "expected four numbers"),
        ("0.1,0.1,0.5,0.5", "fractions of the image"),
    ],
)
def test_a_bad_box_is_refused_with_its_line(tmp_path, box, reason):
    photo().save(tmp_path / "plain.png")
    file = table(tmp_path, "plain.png,red,0,0,96,64", "", f"plain.png,blue,{box}")
    with pytest.raises(ValueError, match=f"a.csv, line 4: got the box {box}.*{reason}"):
        open_data(file)


def test_the_size_of_a_turned_photograph_is_its_upright_one(images, tmp_path):
    """Stored, turned.jpg is 64 x 96; upright it is 96 x 64."""
    assert open_data(table(tmp_path, "turned.jpg,red,0,0,96,64", "plain.png,blue,0,0,9,9")).read(0).size == (96, 64)
    with pytest.raises(ValueError, match=r"line 2: .*turned.jpg, which is 96 x 64 .* \(1 further boxes lie outside"):
        open_data(table(tmp_path, "turned.jpg,red,0,0,64,96", "turned.jpg,blue,0,0,9,96"))


def test_a_missing_column_is_named(tmp_path):
    with pytest.raises(ValueError, match="line 1: got x1, x2 without y1, y2, expected all of x1, y1, x2, y2"):
        open_data(table(tmp_path, "a.png,red,1,2", header="file,class,x1,x2"))


def test_files_that_are_missing_or_damaged_are_left_out_as_always(images, tmp_path):
    (tmp_path / "damaged.jpg").write_bytes(b"no image")
    rows = [f"{file},{name},0,0,9,9" for name in COLOURS for file in ("gone.jpg", "damaged.jpg", "plain.png")]
    found = open_data(table(tmp_path, *rows))
    feed = EvalFeed(found, EvalView(8))
    assert sum(len(batch.labels) for batch in feed) == 2
    assert len(feed.bad) == 2, "two files, each with the same box twice"
    Image.new("RGB", (4, 4)).save(tmp_path / "plain.png")  # it was another file when the set was opened
    with pytest.raises(BadImage, match=r"the box \(0, 0, 9, 9\) lies outside the image, which is 4 x 4 when upright"):
        found.read(2)


def test_a_row_without_a_file_is_left_out_and_counted(tmp_path):
    photo().save(tmp_path / "plain.png")
    found = open_data(table(tmp_path, "plain.png;a", ";b", "plain.png;c", ";", ";;;", ";d", header="file;class"))
    assert found.classes == ["a", "c"]
    assert f"{tmp_path / 'a.csv'}: rows without a file, left out: 2 (line 3, 7)" in found.notes
    with pytest.raises(ValueError, match=r"line 2: got 'plain\.png;' without a class"):
        open_data(table(tmp_path, "plain.png;", ";b", header="file;class"))
    with pytest.raises(ValueError, match="got 2 rows without a file, expected a row for each image"):
        open_data(table(tmp_path, ";a", ";b", header="file;class"))
