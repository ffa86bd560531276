"""Colour jitter and random erasing, compared with torchvision's changes, alone and in feeds."""

import numpy as np
import pytest
import torch
from PIL import Image

from proxymetric.data import Batches, ImageSet, TrainFeed, TrainView
from proxymetric.data.augmentation import erase, jitter
from proxymetric.system import _torchvision  # noqa: F401

STRENGTHS = (0.4, 0.3, 0.5, 0.2)


def pictures(count: int = 40, side: int = 24) -> np.ndarray:
    """Smooth colourful pictures (count, side, side, 3)."""
    coarse = np.random.default_rng(0).integers(0, 256, (count, 5, 5, 3), dtype=np.uint8)
    sized = [np.asarray(Image.fromarray(image).resize((side, side), Image.Resampling.BICUBIC)) for image in coarse]
    return np.stack(sized)


@pytest.mark.parametrize("which", [(0,), (1,), (2,), (3,), (0, 1, 2, 3)])
def test_jitter_is_torchvisions(which):
    from torchvision.transforms.v2 import functional

    images = torch.from_numpy(pictures()).permute(0, 3, 1, 2).contiguous()
    strengths = tuple(strength if k in which else 0.0 for k, strength in enumerate(STRENGTHS))
    draws = np.random.default_rng(1).random((len(images), 4))
    ours = jitter(images, strengths, draws)
    changes = (2 * draws - 1) * np.array(strengths)
    adjust = (functional.adjust_brightness, functional.adjust_contrast, functional.adjust_saturation)
    for image, mine, change in zip(images.float() / 255, ours, changes):
        for function, part in zip(adjust, change[:3]):
            image = function(image, 1 + part)
        image = functional.adjust_hue(image, change[3])
        assert (255 * image - mine).abs().max() <= 1.01
    assert (ours.float() - images).abs().mean() > 3


def test_erased_parts_have_the_sizes_of_the_paper_and_the_mean_colour():
    images = torch.from_numpy(pictures(400, 32)).permute(0, 3, 1, 2).contiguous()
    images[:, :, 0, 0] = 255
    draws = np.random.default_rng(2).random((len(images), 5))
    erased = erase(images, 0.25, draws)
    changed = (erased != images).any(1)
    hit = changed.flatten(1).any(1)
    assert 0.18 < hit.float().mean() < 0.32
    assert torch.equal(hit, torch.from_numpy(draws[:, 0] < 0.25))
    area = changed[hit].flatten(1).float().mean(1)
    assert area.min() > 0.005
    assert area.max() < 0.36
    for image, result, mask in zip(images[hit], erased[hit], changed[hit]):
        colours = result[:, mask].T.unique(dim=0)
        assert len(colours) == 1
        assert (colours[0] - image.float().mean((1, 2))).abs().max() <= 0.51


def feed(cache: str, **settings) -> TrainFeed:
    images = ImageSet("pictures", np.arange(40) // 4, [str(c) for c in range(10)], arrays=pictures())
    view = TrainView(24, resize=24, crop="none", **settings)
    return TrainFeed(images, Batches(images.labels, 8), view, cache, seed=3)


@pytest.mark.parametrize("settings", [{"jitter": STRENGTHS}, {"erase": 0.5}, {"jitter": STRENGTHS, "erase": 0.5}])
def test_all_caches_give_the_same_pixels_and_an_epoch_can_be_continued(settings):
    first, *_, last = (batch.images for batch in feed("none", **settings).epoch(2))
    plain = next(feed("none").epoch(2)).images
    assert (first != plain).flatten(1).any(1).float().mean() > 0.2
    for cache in ("memory", "device"):
        assert torch.equal(next(feed(cache, **settings).epoch(2)).images, first)
    assert torch.equal(next(feed("device", **settings).epoch(2, start=4)).images, last)
    view = feed("none", **settings).view
    image = Image.fromarray(pictures()[0])
    assert torch.equal(view(image, 5), view(image, 5))


def test_boxes_do_not_depend_on_jitter():
    assert np.array_equal(TrainView(24, erase=0.1).draw(3, 7)[:, :23], TrainView(24).draw(3, 7))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"jitter": (0.4, 0.4, 2.0, 0.1)}, "jitter: got .* expected brightness, contrast and saturation in 0..1"),
        ({"jitter": (0.4, 0.4, 0.4, 0.6)}, "jitter: got .* hue in 0..0.5"),
        ({"erase": 1.5}, "erase: got 1.5, expected a probability in 0..1"),
    ],
)
def test_wrong_strengths_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        TrainView(24, **settings)
