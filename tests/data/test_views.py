"""Views, compared with torchvision's transforms, and views of single images compared with those of a buffer."""

import numpy as np
import pytest
import torch
from PIL import Image

from proxymetric.data import VIEWS, EvalView, TrainView, named_view
from proxymetric.data.image_buffer import ImageBuffer
from proxymetric.data.views import shrink
from proxymetric.system import _torchvision  # noqa: F401


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """A smooth colourful picture, so that half a pixel of difference stays a small difference."""
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


@pytest.mark.parametrize(("width", "height"), [(200, 150), (90, 160), (300, 100)])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_eval_view_is_torchvisions_resize_and_centre_crop(width, height, interpolation):
    from torchvision import transforms

    mode = transforms.InterpolationMode(interpolation)
    image = picture(width, height)
    theirs = transforms.Compose([transforms.Resize(72, mode), transforms.CenterCrop(64)])(image)
    ours = EvalView(64, resize=72, interpolation=interpolation)(image)
    assert ours.dtype == torch.uint8
    # a shift by one pixel makes 8 grey levels and more
    assert np.abs(ours.permute(1, 2, 0).numpy().astype(int) - np.asarray(theirs)).mean() < 0.1


@pytest.mark.parametrize(("width", "height"), [(341, 256), (256, 341), (303, 256), (256, 256), (359, 256)])
def test_a_centre_crop_that_is_not_resized_has_the_pixels_of_the_image(width, height):
    """Half of the sides leave an odd margin, in which the centre lies between two pixels."""
    from torchvision import transforms

    noise = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    theirs = torch.from_numpy(np.array(transforms.CenterCrop(224)(image))).permute(2, 0, 1)
    view = EvalView(224, resize=256)
    assert torch.equal(view(image), theirs)
    buffer = ImageBuffer([noise])
    assert torch.equal(buffer.cut(np.array([0]), view.boxes(buffer.heights, buffer.widths), 224)[0], theirs)
    uncropped = TrainView(224, resize=256, crop="none", flip=False)
    assert torch.equal(uncropped(image, 0), theirs)


def test_a_cache_keeps_the_side_that_was_asked_for():
    assert TrainView(224).stored == 256
    assert TrainView(224, resize=240).stored == 240
    assert TrainView(224, stored=400).stored == 400
    with pytest.raises(ValueError, match="stored: got 200, expected at least 256"):
        TrainView(224, resize=256, stored=200)


def test_images_of_the_right_size_pass_unchanged():
    image = picture(48, 48)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    assert torch.equal(EvalView(48, resize=48)(image), pixels)
    assert torch.equal(TrainView(48, resize=48, crop="none", flip=False)(image, 0), pixels)
    assert torch.equal(TrainView(48, resize=48, crop="random", flip=False)(image, 0), pixels)


def test_random_resized_boxes_have_torchvisions_distribution():
    from torchvision.transforms import RandomResizedCrop

    height, width, count = 120, 200, 4000
    torch.manual_seed(0)
    image = Image.new("L", (width, height))
    theirs = np.array([RandomResizedCrop.get_params(image, [0.16, 1.0], [0.75, 1.3333]) for _ in range(count)], float)
    view = TrainView(32)
    boxes = view.boxes(np.full(count, height), np.full(count, width), view.draw(count, 1))
    for ours, other, unit in zip(boxes[:4], theirs.T, (height, width, height, width)):
        quantiles = np.linspace(0.05, 0.95, 10)
        assert np.abs(np.quantile(ours, quantiles) - np.quantile(other, quantiles)).max() < 0.04 * unit
    assert np.abs(boxes.height * boxes.width - 0.5 * height * width).mean() > 0.1 * height * width
    assert abs(boxes.flip.mean() - 0.5) < 0.04


@pytest.mark.parametrize(("height", "width"), [(10, 400), (400, 10), (1, 1), (3, 1000)])
@pytest.mark.parametrize("crop", ["random-resized", "random", "none"])
@pytest.mark.parametrize("resize", [None, 40])
def test_boxes_lie_inside_images_of_any_shape(height, width, crop, resize):
    view = TrainView(32, resize=resize, crop=crop)
    boxes = view.boxes(np.full(500, height), np.full(500, width), view.draw(500, 2))
    assert min(boxes.top.min(), boxes.left.min()) >= 0
    assert (boxes.top + boxes.height).max() <= height + 1e-9
    assert (boxes.left + boxes.width).max() <= width + 1e-9
    assert min(boxes.height.min(), boxes.width.min()) > 0
    assert view(Image.new("RGB", (width, height)), 0).shape == (3, 32, 32)


def test_a_strip_falls_back_to_the_largest_box_in_the_middle():
    view = TrainView(32)
    boxes = view.boxes(np.full(50, 10), np.full(50, 400), view.draw(50, 0))
    assert set(boxes.height.tolist()) == {10.0}
    assert set(boxes.width.tolist()) == {13.0}
    assert set(boxes.left.tolist()) == {194.0}


def test_random_crop_keeps_the_scale_and_reaches_every_offset():
    pixels = np.arange(36 * 40, dtype=np.uint16).reshape(36, 40)
    image = Image.fromarray(np.stack([pixels >> 8, pixels & 255, pixels * 0], 2).astype(np.uint8))
    view = TrainView(32, resize=36, crop="random", flip=False)
    offsets = set()
    for seed in range(400):
        square = view(image, seed).int()
        start = int(square[0, 0, 0] * 256 + square[1, 0, 0])
        top, left = divmod(start, 40)
        assert np.array_equal((square[0] * 256 + square[1]).numpy(), pixels[top : top + 32, left : left + 32])
        offsets.add((top, left))
    assert offsets == {(top, left) for top in range(5) for left in range(9)}


def test_seed_and_generator_decide_alone():
    image = picture(80, 60)
    view = TrainView(32)
    torch.manual_seed(1)
    first = view(image, 5)
    torch.manual_seed(2)
    assert torch.equal(first, view(image, np.random.default_rng(5)))
    flipped = TrainView(32, resize=32, crop="none")
    squares = {bytes(flipped(image, seed).numpy()) for seed in range(12)}
    assert len(squares) == 2


@pytest.mark.parametrize("crop", ["random-resized", "random", "none"])
@pytest.mark.parametrize("resize", [None, 48, 130])
def test_a_batch_cut_from_the_flat_buffer_is_what_pillow_cuts(crop, resize):
    view = TrainView(40, resize=resize, crop=crop, scale=(0.3, 1.0))
    pictures = [shrink(picture(60 + 13 * k, 90 - 5 * k, k), view.stored) for k in range(8)]
    store = ImageBuffer([np.array(p) for p in pictures])
    rows = np.array([3, 0, 7, 3, 5])
    draws = view.draw(5, 4)
    whole = store.cut(rows, view.boxes(store.heights[rows], store.widths[rows], draws), 40)
    for k, row in enumerate(rows):
        one = view.apply(store.image(row), draws[k : k + 1])
        assert (whole[k].int() - one.int()).abs().float().mean() < 1.5
        assert not torch.equal(whole[k], whole[k].flip(2))


def test_flat_buffer_gives_back_its_images():
    arrays = [np.asarray(picture(20 + k, 30 - k, k)) for k in range(4)]
    store = ImageBuffer(list(arrays))
    for k, array in enumerate(arrays):
        assert np.array_equal(np.asarray(store.image(k)), array)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: EvalView(0), "size: got 0, expected at least 1"),
        (lambda: EvalView(64, resize=32), "resize: got 32, expected at least size=64"),
        (lambda: EvalView(64, interpolation="area"), "interpolation: got 'area', expected one of bilinear, bicubic"),
        (lambda: TrainView(64, crop="centre"), "crop: got 'centre', expected one of random-resized, random, none"),
        (lambda: TrainView(64, resize=32, crop="random"), "resize: got 32 .* expected at least size=64"),
        (lambda: TrainView(64, scale=(0.5, 1.5)), "scale: got"),
        (lambda: TrainView(64, ratio=(2.0, 1.0)), "ratio: got"),
    ],
)
def test_views_that_are_refused(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("size", [None, 64])
def test_named_views_make_views_of_one_size(name, size):
    views = named_view(name, size)
    train, test = TrainView(**views["train"]), EvalView(**views["eval"])
    assert train.size == test.size == (size or VIEWS[name]["train"]["size"])
    assert test.resize / test.size == pytest.approx(256 / VIEWS[name]["eval"]["size"], abs=0.01)
    assert train(picture(90, 70), 0).shape == test(picture(90, 70)).shape
    views["train"]["size"] = 1
    assert named_view(name)["train"]["size"] > 1


def test_named_views_are_the_papers():
    from torchvision import transforms

    crop = transforms.RandomResizedCrop(
        224
    )  # the transform in the code of Proxy-Anchor and VPTSP, with its default arguments
    for name, kind in (("proxy-anchor", "bilinear"), ("vptsp", "bicubic")):
        view = TrainView(**named_view(name)["train"])
        assert (view.scale, view.crop, view.flip, view.resize) == (crop.scale, "random-resized", True, None)
        assert view.ratio == pytest.approx(crop.ratio, abs=1e-4)
        assert view.interpolation == named_view(name)["eval"]["interpolation"] == kind
    ccp, mlrc = (TrainView(**named_view(name)["train"]) for name in ("ccp", "mlrc"))
    assert (ccp.size, ccp.scale, ccp.resize) == (227, (0.16, 1.0), None)
    assert (mlrc.size, mlrc.scale, mlrc.resize) == (227, (0.16, 1.0), 256)
    with pytest.raises(ValueError, match=r"view: got .*, expected one of proxy-anchor, .* did you mean 'mlrc'"):
        named_view("mlcr")
