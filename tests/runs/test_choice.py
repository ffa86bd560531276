"""The epoch that the held-out classes choose is saved, loaded, reported and used for the refit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import proxymetric as pm
from proxymetric.data import ImageSet, open_data, split
from proxymetric.runs.train import Run
from proxymetric.system.checkpoint import Checkpoint
from proxymetric.system.watcher import Silent
from training_runs import Notes, Process, command, records, run, same_run, same_tensors, state, until

TIMES = ("training_seconds", "waiting_seconds", "memory", "images_per_second")

pytestmark = pytest.mark.usefixtures("only_training")
LONGER = {"train__epochs": 5, "train__lr": 3e-3, "data__validation": 0.4}
"""four held-out classes that cannot be told apart perfectly, and a rate at which scores go up and down"""


@pytest.fixture(scope="module")
def chosen(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("proxymetric.runs.session.draw_report", lambda *args, **kwargs: None)
        return run(photos, tmp_path_factory.mktemp("chosen") / "run", **LONGER)


def held_out(photos: Path, seed: int = 0) -> ImageSet:
    found = split(open_data(photos), 0.4, "auto", seed).validation
    assert found is not None
    return found


def test_the_loaded_model_scores_what_was_recorded(chosen: Run, photos: Path) -> None:
    curve = chosen.result.curve
    trained = [record for record in curve if record["epoch"] > 0]
    best = max(trained, key=lambda record: record["MAP@R"])
    assert [record["epoch"] for record in curve] == [0, 1, 2, 3, 4, 5]
    assert len({record["MAP@R"] for record in trained}) > 1, "a curve that cannot tell epochs apart shows nothing"
    assert chosen.result.chosen_epoch == best["epoch"]
    images = held_out(photos)
    for which, record in (("best", best), ("chosen", best), ("last", curve[-1])):
        scores = pm.evaluate(pm.load(chosen.folder, which).embed(images), images.labels, ("R@1", "MAP@R"))
        assert scores == {name: record[name] for name in scores}
    assert chosen.result.validation == best
    assert chosen.scores == {name: best[name] for name in ("R@1", "MAP@R")}
    assert Checkpoint.read(chosen.folder / "best.safetensors").state["epoch"] == best["epoch"]


def test_vectors_do_not_depend_on_how_images_are_given(chosen: Run, photos: Path) -> None:
    model, images = chosen.load(), held_out(photos)
    vectors = model.embed(images)
    assert torch.equal(vectors, model.embed(images.paths))
    assert torch.equal(vectors, model.embed([images.read(i) for i in range(len(images))], batch=len(images)))
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(len(images)))
    assert set(model.classes) == {f"class{c}" for c in range(10)} - set(images.classes)


def test_the_untrained_encoder_is_chosen_where_training_does_not_help(photos: Path, tmp_path: Path) -> None:
    # A learning rate of 0 leaves every score unchanged: no epoch is better than the first evaluation.
    still = run(photos, tmp_path / "run", train__lr=0.0, encoder__freeze_bn=True, train__epochs=2)
    assert len({record["MAP@R"] for record in still.result.curve}) == 1
    assert still.result.chosen_epoch == 0


def test_patience_ends_training(photos: Path, tmp_path: Path) -> None:
    still = {"train__lr": 0.0, "encoder__freeze_bn": True, "train__epochs": 9, "train__patience": 2}
    done = run(photos, tmp_path / "run", **still)
    assert done.result.epochs == 2
    assert [record["epoch"] for record in done.result.curve] == [0, 1, 2]
    assert state(done.folder)["done"]
    # A run that stopped early does not continue, unless its patience is increased.
    assert run(photos, tmp_path / "run", resume=True, **still).result.epochs == 2
    assert run(photos, tmp_path / "run", resume=True, **still | {"train__patience": 3}).result.epochs == 3


def test_evaluation_every_second_epoch(photos: Path, tmp_path: Path) -> None:
    done = run(photos, tmp_path / "run", train__evaluate_every=2, train__epochs=3)
    assert [record["epoch"] for record in done.result.curve] == [0, 2, 3], "and after the last"
    straight = run(photos, tmp_path / "straight", train__epochs=3)
    same_tensors(done.folder / "last.safetensors", straight.folder / "last.safetensors")
    # The loss of an evaluation is the mean over all steps since the previous evaluation.
    one, two = (record["loss"] for record in straight.result.curve[1:3])
    assert done.result.curve[1]["loss"] == pytest.approx((one + two) / 2)


def test_without_held_out_classes_the_last_epoch_counts(photos: Path, tmp_path: Path) -> None:
    done = run(photos, tmp_path / "run", data__validation=0.0, train__epochs=1)
    assert (done.result.chosen_epoch, done.result.chosen_by) == (1, "last")
    assert not (done.folder / "best.safetensors").exists()
    assert len(done.load().classes) == 10


def test_refit_trains_on_all_classes_for_the_chosen_epochs(chosen: Run, photos: Path, tmp_path: Path) -> None:
    both = run(photos, tmp_path / "run", train__refit=True, **LONGER)
    for name in ("best.safetensors", "last.safetensors"):
        same_tensors(both.folder / name, chosen.folder / name)
    epochs = chosen.result.chosen_epoch
    assert {key: both.result.refit[key] for key in ("epochs", "images", "classes")} == {
        "epochs": epochs,
        "images": 80,
        "classes": 10,
    }
    assert state(both.folder / "refit")["epoch"] == epochs
    assert len(both.load().classes) == 10
    assert len(both.load(which="chosen").classes) == 6
    images = held_out(photos)
    first = both.load(which="chosen").embed(images)
    assert torch.equal(first, chosen.load().embed(images))
    assert not torch.equal(first, both.load().embed(images))
    assert torch.equal(both.load().embed(images), both.load(which="last").embed(images))
    # The refitted model has seen every class: its row holds the scores that chose the epoch.
    assert both.scores == {name: both.result.validation[name] for name in ("R@1", "MAP@R")}
    # The refit equals a run that trains on all classes from the start.
    alone = run(photos, tmp_path / "alone", **LONGER | {"data__validation": 0.0, "train__epochs": epochs})
    same_tensors(both.folder / "refit" / "last.safetensors", alone.folder / "last.safetensors")


def test_killed_while_refitting_it_goes_on(photos: Path, tmp_path: Path) -> None:
    short = {"train__refit": True, "train__epochs": 2}
    out = tmp_path / "run"
    started = Process(command(photos, out, train__save_every=1, **short), tmp_path / "text")
    until(lambda: state(out / "refit").get("step", 0) >= 3, started.running, "steps of the refit")
    started.process.kill()
    assert started.finish() == -9
    assert not state(out / "refit")["done"]
    assert len(pm.load(out).classes) == 8, "while the refit is not done, the chosen model is the best"
    run(photos, out, resume=True, **short)
    straight = run(photos, tmp_path / "straight", **short)
    same_run(out, straight.folder)
    same_tensors(out / "refit" / "last.safetensors", straight.folder / "refit" / "last.safetensors")
    assert records(out / "refit") == records(straight.folder / "refit")
    assert len(pm.load(out).classes) == 10


def test_a_refit_of_too_many_epochs_is_done_anew(photos: Path, tmp_path: Path) -> None:
    """A refit after another choice in the same folder never has the weights of more epochs than were chosen."""
    first = run(photos, tmp_path / "run", train__refit=True, train__epochs=1)
    assert first.result.refit["epochs"] == 1
    longer = {"train__refit": True, "train__epochs": 2}
    second = run(photos, tmp_path / "run", resume=True, **longer)
    straight = run(photos, tmp_path / "straight", **longer)
    timeless = [
        {key: value for key, value in run.result.refit.items() if key not in TIMES} for run in (second, straight)
    ]
    assert timeless[0] == timeless[1]
    same_tensors(second.folder / "refit" / "last.safetensors", straight.folder / "refit" / "last.safetensors")
    # An earlier epoch is chosen now, as if the scores of the held-out classes had been different.
    best = Checkpoint.read(second.folder / "last.safetensors")
    best.state["best"] = [1.0, 1]
    best.write(second.folder / "last.safetensors")
    third = run(photos, tmp_path / "run", resume=True, **longer)
    assert third.result.refit["epochs"] == 1
    assert state(third.folder / "refit")["epoch"] == 1


def test_one_json_explains_the_numbers(chosen: Run) -> None:
    result = json.loads((chosen.folder / "result.json").read_text())
    assert result == json.loads(json.dumps(chosen.result.as_dict()))
    assert result["recipe"]["method"] == "proxy-anchor"
    assert result["recipe"]["seed"] == 0
    assert result["recipe"]["loss"]["margin"] == 0.1, "defaults are written out too"
    assert result["recipe"]["train"]["batch"] == 8
    assert torch.__version__.startswith(result["versions"]["torch"])
    assert result["versions"].keys() >= {"python", "proxymetric", "timm", "numpy"}
    assert len(result["data"]["identity"]) == 64
    assert result["data"]["train"].items() >= {"images": 48, "classes": 6}.items()
    assert result["data"]["validation"].items() >= {"images": 32, "classes": 4}.items()
    assert result["machine"]["cores"] > 0
    assert result["seconds"] >= 0
    assert result["memory"]["process_mb"] > 50
    assert result["parameters"]["total"] == 388_896 + 256 * 8 + 8 + 6 * 8
    assert result["parameters"]["trained"] == result["parameters"]["total"]
    assert result["steps"] == 30
    assert result["skipped_steps"] == 0
    assert len(result["curve"]) == 6
    assert result["rows"].keys() == {"raw pixels", "untrained encoder", "whitening", "lda", "trained encoder"}
    assert {path.name for path in chosen.folder.iterdir()} == {
        "run.json", "result.json", "log.jsonl", "last.safetensors", "best.safetensors", "held_out.safetensors"
    }  # fmt: skip


def test_a_watcher_is_told(photos: Path, tmp_path: Path) -> None:
    class Ears(Notes):
        def __init__(self) -> None:
            super().__init__()
            self.ticks: list[tuple[int, int, int]] = []
            self.scores: list[tuple[int, bool]] = []

        def tick(self, tick) -> None:
            self.ticks.append((tick.step, tick.steps, tick.epoch))

        def evaluated(self, epoch, scores, best, scored_on) -> None:
            self.scores.append((epoch, best))

    ears = Ears()
    assert isinstance(ears, Silent)
    run(photos, tmp_path / "run", watcher=ears, train__epochs=2)
    assert ears.ticks == [(step, 16, 1 + (step - 1) // 8) for step in range(1, 17)]
    assert ears.scores[0] == (0, True)
    assert [epoch for epoch, _ in ears.scores] == [0, 1, 2]
