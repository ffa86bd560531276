"""Remarks on the trained and the untrained encoder: differences, intervals, epoch 0, and what to try."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from proxymetric.data import ImageSet
from proxymetric.metrics import evaluate
from proxymetric.runs.comparison import compare, remarks
from proxymetric.runs.result import Result
from proxymetric.runs.score import EmbeddedSet
from training_runs import run

RECIPE = {"train": {"lr": None, "frozen": True}}


def embedded(noise: float, classes: int = 12, images: int = 6) -> EmbeddedSet:
    generator = torch.Generator().manual_seed(3)
    labels = torch.arange(classes).repeat_interleave(images)
    vectors = torch.randn(classes, 8, generator=generator)[labels]
    vectors = vectors + noise * torch.randn(len(labels), 8, generator=generator)
    pictures = np.zeros((len(labels), 8, 8), np.uint8)
    dots = ImageSet("dots", labels.numpy(), [f"c{c}" for c in range(classes)], arrays=pictures)
    return EmbeddedSet(dots, vectors, np.arange(len(labels)))


def test_scores_are_those_of_evaluate():
    near, far = embedded(0.4), embedded(2.0)
    comparison = compare(near, far, ("R@1", "MAP@R", "NMI"))
    for name, each in (("trained encoder", near), ("untrained encoder", far)):
        assert comparison.rows[name] == pytest.approx(evaluate(each.vectors, each.labels, ("R@1", "MAP@R", "NMI")))
    assert comparison.differences["NMI"].low is None, "no interval of what is no mean over queries"


@pytest.mark.parametrize(
    ("after", "before", "words"), [(0.4, 2.0, "training gained +"), (2.0, 0.4, "worse"), (1, 1, "not better")]
)
def test_a_gain_and_a_loss_are_said(after, before, words):
    comparison = compare(embedded(after), embedded(before), ("R@1", "MAP@R"))
    assert all(words in sentence for sentence in comparison.verdict())
    assert comparison.helped == (words == "training gained +")
    for difference in comparison.differences.values():
        assert difference.low <= difference.value <= difference.high


def test_the_interval_of_a_difference_is_paired():
    """For nearly equal encoders, the interval of the difference is narrower than that of either score."""
    near = embedded(1.0)
    shaken = near._replace(
        vectors=near.vectors + 0.01 * torch.randn(len(near.vectors), 8, generator=torch.Generator().manual_seed(5))
    )
    comparison = compare(shaken, near, ("MAP@R",))
    low, high = comparison.intervals["trained encoder"]["MAP@R"]
    difference = comparison.differences["MAP@R"]
    assert difference.high - difference.low < (high - low) / 3


def test_few_classes_have_no_intervals():
    comparison = compare(embedded(0.4, classes=4), embedded(2.0, classes=4), ("R@1",))
    assert not comparison.has_intervals
    assert comparison.verdict()[-1] == "no intervals: 4 classes are too few, expected at least 5"


def rows(before: dict[str, float], after: dict[str, float], pixels: float = 0.0) -> dict[str, dict[str, float]]:
    return {"raw pixels": {"MAP@R": pixels}, "untrained encoder": before, "trained encoder": after}


def test_a_result_that_is_worse_says_so_and_what_to_try():
    worse = Result(
        rows=rows({"MAP@R": 0.384}, {"MAP@R": 0.268}, 0.62), recipe=RECIPE, chosen_epoch=2, chosen_by="MAP@R"
    )
    assert remarks(worse) == [
        "raw pixels score higher than the trained encoder: 62.0 MAP@R",
        "the trained encoder is worse than the untrained one: -11.6 MAP@R",
        "try another learning rate (--lr 0.0001 or 0.01), training the backbone too (without --frozen), and more "
        "training classes",
    ]
    better = Result(rows=rows({"MAP@R": 0.2, "R@1": 0.5}, {"MAP@R": 0.3, "R@1": 0.6}), recipe=RECIPE, chosen_epoch=2)
    assert remarks(better) == []
    mixed = Result(rows=rows({"MAP@R": 0.2, "R@1": 0.5}, {"MAP@R": 0.3, "R@1": 0.4}), recipe=RECIPE, chosen_epoch=2)
    assert remarks(mixed) == ["training raised MAP@R, but these metrics fell: R@1 50.0 to 40.0"]


@pytest.mark.usefixtures("only_training")
def test_a_run_that_chose_epoch_0_says_that_nothing_was_trained(photos, tmp_path):
    result = run(photos, tmp_path / "run", train__frozen=True, train__lr=1e-12, train__epochs=1).result
    assert result.chosen_epoch == 0
    sentences = remarks(result)
    assert sentences[0].startswith("epoch 0 was chosen: no epoch scored higher than the model before training")
    assert "untrained backbone with a new, random head" in sentences[0]


@pytest.mark.parametrize("kind", ["plain", "distractors", "differs"])
def test_an_error_rate_lies_in_its_interval(kind: str) -> None:
    """The interval is that of the pairs that are compared, whatever the set leaves out."""
    found = embedded(2.0, classes=30, images=3)
    count = len(found.kept)
    pictures = replace(found.images, columns={"camera": np.array([str(i % 3 % 2) for i in range(count)])})
    vectors = found.vectors
    if kind == "distractors":
        pictures = replace(pictures, distractors=np.arange(count) % 3 == 2)
    if kind == "differs":  # one camera sees everything displaced: pairs of one camera are much more alike
        vectors = vectors + 3 * torch.from_numpy(pictures.columns["camera"] == "0")[:, None]
    given = EmbeddedSet(pictures, vectors, found.kept, "camera" if kind == "differs" else None)
    comparison = compare(given, None, ["EER"])
    low, high = comparison.intervals["trained encoder"]["EER"]
    assert low < comparison.rows["trained encoder"]["EER"] < high
    if kind == "distractors":  # all pairs are compared, as without distractors
        plain = compare(found, None, ["EER"])
        assert (low, high) == plain.intervals["trained encoder"]["EER"]
