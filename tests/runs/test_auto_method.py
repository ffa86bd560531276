"""--method auto compares candidates on folds of the known classes, and takes a simple one unless another is better."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from proxymetric.data import ImageSet
from proxymetric.encoders import build
from proxymetric.runs import auto_method, trials
from proxymetric.runs import recipe as recipes
from proxymetric.runs.assemble import RunContext
from proxymetric.runs.auto_method import DEFAULT_METHOD, FROZEN_CANDIDATES, LOSSES, PLAN, decide
from proxymetric.runs.clear_gain import ClassScores
from proxymetric.runs.closed_form import Fit, joined
from proxymetric.runs.score import EmbeddedSet
from proxymetric.runs.trials import Candidate, outer_folds, run_trial, tried_recipe
from proxymetric.system.files import read_json
from proxymetric.system.watcher import Silent
from proxymetric.training.process_group import ProcessGroup
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
def enough_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every trial is made, however long it takes on this machine; one short trial of each kind."""
    monkeypatch.setattr(auto_method, "FROZEN_SHARE", math.inf)
    monkeypatch.setattr(auto_method, "WHOLE_SHARE", math.inf)
    monkeypatch.setattr(trials, "MAX_FOLDS", 3)
    monkeypatch.setattr(trials, "TRIAL_SHRINKAGES", (0.5,))


def embedded(classes: int, images: int, shift: float, seed: int = 0) -> EmbeddedSet:
    """Features of classes whose means differ by `shift` along a few directions, among noise in all of them."""
    random = np.random.default_rng(seed)
    labels = np.arange(classes).repeat(images)
    means = shift * random.normal(size=(classes, 16)) * (np.arange(16) < 4)
    vectors = torch.from_numpy((means[labels] + random.normal(size=(len(labels), 16))).astype(np.float32))
    arrays = np.empty((len(labels), 1, 1), np.uint8)
    names = [f"{seed}-{number}" for number in range(classes)]
    return EmbeddedSet(ImageSet("drawn", labels, names, arrays=arrays), vectors, np.arange(len(labels)))


def context_of(**train: Any) -> RunContext:
    recipe = recipes.check({"encoder": {"backbone": "small"}, "train": {"frozen": True, "epochs": 2, **train}})
    return RunContext(recipe, torch.device("cpu"), ProcessGroup(), Silent(), {})


@pytest.mark.usefixtures("enough_time")
def test_every_candidate_is_tried_and_the_choice_is_recorded(
    photos: Path, tmp_path: Path, weights: dict[str, Any]
) -> None:
    notes = Notes()
    done = run(photos, tmp_path / "run", method="auto", watcher=notes, **weights)
    choice = done.result.auto
    assert choice is not None
    tried = [str(Candidate(trial["method"], trial["start"])) for trial in choice["trials"]]
    assert sorted(tried) == sorted(str(candidate) for candidate in FROZEN_CANDIDATES[1:])
    (refused,) = choice["dropped"]
    assert refused.startswith("untrained (its vectors have 256 dimensions, and encoder.dim=8 is named")
    scores = [trial["score"] for trial in choice["trials"]]
    assert scores == sorted(scores, reverse=True)
    assert 0 < scores[-1] < scores[0] <= 1
    assert (choice["divisions"], choice["folds"], choice["classes"]) == (2, 3, 10)
    assert choice["seconds"] >= 0 < choice["run_seconds"]
    assert read_json(done.folder / "run.json")["auto"] == choice
    assert done.result.recipe["method"] == choice["method"] == read_json(done.folder / "run.json")["said"]["method"]
    said = next(line for line in notes.said if line.startswith(f"method {choice['method']}"))
    assert choice["reason"] in said
    assert "MAP@R on 2 times 3 folds of the known classes (10 scored): " in said
    assert not list(done.folder.glob(".*.part"))
    # The run is that of the candidate by name.
    named = {"method": choice["method"]} | ({"train__start": choice["start"]} if choice["start"] else {})
    same = run(photos, tmp_path / "named", **named, **weights)
    same_tensors(same.folder / "best.safetensors", done.folder / "best.safetensors")


@pytest.mark.usefixtures("enough_time")
def test_a_run_that_trains_the_backbone_chooses_among_losses(
    photos: Path, tmp_path: Path, weights: dict[str, Any]
) -> None:
    """The chosen one is nested, and a resumed run keeps the choice."""
    settings = weights | {"train__frozen": False, "loss__nested": [4, 8]}
    first = run(photos, tmp_path / "run", method="auto", **settings).result
    assert first.auto is not None
    tried = {trial["method"] for trial in first.auto["trials"]}
    assert tried <= {candidate.method for candidate in LOSSES}
    assert DEFAULT_METHOD in tried
    assert [each["dim"] for each in first.sizes] == [4] * 3 + [8] * 3
    again = run(photos, tmp_path / "run", method="auto", resume=True, **settings | {"train__epochs": 2}).result
    assert again.auto == first.auto
    assert again.epochs == 2


def test_without_trials(photos: Path, tmp_path: Path, weights: dict[str, Any]) -> None:
    random = {key: value for key, value in weights.items() if key != "encoder__weights"}
    untrained = run(photos, tmp_path / "random", method="auto", **random).result
    assert "no pre-trained weights" in untrained.auto["reason"]
    assert untrained.recipe["method"] == DEFAULT_METHOD


@pytest.mark.parametrize(("frozen", "taken"), [(True, "untrained"), (False, "proxy-anchor")])
def test_with_too_few_classes_nothing_is_compared(frozen: bool, taken: str) -> None:
    context = context_of(frozen=frozen)
    context.recipe.encoder["weights"] = "somewhere"
    images = embedded(7, 3, 0.0).images
    single = images.subset(np.flatnonzero((images.labels > 1) | (np.arange(len(images)) % 3 == 0)))
    choice = auto_method.choose_method(context, single, None)
    assert choice.method == taken
    assert choice.reason == (
        "no trials: got 5 known classes with two images or more, expected at least 6 to compare candidates"
    )


def test_settings_of_a_loss_are_refused(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^loss.margin: got a setting of one method together with method 'auto'"):
        run(photos, tmp_path / "run", method="auto", loss__margin=0.2)
    assert not (tmp_path / "run").exists()


def test_features_that_are_not_finite_are_refused(
    photos: Path, tmp_path: Path, weights: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*words: Any) -> EmbeddedSet:
        found = features(*words)
        found.vectors[3, 0] = math.nan
        return found

    features = auto_method.embed_features
    monkeypatch.setattr(auto_method, "embed_features", broken)
    with pytest.raises(ValueError, match=r"^features: got NaN or infinity, expected finite numbers"):
        run(photos, tmp_path / "run", method="auto", **weights)


def sums(**means: float) -> ClassScores:
    """Candidates whose scores differ by the same amount on each of six classes: there is no standard error."""
    return ClassScores("MAP@R", [10] * 6, {name.replace("_", "-"): [10 * mean] * 6 for name, mean in means.items()})


@pytest.mark.parametrize(
    ("scores", "frozen", "taken"),
    [
        ({"untrained": 0.5, "whitening": 0.49, "lda": 0.48}, True, "untrained"),
        ({"untrained": 0.5, "whitening": 0.501, "lda": 0.502}, True, "lda"),
        ({"untrained": 0.5, "whitening": 0.55, "proxy_anchor": 0.558}, True, "whitening"),
        ({"untrained": 0.5, "whitening": 0.55, "proxy_anchor": 0.562}, True, "proxy-anchor"),
        ({"proxy_anchor": 0.5, "vcpa": 0.529}, False, "proxy-anchor"),
        ({"proxy_anchor": 0.5, "vcpa": 0.531, "mpa_ap": 0.52}, False, "vcpa"),
        ({"vcpa": 0.5, "mpa_ap": 0.52}, False, "mpa-ap"),
    ],
)
def test_which_candidate_is_taken(scores: dict[str, float], frozen: bool, taken: str) -> None:
    """What needs no training, or Proxy-Anchor for a whole network, unless another one gains 1 point, or 3."""
    found = sums(**scores)
    chosen, reason = decide(found, [Candidate(name) for name in found.sums], frozen)
    assert chosen == Candidate(taken)
    assert ("features alone say little" in reason) == (scores == {"proxy_anchor": 0.5, "vcpa": 0.529})


def test_the_head_that_starts_from_a_closed_form_is_a_trained_one() -> None:
    found = ClassScores("MAP@R", [10] * 6, {"whitening": [5.0] * 6, "proxy-anchor from whitening": [5.09] * 6})
    candidates = [Candidate("whitening"), Candidate("proxy-anchor", "whitening")]
    assert decide(found, candidates, frozen=True)[0].start is None
    better = found._replace(sums=found.sums | {"proxy-anchor from whitening": [5.2] * 6})
    assert decide(better, candidates, frozen=True)[0].start == "whitening"


def test_each_class_is_scored_once_by_candidates_that_do_not_know_it() -> None:
    known = joined([embedded(7, 3, 1.0), embedded(4, 2, 1.0, seed=1)])
    assert len(known.images.classes) == 11
    tasks = outer_folds(known, seed=0)
    assert len(tasks) == 4
    scored = [set(task.scored.labels.tolist()) for task in tasks]
    assert sorted(label for labels in scored for label in labels) == list(range(11))
    assert min(map(len, scored)) >= 2
    for task, labels in zip(tasks, scored, strict=True):
        assert set(task.inner.labels.tolist()) == set(range(11)) - labels
        assert set(trials._choosing_classes(task).tolist()) <= set(task.inner.labels.tolist())


@pytest.mark.parametrize("candidate", [Candidate("lda"), Candidate("proxy-anchor", "whitening")])
def test_what_a_candidate_learns_does_not_depend_on_the_classes_that_it_is_scored_on(candidate: Candidate) -> None:
    """Neither shrinkage nor epoch: the same image gets the same vector, whatever else is scored."""
    context, found = context_of(), []
    encoder = build("small", size=16, dim=8)
    encoder.width = 16
    for seed in (5, 6):
        (task, *_) = outer_folds(embedded(9, 4, 2.0), seed=0)
        other = embedded(2, 4, 9.0, seed=seed)
        vectors = torch.cat([task.scored.vectors[:1], other.vectors[1:]])
        task.scored = other._replace(vectors=vectors)
        seen: list[torch.Tensor] = []
        task.values = lambda made, seen=seen: seen.append(made[0]) or torch.zeros(1)  # type: ignore[method-assign]
        run_trial(context, encoder, tried_recipe(context.recipe, candidate), task, epochs=4)
        found += seen
    assert len(found) == 2
    torch.testing.assert_close(*found)


def test_closed_forms_of_wide_features_are_tried_in_their_principal_directions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (task, *_) = outer_folds(embedded(9, 8, 2.0), seed=0)
    recipe = tried_recipe(context_of().recipe, Candidate("whitening"))
    plain = task.values(task.head("whitening", recipe)(trials.unit_features(task.scored).vectors)).mean()
    untrained = task.values(task.scored.vectors).mean()
    monkeypatch.setattr(trials, "MAX_REDUCED", 10)
    (task, *_) = outer_folds(embedded(9, 8, 2.0), seed=0)
    head = task.head("whitening", recipe)
    assert head.weight.shape[1] == 16
    reduced = task.values(head(trials.unit_features(task.scored).vectors)).mean()
    assert abs(reduced - plain) < abs(reduced - untrained) or abs(reduced - plain) < 0.05


def test_the_other_folds_of_a_division_choose_a_shrinkage() -> None:
    known, recipe = embedded(9, 8, 2.0), context_of().recipe
    tasks, others = outer_folds(known, seed=0), outer_folds(known, seed=0, division=1)
    assert {label for task in others for label in task.scored.labels.tolist()} == set(known.labels.tolist())
    assert any(
        set(a.scored.labels.tolist()) != set(b.scored.labels.tolist()) for a, b in zip(tasks, others, strict=True)
    )
    values = tasks[0].computed_values("whitening", recipe, tasks[1:])

    def mean(fit: Fit) -> float:
        return float(torch.cat([task._values[fit] for task in tasks[1:]]).mean())

    best = max(tasks[1]._values, key=mean)
    torch.testing.assert_close(values, tasks[0]._values[best])
    assert len(tasks[0]._values) == 1, "no other head is scored on the fold"


def test_the_time_of_the_run_limits_the_trials_and_an_interrupted_choice_goes_on_with_them(
    photos: Path, tmp_path: Path, weights: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(Exception):
        pass

    def dies(*words: Any) -> torch.Tensor:
        calls.append(words)
        if len(calls) == 10:  # the first division of two candidates was tried before the plan
            raise Killed
        return run_trial(*words)

    calls: list[Any] = []
    monkeypatch.setattr(auto_method, "run_trial", dies)
    monkeypatch.setattr(auto_method, "FROZEN_SHARE", 0.0)
    monkeypatch.setattr(trials, "TRIAL_SHRINKAGES", (0.5,))
    with pytest.raises(Killed):
        run(photos, tmp_path / "run", method="auto", **weights)
    assert (tmp_path / "run" / PLAN).is_file()
    monkeypatch.setattr(auto_method, "FROZEN_SHARE", math.inf)
    again = run(photos, tmp_path / "run", method="auto", **weights).result.auto
    assert not (tmp_path / "run" / PLAN).exists()
    assert again["folds"] == 4
    assert {trial["method"] for trial in again["trials"]} == {"whitening", "lda"}
    (trained,) = again["dropped"][1:]
    assert trained.startswith("proxy-anchor, multi-similarity, multi-similarity from whitening, ")
    assert trained.endswith("norm-softmax (no time)")


@pytest.mark.usefixtures("enough_time")
def test_a_frozen_run_that_names_no_method_chooses(photos: Path, tmp_path: Path, weights: dict[str, Any]) -> None:
    done = run(photos, tmp_path / "run", train__keep="simplest", **weights)
    assert done.result.auto is not None
    assert done.result.auto["trials"]
    again = run(photos, tmp_path / "run", resume=True, train__keep="simplest", **weights)
    assert again.result.auto == done.result.auto


@pytest.mark.parametrize(
    ("raw", "chooses"),
    [
        ({"train": {"frozen": True}}, True),
        ({"train": {"frozen": True}, "method": "proxy-anchor"}, False),
        ({"train": {"frozen": True}, "protocol": "papers"}, False),
        ({"train": {"frozen": True, "start": "whitening"}}, False),
        ({"train": {"frozen": True, "keep": "trained"}}, False),
        ({"train": {"frozen": True}, "encoder": {"pretrained": False}}, False),
        ({"encoder": {"backbone": "resnet18"}}, False),
    ],
)
def test_which_runs_choose_by_default(raw: dict[str, Any], chooses: bool) -> None:
    assert auto_method.chooses_by_default(raw) == chooses
