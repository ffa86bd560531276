"""`--whiten`: the whitening of the trained vectors behind the head of a trained encoder."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import proxymetric as pm
from no_forms import no_forms
from oracles.closed_forms import whitening_metric
from proxymetric.data import open_data, split
from proxymetric.features.cache import cached_features
from proxymetric.runs.train import Run
from proxymetric.system.checkpoint import Checkpoint
from training_runs import LEARNING, Notes, run, same_tensors

pytestmark = pytest.mark.usefixtures("only_training")
LEARN = LEARNING | {"data__validation": 0.3, "data__test": 0.3, "train__epochs": 1, "encoder__layer_norm": False}
WHITEN = {"train__whiten": True}


@pytest.fixture(scope="module")
def both(letters: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    """A finished run, and the same run with a whitened head. Only read their folders."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("proxymetric.runs.session.draw_report", lambda *args, **kwargs: None)
        patch.setattr("proxymetric.runs.session.closed_form_rows", no_forms)
        folder = tmp_path_factory.mktemp("whiten")
        return run(letters, folder / "plain", **LEARN), run(letters, folder / "whitened", **LEARN | WHITEN)


def vectors_of(folder, images, which="best"):
    """Vectors of the head before they are normalised, float64."""
    model = pm.load(folder, which, "cpu")
    features = cached_features(model.encoder, images, model.view).vectors
    return model.encoder.head(features).detach().double().numpy()


def test_it_is_the_whitening_of_the_trained_vectors(both, letters):
    plain, done = both
    record = done.result.whiten
    assert record["kept"]
    assert record["after"]["MAP@R"] > record["before"]["MAP@R"]
    assert record["before"]["MAP@R"] == pytest.approx(done.result.validation["MAP@R"], abs=1e-6)
    known = split(open_data(letters), 0.3, 0.3, 0).train
    assert record["fit"]["images"] == len(known), "the images that the head was trained on"
    before, after = vectors_of(plain.folder, known), vectors_of(done.folder, known)
    metric = whitening_metric(before, known.labels, record["fit"]["shrinkage"], before.shape[1])
    centred = before - before.mean(0)
    expected, products = centred @ metric @ centred.T, after @ after.T
    scale = np.trace(products) / np.trace(expected)
    np.testing.assert_allclose(products, scale * expected, atol=2e-3 * abs(products).max())


def test_the_held_out_scores_are_those_of_the_two_models(both, letters):
    _, done = both
    held_out = split(open_data(letters), 0.3, 0.3, 0).validation
    vectors = pm.load(done.folder, device="cpu").embed(held_out)
    scores = pm.evaluate(vectors, held_out.labels, metrics=("R@1", "MAP@R"))
    assert scores == pytest.approx(done.result.whiten["after"], abs=2e-3)


def test_a_finished_run_is_whitened_when_it_is_resumed_and_only_once(both, letters, tmp_path):
    plain, whole = both
    assert plain.result.whiten is None
    shutil.copytree(plain.folder, tmp_path / "later")
    later = run(letters, tmp_path / "later", resume=True, **LEARN | WHITEN)
    again = run(letters, tmp_path / "later", resume=True, **LEARN | WHITEN)
    for other in (later, again):
        assert other.scores == whole.scores
        assert other.result.whiten == whole.result.whiten
    same_tensors(whole.folder / "best.safetensors", later.folder / "best.safetensors")
    with pytest.raises(ValueError, match=r"train.whiten: got false, but the model in .* is whitened; expected true"):
        run(letters, tmp_path / "later", resume=True, **LEARN | {"train__whiten": False})


def test_a_run_that_was_killed_after_it_was_whitened_is_not_whitened_again(both, letters, tmp_path):
    _, done = both
    (shutil.copytree(done.folder, tmp_path / "killed") / "result.json").unlink()
    again = run(letters, tmp_path / "killed", resume=True, **LEARN | WHITEN)
    same_tensors(done.folder / "best.safetensors", again.folder / "best.safetensors")
    assert (again.scores, again.result.whiten) == (done.scores, done.result.whiten)


def test_the_better_head_is_kept(both, letters, tmp_path, monkeypatch):
    """The metric that decides is turned round: the whitened head is then the worse one."""
    monkeypatch.setattr("proxymetric.runs.whiten.lower_is_better", lambda name: True)
    notes = Notes()
    done = run(letters, tmp_path / "run", watcher=notes, **LEARN | WHITEN)
    plain, _ = both
    assert not done.result.whiten["kept"]
    assert any("whitened head" in line and line.endswith("the trained head is kept") for line in notes.said)
    assert done.scores == plain.scores
    same_tensors(done.folder / "best.safetensors", plain.folder / "best.safetensors")


def test_without_held_out_classes_the_whitened_head_is_kept_and_loaded(letters, tmp_path):
    done = run(letters, tmp_path / "run", **LEARN | WHITEN, protocol="last")
    assert done.result.whiten["kept"]
    assert done.result.whiten["before"] == {}
    test = split(open_data(letters), 0.0, 0.3, 0).test
    vectors = pm.load(done.folder, device="cpu").embed(test)
    assert pm.evaluate(vectors, test.labels, metrics=("R@1", "MAP@R")) == pytest.approx(done.scores, abs=2e-3)
    assert not torch.allclose(vectors, pm.load(done.folder, "last", "cpu").embed(test), atol=0.02)
    longer = run(letters, tmp_path / "run", resume=True, **LEARN | WHITEN | {"train__epochs": 2}, protocol="last")
    straight = run(letters, tmp_path / "straight", **LEARN | WHITEN | {"train__epochs": 2}, protocol="last")
    assert longer.scores == straight.scores, "more epochs: the trained head is whitened anew"


def test_a_refitted_encoder_is_whitened_by_what_the_held_out_classes_chose(letters, tmp_path):
    settings = LEARN | {"train__refit": True, "train__epochs": 3}
    done = run(letters, tmp_path / "run", **settings | WHITEN)
    assert done.result.refit is not None
    assert done.result.whiten["kept"]
    folder = done.folder / "refit"
    state = Checkpoint.read(folder / "best.safetensors").state
    assert state["whiten"]["fit"]["images"] == done.result.refit["images"]
    assert state["whiten"]["fit"]["shrinkage"] == done.result.whiten["fit"]["shrinkage"]
    test = split(open_data(letters), 0.0, 0.3, 0).test
    scores = pm.evaluate(pm.load(done.folder, device="cpu").embed(test), test.labels, metrics=("R@1", "MAP@R"))
    assert scores == pytest.approx(done.scores, abs=2e-3)
    again = run(letters, tmp_path / "run", resume=True, **settings | WHITEN)
    assert again.scores == done.scores


def test_a_trained_backbone_is_whitened_too(letters, tmp_path):
    settings = {**LEARN, "train__frozen": False, "encoder__normalise_features": True}
    done = run(letters, tmp_path / "run", **settings | WHITEN)
    if done.result.whiten["kept"]:
        names = Checkpoint.read(done.folder / "best.safetensors").tensors
        assert "encoder.head.1.weight" in names
        assert not [name for name in names if name.startswith("criterion.")], "its proxies do not suit the new vectors"
    assert pm.load(done.folder, device="cpu").embed(torch.zeros(1, 3, 16, 16)).isfinite().all()


def test_methods_with_uncertain_proxies_are_refused(letters, tmp_path):
    with pytest.raises(ValueError, match=r"train.whiten: got true with method 'vcpa'.*expected false"):
        run(letters, tmp_path / "run", method="vcpa", **LEARN | WHITEN)
    assert not (tmp_path / "run" / "run.json").exists()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"encoder__head": "none", "encoder__dim": "none"}, "train.whiten: got True with encoder.head='none'"),
        ({"loss__nested": [8, 32]}, "train.whiten: got True with loss.nested"),
        ({"train__parallel": "fsdp", "train__frozen": False, "train__warmup": 0}, "train.whiten: got True with .*fsdp"),
    ],
)
def test_what_cannot_be_whitened_is_refused(letters, tmp_path, settings, words):
    with pytest.raises(ValueError, match=words):
        run(letters, tmp_path / "run", **LEARN | WHITEN | settings)
