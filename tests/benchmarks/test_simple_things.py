"""The benchmarks of `train --frozen` against simple things: sets, splits, rows, pairing and rules at a tiny size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from proxymetric.data import ImageSet, open_data
from proxymetric.papers import closed_form
from proxymetric.runs import closed_form as choices
from proxymetric.runs.score import EmbeddedSet

FOLDER = Path(__file__).resolve().parent.parent.parent / "benchmarks"


@pytest.fixture
def modules(monkeypatch):
    """The programs, imported as `python benchmarks/<name>.py` would."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import frozen_defaults
    import photo_sets
    import simple_things

    yield simple_things, frozen_defaults, photo_sets
    for name in ("simple_things", "frozen_defaults", "photo_sets", "common"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def clusters() -> EmbeddedSet:
    """Twelve classes of six features whose first half says the class, in a space where the second half is louder."""
    random = np.random.default_rng(0)
    labels = np.repeat(np.arange(12), 6)
    signal = random.normal(size=(12, 8))[labels] + 0.3 * random.normal(size=(72, 8))
    noise = 4 * random.normal(size=(72, 8))
    images = ImageSet("clusters", labels, [f"c{label}" for label in range(12)], arrays=np.zeros((72, 8, 8), np.uint8))
    return EmbeddedSet(images, torch.from_numpy(np.hstack([signal, noise])).float(), np.arange(72))


def cosines(vectors: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cosine_similarity(vectors[:-1], vectors[1:])


def test_a_set_is_laid_out_from_a_clone(modules, tmp_path):
    photo_sets = modules[2]
    clone, folder = tmp_path / "clone", tmp_path / "set"
    for name in ("train/rose/1.jpg", "train/rose/2.jpg", "test/rose/3.jpg", "train/tulip/1.jpg", "train/notes.txt"):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (600, 300), "red").save(clone / name, "JPEG")
    git = ["git", "-C", str(clone), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "photographs"]):
        subprocess.run([*git, *words], check=True)
    origin = photo_sets.Origin("me/mine", "HEAD", r"(?:train|test)/(?P<label>\w+)/\d\.jpg", 2, "mine")
    assert photo_sets.lay_out(origin, clone, folder) == {"rose": 2, "tulip": 1}
    assert len(open_data(folder)) == 3
    with Image.open(next((folder / "rose").iterdir())) as image:
        assert image.size == (512, 256)


def test_splits_and_folds_share_no_class(modules, clusters):
    simple_things = modules[0]
    at = simple_things.task(clusters, seed=1)
    known, unseen = (set(part.labels.tolist()) for part in (at.known, at.unseen))
    assert len(known) == len(unseen) == 6
    assert not known & unseen
    scored = []
    for fitted, other in simple_things.folds(at.known, 1, count=3):
        assert set(fitted.labels.tolist()) | set(other.labels.tolist()) == known
        assert not set(fitted.labels.tolist()) & set(other.labels.tolist())
        scored += sorted(set(other.labels.tolist()))
    assert sorted(scored) == sorted(known)


def test_the_closed_forms_of_few_wide_features_are_those_of_the_library(modules, clusters):
    simple_things = modules[0]
    random = torch.Generator().manual_seed(0)
    wide = torch.cat([clusters.vectors, torch.randn(72, 64, generator=random)], dim=1)
    at = simple_things.task(clusters._replace(vectors=wide), seed=0)
    known, form = choices.unit_features(at.known), closed_form("whitening")
    limits, folds = choices.Limits(None, wide.shape[1]), choices.make_folds(known, None, 0)
    fit, head = choices.fitted(
        choices.choose("whitening", form, folds, limits), form, choices.scatter_of([known])
    )  # fmt: skip
    found, in_span = simple_things.head_of("whitening", at.known, None, 0)
    assert (found.shrinkage, found.principal) == (fit.shrinkage, fit.principal)
    vectors, expected = (each(choices.unit_features(at.unseen).vectors) for each in (in_span, head))
    assert torch.allclose(cosines(vectors), cosines(expected), atol=1e-3)


def test_differences_are_paired_and_a_class_counts_once(modules):
    simple_things = modules[0]
    queries = {"MAP@R": torch.tensor([0.5, 0.5, 1.0, 1.0]), "R@1": torch.ones(4)}
    lower = {"MAP@R": queries["MAP@R"] - 0.25, "R@1": torch.ones(4)}
    split = {
        "classes": torch.tensor([0, 0, 1, 1]),
        "rows": {"untrained": queries, "whitening": lower, "train --frozen": lower},
        "held-out": {"untrained": 0.6, "whitening": 0.5},
    }
    split["held-out"]["LDA"], split["rows"]["LDA"] = 0.4, lower
    split = simple_things.with_closed_form(split)
    cells = {("flowers", "a"): [split, split], ("flowers", "b"): [split], ("pets", "a"): [split]}
    assert simple_things.verdict(cells)[simple_things.CLOSED_FORM]["pets"]["MAP@R"]["value"] == 0
    found = simple_things.verdict(cells)["train --frozen"]
    assert found["all sets"]["MAP@R"] == {"value": -25.0, "interval": [-25.0, -25.0]}
    assert set(found) == {"flowers", "pets", "all sets"}
    summary = simple_things.summary([split])
    assert summary["chosen"] == ["untrained"]
    assert summary["rows"]["whitening"] == {"MAP@R": 50.0, "R@1": 100.0, "held-out": 50.0}


def test_the_simplest_within_one_standard_error(modules):
    frozen_defaults = modules[1]
    classes = torch.arange(8)
    simple = torch.full((8,), 0.5)
    noisy = simple + torch.tensor([0.4, -0.3] * 4)
    values = {"untrained": simple, "trained": noisy}
    assert frozen_defaults.simplest(["untrained", "trained"], values, classes) == "untrained"
    assert frozen_defaults.simplest(["untrained", "trained"], values, classes, errors=0) == "trained"
    values["trained"] = simple + 0.05
    assert frozen_defaults.simplest(["untrained", "trained"], values, classes) == "trained"


def test_what_few_classes_choose_is_scored_on_the_others(modules, monkeypatch):
    frozen_defaults = modules[1]
    monkeypatch.setattr(frozen_defaults, "DRAWS", 30)
    classes = torch.arange(12).repeat_interleave(2)
    better = torch.where(classes % 2 == 0, 0.9, 0.5).double()  # than the untrained features, on half of the classes
    values = {"untrained": torch.full((24,), 0.6).double(), "whitening": better, "LDA": better - 0.3}
    found = frozen_defaults.regret_of_few_classes(values, classes, seed=0)
    assert set(found) == {"simplest within one standard error", "best"}
    for points in found.values():
        assert list(points) == ["4", "6", "8"]
        assert all(0 < each < 20 for each in points.values())
    assert found["best"]["4"] < found["simplest within one standard error"]["4"]
    same = frozen_defaults.regret_of_few_classes(dict.fromkeys(values, better), classes, seed=0)
    assert not any(points for regrets in same.values() for points in regrets.values())


@pytest.mark.release
def test_a_candidate_is_trained_with_and_without_all_known_classes(modules, clusters):
    frozen_defaults, at = modules[1], modules[0].task(clusters, seed=0)
    settings = frozen_defaults.Settings("whitening", lr=1e-4, epochs=1, proxies="means")
    found = frozen_defaults.measured(at, str(settings), settings, count=2)
    assert set(found["rows"]) == {"whitening, 0.0001, 1 epochs, means", "whitening, 0.0001, 1 epochs, means, refit"}
    assert len(found["epochs"]) == 3
    for row in found["rows"].values():
        assert len(row["held-out"]["MAP@R"]) == len(found["held-out classes"]) == 36
        assert len(row["unseen"]["R@1"]) == len(found["classes"]) == 36


@pytest.mark.release
def test_the_records(modules, letters, tmp_path, monkeypatch):
    from safetensors.torch import save_file

    from proxymetric.encoders import build

    simple_things, frozen_defaults, _ = modules
    monkeypatch.setenv("PROXYMETRIC_CACHE", str(tmp_path / "cache"))
    weights = tmp_path / "small.safetensors"
    save_file(build("small", size=32).backbone.state_dict(), weights)
    common = [str(letters), "--backbone", f"small={weights}", "--work", str(tmp_path / "work")]
    out = tmp_path / "simple.json"
    monkeypatch.setattr(sys, "argv", ["simple_things.py", *common, "--splits", "1", "--out", str(out)])
    simple_things.main()
    record = json.loads(out.read_text())
    assert {simple_things.DEFAULT, simple_things.TRAINED, simple_things.CLOSED_FORM} < set(record["verdict"])
    before = record["cells"]
    simple_things.main()
    assert json.loads(out.read_text())["cells"] == before, "finished splits are not measured again"
    words = ["--splits", "0", "--folds", "2", "--candidates", "0", "4", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["frozen_defaults.py", *common, *words])
    frozen_defaults.main()
    record = json.loads(out.read_text())
    assert "less untrained" in record["differences"]["unseen"]
