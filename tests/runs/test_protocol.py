"""Protocols by name: which classes are trained on, which choose the epoch, and how the scores are labelled."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from no_forms import no_forms
from proxymetric.cli import app
from proxymetric.data import ImageSet, open_data, split
from proxymetric.data.splits import altered
from proxymetric.runs import recipe as recipes
from proxymetric.runs.evaluation_set import evaluation_set, seen_set
from training_runs import LEARNING, run

LEARN = {**LEARNING, "data__test": 0.3, "train__epochs": 4}
del LEARN["data__validation"]


def test_papers_scores_the_test_classes_at_every_evaluation_and_reports_best_and_last(letters, tmp_path, monkeypatch):
    monkeypatch.setattr("proxymetric.runs.session.closed_form_rows", no_forms)
    done = run(letters, tmp_path / "run", protocol="papers", **LEARN)
    result = done.result
    assert result.protocol == result.recipe["protocol"] == "papers"
    assert "validation" not in result.data
    assert result.chosen_by == "R@1"
    best = max(result.curve, key=lambda record: record["R@1"])
    assert result.chosen_epoch == best["epoch"]
    for name in ("R@1", "MAP@R"):
        assert done.scores[name] == pytest.approx(best[name])
        assert result.rows["last epoch"][name] == result.curve[-1][name]
    images, words = evaluation_set(done.folder)
    assert len(images.classes) == result.data["test"]["classes"]
    assert "epoch chosen on the test half" in words
    assert "epoch chosen on the test half" in (done.folder / "report.html").read_text()


@pytest.mark.usefixtures("only_training")
def test_last_trains_on_all_classes_for_the_epochs_asked(letters, tmp_path):
    held_out = run(letters, tmp_path / "held-out", protocol="held-out", **LEARN).result
    last = run(letters, tmp_path / "last", protocol="last", **LEARN, train__patience=1).result
    classes = {part: held_out.data[part]["classes"] for part in ("train", "validation", "test")}
    assert last.data["train"]["classes"] == classes["train"] + classes["validation"]
    assert last.data["test"]["classes"] == classes["test"]
    assert (last.chosen_by, last.chosen_epoch, last.epochs) == ("last", 4, 4)
    assert last.recipe["train"]["patience"] is None


@pytest.mark.usefixtures("only_training")
def test_the_untrained_model_is_a_candidate(letters, tmp_path):
    """The learning rate is so high that no epoch is as good as the untrained model."""
    settings = {**LEARNING, "train__lr": 10.0, "train__epochs": 3, "data__validation": 0.3, "data__test": 0.3}
    done = run(letters, tmp_path / "run", **settings)
    scores = [record["MAP@R"] for record in done.result.curve]
    assert max(scores[1:]) < scores[0]
    assert done.result.chosen_epoch == 0
    assert done.load() is not None
    refitted = run(letters, tmp_path / "refit", **settings, train__refit=True)
    assert refitted.result.refit is None
    assert refitted.scores == pytest.approx(done.scores)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"protocol": "paper"},
            r"protocol: got 'paper', expected one of held-out, last, papers, mlrc; did you mean 'papers'\?",
        ),
        ({"protocol": "papers", "train__refit": True}, "train.refit: got true with protocol 'papers'"),
        ({"protocol": "papers", "data__test": "none"}, "chooses the epoch on the test classes, but photos has none"),
        ({"protocol": "last", "method": "ccp"}, "got 'ccp', which needs held-out classes during the whole training"),
        ({"data__fraction": 0.0}, "data.fraction: got 0.0, expected a number above 0"),
        ({"data__wrong_labels": 1.0}, "data.wrong_labels: got 1.0, expected a number of at least 0"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(photos: Path, tmp_path: Path, settings, message):
    with pytest.raises(ValueError, match=message):
        run(photos, tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists()


def test_the_command_line_labels_scores_of_papers(letters, tmp_path, monkeypatch):
    monkeypatch.setattr("proxymetric.runs.session.closed_form_rows", no_forms)
    words = ["train", "--data", str(letters), "--out", str(tmp_path / "run"), "--protocol", "papers", "--no-report"]
    words += ["--backbone", "small", "--frozen", "--epochs", "1", "--set", "data.test=0.3", "--set", "view.size=16"]
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0, shown.output
    assert re.search(r"18 test classes \(180 images\): R@1", shown.output)
    assert " ".join(shown.output.split()).count("epoch chosen on the test half") == 2
    assert not (tmp_path / "run" / "report.html").exists()


def test_a_recipe_file_may_name_its_protocol(tmp_path):
    checked = recipes.check({"protocol": "papers", "data": {"validation": 0.2}, "train": {"patience": 3}})
    assert (checked.data.validation, checked.train.patience, checked.train.monitor) == (0.0, None, "R@1")
    kept = recipes.check({"protocol": "papers", "train": {"monitor": "MAP@R"}})
    assert kept.train.monitor == "MAP@R"


@pytest.mark.usefixtures("only_training")
def test_results_say_schema_and_commit(photos: Path, tmp_path: Path):
    run(photos, tmp_path / "run", train__epochs=1)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["schema"] == 2
    assert result["commit"] is None or len(result["commit"].removesuffix("+changes")) == 40
    assert result["images_per_second"] > 0


def test_a_share_of_each_class_and_wrong_labels_are_drawn_by_the_seed():
    images = ImageSet("dots", np.repeat(np.arange(5), 20), list("abcde"), arrays=np.zeros((100, 8, 8), np.uint8))
    fewer = altered(images, fraction=0.25, seed=3)
    assert np.bincount(fewer.labels).tolist() == [5] * 5
    assert np.bincount(altered(images, fraction=0.01).labels).tolist() == [2] * 5
    wrong = altered(images, wrong_labels=0.2, seed=3)
    assert (wrong.labels != images.labels).sum() == 20
    assert (altered(images, wrong_labels=0.2, seed=3).labels == wrong.labels).all()
    assert (altered(images, wrong_labels=0.2, seed=4).labels != wrong.labels).any()
    assert altered(images) is images


@pytest.mark.usefixtures("only_training")
def test_the_images_that_a_run_was_trained_on_are_those_that_it_saw(photos: Path, tmp_path: Path) -> None:
    done = run(photos, tmp_path / "run", data__fraction=0.5, data__wrong_labels=0.2)
    trained_on, note = evaluation_set(done.folder, part="train")
    assert len(trained_on) == len(seen_set(done.folder)) == done.result.data["train"]["images"]
    parts = split(open_data(photos), done.result.recipe["data"]["validation"], done.result.recipe["data"]["test"])
    assert len(trained_on) < len(parts.train)
    assert np.array_equal(trained_on.labels, seen_set(done.folder).labels)
    assert note == "all of them trained on"
