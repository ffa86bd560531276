"""`evaluate` compares the trained encoder with the untrained one, or two runs: as a table, in words, and on a page."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

import proxymetric as pm
from proxymetric.system.files import read_json
from terminal import bytes_of, proxymetric, refused, train

HELD_OUT = ("--set", "data.validation=0.5", "--set", "train.keep=trained")


@pytest.fixture(scope="module")
def run(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with five held-out classes. Only read it."""
    folder = tmp_path_factory.mktemp("runs") / "photos"
    answer = train(photos, folder, *HELD_OUT, "--no-report")
    assert answer.code == 0, answer
    return folder


@pytest.fixture(scope="module")
def frozen(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "frozen"
    answer = train(photos, folder, *HELD_OUT, "--frozen", "--no-report")
    assert answer.code == 0, answer
    return folder


def columns(out: str) -> dict[str, list[float]]:
    """The scores of both encoders and their difference, for each metric, without intervals."""
    rows = re.findall(r"^(\w+@\w+) {2,}(.*)$", out, re.MULTILINE)
    return {
        name: [float(value) for value in re.findall(r"(?<![\d(.])[-+]?\d+\.\d(?! to)(?!\))", line)]
        for name, line in rows
    }


@pytest.mark.parametrize("kind", ["run", "frozen"])
def test_the_untrained_encoder_stands_beside_the_trained_one(kind, request, tmp_path):
    run = request.getfixturevalue(kind)
    answer = proxymetric("evaluate", run, "--metrics", "R@1,MAP@R", "--no-report")
    assert answer.code == 0, answer
    rows = read_json(run / "result.json")["rows"]
    for metric, (before, after, difference) in columns(answer.out).items():
        assert before == pytest.approx(100 * rows["untrained encoder"][metric], abs=0.06)
        assert after == pytest.approx(100 * rows["trained encoder"][metric], abs=0.06)
        assert difference == pytest.approx(
            100 * (rows["trained encoder"][metric] - rows["untrained encoder"][metric]), abs=0.06
        )
    assert set(columns(answer.out)) == {"R@1", "MAP@R"}
    assert len(re.findall(r"\(-?\d+\.\d to -?\d+\.\d\)", answer.out)) == 2 * 3 + 2, "all with intervals"
    assert re.search(r"^(training gained|the trained encoder is (worse|not)).* MAP@R \(", answer.out, re.MULTILINE)
    assert "untrained encoder is the backbone before training, without the new head" in answer.out


def test_the_untrained_encoder_can_be_left_out(run):
    answer = proxymetric("evaluate", run, "--metrics", "R@1", "--no-untrained", "--no-report")
    assert answer.code == 0, answer
    assert "untrained" not in answer.out
    assert len(columns(answer.out)["R@1"]) == 1


def test_two_runs_are_compared(photos, run, frozen, tmp_path):
    page = tmp_path / "page.html"
    words = ("--data", photos, "--split", "all", "--metrics", "R@1,MAP@R", "--report", page)
    answer = proxymetric("evaluate", run, "--against", frozen, *words)
    assert answer.code == 0, answer
    assert "untrained" not in answer.out
    old, new, difference = columns(answer.out)["R@1"]
    images = pm.open_data(photos)
    for name, shown in ((frozen, old), (run, new)):
        score = pm.evaluate(pm.load(name).embed(images), images.labels, metrics=["R@1"])["R@1"]
        assert shown == pytest.approx(100 * score, abs=0.06)
    assert difference == pytest.approx(new - old, abs=0.11)
    text = " ".join(answer.out.split())
    assert re.search(rf"{re.escape(str(run))} is (not .*better|worse|better) than {re.escape(str(frozen))}: ", text)
    assert f"{frozen}: 5 of these 10 classes were trained on" in text
    assert str(frozen) in page.read_text()
    refused(proxymetric("evaluate", run, "--against", run), "--against: got", "which is the run itself; expected")
    refused(proxymetric("evaluate", run, "--against", frozen.with_name("frozn")), "did you mean", str(frozen))


def test_weights_that_are_gone_leave_the_untrained_row_out(run, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    about = (copy / "run.json").read_text()
    (copy / "run.json").write_text(re.sub(r'"weights": null', '"weights": "gone.safetensors"', about, count=1))
    answer = proxymetric("evaluate", copy, "--metrics", "R@1", "--no-report")
    assert answer.code == 0, answer
    assert "no row for the untrained encoder: weights: " in answer.out
    assert "gone.safetensors" in answer.out
    assert len(columns(answer.out)["R@1"]) == 1


def test_too_few_classes_for_an_interval(photos, run, tmp_path):
    for name in ("class0", "class1"):
        shutil.copytree(photos / name, tmp_path / "two" / name)
    answer = proxymetric("evaluate", run, "--data", tmp_path / "two", "--metrics", "R@1", "--no-report")
    assert "no intervals: 2 classes are too few" in answer.out
    assert " to " not in answer.out.split("R@1", 2)[1].splitlines()[0]


def test_a_picture_with_two_labels_is_said(photos, run, tmp_path):
    data = tmp_path / "photos"
    shutil.copytree(photos, data)
    one, other = sorted(path for path in data.iterdir() if path.is_dir())[:2]
    picture = sorted(one.iterdir())[0]
    before = proxymetric("evaluate", run, "--data", data, "--no-report", "--no-untrained")
    assert "exactly the vector" not in before.out
    shutil.copy(picture, other / f"again{picture.suffix}")
    answer = proxymetric("evaluate", run, "--data", data, "--no-report", "--no-untrained")
    assert "images with exactly the vector of an image of another class: 2" in " ".join(answer.out.split())


def test_classes_that_were_trained_on_are_said(photos, run, tmp_path):
    trained = set(read_json(run / "run.json")["classes"])
    other = tmp_path / "other"
    for folder in photos.iterdir():
        shutil.copytree(folder, other / folder.name)
    shutil.copytree(photos / "class0", other / "new")
    answer = proxymetric("evaluate", run, "--data", other, "--metrics", "R@1", "--no-report")
    assert answer.code == 0, answer
    assert f"{len(trained)} of these 11 classes were trained on (same names): the scores are not those" in answer.out
    assert f"{10 - len(trained)} of these 11 classes chose the epoch (same names)" in answer.out
    own = proxymetric("evaluate", run, "--metrics", "R@1", "--no-report")
    assert "(none of them trained on, but they chose the epoch)" in own.out
    assert "same names" not in own.out


def test_data_that_changed_since_training_is_said(photos, tmp_path):
    """A photo more leaves the classes as they were: the held-out ones are still known. A class more does not."""
    data, folder = tmp_path / "photos", tmp_path / "run"
    shutil.copytree(photos, data)
    assert train(data, folder, *HELD_OUT, "--no-report").code == 0
    first = sorted(each for each in data.iterdir() if each.is_dir())[0]
    image = sorted(first.iterdir())[0]
    shutil.copy(image, first / "one more.png")
    held_out = len(read_json(folder / "run.json")["classes"])
    for words in ((), ("--split", "validation")):
        answer = proxymetric("evaluate", folder, *words, "--no-report")
        assert answer.code == 0, answer
        out = " ".join(answer.out.split())
        assert f" of {10 - held_out} classes (none of them trained on" in out
        assert "photos has changed since the run was trained" in out
    report = proxymetric("evaluate", folder, "--redraw")
    assert report.code == 0, report
    assert "photos has changed since the run was trained" in report.err
    shutil.copytree(first, data / "a class more")
    refused(
        proxymetric("evaluate", folder, "--split", "validation"), "split: got 'validation'", "classes of photos have",
        "expected --split all",
    )  # fmt: skip
    assert "has changed since" in proxymetric("evaluate", folder, "--no-report").out


def test_a_run_that_is_not_there_or_no_run_at_all(run, tmp_path):
    refused(
        proxymetric("evaluate", run.with_name("photoz"), "--redraw"), "which holds no run", f"did you mean '{run}'?"
    )
    (tmp_path / "model.onnx").write_bytes(b"onnx")
    refused(
        proxymetric("evaluate", tmp_path / "model.onnx", "--data", "glyphs"), "model.onnx, expected the folder of a run"
    )


def test_a_run_that_is_not_finished_is_said(run, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    (copy / "result.json").unlink()
    sentence = f"{copy} is not finished: this is its best model so far; `proxymetric train --resume` continues it"
    assert sentence in proxymetric("evaluate", copy, "--metrics", "R@1", "--no-report").out
    assert sentence not in proxymetric("evaluate", run, "--metrics", "R@1", "--no-report").out


def test_the_page_stands_beside_the_run(photos, run):
    before = bytes_of(run)
    answer = proxymetric("evaluate", run, "--data", photos, "--split", "all", "--metrics", "R@1,MAP@R")
    page = run.parent / "photos-on-photos.html"
    assert f"report: {page}" in answer.out
    text = page.read_text(encoding="utf-8")
    for part in ("untrained encoder", "trained encoder", "difference", "What it finds", "80 images of 10 classes"):
        assert part in text
    assert 'class="range"' in text, "intervals"
    for name in ("raw pixels", "untrained encoder", "trained encoder"):
        assert re.search(rf"{name}, 10 classes: MAP@R [\d.]+ %<", text), "drawn against the number of classes"
    assert re.search(
        r"^R@1 [\d.]+ %: of 100 images of the 10 classes \(80 images\), \d+ find an", answer.out, re.MULTILINE
    )
    assert bytes_of(run) == before
    again = proxymetric("evaluate", run, "--data", photos, "--split", "all", "--metrics", "R@1,MAP@R")
    assert again.code == 0, again
    page.unlink()


def test_the_page_replaces_nothing_of_others(run, tmp_path):
    photo = tmp_path / "photo.jpg"
    photo.write_bytes(b"a photo")
    refused(proxymetric("evaluate", run, "--report", photo), "report: got", "photo.jpg", "not a page of proxymetric")
    refused(proxymetric("evaluate", run, "--report", tmp_path), "report: got", "which is a folder")
    refused(proxymetric("evaluate", run, "--report", "/dev/full"), "report: got /dev/full")
    (tmp_path / "link.html").symlink_to(photo)
    refused(proxymetric("evaluate", run, "--report", tmp_path / "link.html"), "link.html")
    assert photo.read_bytes() == b"a photo"
    assert Path("/dev/full").is_char_device()


def test_a_folder_that_cannot_be_written_costs_only_the_page(photos, run, monkeypatch):
    def full(*args: object, **options: object) -> None:
        raise OSError("could not save: the disk is full")

    monkeypatch.setattr("proxymetric.runs.evaluate.draw_evaluation", full)
    answer = proxymetric("evaluate", run, "--metrics", "R@1")
    assert answer.code == 0, answer
    assert "no page: could not save: the disk is full; --report PATH writes it elsewhere" in answer.err
    refused(proxymetric("evaluate", run, "--metrics", "R@1", "--report", run.parent / "x.html"), "the disk is full")
