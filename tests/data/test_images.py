"""Reading images: what comes out upright and RGB, and what is refused by name."""

import io
import pickle

import numpy as np
import pytest
from PIL import Image

from proxymetric.data import BadImage, ImageSet, read_image, singletons


def jpeg(side: int = 64) -> bytes:
    noise = np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, "JPEG")
    return buffer.getvalue()


def test_truncated_jpeg_is_bad_also_after_a_good_header(tmp_path):
    (tmp_path / "cut.jpg").write_bytes(jpeg()[: len(jpeg()) // 2])
    with pytest.raises(BadImage, match="truncated") as caught:
        read_image(tmp_path / "cut.jpg")
    assert caught.value.path == str(tmp_path / "cut.jpg")


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"", "empty"), (b"dear diary", "recognised"), (b"\x89PNG\r\n\x1a\n" + b"\0" * 40, "recognised")],
)
def test_files_that_are_no_images(tmp_path, content, reason):
    (tmp_path / "a.jpg").write_bytes(content)
    with pytest.raises(BadImage, match=reason):
        read_image(tmp_path / "a.jpg")


def test_missing_file_is_a_bad_image(tmp_path):
    with pytest.raises(BadImage, match="No such file"):
        read_image(tmp_path / "gone.jpg")


def test_exif_orientation_is_applied(tmp_path):
    image = Image.new("RGB", (40, 20), "blue")
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned a quarter
    image.save(tmp_path / "turned.jpg", exif=exif)
    assert read_image(tmp_path / "turned.jpg").size == (20, 40)


def test_transparency_lies_on_white_and_sixteen_bits_are_scaled(tmp_path):
    Image.new("RGBA", (2, 2), (255, 0, 0, 0)).save(tmp_path / "clear.png")
    assert read_image(tmp_path / "clear.png").getpixel((0, 0)) == (255, 255, 255)
    Image.fromarray(np.full((2, 2), 32896, dtype=np.uint16)).save(tmp_path / "deep.png")
    assert read_image(tmp_path / "deep.png").getpixel((0, 0)) == (128, 128, 128)
    palette = Image.new("P", (2, 2), 1)
    palette.putpalette([0, 0, 0, 9, 8, 7])
    palette.save(tmp_path / "palette.gif")
    assert read_image(tmp_path / "palette.gif").getpixel((0, 0)) == (9, 8, 7)


def test_bad_image_survives_the_way_back_from_a_worker():
    error = pickle.loads(pickle.dumps(BadImage("a.jpg", "empty")))
    assert (error.path, error.reason, str(error)) == ("a.jpg", "empty", "a.jpg: empty")


def four_classes(**fields) -> ImageSet:
    arrays = np.arange(7 * 4 * 4, dtype=np.uint8).reshape(7, 4, 4)
    return ImageSet("dots", np.array([0, 1, 2, 2, 3, 1, 0]), list("abcd"), arrays=arrays, **fields)


def test_of_classes_renumbers_in_the_order_given():
    part = four_classes().of_classes([2, 0])
    assert part.classes == ["c", "a"]
    assert part.labels.tolist() == [1, 0, 0, 1]
    assert np.array_equal(part.arrays[:, 0, 0], np.array([0, 32, 48, 96]))
    with pytest.raises(ValueError, match=r"ids: got .*, expected different labels in 0\.\.3"):
        four_classes().of_classes([0, 4])
    with pytest.raises(ValueError, match="different"):
        four_classes().of_classes([0, 0])


def test_of_classes_carries_the_benchmark_split_while_both_sides_remain():
    images = four_classes(test_classes=(1, 3))
    assert images.of_classes([3, 2]).test_classes == (0,)
    assert images.of_classes([1, 3]).test_classes == ()
    assert images.of_classes([0, 2]).test_classes == ()


def test_subset_keeps_numbering_and_takes_numbers_or_bools():
    images = four_classes(test_classes=(1, 3))
    some = images.subset([5, 0])
    assert (some.labels.tolist(), some.classes, some.test_classes) == ([1, 0], list("abcd"), (1, 3))
    assert np.array_equal(some.arrays, images.arrays[[5, 0]])
    assert np.array_equal(images.subset(images.labels == 2).arrays, images.arrays[[2, 3]])
    assert len(images.subset([])) == 0
    with pytest.raises(ValueError, match=r"indices: got 7, expected numbers in 0\.\.6"):
        images.subset([0, 7])
    with pytest.raises(ValueError, match="7 bools"):
        images.subset(np.array([True, False]))


def test_sides_follow_their_images():
    gallery = np.array([True, False, False, True, False, True, False])
    tested = np.array([False, True, True, False, True, True, False])
    images = four_classes(gallery=gallery, test_images=tested)
    some = images.of_classes([1, 2])
    assert some.gallery.tolist() == gallery[[1, 2, 3, 5]].tolist()
    assert some.test_images.tolist() == tested[[1, 2, 3, 5]].tolist()
    assert images.subset([3, 4, 0]).gallery.tolist() == [True, False, True]
    assert images.subset([1, 2]).gallery is None
    assert images.subset(tested).test_images is None
    assert images.subset(~tested).test_images is None


def test_identity_tells_the_sides_apart():
    one = np.array([True, False, False, True, False, True, False])
    known = {
        images.identity()
        for images in (
            four_classes(),
            four_classes(gallery=one),
            four_classes(gallery=~one),
            four_classes(test_images=one),
        )
    }
    assert len(known) == 4


def test_identity_follows_pixels_labels_and_names():
    same, other = four_classes(), four_classes()
    assert same.identity() == other.identity()
    other.arrays[0, 0, 0] += 1
    assert same.identity() != other.identity()
    assert same.identity() != same.of_classes([1, 0, 2, 3]).identity()


def test_identity_of_files_does_not_depend_on_where_they_lie(tmp_path):
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "a.jpg").write_bytes(jpeg())

    def opened(place):
        root = tmp_path / place
        return ImageSet("x", np.array([0]), ["a"], paths=[root / "a.jpg"], root=root)

    assert opened("here").identity() == opened("there").identity()
    (tmp_path / "there" / "a.jpg").write_bytes(jpeg() + b"!")
    assert opened("here").identity() != opened("there").identity()


def test_singletons():
    assert singletons(four_classes()) == ["d"]


def test_the_repr_is_short():
    images = four_classes()
    assert repr(images) == "ImageSet('dots', 7 images, 4 classes)"


def test_an_image_and_its_label_by_index(tmp_path):
    images = four_classes()
    image, label = images[4]
    assert (image.mode, image.size, label) == ("RGB", (4, 4), 3)
    assert np.array_equal(np.asarray(images[-1][0]), np.asarray(images.read(6)))
    assert [label for _, label in images] == images.labels.tolist()
    with pytest.raises(IndexError, match=r"index: got 7, expected a number in -7\.\.6"):
        images[7]
    with pytest.raises(TypeError, match="index: got slice, expected an integer; `subset` selects several"):
        images[1:3]
    broken = ImageSet("files", np.array([0]), ["a"], paths=[tmp_path / "gone.png"])
    with pytest.raises(BadImage, match="No such file"):
        broken[0]
