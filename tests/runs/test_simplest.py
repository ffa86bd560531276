"""A run keeps the best model that needs no training unless the trained one is clearly better."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import proxymetric as pm
from conftest import write_photos
from proxymetric.data import ImageSet
from proxymetric.runs import recipe as recipes
from proxymetric.runs.clear_gain import ClassScores, Kept
from proxymetric.runs.score import EmbeddedSet
from proxymetric.runs.session import RunSession
from proxymetric.runs.simplest import closed_form_recipe, simplest
from proxymetric.runs.train import train
from proxymetric.system.watcher import Silent


def embedded(sizes: list[int]) -> EmbeddedSet:
    """Images whose classes are far apart: every score is 1."""
    labels = np.repeat(np.arange(len(sizes)), sizes)
    images = ImageSet(
        "drawn", labels, [str(label) for label in range(len(sizes))], arrays=np.empty((len(labels), 1, 1))
    )
    return EmbeddedSet(images, torch.eye(len(sizes))[labels], np.arange(len(labels)))


def test_the_trained_model_is_compared_on_the_same_classes() -> None:
    trained = embedded([5, 5, 5])
    kept = simplest(ClassScores("R@1", [5, 5, 5], {"untrained": [5.0, 4, 4], "lda": [1.0, 1, 1]}), trained)
    assert kept is not None
    assert (kept.name, kept.scores) == ("trained", {"untrained": 13 / 15, "lda": 3 / 15, "trained": 1.0})
    equal = simplest(ClassScores("R@1", [5, 5, 5], {"untrained": [5.0, 5, 5]}), trained)
    assert equal is not None
    assert equal.name == "untrained"


def test_two_classes_do_not_tell() -> None:
    assert simplest(ClassScores("R@1", [5, 5, 0], {"untrained": [5, 5, 0]}), embedded([5, 5, 0])) is None


def test_a_closed_form_takes_over_data_view_and_backbone() -> None:
    said = {
        "method": "vcpa",
        "seed": 3,
        "data": {"path": "birds", "validation": 0.3, "cache": "device"},
        "view": {"size": 64, "scale": [0.3, 1.0]},
        "encoder": {"backbone": "small", "dim": 96, "tuning": "full", "pooling": "gem"},
        "loss": {"newton_steps": 2},
        "train": {"lr": 1e-3, "monitor": "R@1", "epochs": 3, "start": "whitening"},
    }
    recipe = closed_form_recipe(recipes.check(said), "whitening")
    assert (recipe.method, recipe.seed, recipe.data.path, recipe.data.validation) == ("whitening", 3, "birds", 0.3)
    assert (recipe.view["size"], recipe.encoder["dim"], recipe.encoder["pooling"]) == (64, 96, "gem")
    assert (recipe.train.monitor, recipe.train.lr, recipe.train.refit, recipe.data.cache) == ("R@1", None, True, "auto")
    assert closed_form_recipe(recipes.check(said), "untrained").encoder["dim"] == 512


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fifteen classes of which four are held out; an epoch of training teaches nothing about them."""
    return write_photos(tmp_path_factory.mktemp("few") / "photos", classes=15, images=6)


def begin(data: Path, out: Path, **options: object) -> pm.Run:  # type: ignore[name-defined]
    settings = {"data.validation": 0.3, "train.lr": 1e-9, "train.proxy_lr": 1e-9, "train.warmup": 0}
    return train(data, out=out, backbone="small", size=32, epochs=1, watcher=Silent(), settings=settings, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def simple(few: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that keeps a simpler model. Only read it, or copy it."""
    folder = tmp_path_factory.mktemp("simple") / "run"
    begin(few, folder)
    return folder


def test_the_best_model_is_the_simpler_one(simple: Path) -> None:
    result = json.loads((simple / "result.json").read_text())
    kept = Kept(**result["kept"])
    assert kept.name != "trained"
    best, chosen = pm.load(simple), pm.load(simple, which="chosen")
    assert chosen.dim == 512
    assert best.dim != 512
    scored = pm.evaluate(best.embed(*held_out(simple)[:1]), held_out(simple)[1], metrics=["MAP@R"])
    row = {"untrained": "untrained encoder"}.get(kept.name, kept.name)
    if kept.name == "untrained":  # a closed form is fitted on the held-out classes, too, at the end
        assert scored["MAP@R"] == pytest.approx(result["rows"][row]["MAP@R"], abs=1e-6)
    page = (simple / "report.html").read_text()
    assert str(kept).replace("'", "&#x27;") in page


def held_out(run: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """The images of the held-out classes and their labels."""
    from proxymetric.runs.evaluation_set import evaluation_set

    images, _ = evaluation_set(run, part="validation", which="chosen")
    view = pm.load(run).view
    return torch.stack([view(images.read(i)) for i in range(len(images))]), torch.from_numpy(images.labels)


def test_stopped_while_the_simpler_model_is_made_it_goes_on(
    few: Path, simple: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, finish = tmp_path / "run", RunSession._finish

    def stopped(self: RunSession, *arguments: object) -> object:
        if self.folder.name == "simpler":
            raise KeyboardInterrupt
        return finish(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(RunSession, "_finish", stopped)
    with pytest.raises(KeyboardInterrupt):
        begin(few, run)
    monkeypatch.undo()
    assert not (run / "result.json").exists()
    assert pm.load(run).dim == 512  # until then the best model is the trained one
    again = begin(few, run, resume=True).result
    once = json.loads((simple / "result.json").read_text())
    assert (again.kept, again.rows, again.thresholds) == (once["kept"], once["rows"], once.get("thresholds"))


def test_keeping_the_trained_model_on_resuming_removes_the_simpler_one(few: Path, simple: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(simple, run)
    result = train(out=run, resume=True, settings={"train.keep": "trained"}, watcher=Silent(), report=False).result
    assert result.kept is None
    assert not (run / "simpler").exists()
    assert pm.load(run).dim == 512


def test_a_lost_simpler_model_is_named(simple: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(simple, run)
    shutil.rmtree(run / "simpler")
    with pytest.raises(ValueError, match=r"run: .*simpler/result\.json is missing, though the run keeps the model"):
        pm.load(run)
    assert pm.load(run, which="chosen").dim == 512
