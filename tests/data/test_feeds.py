"""Feeds: batches do not depend on workers, cache and earlier epochs; unreadable files are named and left out."""

import io
import multiprocessing
import threading

import numpy as np
import pytest
import torch
from PIL import Image

from proxymetric.data import Batches, EvalFeed, EvalView, TrainFeed, TrainView, open_data

CACHES = ("none", "memory", "device")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Five classes of eight pictures, three of the forty broken: cut short, text, empty."""
    root = tmp_path_factory.mktemp("photos")
    random = np.random.default_rng(0)
    for c in range(5):
        (root / f"c{c}").mkdir()
        for k in range(8):
            coarse = random.integers(0, 256, (5, 6, 3), dtype=np.uint8)
            image = Image.fromarray(coarse).resize((40 + 3 * k, 60 - 2 * c), Image.Resampling.BICUBIC)
            image.save(root / f"c{c}" / f"{k}.jpg", quality=95)
    noise = Image.fromarray(random.integers(0, 256, (64, 64, 3), dtype=np.uint8))
    buffer = io.BytesIO()
    noise.save(buffer, "JPEG")
    (root / "c0" / "2.jpg").write_bytes(buffer.getvalue()[:2000])
    (root / "c1" / "5.jpg").write_text("dear diary")
    (root / "c4" / "0.jpg").write_bytes(b"")
    return root


@pytest.fixture(scope="module")
def images(folder):
    return open_data(folder)


BROKEN = {"c0/2.jpg", "c1/5.jpg", "c4/0.jpg"}


def feed(images, cache="none", workers=0, view=None, **batches):
    view = view or TrainView(24, resize=32, scale=(0.4, 1.0))
    return TrainFeed(images, Batches(images.labels, **{"batch": 12, **batches}), view, cache, workers=workers, seed=3)


def equal(ours, others):
    ours, others = list(ours), list(others)
    assert len(ours) == len(others) > 0
    for one, other in zip(ours, others):
        assert torch.equal(one.labels, other.labels)
        assert torch.equal(one.images, other.images)


@pytest.mark.parametrize("cache", ["none", "memory"])
def test_workers_make_the_same_batches_and_report_the_same_bad_ones(images, cache):
    alone, helped = feed(images, cache), feed(images, cache, workers=2)
    state = torch.get_rng_state()
    equal(alone.epoch(1), helped.epoch(1))
    assert alone.bad == helped.bad
    assert torch.equal(state, torch.get_rng_state()), "the feed took a number from the global generator"


def test_memory_cache_changes_nothing_when_the_view_resizes(images):
    equal(feed(images).epoch(0), feed(images, "memory").epoch(0))


@pytest.mark.parametrize("resize", [32, None])
def test_device_cache_cuts_the_same_boxes(images, resize):
    view = TrainView(24, resize=resize, scale=(0.4, 1.0))
    for one, other in zip(feed(images, "memory", view=view).epoch(0), feed(images, "device", view=view).epoch(0)):
        assert torch.equal(one.labels, other.labels)
        # a batch cut with other boxes differs by 40 grey levels and more
        assert (one.images.int() - other.images.int()).abs().float().mean() < 4


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("per_class", [None, 3])
def test_an_epoch_taken_up_in_the_middle(images, cache, per_class):
    whole = list(feed(images, cache, per_class=per_class).epoch(2))
    equal(feed(images, cache, per_class=per_class).epoch(2, start=1), whole[1:])
    again = list(feed(images, cache, per_class=per_class).epoch(3))
    assert not torch.equal(torch.cat([b.images for b in whole])[:20], torch.cat([b.images for b in again])[:20])


@pytest.mark.parametrize("cache", CACHES)
def test_ranks_together_see_what_one_process_sees(images, cache):
    ranks = [list(feed(images, cache, rank=r, world=3).epoch(0)) for r in range(3)]
    for step, whole in enumerate(feed(images, cache).epoch(0)):
        assert torch.equal(whole.labels, torch.cat([rank[step].labels for rank in ranks]))
        assert torch.equal(whole.images, torch.cat([rank[step].images for rank in ranks]))


def test_repeated_images_of_a_small_class_are_cut_differently(images):
    few = images.of_classes([2, 3])
    view = TrainView(24)
    source = TrainFeed(few, Batches(few.labels, batch=32, per_class=16), view)
    squares = next(source.epoch(0)).images.flatten(1)
    assert len(torch.unique(squares, dim=0)) == 32


@pytest.mark.parametrize("cache", CACHES)
def test_bad_images_are_left_out_named_once_and_counted(images, folder, cache):
    told = []
    batches = Batches(images.labels, batch=10)
    view = TrainView(24)
    source = TrainFeed(images, batches, view, cache, on_bad=lambda title, reason: told.append((title, reason)))
    broken = [i for i in range(len(images)) if str(images.paths[i].relative_to(folder)) in BROKEN]
    for number in range(2):
        for batch, indices in zip(source.epoch(number), batches.epoch(number), strict=True):
            good = indices[~np.isin(indices, broken)]
            assert batch.labels.tolist() == images.labels[good].tolist()
            assert len(batch.images) == len(good)
    assert {title.removeprefix(f"{folder}/") for title in source.bad} == BROKEN
    assert sorted(told) == sorted(source.bad.items())
    assert source.bad[str(folder / "c4" / "0.jpg")] == "the file is empty"


@pytest.mark.parametrize("cache", CACHES)
def test_a_batch_without_any_readable_image_is_empty(tmp_path, cache):
    for name in ("a/1.jpg", "a/2.jpg", "b/1.jpg", "b/2.jpg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("nothing")
    images = open_data(tmp_path)
    batches = list(TrainFeed(images, Batches(images.labels, 2), TrainView(16), cache).epoch(0))
    assert [tuple(b.images.shape) for b in batches] == [(0, 3, 16, 16)] * 2
    assert [tuple(b.labels.shape) for b in batches] == [(0,)] * 2
    evaluation = EvalFeed(images, EvalView(16), cache=cache)
    assert list(evaluation) == []
    assert len(evaluation.kept) == 0
    assert len(evaluation.bad) == 4


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("cache", CACHES)
def test_evaluation_gives_all_readable_images_in_order_every_time(images, folder, cache, workers):
    view = EvalView(24)
    source = EvalFeed(images, view, batch=7, cache=cache, workers=workers)
    first = list(source)
    equal(first, source)
    kept = [i for i in range(40) if str(images.paths[i].relative_to(folder)) not in BROKEN]
    assert source.kept.tolist() == kept
    assert torch.cat([b.labels for b in first]).tolist() == images.labels[kept].tolist()
    assert torch.equal(torch.cat([b.images for b in first]), torch.stack([view(images.read(i)) for i in kept]))
    assert len(source.bad) == 3


def test_a_pass_that_is_broken_off_is_not_cached(images):
    source = EvalFeed(images, EvalView(24), batch=7, cache="memory")
    next(iter(source))
    assert sum(len(b.labels) for b in source) == 37


def test_cache_is_read_once(images, folder):
    source = feed(images, "memory")
    before = list(source.epoch(0))
    other = folder / "c2" / "0.jpg"
    content = other.read_bytes()
    try:
        other.write_bytes(b"gone")
        equal(source.epoch(0), before)
    finally:
        other.write_bytes(content)


def started(batches) -> tuple[int, int]:
    """Take a batch and return how many processes and reading threads have begun."""
    processes, threads = set(multiprocessing.active_children()), set(threading.enumerate())
    next(batches)
    new_threads = [thread.name for thread in threading.enumerate() if thread not in threads]
    count = len(set(multiprocessing.active_children()) - processes)
    batches.close()
    return count, sum(name.startswith("read-ahead") for name in new_threads)


def test_only_workers_that_are_asked_for_are_processes(images):
    view, eval_view = TrainView(24, resize=32), EvalView(24)
    assert started(TrainFeed(images, Batches(images.labels, 12), view).epoch(0)) == (0, 0)
    assert started(TrainFeed(images, Batches(images.labels, 12), view, workers=1).epoch(0)) == (1, 0)
    assert started(iter(EvalFeed(images, eval_view, batch=12))) == (0, 0)
    # The device "meta" stands for an accelerator: it needs no hardware.
    assert started(iter(EvalFeed(images, eval_view, batch=12, device="meta", workers=1))) == (1, 0)


def test_an_evaluation_on_the_cpu_reads_in_threads(images):
    assert started(iter(EvalFeed(images, EvalView(24), batch=12, workers=2))) == (0, 2)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("read-ahead")]


def test_feeds_that_are_refused(images):
    with pytest.raises(ValueError, match="cache: got 'disk', expected one of none, memory, device"):
        feed(images, "disk")
    with pytest.raises(ValueError, match="workers: got -1, expected at least 0"):
        feed(images, workers=-1)
    with pytest.raises(ValueError, match="got batches for 40 images, expected 8"):
        TrainFeed(images.of_classes([0]), Batches(images.labels, 4), TrainView(16))
    with pytest.raises(ValueError, match="batch: got 0, expected at least 1"):
        EvalFeed(images, EvalView(16), batch=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_device_cache_on_the_accelerator_is_the_one_on_the_cpu(images):
    view = TrainView(24, resize=32, scale=(0.4, 1.0))
    batches = Batches(images.labels, 12)
    there = TrainFeed(images, batches, view, "device", device="cuda", seed=3)
    for one, other in zip(feed(images, "device").epoch(0), there.epoch(0), strict=True):
        assert other.images.is_cuda
        assert (one.images.int() - other.images.cpu().int()).abs().max() <= 1
