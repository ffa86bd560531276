"""A finished run without thresholds, as earlier versions wrote it, gets them from `evaluate`, or a reason why not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from proxymetric.search.run_knowledge import HELD_OUT, run_knowledge
from proxymetric.system.files import read_json, write_json
from proxymetric.system.lock import locked
from terminal import bytes_of, finished_run, proxymetric

HALF = ("--set", "data.validation=0.5")
EVALUATE = ("--metrics", "R@1", "--no-untrained", "--no-report")


@pytest.fixture(scope="module")
def run(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of VCPA with five held-out classes. Only read it."""
    return finished_run(photos, tmp_path_factory.mktemp("runs") / "vcpa", *HALF, "--method", "vcpa")


@pytest.fixture(scope="module")
def others(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few other images."""
    folder = tmp_path_factory.mktemp("data") / "others"
    for number in range(2):
        shutil.copytree(photos / f"class{number}", folder / f"other{number}")
    return folder


def without_thresholds(run: Path, folder: Path) -> Path:
    """A copy of a run, as an earlier version would have left it."""
    shutil.copytree(run, folder)
    (folder / HELD_OUT).unlink(missing_ok=True)
    result = read_json(folder / "result.json")
    result.pop("thresholds", None)
    write_json(folder / "result.json", result)
    return folder


@pytest.mark.parametrize("other_data", [False, True])
def test_evaluate_writes_what_train_would_have_written(run, others, tmp_path, other_data):
    earlier = without_thresholds(run, tmp_path / "earlier")
    words = ("--data", others) if other_data else ()
    answer = proxymetric("evaluate", earlier, *EVALUATE, *words)
    assert answer.code == 0, answer
    assert "the run had no thresholds; chosen on its 5 held-out classes, at false-match" in answer.out
    assert read_json(earlier / "result.json") == read_json(run / "result.json")
    ours, theirs = run_knowledge(earlier), run_knowledge(run)
    torch.testing.assert_close(ours.vectors, theirs.vectors)
    assert (ours.labels, ours.trained, ours.uncertainty) == (theirs.labels, theirs.trained, theirs.uncertainty)
    assert len(ours.uncertainty) == 5
    before = bytes_of(earlier)
    answer = proxymetric("evaluate", earlier, *EVALUATE)
    assert "thresholds" not in answer.out
    assert bytes_of(earlier) == before


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("unfinished", "no thresholds: the run is not finished"),
        ("no held-out classes", "no thresholds: the run held no classes out of its training"),
        ("last", "no thresholds: they belong to the model of the chosen epoch; `evaluate --which best` writes them"),
        ("other data", "are not those that the run was trained with"),
        ("no data", "no thresholds: data: got"),
        ("in use", "in use by process"),
        ("few", "no thresholds: fewer than 5 held-out classes have two images or more"),
        ("damaged", "no thresholds: "),
        ("refitted", "no thresholds: the model was refitted, and its held-out classes were trained on then"),
    ],
)
def test_evaluate_says_why_a_run_gets_no_thresholds(run, photos, others, tmp_path, change, reason):
    earlier, words = tmp_path / "earlier", ["--data", others]
    if change in ("few", "refitted"):
        half = HALF if change == "refitted" else ()
        earlier = finished_run(photos, earlier, *half, *(["--refit"] if change == "refitted" else []))
    else:
        without_thresholds(run, earlier)
    description = read_json(earlier / "run.json")
    if change == "unfinished":
        (earlier / "result.json").unlink()
    elif change == "no held-out classes":
        description["recipe"]["data"]["validation"] = 0
    elif change == "damaged":
        (earlier / "result.json").write_text("null")
    elif change == "last":
        words += ["--which", "last"]
    elif change == "other data":
        description["recipe"]["data"]["path"] = str(others)
    elif change == "no data":
        description["recipe"]["data"]["path"] = str(tmp_path / "gone")
    write_json(earlier / "run.json", description)
    before = bytes_of(earlier)
    if change == "in use":
        with locked(earlier):
            answer = proxymetric("evaluate", earlier, *EVALUATE, *words)
    else:
        answer = proxymetric("evaluate", earlier, *EVALUATE, *words)
    assert answer.code == 0, answer
    assert reason in answer.out
    assert bytes_of(earlier) == before


@pytest.mark.parametrize("words", [(*HALF, "--refit"), ("--set", "data.validation=0")])
def test_a_model_that_was_trained_on_all_classes_keeps_their_uncertainty(photos, tmp_path, words):
    run = finished_run(photos, tmp_path / "run", "--method", "vcpa", *words)
    knowledge = run_knowledge(run)
    assert sorted(knowledge.uncertainty) == sorted(knowledge.trained) == [f"class{c}" for c in range(10)]
    assert not knowledge.labels
    assert "thresholds" not in json.loads((run / "result.json").read_text())
