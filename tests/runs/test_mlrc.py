"""MLRC on a small set of glyphs: folds, choice, average and concatenation."""

import json

import pytest
import torch

from groups import free_port, place
from no_forms import no_forms
from proxymetric.core.normalisation import unit
from proxymetric.data import open_data, split
from proxymetric.metrics import evaluate
from proxymetric.runs.evaluation_set import unseen_vectors
from proxymetric.runs.mlrc import mlrc
from proxymetric.system.checkpoint import Checkpoint
from proxymetric.system.files import read_json
from proxymetric.system.watcher import Silent
from terminal import proxymetric, refused
from training_runs import Process, command

pytestmark = pytest.mark.slow

SETTINGS = {
    "view.size": 16,
    "view.resize": 16,
    "view.crop": "none",
    "view.flip": False,
    "train.lr": 2e-3,
    "train.warmup": 0,
    "train.metrics": ["P@1", "P@R", "MAP@R"],
}
ARGUMENTS = {"backbone": "small", "epochs": 2, "dim": 16, "settings": SETTINGS, "watcher": Silent()}


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    out = tmp_path_factory.mktemp("mlrc") / "study"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("proxymetric.runs.session.draw_report", lambda *args, **kwargs: None)
        patch.setattr("proxymetric.runs.session.closed_form_rows", no_forms)
        return out, mlrc("glyphs:40", out=out, **ARGUMENTS)


def test_folds_are_contiguous_blocks_that_cover_the_training_classes_once():
    images = open_data("glyphs:40")
    whole = split(images, 0.0).train.classes
    held_out = [split(images, f"{k}/4", seed=k).validation.classes for k in range(1, 5)]
    assert [name for block in held_out for name in block] == whole
    for k, block in enumerate(held_out, 1):
        parts = split(images, f"{k}/4")
        assert set(parts.train.classes) == set(whole) - set(block)
        assert not set(parts.test.classes) & set(whole)


@pytest.mark.parametrize("fold", ["0/4", "5/4", "1/1", "first", "1/20"])
def test_a_fold_that_cannot_be_is_refused(fold):
    with pytest.raises(ValueError, match="validation"):
        split(open_data("glyphs:40"), fold)


def test_average_and_concatenation(study):
    out, result = study
    assert result["average"]["MAP@R"] == pytest.approx(sum(m["test"]["MAP@R"] for m in result["models"]) / 4)
    parts = [unseen_vectors(out / f"fold{k}", Silent()) for k in range(1, 5)]
    joined = torch.cat([unit(part.vectors) for part in parts], dim=1)
    assert joined.shape[1] == 64
    labels = parts[0].labels
    assert result["concatenated"] == evaluate(joined, labels, ["P@1", "P@R", "MAP@R"])
    assert result["concatenated"]["MAP@R"] > result["average"]["MAP@R"]
    assert json.loads((out / "result.json").read_text())["concatenated"] == result["concatenated"]
    for model in result["models"]:
        run = json.loads((out / model["fold"] / "result.json").read_text())
        best = max(run["curve"], key=lambda record: record["MAP@R"])
        assert model["chosen_epoch"] == best["epoch"]
    assert result["finished"] == read_json(out / "fold4" / "result.json")["finished"], "the end of the last fold"


@pytest.mark.usefixtures("only_training")
def test_it_goes_on_with_the_folds_that_are_left(study, tmp_path):
    class Enough(Exception):
        pass

    class StopInFold2(Silent):
        def say(self, text):
            if text.startswith("fold 2"):
                raise Enough

    out = tmp_path / "again"
    with pytest.raises(Enough):
        mlrc("glyphs:40", out=out, **ARGUMENTS | {"watcher": StopInFold2()})
    again = mlrc("glyphs:40", out=out, resume=True, **ARGUMENTS)
    assert again["concatenated"] == study[1]["concatenated"]


@pytest.mark.usefixtures("only_training")
def test_a_setting_of_the_dimensions_wins(tmp_path):
    arguments = ARGUMENTS | {"settings": SETTINGS | {"encoder.dim": 6}, "epochs": 1, "folds": 2}
    mlrc("glyphs:40", out=tmp_path / "x", **arguments)
    assert {read_json(file)["recipe"]["encoder"]["dim"] for file in (tmp_path / "x").glob("fold*/run.json")} == {6}


@pytest.mark.parametrize("folds", [0, 1, -2])
def test_too_few_folds_are_refused_before_any_of_them(folds, tmp_path):
    with pytest.raises(ValueError, match=f"^folds: got {folds}, expected a whole number of at least 2$"):
        mlrc("glyphs:40", out=tmp_path / "x", folds=folds, **ARGUMENTS)
    assert not (tmp_path / "x").exists()


def test_the_protocols_own_settings_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"settings: got data\.validation, which MLRC sets itself"):
        mlrc("glyphs:40", out=tmp_path / "x", settings={"data.validation": 0.5})


@pytest.mark.usefixtures("only_training")
def test_data_without_test_classes_is_refused_before_any_fold(photos, tmp_path):
    """The flag that the error names exists, and helps."""
    words = ("train", "--protocol", "mlrc", "--data", photos, "--out", tmp_path / "x", "--backbone", "small",
             "--epochs", 1, "--size", 16, "--dim", 8, "--device", "cpu", "--set", "view.resize=16",
             "--set", "data.workers=0")  # fmt: skip
    refused(proxymetric(*words), "data: got photos, which has no test classes", "--set data.test=0.5")
    assert not (tmp_path / "x").exists()
    answer = proxymetric(*words, "--set", "data.test=0.5", "--folds", 2, "--set", "encoder.dim=4")
    assert answer.code == 0, answer
    for row in ("average of 2 x 4-D", "concatenated, 8-D"):
        assert row in answer.out, "the dimensions of the models, not those of --dim"


def test_folds_do_not_choose_their_method(photos, tmp_path):
    words = ("train", "--protocol", "mlrc", "--data", photos)
    refused(proxymetric(*words, "--out", tmp_path / "run", "--method", "auto"), "each fold would choose")
    refused(proxymetric(*words), "out: got none with --protocol mlrc, expected a folder")
    refused(proxymetric("train", "--folds", 3, "--data", photos), "folds: got 3 without --protocol mlrc")
    assert not (tmp_path / "run" / "fold0").exists()


@pytest.mark.release
def test_two_processes_equal_one(photos, tmp_path):
    """torchrun: all processes train each fold, and one of them holds the lock."""
    settings = {
        "encoder__freeze_bn": True,
        "train__epochs": 1,
        "train__warmup": 0,
        "train__lr": 1e-4,
        "data__test": 0.4,
    }

    def study(size: int, *more: str) -> dict:
        out, port = tmp_path / str(size), free_port()
        words = command(photos, out, "--protocol", "mlrc", "--folds", "2", *more, **settings)
        ranks = [
            Process(words, tmp_path / f"text{r}", **(place(r, size, port) if size > 1 else {})) for r in range(size)
        ]
        codes = [rank.finish() for rank in ranks]
        assert codes == [0] * size, "".join(rank.text() for rank in ranks)
        assert ranks[0].text().count("result: ") == 1
        for rank in ranks[1:]:
            assert not rank.text().strip(), "only one of them writes"
        assert {path.name for path in out.iterdir()} == {"fold1", "fold2", "result.json"}
        return read_json(out / "result.json")

    two, one = study(2), study(1)
    assert two["machine"]["processes"] == 2
    for fold in ("fold1", "fold2"):
        ours, theirs = (Checkpoint.read(tmp_path / size / fold / "last.safetensors").tensors for size in "21")
        assert ours.keys() == theirs.keys()
        for name in theirs:
            torch.testing.assert_close(ours[name], theirs[name], rtol=2e-3, atol=2e-5, msg=name)
    for kind in ("average", "concatenated"):
        assert two[kind] == pytest.approx(one[kind], abs=0.02)
    again = study(2, "--resume")
    assert again["concatenated"] == two["concatenated"]
