"""A run keeps the simplest candidate within one standard error of the best."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import proxymetric as pm
from conftest import write_photos
from proxymetric.runs import recipe as recipes
from proxymetric.runs.session import RunSession
from proxymetric.runs.simplest import HeldOutScores, Kept, closed_form_recipe, simplest
from proxymetric.runs.train import train
from proxymetric.system.watcher import Silent


def one_standard_error(queries: list[np.ndarray], others: list[np.ndarray]) -> tuple[float, float]:
    """The mean difference over all queries, and its standard error over classes, by the jackknife-free definition."""
    pairs = [b - a for a, b in zip(queries, others, strict=True)]
    mean = np.concatenate(pairs).mean()
    residuals = np.array([(pair - mean).sum() for pair in pairs])
    classes, total = len(pairs), sum(map(len, pairs))
    return mean, np.sqrt(classes / (classes - 1) * (residuals**2).sum()) / total


@pytest.mark.parametrize("seed", range(4))
def test_difference_and_standard_error_are_those_of_the_definition(seed: int) -> None:
    random = np.random.default_rng(seed)
    sizes = random.integers(1, 9, 7)
    low = [random.random(size) * 0.5 for size in sizes]
    high = [random.random(size) for size in sizes]
    scores = HeldOutScores(
        "MAP@R",
        [0, *sizes.tolist()],  # a class without queries does not count
        {"untrained": [0.0, *(v.sum() for v in low)], "trained": [0.0, *(v.sum() for v in high)]},
    )
    kept = simplest(scores)
    assert kept is not None
    assert kept.classes == 7
    mean, error = one_standard_error(low, high)
    assert kept.behind["untrained"] == pytest.approx(mean, rel=1e-12)
    assert kept.errors["untrained"] == pytest.approx(error, rel=1e-12)
    assert kept.name == ("untrained" if mean <= error else "trained")


@pytest.mark.parametrize(
    ("untrained", "whitening", "lda", "trained", "kept"),
    [
        ([1, 2, 3, 4], [5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7, 8], "whitening"),
        ([1, 2, 3, 4], [2, 3, 4, 5], [5, 6, 7, 8], [5, 6, 7, 9], "lda"),
        ([1, 2, 3, 4], [5, 6, 7, 8], [5, 6, 7, 8.5], [5, 6, 7, 9], "lda"),
        ([9, 9, 9, 9], [2, 3, 4, 5], [5, 6, 7, 8], [5, 6, 7, 9], "untrained"),
        ([1, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 6], [8, 9, 9, 9], "trained"),
    ],
)
def test_the_simplest_within_one_standard_error_is_kept(
    untrained: list[float], whitening: list[float], lda: list[float], trained: list[float], kept: str
) -> None:
    sums = {"untrained": untrained, "whitening": whitening, "lda": lda, "trained": trained}
    choice = simplest(HeldOutScores("R@1", [10, 10, 10, 10], sums))
    assert choice is not None
    assert choice.name == kept
    assert f"; {kept} is kept" in str(choice)


def test_two_classes_do_not_tell() -> None:
    assert simplest(HeldOutScores("R@1", [5, 5, 0], {"untrained": [5, 5, 0], "trained": [1, 1, 0]})) is None


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
