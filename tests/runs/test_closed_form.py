"""Methods in closed form, heads that start from one, and the rows of every report."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import proxymetric as pm
from no_forms import no_forms
from oracles.closed_forms import whitening_metric
from proxymetric.closed_forms import Whitening
from proxymetric.data import ImageSet, open_data, split
from proxymetric.encoders import Encoder
from proxymetric.features.cache import cached_features
from proxymetric.papers import CLOSED_FORMS, closed_form
from proxymetric.runs import recipe as recipes
from proxymetric.runs.closed_form import (
    FALLBACK_SHRINKAGE,
    Fit,
    Limits,
    choose,
    fitted,
    make_folds,
    reduced,
    scatter_of,
)
from proxymetric.runs.evaluation_set import evaluation_set
from proxymetric.runs.report import remake_report
from proxymetric.runs.score import EmbeddedSet
from proxymetric.runs.train import Run
from proxymetric.system.checkpoint import Checkpoint
from training_runs import LEARNING, TINY, Notes, Stop, StopAfter, run, same_run

COMPUTED = {"data__validation": 0.3, "data__test": 0.3}
WHITENED = {"method": "whitening", "train__epochs": 5} | COMPUTED
LEARN = LEARNING | COMPUTED | {"encoder__layer_norm": False}


@pytest.fixture(scope="module")
def letters(letters: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty of the characters in eight drawings: thirteen classes are held out, enough to choose on. Only read it."""
    fewer = tmp_path_factory.mktemp("letters") / "letters"
    for folder in sorted(letters.iterdir())[:60]:
        (fewer / folder.name).mkdir(parents=True)
        for file in sorted(folder.iterdir())[:8]:
            shutil.copy(file, fewer / folder.name)
    return fewer


@pytest.fixture(scope="module")
def whitened(letters: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, list[str]]:
    """A finished run of whitening, for which epochs were asked, and its messages. Only read its folder."""
    notes = Notes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("proxymetric.runs.session.draw_report", lambda *args, **kwargs: None)
        patch.setattr("proxymetric.runs.session.closed_form_rows", no_forms)
        done = run(letters, tmp_path_factory.mktemp("whitened") / "run", watcher=notes, **WHITENED)
    return done, notes.said


def without_dim(
    photos: Path, out: Path, *, resume: bool = False, watcher: Notes | None = None, **settings: object
) -> Run:
    """A tiny run that does not name its dimensions."""
    given = {key.replace("__", "."): value for key, value in settings.items()}
    tables = {key: value for key, value in TINY.items() if key != "encoder.dim"} | given
    return pm.train(photos, out=out, settings=tables, resume=resume, watcher=watcher or Notes())


def head_of(folder: Path) -> torch.nn.Linear:
    head = pm.load(folder, device="cpu").encoder.head
    return head[-1] if isinstance(head, torch.nn.Sequential) else head


def embedded(seed: int, classes: int, images: int = 6, width: int = 20, signal: float = 0.5) -> EmbeddedSet:
    """Features in which the classes differ along few directions, and the images of a class along others."""
    random = np.random.default_rng(seed)
    labels = np.repeat(np.arange(classes), images)
    spread = np.where(np.arange(width) < 5, 1.0, 0.1)
    features = random.normal(size=(classes, width))[labels] * signal + random.normal(size=(len(labels), width)) * spread
    images_of = ImageSet(
        "dots", labels, [str(c) for c in range(classes)], arrays=np.zeros((len(labels), 8, 8), np.uint8)
    )
    return EmbeddedSet(images_of, torch.from_numpy(features).float(), np.arange(len(labels)))


def test_whitening_is_the_closed_form_on_all_known_classes(whitened, letters):
    done, said = whitened
    fit, recipe = done.result.refit["closed_form"], done.result.recipe
    assert (recipe["train"]["frozen"], recipe["train"]["refit"]) == (True, True)
    assert recipe["encoder"]["normalise_features"]
    (nothing,) = (line for line in said if line.startswith("whitening: nothing is trained"))
    assert "without effect: " in nothing
    assert "train.epochs" in nothing
    assert (done.result.steps, done.result.epochs, done.result.refit["steps"]) == (0, 0, 0)
    images = open_data(letters)
    known = split(images, 0.0, 0.3, 0).train
    assert (fit["images"], fit["classes"]) == (len(known), len(known.classes)), "held-out classes included"
    assert fit["chosen_on"] == f"chosen on 4 folds of the {len(known.classes)} training classes"
    model = pm.load(done.folder, device="cpu")
    features = cached_features(model.encoder, known, model.view).vectors.double().numpy()
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    expected = whitening_metric(features, known.labels, fit["shrinkage"], fit["principal"])
    weight = head_of(done.folder).weight.detach().double().numpy()
    scale = np.trace(weight.T @ weight) / np.trace(expected)
    np.testing.assert_allclose(weight.T @ weight, scale * expected, atol=1e-4 * scale * abs(expected).max())
    vectors = model.embed(known)
    centred = features - features.mean(0)
    expected_vectors = torch.nn.functional.normalize(torch.from_numpy(centred @ weight.T))
    torch.testing.assert_close(vectors.double(), expected_vectors, atol=2e-4, rtol=0)


@pytest.mark.usefixtures("only_training")
def test_held_out_classes_choose_and_are_scored_by_a_head_that_does_not_know_them(letters, tmp_path):
    done = without_dim(letters, tmp_path / "run", method="lda", **COMPUTED)
    fit, validation = done.result.closed_form, done.result.validation
    assert "held-out classes" in fit["chosen_on"]
    assert validation["MAP@R"] == pytest.approx(fit["score"], abs=1e-4)
    chosen, final = (pm.load(done.folder, which, "cpu") for which in ("chosen", "best"))
    assert len(chosen.classes) == done.result.data["train"]["classes"]
    assert len(final.classes) == len(chosen.classes) + done.result.data["validation"]["classes"]
    assert fit["dim"] is None
    assert final.dim <= len(final.classes) - 1


@pytest.mark.usefixtures("only_training")
def test_untrained_is_the_backbone_as_it_is(letters, tmp_path):
    done = run(letters, tmp_path / "run", method="untrained", **COMPUTED)
    assert done.result.rows["trained encoder"] == pytest.approx(done.result.rows["untrained encoder"], abs=1e-6)
    assert done.result.refit is None
    model = pm.load(done.folder, device="cpu")
    images = torch.randint(0, 256, (4, 3, 16, 16), dtype=torch.uint8)
    torch.testing.assert_close(
        model.embed(images), torch.nn.functional.normalize(model.encoder.features(images)).detach()
    )


@pytest.mark.usefixtures("no_page")
@pytest.mark.parametrize("frozen", [True, False])
def test_every_run_has_rows_of_the_closed_forms_and_they_are_those_of_the_methods(letters, tmp_path, frozen):
    settings = LEARN | {"train__frozen": frozen, "train__epochs": 1, "encoder__pooling": "avg+max"}
    notes = Notes()
    trained = run(letters, tmp_path / "trained", watcher=notes, **settings)
    assert list(trained.result.rows) == ["raw pixels", "untrained encoder", "whitening", "lda", "trained encoder"]
    for name in ("whitening", "lda"):
        same = COMPUTED | {"encoder__pooling": "avg+max", "encoder__dim": LEARN["encoder__dim"]}
        alone = run(letters, tmp_path / name, method=name, **same)
        assert name not in alone.result.rows
        assert trained.result.rows[name] == pytest.approx(alone.scores, abs=2e-3)
    costs = [line for line in notes.said if "one pass of the untrained backbone over" in line]
    assert len(costs) == (0 if frozen else 1), "the features of a frozen run are there anyway"


@pytest.mark.usefixtures("no_page")
def test_the_rows_are_computed_once_for_a_resumed_run(photos, tmp_path, monkeypatch):
    with pytest.raises(Stop):
        run(photos, tmp_path / "run", watcher=StopAfter(11), train__save_every=3)
    monkeypatch.setattr("proxymetric.runs.session.closed_form_rows", lambda *args: pytest.fail("computed again"))
    done = run(photos, tmp_path / "run", resume=True, train__save_every=3)
    assert {"whitening", "lda"} <= done.result.rows.keys()


@pytest.mark.usefixtures("only_training")
@pytest.mark.parametrize(
    ("start", "frozen"),
    [
        ("lda", True),
        ("whitening", False),
        pytest.param("lda", False, marks=pytest.mark.slow),
        pytest.param("whitening", True, marks=pytest.mark.slow),
    ],
)
def test_a_start_is_the_closed_form_before_training_and_resumes_bit_for_bit(letters, tmp_path, start, frozen):
    settings = LEARN | {"train__frozen": frozen, "train__start": start, "train__epochs": 1, "train__lr": 1e-3}
    settings |= {"train__save_every": 1}
    done = run(letters, tmp_path / "run", **settings)
    assert done.result.recipe["encoder"]["normalise_features"]
    computed = run(letters, tmp_path / "computed", method=start, **COMPUTED, encoder__dim=32, encoder__pooling="auto")
    first = done.result.curve[0]["MAP@R"]
    random = run(letters, tmp_path / "random", **settings | {"train__start": "none"})
    assert first > 1.1 * random.result.curve[0]["MAP@R"]
    if frozen and start == "lda":
        assert first == pytest.approx(computed.result.validation["MAP@R"], abs=0.02)
    with pytest.raises(Stop):
        run(letters, tmp_path / "stopped", watcher=StopAfter(2), **settings)
    resumed = run(letters, tmp_path / "stopped", resume=True, **settings)
    same_run(resumed.folder, done.folder)
    assert resumed.result.closed_form is not None


@pytest.mark.usefixtures("only_training")
def test_a_start_does_not_change_the_rest_of_the_training(letters, tmp_path):
    """The random numbers after the head are those of a run without a start: proxies and batches are the same."""
    settings = LEARN | {"train__epochs": 1, "train__lr": 0.0, "encoder__normalise_features": True}
    plain, started = (run(letters, tmp_path / str(s), **settings, train__start=s) for s in ("none", "whitening"))
    one, other = (Checkpoint.read(each.folder / "last.safetensors").tensors for each in (plain, started))
    proxies = [name for name in one if name.startswith("criterion.")]
    assert proxies
    assert all(torch.equal(one[name], other[name]) for name in proxies)
    assert not torch.equal(one["encoder.head.1.weight"], other["encoder.head.1.weight"])


@pytest.mark.usefixtures("only_training")
def test_a_start_keeps_the_dimensions_that_are_named_and_else_those_that_there_are(photos, tmp_path):
    named = run(photos, tmp_path / "named", train__start="lda", train__epochs=1, encoder__dim=300)
    assert pm.load(named.folder, device="cpu").dim == 300
    other = without_dim(photos, tmp_path / "other", train__start="lda", train__epochs=1)
    assert pm.load(other.folder, device="cpu").dim == 256


def test_the_page_of_a_method_in_closed_form(letters, tmp_path):
    done = run(letters, tmp_path / "run", method="whitening", data__validation=0.3)
    page = (done.folder / "report.html").read_text()
    assert "whitening: shrinkage" in page
    assert "lda" in page
    assert "epoch 0 was chosen" not in page
    assert re.search(r"\d+ held-out classes \(\d+ images\), not fitted on, but they chose the shrinkage", page)
    before = page.count("<svg")
    remake_report(done.folder)
    assert (done.folder / "report.html").read_text().count("<svg") == before
    note = evaluation_set(done.folder)[1]
    assert note == "all of them trained on"


@pytest.mark.usefixtures("only_training")
def test_a_run_in_closed_form_that_was_killed_ends_the_same(whitened, letters, tmp_path):
    done, _ = whitened
    killed = tmp_path / "killed"
    for missing in (["result.json"], ["result.json", "refit"], ["result.json", "refit", "last.safetensors"]):
        shutil.copytree(done.folder, killed)
        for name in missing:
            shutil.rmtree(killed / name) if (killed / name).is_dir() else (killed / name).unlink()
        if "last.safetensors" in missing:
            (killed / "best.safetensors").unlink()
            (killed / "log.jsonl").unlink()
        again = run(letters, killed, resume=True, **WHITENED)
        assert again.scores == done.scores
        one, other = (Checkpoint.read(each / "refit" / "last.safetensors").tensors for each in (killed, done.folder))
        assert all(torch.equal(one[name], other[name]) for name in other if name.startswith("encoder."))
        shutil.rmtree(killed)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"method": "whitenning"}, "method: got 'whitenning'.*did you mean 'whitening'"),
        ({"train": {"start": "whitenning"}}, "train.start: got 'whitenning'.*did you mean 'whitening'"),
        ({"method": "whitening", "train": {"frozen": False}}, "train.frozen: got False with method 'whitening'"),
        ({"method": "lda", "train": {"start": "lda"}}, "train.start: got 'lda' with method 'lda'"),
        ({"method": "lda", "train": {"whiten": True}}, "train.whiten: got True with method 'lda'"),
        ({"method": "lda", "loss": {"nested": [2, 4]}}, "loss.nested: got"),
        ({"method": "lda", "encoder": {"normalise_features": False}}, "encoder.normalise_features: got False"),
        ({"train": {"start": "lda"}, "encoder": {"layer_norm": True}}, "encoder.layer_norm: got True with train.start"),
        ({"train": {"start": "lda"}, "encoder": {"head": "none"}}, "encoder.head: got 'none' with train.start='lda'"),
        ({"method": "whitening", "loss": {"shrinkag": 0.2}}, "loss.shrinkag: got an unknown key.*mean 'shrinkage'"),
    ],
)  # fmt: skip
def test_what_a_closed_form_cannot_do_is_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        recipes.check(settings)


@pytest.mark.usefixtures("only_training")
@pytest.mark.parametrize(
    ("shrinkage", "words"), [("much", "expected a number or 'auto'"), (0.0, "above 0"), (2, "0 to 1")]
)
def test_a_wrong_shrinkage_is_refused_before_the_images_are_opened(tmp_path, shrinkage, words):
    with pytest.raises(ValueError, match=f"shrinkage: got .*{words}"):
        run(tmp_path, tmp_path / "run", method="whitening", loss__shrinkage=shrinkage)


@pytest.mark.usefixtures("only_training")
def test_a_shrinkage_and_dimensions_that_are_named_are_taken(letters, tmp_path):
    named = run(
        letters, tmp_path / "run", method="whitening", loss__shrinkage=0.123, encoder__dim=19, **COMPUTED
    ).result
    assert (named.closed_form["shrinkage"], named.closed_form["principal"]) == (0.123, 19)
    large = run(letters, tmp_path / "large", method="whitening", encoder__dim=300, **COMPUTED)
    assert pm.load(large.folder, device="cpu").dim == 256, "there are no more features"


@pytest.mark.usefixtures("only_training")
@pytest.mark.parametrize("method", ["whitening", "lda"])
def test_few_classes(photos, tmp_path, method):
    """Two training classes and none held out; then one image of each class, which says nothing."""
    two = tmp_path / "two"
    for name in ("class0", "class1"):
        shutil.copytree(photos / name, two / name)
    done = run(two, tmp_path / "run", method=method, data__validation=0)
    assert done.result.closed_form["shrinkage"] == FALLBACK_SHRINKAGE
    assert "2 classes with two images or more are too few" in done.result.closed_form["chosen_on"]
    for file in [*two.rglob("[1-9].png")]:
        file.unlink()
    with pytest.raises(
        ValueError, match="data: got one image of each of the 2 classes, expected classes of two images or more"
    ):
        run(two, tmp_path / "single", method=method, data__validation=0)


@pytest.mark.usefixtures("only_training")
def test_features_that_are_not_finite_end_the_run_with_a_sentence(letters, tmp_path, monkeypatch):
    features = Encoder.features
    monkeypatch.setattr(Encoder, "features", lambda self, images: features(self, images) * float("nan"))
    monkeypatch.setenv("PROXYMETRIC_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ValueError, match=r"features: got NaN or infinity, first in row 0, expected finite numbers"):
        run(letters, tmp_path / "run", method="whitening", **COMPUTED)


def test_ten_held_out_classes_choose_and_else_folds():
    known = embedded(0, 12)
    assert make_folds(known, embedded(1, 10), 0).words == "chosen on 10 held-out classes"
    assert make_folds(known, embedded(1, 9), 0).words == "chosen on 4 folds of the 12 training classes"
    assert make_folds(known, None, 0).words == "chosen on 4 folds of the 12 training classes"
    assert make_folds(embedded(0, 3), embedded(1, 9), 0).words == "chosen on 9 held-out classes"
    folds = make_folds(known, None, 0)
    for scatter, scored in folds.tasks:
        assert (scatter.classes, len(np.unique(scored.labels))) == (9, 3)
        fitted_classes = torch.nonzero(scatter.counts).flatten()
        assert not set(fitted_classes.tolist()) & set(scored.labels.tolist())


def test_the_choice_is_the_best_shrinkage_and_then_the_best_number_of_directions():
    known, held_out = (embedded(seed, 15, width=64, signal=0.06) for seed in (0, 1))
    folds = make_folds(known, held_out, 0)
    fit = choose("whitening", closed_form("whitening"), folds, Limits(None, 64))

    def score(shrinkage: float, principal: int) -> float:
        vectors = Whitening(shrinkage, principal)(folds.tasks[0][0])(held_out.vectors)
        return float(pm.evaluate(vectors, held_out.labels, metrics=["MAP@R"])["MAP@R"])

    first = {shrinkage: score(shrinkage, 64) for shrinkage in (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)}
    shrinkage = max(first, key=first.__getitem__)
    second = {principal: score(shrinkage, principal) for principal in (64, 32, 16)}
    assert len(set(first.values())) > 4
    assert (fit.shrinkage, fit.principal) == (shrinkage, max(second, key=second.__getitem__))
    assert fit.score == pytest.approx(max(second.values()), abs=1e-6)


@pytest.mark.parametrize(("images", "classes"), [(30, 5), (1200, 40)])
def test_a_closed_form_of_reduced_features_is_that_of_all_features(images, classes):
    known = embedded(0, classes, images // classes, width=48)
    narrow, projection = reduced(known, 32)
    assert narrow.vectors.shape == (images, min(images, 32))
    for name in ("whitening", "lda"):
        fit, form = Fit(name, 0.3, 12, None, None, ""), closed_form(name)
        wide = fitted(fit, form, scatter_of([known]))[1](known.vectors)
        other = fitted(fit, form, scatter_of([narrow]), projection)[1](known.vectors)
        torch.testing.assert_close(
            other @ other.T, wide @ wide.T, atol=1e-3 * float((wide @ wide.T).abs().max()), rtol=0
        )
    broken = known._replace(vectors=known.vectors.index_fill(0, torch.tensor([3]), float("nan")))
    with pytest.raises(ValueError, match="features: got NaN or infinity, first in row 3"):
        reduced(broken, 32)
    assert reduced(known, 48) == (known, None)


@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_every_closed_form_cites_and_advises_and_says_that_no_step_trains_it(name):
    row = CLOSED_FORMS[name]
    assert re.fullmatch(r"[^,]+ (19|20)\d\d, .{10,}", row.about.paper), "authors year, title"
    assert len(row.about.choose) > 20
    criterion = pm.method(name, classes=3, dim=4)
    with pytest.raises(ValueError, match=r"method: got a closed form, .* expected a method that steps train"):
        criterion(torch.randn(2, 4), torch.tensor([0, 1]))
