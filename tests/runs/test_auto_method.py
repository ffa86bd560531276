"""--method auto tries some methods on features and takes the best on held-out classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from proxymetric.data import open_data, split
from proxymetric.encoders import build
from proxymetric.runs import auto_method
from proxymetric.runs import recipe as recipes
from proxymetric.runs.auto_method import CANDIDATES, DEFAULT_METHOD, Trial, decide
from proxymetric.system.files import read_json
from training_runs import Notes, run, same_tensors

pytestmark = pytest.mark.usefixtures("only_training")


@pytest.fixture
def weights(tmp_path: Path) -> dict[str, Any]:
    """Settings of a run whose backbone comes from a file, so that its features count."""
    torch.manual_seed(3)
    file = tmp_path / "small.safetensors"
    save_file(build("small", size=16).backbone.state_dict(), file)
    return {"encoder__weights": str(file), "train__frozen": True, "train__epochs": 1, "train__batch": 16}


@pytest.fixture
def few_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_method, "MIN_HELD_OUT_CLASSES", 2)
    monkeypatch.setattr(auto_method, "TRIAL_EPOCHS", 2)


@pytest.mark.usefixtures("few_classes")
def test_every_method_is_tried_and_the_choice_is_recorded(
    photos: Path, tmp_path: Path, weights: dict[str, Any]
) -> None:
    notes = Notes()
    done = run(photos, tmp_path / "run", method="auto", watcher=notes, **weights)
    choice = done.result.auto
    assert choice is not None
    assert sorted(trial["method"] for trial in choice["trials"]) == sorted(CANDIDATES)
    scores = [trial["score"] for trial in choice["trials"]]
    assert scores == sorted(scores, reverse=True)
    assert 0 < scores[-1] <= scores[0] <= 1
    assert len(set(scores)) > 1, "methods differ"
    assert done.result.recipe["method"] == choice["method"] == read_json(done.folder / "run.json")["said"]["method"]
    assert any("MAP@R of the methods that were tried" in line for line in notes.said)
    # The same choice again, and the run is that of the chosen method.
    assert run(photos, tmp_path / "again", method="auto", **weights).result.auto["trials"][0]["score"] == scores[0]
    named = run(photos, tmp_path / "named", method=choice["method"], **weights)
    same_tensors(named.folder / "best.safetensors", done.folder / "best.safetensors")


@pytest.mark.usefixtures("few_classes")
def test_the_chosen_method_is_nested(photos: Path, tmp_path: Path, weights: dict[str, Any]) -> None:
    done = run(photos, tmp_path / "run", method="auto", loss__nested=[4, 8], **weights).result
    assert done.auto is not None
    assert len(done.auto["trials"]) == len(CANDIDATES)
    assert done.recipe["loss"]["nested"] == [4, 8]
    assert [each["dim"] for each in done.sizes] == [4] * 3 + [8] * 3


@pytest.mark.usefixtures("few_classes")
def test_a_resumed_run_keeps_its_choice(photos: Path, tmp_path: Path, weights: dict[str, Any]) -> None:
    first = run(photos, tmp_path / "run", method="auto", **weights).result.auto
    longer = weights | {"train__epochs": 2}
    again = run(photos, tmp_path / "run", method="auto", resume=True, **longer)
    assert again.result.auto == first
    assert again.result.epochs == 2


def test_without_trials(photos: Path, tmp_path: Path, weights: dict[str, Any]) -> None:
    few = run(photos, tmp_path / "few", method="auto", **weights).result
    assert few.recipe["method"] == DEFAULT_METHOD
    assert few.auto["reason"] == (
        "no trials: 2 held-out classes are too few to compare methods, expected at least 10: more classes (50 for "
        "data.validation=0.2)"
    )
    parts = split(open_data("glyphs:60"))
    reason = auto_method._too_few(recipes.check({}), parts.train, parts.validation)
    assert "no trials: 6 held-out classes" in reason
    assert reason.endswith("or a larger share of them: --set data.validation=0.34")
    enough = split(open_data("glyphs:60"), validation=0.34).validation
    assert len(enough.classes) == 10
    own = recipes.check({"data": {"validation": "1/4"}})
    assert auto_method._too_few(own, parts.train, parts.validation).endswith("at least 10: more classes")
    random = {key: value for key, value in weights.items() if key != "encoder__weights"}
    untrained = run(photos, tmp_path / "random", method="auto", **random).result
    assert "no pre-trained weights" in untrained.auto["reason"]


def test_settings_of_a_loss_are_refused(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^loss.margin: got a setting of one method together with method 'auto'"):
        run(photos, tmp_path / "run", method="auto", loss__margin=0.2)
    assert not (tmp_path / "run").exists()


def test_a_method_must_be_better_with_its_whole_interval() -> None:
    plain = Trial(DEFAULT_METHOD, 0.5, 0.0, 0.0, 0.0, 1.0)
    unsure, sure = Trial("mpa-ap", 0.6, 0.1, -0.01, 0.2, 1.0), Trial("vcpa", 0.52, 0.02, 0.01, 0.03, 1.0)
    assert decide([unsure, plain], frozen=True)[0] == DEFAULT_METHOD
    assert decide([unsure, sure, plain], frozen=True)[0] == "vcpa"


def test_a_run_that_trains_the_backbone_needs_a_larger_gain() -> None:
    plain, small = Trial(DEFAULT_METHOD, 0.5, 0.0, 0.0, 0.0, 1.0), Trial("vcpa", 0.529, 0.029, 0.02, 0.04, 1.0)
    method, reason = decide([small, plain], frozen=False)
    assert method == DEFAULT_METHOD
    assert reason.startswith("no other method gains 3 points of MAP@R on held-out classes")
    large = Trial("mpa-ap", 0.53, 0.03, 0.01, 0.05, 1.0)
    assert decide([large, small, plain], frozen=False) == (
        "mpa-ap", "+3.0 MAP@R (1.0 to 5.0) over proxy-anchor on held-out classes"
    )  # fmt: skip
    assert decide([large, small, plain], frozen=True)[0] == "mpa-ap"


@pytest.mark.usefixtures("few_classes")
def test_trials_are_never_scored_on_classes_that_they_train_on(
    photos: Path, tmp_path: Path, weights: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the run itself holds nothing out."""
    embedded: dict[str, set[str]] = {}

    def embed(context: Any, encoder: Any, images: Any, what: str) -> Any:
        embedded[what] = {images.classes[label] for label in images.labels}
        return features(context, encoder, images, what)

    features = auto_method.embed_features
    monkeypatch.setattr(auto_method, "embed_features", embed)
    run(photos, tmp_path / "run", method="auto", protocol="last", **weights)
    assert embedded["training images"]
    assert embedded["held-out images"]
    assert not embedded["training images"] & embedded["held-out images"]
