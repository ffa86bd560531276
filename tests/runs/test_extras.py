"""Galleries, views of the papers by name, TensorBoard, and reports that are drawn again."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from proxymetric.data import ImageSet
from proxymetric.metrics import evaluate
from proxymetric.runs.assemble import eval_view, train_view
from proxymetric.runs.comparison import compare
from proxymetric.runs.evaluation_set import evaluation_set, unseen_vectors
from proxymetric.runs.recipe import check
from proxymetric.runs.report import remake_report
from proxymetric.runs.score import (
    EmbeddedSet,
    break_down,
    describe,
    queries_left_out,
    rank_set,
    rates_below_one_pair,
    score,
)
from proxymetric.runs.train import train
from proxymetric.system.watcher import Silent
from terminal import proxymetric
from training_runs import TINY


@pytest.fixture(scope="module")
def in_shop(tmp_path_factory):
    """Files in the official layout of In-Shop: a list assigns each image to train, query or gallery."""
    root = tmp_path_factory.mktemp("in_shop")
    random = np.random.default_rng(0)
    rows = []
    for item in range(12):
        pattern = random.integers(0, 256, (4, 4, 3))
        for k in range(6):
            status = "train" if item < 6 else ("query" if k < 2 else "gallery")
            file = f"img/WOMEN/Dresses/id_{item:08d}/{k:02d}.jpg"
            pixels = np.clip(pattern + random.integers(-60, 61, (4, 4, 3)), 0, 255).astype(np.uint8)
            (root / file).parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).resize((16, 16)).save(root / file, quality=95)
            rows.append(f"{file} id_{item:08d} {status}")
    text = "\n".join([str(len(rows)), "image_name item_id evaluation_status", *rows]) + "\n"
    (root / "list_eval_partition.txt").write_text(text)
    return root


@pytest.mark.usefixtures("only_training")
def test_a_test_set_with_a_gallery_is_measured_query_against_gallery(in_shop, tmp_path):
    settings = TINY | {"train.epochs": 1, "data.validation": 0.34}
    run = train(in_shop, out=tmp_path / "run", settings=settings, watcher=Silent())
    embedded = unseen_vectors(tmp_path / "run", Silent())
    images, vectors = embedded.images, embedded.vectors
    stored = torch.from_numpy(images.gallery)
    labels = torch.from_numpy(images.labels)
    assert (int((~stored).sum()), int(stored.sum())) == (12, 24)
    wanted = evaluate(
        vectors[~stored], labels[~stored], ["R@1", "MAP@R"], gallery=vectors[stored], gallery_labels=labels[stored]
    )
    assert run.scores == pytest.approx(wanted)
    assert run.scores != pytest.approx(evaluate(vectors, labels, ["R@1", "MAP@R"]))
    assert score(embedded, ["R@1", "MAP@R"]) == wanted
    answer = proxymetric("evaluate", tmp_path / "run", "--metrics", "R@1,MAP@R", "--device", "cpu")
    assert answer.code == 0, answer
    assert "12 queries against a gallery of 24 images, 6 classes" in " ".join(answer.out.split())
    shown = [f"{100 * wanted[name]:.1f}" for name in ("R@1", "MAP@R")]
    assert all(value in answer.out for value in shown), (shown, answer.out)


def toy(gallery: list[bool] | None, test_classes: tuple[int, ...] = ()) -> EmbeddedSet:
    """Five images of three classes; the last image could not be read."""
    images = ImageSet(
        "toy", np.array([0, 0, 1, 1, 2, 0]), ["a", "b", "c"], arrays=np.zeros((6, 8, 8), np.uint8),
        test_classes=test_classes, gallery=None if gallery is None else np.array(gallery),
    )  # fmt: skip
    vectors = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.8, 0.3], [0.1, 1.0]])
    return EmbeddedSet(images, vectors, np.arange(5))


def test_a_gallery_is_searched_and_never_asked():
    """Rows of rankings and breakdowns are those of the embedded set, on both sides."""
    embedded = toy([False, True, False, True, False, True])
    ranking = rank_set(embedded, 3)
    assert ranking.queries.tolist() == [0, 2]
    assert ranking.neighbours.tolist() == [[1, 3, -1], [3, 1, -1]]
    assert ranking.hits[:, 0].tolist() == [True, True]
    assert (ranking.left_out, queries_left_out(embedded)) == (1, 1), "nothing of class c is in the gallery"
    assert score(embedded, ["R@1"]) == {"R@1": 1.0}
    parts = break_down(embedded, worst=2, pairs=1)
    assert [(query.query, query.neighbours) for query in parts.worst] == [(0, [1, 3]), (2, [3, 1])]
    assert parts.queries.tolist() == [0, 2]
    assert describe(embedded) == "3 queries against a gallery of 2 images, 3 classes"


def test_a_rate_below_that_of_one_pair_is_named():
    """Five images of classes 2, 2, 1: ten pairs, of which two are genuine; 3 x 2 with a gallery, of which two are."""
    asked = ["R@1", "FNMR@FMR=0.2", "FNMR@FMR=0.01", "FNMR@FMR=0"]
    assert rates_below_one_pair(toy(None), asked) == {
        "FNMR@FMR=0.01": "FNMR@FMR=0.01: got 8 pairs of different classes, expected at least 100, so that one false "
        "match is a rate of 0.01 at most; the figure is left out"
    }
    both = rates_below_one_pair(toy([False, True, False, True, False, True]), asked)
    assert list(both) == ["FNMR@FMR=0.2", "FNMR@FMR=0.01"]
    assert "got 4 pairs of different classes, expected at least 5," in both["FNMR@FMR=0.2"]


def test_a_figure_without_enough_pairs_is_left_out_of_a_comparison(recwarn):
    comparison = compare(toy(None), toy(None), ["R@1", "FNMR@FMR=0.2", "FNMR@FMR=0.01", "FNMR@FMR=0"])
    assert comparison.metrics == ("R@1", "FNMR@FMR=0.2", "FNMR@FMR=0")
    assert {len(row) for row in comparison.rows.values()} == {len(comparison.differences)} == {3}
    assert not recwarn.list, "the sentence of rates_below_one_pair is enough"
    with pytest.warns(UserWarning, match=r"FNMR@FMR=0\.01: got 8 pairs"):
        assert list(score(toy(None), ["FNMR@FMR=0.01", "R@1"])) == ["R@1"]


@pytest.mark.parametrize(("gallery", "test"), [(None, ()), ([False, True, False, True, False, True], (1, 2))])
def test_other_sets_are_scored_each_image_against_all_others(gallery, test):
    """Also a set that holds training classes, which have no gallery."""
    embedded = toy(gallery, test)
    assert embedded.gallery is None
    assert rank_set(embedded, 1).neighbours.flatten().tolist() == [1, 0, 4, 1]
    assert score(embedded, ["R@1"]) == {"R@1": 0.5}
    assert describe(embedded) == "5 images of 3 classes"


def test_the_report_ranks_queries_against_the_gallery(in_shop, tmp_path, monkeypatch):
    pages = []
    monkeypatch.setattr("proxymetric.plots.write_report", lambda file, **parts: pages.append(parts) or file)
    settings = TINY | {"train.epochs": 1, "data.validation": 0.34}
    run = train(in_shop, out=tmp_path / "run", settings=settings, watcher=Silent())
    remake_report(run.folder)
    for page in pages:
        assert page["facts"]["evaluated on"].startswith("12 queries against a gallery of 24 images")
        assert all(sum(hit.right for hit in row.results) <= 4 for row in page["gallery"]), "4 of a class can be found"
    (_, first), (_, again) = ((len(page["gallery"]), [r.query_class for r in page["gallery"]]) for page in pages)
    assert first == again


def test_a_papers_view_by_name():
    recipe = check({"view": {"name": "ccp"}})
    assert (train_view(recipe).size, train_view(recipe).scale) == (227, (0.16, 1.0))
    assert eval_view(recipe) == {"size": 227, "resize": 256, "interpolation": "bilinear"}
    bent = check({"view": {"name": "ccp", "size": 114, "flip": False}})
    assert (train_view(bent).size, train_view(bent).flip, eval_view(bent)["resize"]) == (114, False, 129)
    assert check(json.loads(json.dumps(recipe.as_dict()))) == recipe
    with pytest.raises(ValueError, match="did you mean 'proxy-anchor'"):
        check({"view": {"name": "proxy-ancor"}})


@pytest.mark.usefixtures("only_training")
def test_tensorboard_holds_the_log_and_a_resumed_run_does_not_repeat_itself(photos, tmp_path):
    event_file = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    settings = TINY | {"train.epochs": 2, "train.track": "tensorboard"}
    train(photos, out=tmp_path / "run", settings=settings, watcher=Silent())
    train(photos, out=tmp_path / "run", settings=settings | {"train.epochs": 3}, resume=True, watcher=Silent())
    found = event_file.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    found.Reload()
    records = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    scores = {r["step"]: r["MAP@R"] for r in records if r["event"] == "evaluation"}
    drawn = {event.step: event.value for event in found.Scalars("validation/MAP@R")}
    assert drawn == pytest.approx(scores)
    assert len(found.Scalars("validation/MAP@R")) == len(scores) == 4
    assert "train/lr/proxies" in found.Tags()["scalars"]


@pytest.mark.usefixtures("only_training")
def test_an_encoder_without_a_head_trains(photos, tmp_path):
    settings = TINY | {"encoder.head": "none", "encoder.dim": "none", "train.epochs": 1}
    with pytest.raises(ValueError, match=r"train.warmup: got 1, but there is neither head nor proxies"):
        train(photos, method="triplet", out=tmp_path / "run", settings=settings, watcher=Silent())
    rows = settings | {"loss.touched": "batch"}
    assert train(photos, out=tmp_path / "rows", settings=rows, watcher=Silent()).result.skipped_steps == 0


@pytest.mark.usefixtures("only_training")
def test_batches_fit_themselves_where_images_per_class_are_only_advised(photos, tmp_path):
    said = []

    class Notes(Silent):
        def say(self, text):
            said.append(text)

    settings = TINY | {"train.batch": 128, "train.epochs": 1}
    train(photos, method="triplet", out=tmp_path / "run", settings=settings, watcher=Notes())
    assert "batch size 32: triplet needs 4 images of each class" in said
    train(photos, method="moco", out=tmp_path / "moco", settings=settings | {"loss.base": "triplet"}, watcher=Notes())
    assert "batch size 32: moco needs 4 images of each class" in said, "as its base"
    with pytest.raises(ValueError, match=r"--set train.per_class"):
        train(
            photos, method="triplet", out=tmp_path / "no", settings=settings | {"train.per_class": 4}, watcher=Silent()
        )


@pytest.mark.usefixtures("only_training")
def test_what_a_resumed_run_was_told_anew_is_kept(photos, tmp_path):
    train(photos, out=tmp_path / "run", settings=TINY | {"train.epochs": 1}, watcher=Silent())
    train(out=tmp_path / "run", epochs=2, resume=True, watcher=Silent())
    again = train(out=tmp_path / "run", resume=True, watcher=Silent())
    assert (again.result.recipe["train"]["epochs"], again.result.epochs) == (2, 2)


@pytest.mark.usefixtures("only_training")
def test_a_refit_says_what_it_cost_and_the_chosen_model_is_measured_on_what_it_has_not_seen(photos, tmp_path):
    run = train(photos, out=tmp_path / "run", settings=TINY | {"train.epochs": 1}, refit=True, watcher=Silent())
    refit = run.result.refit
    assert refit["images"] == 80
    assert refit["parameters"]["trained"] > run.result.parameters["trained"]
    assert run.result.seconds >= run.result.training_seconds + refit["training_seconds"]
    images, words = evaluation_set(tmp_path / "run", which="chosen")
    assert (len(images.classes), words) == (2, "none of them trained on, but they chose the epoch")
    assert evaluation_set(tmp_path / "run")[1] == "all of them trained on"


def test_a_report_is_made_again_and_an_unfinished_run_is_refused(photos, tmp_path):
    train(photos, out=tmp_path / "run", settings=TINY | {"train.epochs": 1}, watcher=Silent())
    page = tmp_path / "run" / "report.html"
    first = page.read_text()
    page.unlink()
    assert remake_report(tmp_path / "run") == page
    assert page.read_text().count("<img") == first.count("<img")
    (tmp_path / "run" / "result.json").unlink()
    with pytest.raises(ValueError, match="which is not finished"):
        remake_report(tmp_path / "run")
