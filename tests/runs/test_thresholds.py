"""Thresholds of a run: chosen on its held-out classes, stored, drawn, and used wherever lower is better."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import proxymetric as pm
from proxymetric.data import ImageSet
from proxymetric.data.splits import some_classes
from proxymetric.metrics import verification
from proxymetric.plots.report import _table
from proxymetric.runs import thresholds as module
from proxymetric.runs.comparison import Difference, compare, verdict
from proxymetric.runs.result import TRAINED, UNTRAINED, Result
from proxymetric.runs.score import EmbeddedSet
from proxymetric.runs.thresholds import held_out_thresholds
from proxymetric.search.run_knowledge import run_knowledge
from proxymetric.studies.search import selection_score
from terminal import finished_run


def embedded(number: int = 8, images: int = 5, noise: float = 0.5) -> EmbeddedSet:
    generator = torch.Generator().manual_seed(0)
    labels = np.repeat(np.arange(number), images)
    vectors = torch.randn(number, 6, generator=generator)[torch.from_numpy(labels)]
    vectors = vectors + noise * torch.randn(len(labels), 6, generator=generator)
    pictures = ImageSet(
        "dots", labels, [f"c{c}" for c in range(number)], arrays=np.zeros((len(labels), 4, 4), np.uint8)
    )
    return EmbeddedSet(pictures, vectors, np.arange(len(labels)))


def test_thresholds_are_those_of_the_pairs(tmp_path):
    held_out = embedded()
    found = held_out_thresholds(held_out)
    expected = verification(held_out.vectors, held_out.labels, module.FALSE_MATCH_RATES)
    assert (found["genuine"], found["impostor"]) == expected.pairs
    assert found["eer"][0] == expected.eer
    for point in found["points"]:
        threshold, fmr, fnmr = expected.points[point["asked"]]
        assert (point["threshold"][0], point["fmr"], point["fnmr"][0]) == (threshold, fmr, fnmr)
        assert point["threshold"][1] <= point["threshold"][2]
    places, fmr, fnmr = found["roc"]
    assert places == sorted(places)
    assert (fmr[0], fnmr[-1]) == (1.0, 1.0)
    assert json.loads(json.dumps(found)) == found
    page = pm.plots.write_report(
        tmp_path / "a.html", title="a", facts={}, table=[], curve=[], gallery=[], scatter=None, notes=[],
        thresholds=found,
    ).read_text()  # fmt: skip
    assert "Same class or not" in page
    assert f"{found['points'][1]['threshold'][0]:.3f}" in page
    assert "All pairs of 40 images of 8 held-out classes" in page
    assert held_out_thresholds(embedded(number=4)) is None, "too few classes"
    assert held_out_thresholds(embedded(images=1)) is None, "no genuine pair"


def test_of_many_images_whole_classes_are_drawn():
    labels = np.repeat(np.arange(8), 5)
    rows = some_classes(labels, 32, seed=0)
    assert np.unique(labels[rows], return_counts=True)[1].tolist() == [5] * 6
    assert (np.diff(rows) > 0).all()
    assert not np.array_equal(rows, some_classes(labels, 32, seed=1))
    assert len(some_classes(labels, 3, seed=0, fewest=5)) == 25


def test_a_run_stores_its_thresholds_and_held_out_vectors(photos, tmp_path):
    """An error rate can choose the epoch: the lowest value is the best one."""
    run = finished_run(
        photos, tmp_path / "run", "--epochs", 3, "--set", "data.validation=0.5", "--set",
        "train.metrics=['R@1', 'EER', 'FNMR@FMR=0.1']", "--set", "train.monitor=EER",
    )  # fmt: skip
    result = Result.read(run / "result.json")
    assert result.thresholds is not None
    knowledge = run_knowledge(run)
    description = json.loads((run / "run.json").read_text())
    assert knowledge.trained == description["classes"]
    assert not set(knowledge.labels) & set(knowledge.trained)
    assert len(set(knowledge.labels)) == result.data["validation"]["classes"] == result.thresholds["classes"]
    found = verification(knowledge.vectors, knowledge.labels)
    assert found.eer == pytest.approx(result.thresholds["eer"][0], abs=1e-6)
    assert result.validation["EER"] == min(record["EER"] for record in result.curve)
    assert result.validation["EER"] == pytest.approx(found.eer, abs=1e-6), "the best model was embedded"
    assert selection_score(result) == -result.validation["EER"]
    assert 0 < result.scores["FNMR@FMR=0.1"] < 1


def test_lower_is_better_wherever_a_best_is_chosen_or_told():
    good, bad = embedded(noise=0.4), embedded(noise=1.2)
    comparison = compare(good, bad, ["EER", "R@1"])
    assert comparison.rows[TRAINED]["EER"] < comparison.rows[UNTRAINED]["EER"]
    low, high = comparison.intervals[TRAINED]["EER"]
    assert low < comparison.rows[TRAINED]["EER"] < high
    difference = comparison.differences["EER"]
    assert difference.low < difference.value < difference.high < 0
    assert compare(good, bad, ["EER"]).verdict()[0].startswith("training lowered the error: -")
    assert "worse" in compare(bad, good, ["EER"]).verdict()[0]
    assert "not clearly better" in verdict("EER", Difference(-0.01, -0.03, 0.01))
    html = _table([{"name": "a", "EER": 0.2, "R@1": 0.5}, {"name": "b", "EER": 0.1, "R@1": 0.6}])
    assert "<strong>10.0</strong>" in html
    assert "<strong>20.0</strong>" not in html
    assert html.count('class="badge"') == 1
