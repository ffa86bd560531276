"""The pool from which new proxies are picked: random training views, embedded by the current encoder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from proxymetric.data import Batches, TrainFeed, TrainView, digits, open_data
from proxymetric.data.feeds import draw_rows
from proxymetric.encoders import Encoder, build
from proxymetric.runs.assemble import RunContext, make_pool, train_feed
from proxymetric.runs.recipe import check
from proxymetric.system.watcher import Silent
from proxymetric.training.process_group import ProcessGroup


def desk(**train: Any) -> RunContext:
    recipe = check(
        {
            "seed": 5,
            "data": {"path": "photos", "workers": 0, "cache": train.pop("cache", "none")},
            "view": {"size": 16, "resize": 16, "scale": [0.6, 1.0]},
            "encoder": {"backbone": "small", "dim": 8},
            "train": {"batch": 8, **train},
        }
    )
    return RunContext(recipe, torch.device("cpu"), ProcessGroup(), Silent(), {})


def encoder() -> Encoder:
    torch.manual_seed(0)
    made = build("small", dim=8, size=16)
    for part in made.modules():  # so that evaluation differs from training
        if isinstance(part, torch.nn.BatchNorm2d):
            part.running_mean.normal_()
    return made


def test_members_are_drawn_without_replacement_and_small_classes_take_turns() -> None:
    labels = np.array([2, 0, 2, 2, 0, 2, 5, 2])
    rows = draw_rows(labels, 4, seed=0, key=3).reshape(3, 4)
    assert labels[rows].tolist() == [[0] * 4, [2] * 4, [5] * 4]
    assert sorted(rows[0].tolist()) == [1, 1, 4, 4], "each as often as any other"
    assert len(set(rows[1].tolist())) == 4
    assert set(rows[2].tolist()) == {6}
    assert np.array_equal(rows.ravel(), draw_rows(labels, 4, seed=0, key=3))
    others = [draw_rows(labels, 4, seed, key) for seed, key in ((0, 4), (1, 3))]
    assert not any(np.array_equal(rows.ravel(), other) for other in others)
    counts = np.bincount(np.concatenate([draw_rows(labels, 2, 0, key) for key in range(500)]), minlength=8)
    assert counts[labels == 2] == pytest.approx(200, abs=45), "every member as likely as any other"
    with pytest.raises(ValueError, match="count: got 0, expected at least 1"):
        draw_rows(labels, 0, 0, 0)


@pytest.mark.parametrize("cache", ["none", "memory", "device"])
def test_views_are_a_function_of_seed_rows_and_key(cache: str) -> None:
    images = digits().subset(np.arange(60))
    view = TrainView(16, scale=(0.3, 1.0))

    def feed(**options: Any) -> TrainFeed:
        return TrainFeed(images, Batches(images.labels, 8), view, cache, **options)

    def shown(feed: TrainFeed, key: int = 0, batch: int = 256) -> torch.Tensor:
        parts = list(feed.views(rows, key, batch))
        assert torch.cat([part.labels for part in parts]).tolist() == images.labels[rows].tolist()
        return torch.cat([part.images for part in parts])

    rows = np.array([7, 7, 3, 50, 7])
    first = feed()
    pixels = shown(first)
    assert pixels.shape == (5, 3, 16, 16)
    assert not torch.equal(pixels[0], pixels[1]), "named twice, seen otherwise"
    assert torch.equal(pixels, shown(feed(), batch=2))
    assert torch.equal(pixels, shown(feed(workers=0 if cache == "device" else 1)))
    assert not torch.equal(pixels, shown(first, key=1))
    assert not torch.equal(pixels, shown(feed(seed=1)))
    held = first._cached
    next(first.epoch(0))
    shown(first)
    assert first._cached is held, "one copy of the images serves both"
    assert (held is None) == (cache == "none")


def test_it_is_what_the_encoder_in_evaluation_mode_makes_of_training_views(photos: Path) -> None:
    place, net, images = desk(), encoder(), open_data(photos)
    feed, step = train_feed(place, net, images), 0
    pool = make_pool(place, net, feed)
    random = torch.get_rng_state()
    vectors, labels = pool(3, step)
    assert torch.equal(torch.get_rng_state(), random), "no random number is taken from training"
    assert net.training
    assert all(part.training for part in net.modules())
    assert labels.tolist() == np.repeat(np.arange(10), 3).tolist()
    assert (vectors.dtype, vectors.requires_grad) == (torch.float32, False)
    rows = draw_rows(images.labels, 3, seed=5, key=0)
    (views,) = feed.views(rows, 0)
    with torch.no_grad():
        assert torch.equal(net.eval()(views.images), vectors)
    net.train()
    assert torch.equal(pool(3, step)[0], vectors), "nothing happened in between"
    step = 1
    assert not torch.equal(pool(3, step)[0], vectors)
    with torch.no_grad():
        assert not torch.allclose(net(views.images), vectors), "BatchNorm by the batch would differ"
    net.eval()
    pool(1, step)
    assert not net.training


@pytest.mark.parametrize("cache", ["none", "device"])
def test_images_that_cannot_be_read_are_left_out(cache: str, photos: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(photos, tmp_path / "photos")
    for k in range(8):
        (broken / "class3" / f"{k}.png").write_text("no picture")
    (broken / "class4" / "0.png").write_text("no picture")
    place, net = desk(cache=cache), encoder()
    vectors, labels = make_pool(place, net, train_feed(place, net, open_data(broken)))(8, 0)
    assert torch.bincount(labels).tolist() == [8, 8, 8, 0, 7, 8, 8, 8, 8, 8]
    assert len(vectors) == 71
    assert len(place.bad) == 9
    for file in broken.glob("*/*.png"):
        file.write_text("no picture")
    place = desk(cache=cache)
    with pytest.raises(ValueError, match="data: got 30 random training images, none of which can be read"):
        make_pool(place, net, train_feed(place, net, open_data(broken)))(3, 0)


def test_of_frozen_features_it_is_the_heads(photos: Path, tmp_path: Path) -> None:
    place, net, images = desk(frozen=True), encoder(), open_data(photos)
    feed = train_feed(place, net, images)
    vectors, labels = make_pool(place, net, feed)(2, 0)
    assert labels.tolist() == np.repeat(np.arange(10), 2).tolist()
    features = feed.vectors[draw_rows(images.labels, 2, seed=5, key=0)]
    with torch.no_grad():
        assert torch.equal(net.head(features), vectors)
        net.head.weight.mul_(2)
    assert not torch.equal(make_pool(place, net, feed)(2, 0)[0], vectors), "by the head as it is now"


def test_a_large_pool_comes_in_parts(tmp_path: Path) -> None:
    root, random = tmp_path / "photos", np.random.default_rng(0)
    for c in range(3):
        (root / f"c{c}").mkdir(parents=True)
        for k in range(2):
            Image.fromarray(random.integers(0, 255, (16, 16, 3), np.uint8)).save(root / f"c{c}" / f"{k}.png")
    seen: list[tuple[int, int]] = []

    class Watches(Silent):
        def work(self, what: str, done: int, total: int) -> None:
            seen.append((done, total))

    place, net = desk(cache="device"), encoder()
    place.watcher = Watches()
    vectors, labels = make_pool(place, net, train_feed(place, net, open_data(root)))(100, 0)
    assert torch.bincount(labels).tolist() == [100] * 3
    assert seen == [(256, 300), (300, 300)]
    assert len(vectors.unique(dim=0)) > 250, "two images a class, each time seen otherwise"
