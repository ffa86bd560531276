"""Class-disjoint splits, and batches."""

import numpy as np
import pytest

from proxymetric.data import Batches, ImageSet, split


def images_of(*counts: int, test: tuple[int, ...] = ()) -> ImageSet:
    labels = np.repeat(np.arange(len(counts)), counts)
    names = [f"c{k}" for k in range(len(counts))]
    return ImageSet("dots", labels, names, arrays=np.zeros((len(labels), 4, 4), np.uint8), test_classes=test)


def test_parts_share_no_class_and_lose_none():
    parts = split(images_of(*[3] * 30), validation=0.25, test=0.2, seed=3)
    names = [set(part.classes) for part in parts]
    assert [len(n) for n in names] == [18, 6, 6]
    assert len(set.union(*names)) == 30


def test_seed_moves_validation_but_never_the_test():
    images = images_of(*[3] * 30)
    one, same, two = (split(images, test=0.3, seed=seed) for seed in (0, 0, 1))
    assert one.validation.classes == same.validation.classes
    assert one.validation.classes != two.validation.classes
    assert one.test.classes == two.test.classes


def test_own_split_of_a_benchmark():
    images = images_of(*[2] * 8, test=(1, 5, 6))
    assert split(images).test.classes == ["c1", "c5", "c6"]
    assert split(images, test="none").test is None
    assert split(images_of(*[2] * 8)).test is None
    assert split(images, validation=0).validation is None


def test_single_images_stay_in_training():
    images = images_of(1, 2, 1, 2, 1, 2, 1, 2)
    for seed in range(20):
        parts = split(images, validation=0.25, test=0.25, seed=seed)
        assert {"c0", "c2", "c4", "c6"} <= set(parts.train.classes)


@pytest.mark.parametrize(
    ("counts", "options", "sentence"),
    [
        ((2, 2), {}, "leaves 0 for training"),
        ((2, 2, 2), {}, "leaves 1 for training"),
        (
            (5, 7),
            {},
            "learning needs 4 classes .* are 2 such classes, 12 images together.*`proxymetric serve IMAGES` needs",
        ),
        ((1,) * 9, {}, "here are 0 such classes, 9 images together.*needs neither classes nor training"),
        (
            (1,) * 9,
            {"validation": 0},
            "one image of each of the 9 classes, .* learning needs 4 classes of two",
        ),
        ((2, 2, 1, 1, 1, 1), {"validation": 0.5}, "3 classes of two images or more, .* 2 of the 6"),
        ((2, 1, 1, 1), {"test": 0.2}, "2 classes of two images or more, .* 1 of the 4"),
        ((2, 2, 2, 2), {"validation": 1.0}, "validation: got 1.0, expected a fraction"),
        ((2, 2, 2, 2), {"test": "half"}, "test: got 'half', expected"),
        ((2, 2, 2, 2), {"test": 1.5}, "test: got 1.5, expected"),
    ],
)
def test_splits_that_are_refused(counts, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        split(images_of(*counts), **options)


def test_two_classes_of_which_one_has_two_images_are_trained_on_where_none_are_held_out():
    assert len(split(images_of(2, 1), validation=0).train) == 3


LABELS = np.random.default_rng(0).integers(0, 12, 200)


def test_random_batches_are_a_fresh_permutation_every_epoch():
    batches = Batches(LABELS, batch=24)
    one, two = (np.concatenate(list(batches.epoch(number))) for number in (0, 1))
    assert len(batches) == 8
    assert len(one) == len(set(one.tolist())) == 192
    assert not np.array_equal(one, two)
    everything = np.concatenate(list(Batches(LABELS, batch=24, drop_last=False).epoch(0)))
    assert sorted(everything.tolist()) == list(range(200))
    assert len(Batches(LABELS, batch=24, drop_last=False)) == 9


def test_m_per_class():
    batches = Batches(LABELS, batch=24, per_class=4, seed=5)
    for number in range(3):
        steps = list(batches.epoch(number))
        assert len(steps) == len(batches) == 8
        for indices in steps:
            assert len(set(indices.tolist())) == 24
            assert sorted(np.bincount(LABELS[indices], minlength=12).tolist()) == [0] * 6 + [4] * 6
    drawn = np.concatenate([i for number in range(60) for i in batches.epoch(number)])
    assert set(drawn.tolist()) == set(range(200))


def test_small_classes_repeat_evenly():
    labels = np.array([0, 0, 0, 0, 0, 0, 1, 1, 2])
    for indices in Batches(labels, batch=9, per_class=3).epoch(0):
        times = np.bincount(indices, minlength=9)
        assert sorted(times[6:8].tolist()) == [1, 2]
        assert times[8] == 3
        assert times[:6].max() == 1


@pytest.mark.parametrize("per_class", [None, 2])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_share_the_same_whole_batch(per_class, world):
    alone = list(Batches(LABELS, 24, per_class, seed=1).epoch(4))
    ranks = [list(Batches(LABELS, 24, per_class, seed=1, rank=r, world=world).epoch(4)) for r in range(world)]
    for step, whole in enumerate(alone):
        assert {len(rank[step]) for rank in ranks} == {24 // world}
        assert np.array_equal(np.concatenate([rank[step] for rank in ranks]), whole)


@pytest.mark.parametrize("per_class", [None, 2])
def test_start_is_the_tail_of_the_epoch(per_class):
    batches = Batches(LABELS, 24, per_class)
    whole = list(batches.epoch(2))
    assert np.array_equal(np.stack(list(batches.epoch(2, start=3))), np.stack(whole[3:]))
    assert list(batches.epoch(2, start=8)) == []
    with pytest.raises(ValueError, match=r"start: got 9, expected a step in 0\.\.8"):
        next(batches.epoch(2, start=9))


def test_batch_larger_than_the_set_is_one_batch_of_everything():
    batches = Batches(np.zeros(5, dtype=int), batch=12, world=3, rank=1)
    assert len(batches) == 1
    parts = [next(Batches(np.zeros(5, dtype=int), batch=12, world=3, rank=r).epoch(0)) for r in range(3)]
    assert sorted(np.concatenate(parts).tolist()) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"batch": 25, "world": 2}, "multiple of world"),
        ({"batch": 25, "per_class": 2}, "per_class: got 2, expected a divisor of batch=25"),
        ({"batch": 0}, "positive"),
        ({"batch": 48, "per_class": 2}, "needs 24 classes in every batch, expected at most 12"),
        ({"batch": 8, "rank": 2, "world": 2}, "rank: got 2 with world=2"),
        ({"batch": 8, "seed": -1}, "seed: got -1"),
    ],
)
def test_batches_that_are_refused(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        Batches(LABELS, **options)


@pytest.mark.parametrize("test", ["none", 0.5])
def test_a_split_of_ones_own_ignores_what_comes_with_the_data(test):
    labels = np.repeat(np.arange(10), 4)
    parts = {"test_images": labels >= 5, "gallery": labels % 2 == 0, "distractors": np.arange(40) % 4 == 3}
    images = ImageSet("dots", labels, [f"c{c}" for c in range(10)], arrays=np.zeros((40, 8, 8), np.uint8), **parts)
    for part in split(images, 0.2, test):
        assert part is None or (part.gallery is None and part.distractors is None and part.test_images is None)
