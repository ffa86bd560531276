"""Images that are decoded once for several feeds: the same pixels, fewer decodings, nothing kept outside."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import write_photos
from proxymetric.data import Batches, EvalFeed, EvalView, ImageSet, TrainFeed, TrainView, open_data
from proxymetric.data.decoded_cache import keep_decoded

VIEW = TrainView(12, resize=14, crop="random")


@pytest.fixture
def images(tmp_path: Path) -> ImageSet:
    write_photos(tmp_path / "data", classes=4, images=5, size=20)
    (tmp_path / "data" / "class1" / "3.png").write_bytes(b"no image")
    return open_data(tmp_path / "data")


def epoch(images: ImageSet, cache: str, bad: list[str] | None = None) -> torch.Tensor:
    feed = TrainFeed(
        images, Batches(images.labels, batch=4), VIEW, cache, workers=2 if cache != "none" else 0,
        on_bad=lambda title, reason: (bad if bad is not None else []).append(title),
    )  # fmt: skip
    return torch.cat([batch.images for batch in feed.epoch(0)])


def squares(images: ImageSet, cache: str) -> tuple[torch.Tensor, np.ndarray, dict[str, str]]:
    feed = EvalFeed(images, EvalView(12, resize=14), batch=3, cache=cache)
    return torch.cat([batch.images for batch in feed]), feed.kept, feed.bad


@pytest.mark.parametrize("cache", ["memory", "device"])
def test_training_batches_are_the_same(images, cache):
    alone, first_bad, second_bad = epoch(images, cache), [], []
    with keep_decoded() as kept:
        first, decodings = epoch(images, cache, first_bad), kept.decodings
        second = epoch(images, cache, second_bad)
    assert torch.equal(first, alone)
    assert torch.equal(second, alone)
    assert decodings == kept.decodings == 20
    assert first_bad == second_bad == [str(images.paths[8])]


@pytest.mark.parametrize("cache", ["memory", "device"])
def test_evaluation_squares_are_the_same(images, cache):
    alone = squares(images, cache)
    with keep_decoded() as kept:
        for _ in range(2):
            found = squares(images, cache)
            assert torch.equal(found[0], alone[0])
            assert found[1].tolist() == alone[1].tolist()
            assert found[2] == alone[2]
            assert len(found[2]) == 1
    assert kept.decodings == 20


def test_other_subsets_decode_only_what_is_new(images):
    with keep_decoded() as kept:
        epoch(images.of_classes([0, 1, 2]), "memory")
        assert kept.decodings == 15
        epoch(images.of_classes([3, 1]), "memory")
        assert kept.decodings == 20


def test_another_size_and_another_file_are_decoded_anew(images):
    with keep_decoded() as kept:
        epoch(images, "memory")
        squares(images, "memory")
        assert kept.decodings == 40
        images.paths[0].write_bytes(images.paths[1].read_bytes())
        changed = epoch(images, "memory")
        assert kept.decodings == 41
    assert torch.equal(changed, epoch(images, "memory"))


def test_past_the_limit_nothing_is_kept(images):
    with keep_decoded(limit=2 * 14 * 14 * 3) as kept:
        epoch(images, "memory")
        assert kept.used == 2 * 14 * 14 * 3
        before = kept.decodings
        epoch(images, "memory")
        assert kept.decodings - before == 17  # all but the two, and the one that cannot be read


def test_files_that_are_read_every_time_are_not_kept(images):
    with keep_decoded() as kept:
        epoch(images, "none")
        squares(images, "none")
    assert kept.decodings == 0
