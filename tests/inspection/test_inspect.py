"""`pm.inspect` and `proxymetric inspect`: the folder they write, unreadable files, kills, and what they refuse."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import proxymetric as pm
from proxymetric.encoders import build
from proxymetric.inspection import contents as contents_module
from proxymetric.inspection.report import COLUMNS
from proxymetric.models.model import Model
from terminal import proxymetric, refused


@pytest.fixture(scope="module")
def run(finished):
    return finished


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Model(build("small", dim=8), normalise="l2", classes=[], view={"size": 16, "resize": 16})


@pytest.fixture
def folder(photos, tmp_path):
    """The photos, with a copy in another class, a mirrored one in the same class, and files that cannot be read."""
    folder = Path(shutil.copytree(photos, tmp_path / "photos"))
    shutil.copy(folder / "class0" / "0.png", folder / "class3" / "copy.png")
    image = Image.open(folder / "class1" / "1.png").transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    image.save(folder / "class1" / "mirrored.png")
    (folder / "class2" / "empty.png").touch()
    (folder / "class2" / "text.jpg").write_text("<b>no image</b>")
    return folder


def rows(file: Path) -> list[dict[str, str]]:
    with file.open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def names(table: list[dict[str, str]]) -> set[str]:
    return {Path(row["file"]).name for row in table}


def test_the_folder_holds_tables_a_page_and_json(run, folder, tmp_path):
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    answer = proxymetric("inspect", run, folder, "--out", tmp_path / "out", "--device", "cpu")
    assert answer.code == 0, answer
    assert "files that cannot be read: 2" in answer.out
    assert "text.jpg" in answer.out
    assert "groups of 4 images; with two labels: 1" in answer.out
    for name, columns in COLUMNS.items():
        header = (tmp_path / "out" / f"{name}.csv").read_text().splitlines()[0]
        assert header == ",".join(columns)
    duplicates = rows(tmp_path / "out" / "duplicates.csv")
    assert [(row["group"], Path(row["file"]).name, row["labels"], row["match"]) for row in duplicates] == [
        ("1", "0.png", "two labels", ""),
        ("1", "copy.png", "two labels", "same file"),
        ("2", "1.png", "same label", ""),
        ("2", "mirrored.png", "same label", "mirrored"),
    ]
    assert Path(duplicates[1]["copy_of"]) == folder / "class0" / "0.png"
    assert names(rows(tmp_path / "out" / "unreadable.csv")) == {"empty.png", "text.jpg"}
    page = (tmp_path / "out" / "index.html").read_text()
    assert page.count("data:image/") >= 4
    assert "<b>no image" not in page
    assert "http" not in page.replace("http-equiv", "")
    summary = json.loads((tmp_path / "out" / "inspection.json").read_text())
    assert summary["finished"] is True
    assert summary["images"] == 84
    assert len(summary["unreadable"]) == 2
    assert {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()} == before


def test_json_alone_is_printed(run, folder, tmp_path):
    answer = proxymetric("inspect", run, folder, "--out", tmp_path / "out", "--json", "--device", "cpu")
    summary = json.loads(answer.out)
    assert summary == json.loads((tmp_path / "out" / "inspection.json").read_text())
    assert "page: " in answer.err


def test_a_csv_and_the_data_of_the_run(run, photos, tmp_path):
    lines = ["file,class", *(f"{file},{file.parent.name}" for file in sorted(photos.rglob("*.png")))]
    (tmp_path / "labels.csv").write_text("\n".join([*lines, "missing.png,class1"]))
    answer = proxymetric("inspect", run, tmp_path / "labels.csv", "--out", tmp_path / "out", "--device", "cpu")
    assert answer.code == 0, answer
    [row] = rows(tmp_path / "out" / "unreadable.csv")
    assert (Path(row["file"]).name, row["label"]) == ("missing.png", "class1")
    answer = proxymetric("inspect", run, photos, "--out", tmp_path / "other", "--device", "cpu")
    assert "was trained with these labels" in answer.err
    answer = proxymetric("inspect", run, photos, "--out", tmp_path / "other", "--untrained", "--device", "cpu")
    assert answer.code == 0
    assert "was trained with these labels" not in answer.err


def test_a_label_that_was_changed_is_found(model, tmp_path):
    """Coarse coloured patterns with a little noise: the vectors of any network tell their classes."""
    random = np.random.default_rng(0)
    for name in "abcdef":
        pattern = random.integers(0, 256, (4, 4, 3))
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(8):
            pixels = np.clip(pattern + random.integers(-25, 26, (4, 4, 3)), 0, 255).astype(np.uint8)
            image = Image.fromarray(pixels).resize((16, 16), Image.Resampling.NEAREST)
            image.save(tmp_path / "photos" / name / f"{number}.png")
    (tmp_path / "photos" / "a" / "3.png").rename(tmp_path / "photos" / "d" / "moved.png")
    [row] = pm.inspect(model, tmp_path / "photos").tables()["wrong-labels"]
    assert (Path(row["file"]).name, row["label"], row["suggested_label"]) == ("moved.png", "d", "a")
    assert row["probability_wrong"] > 0.9
    assert Path(row["nearest_of_label"]).parent.name == "d"
    assert Path(row["nearest_of_suggested_label"]).parent.name == "a"


def test_a_killed_inspection_goes_on(model, folder, tmp_path, monkeypatch):
    """What was embedded is not embedded again: after a kill, after a move, and if nothing has changed."""
    monkeypatch.setattr(contents_module, "IMAGES_PER_PART", 1)
    embedded: list[int] = []
    parts = Model.parts

    def counting(self, images, **options):
        for part in parts(self, images, batch=20, **options):
            if len(embedded) == stop_after:
                raise KeyboardInterrupt
            embedded.append(len(part.rows) + len(part.bad))
            yield part

    straight = pm.inspect(model, folder)
    monkeypatch.setattr(Model, "parts", counting)
    stop_after = 2
    with pytest.raises(KeyboardInterrupt):
        pm.inspect(model, folder, out=tmp_path / "out")
    assert json.loads((tmp_path / "out" / "inspection.json").read_text())["finished"] is False
    stop_after = -1
    again = pm.inspect(model, folder, out=tmp_path / "out")
    assert sum(embedded) == 83 + 2, "each different file once, but those that cannot be read are tried again"
    assert again.tables() == straight.tables()
    del embedded[:]
    (folder / "class4" / "2.png").rename(folder / "class5" / "moved.png")
    pm.inspect(model, folder, out=tmp_path / "out")
    assert embedded == [2], "only the files that cannot be read"


def test_a_damaged_store_and_another_model(model, folder, tmp_path):
    found = pm.inspect(model, folder, out=tmp_path / "out")
    [part] = (tmp_path / "out" / "vectors").glob("*.safetensors")
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    assert pm.inspect(model, folder, out=tmp_path / "out").tables() == found.tables()
    store = contents_module.Store(tmp_path / "out" / "vectors", "another model")
    assert not list((tmp_path / "out" / "vectors").glob("*.safetensors"))
    assert found.contents.digests[0] not in store


def test_what_is_not_an_inspection_stays(run, folder, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("three years")
    refused(proxymetric("inspect", run, folder, "--out", tmp_path / "mine"), "did not write", "expected a new folder")
    (tmp_path / "mine" / "inspection.json").write_text('{"my": "own"}')
    refused(proxymetric("inspect", run, folder, "--out", tmp_path / "mine"), "did not write")
    assert {file.name for file in (tmp_path / "mine").iterdir()} == {"thesis.txt", "inspection.json"}
    refused(proxymetric("inspect", run, folder, "--out", tmp_path / "mine" / "thesis.txt"), "which is a file")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--min-probability", "1.5"), ("min-probability: got 1.5", "expected a probability")),
        (("--layout", "fodler"), ("layout: got 'fodler'", "did you mean 'folder'?")),
    ],
)
def test_wrong_arguments(run, folder, tmp_path, words, said):
    refused(proxymetric("inspect", run, folder, "--out", tmp_path / "out", *words), *said)
    assert not (tmp_path / "out").exists()


def test_nothing_can_be_read(model, tmp_path):
    for name in ("a", "b"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        (tmp_path / "photos" / name / "x.jpg").write_text("no image")
    with pytest.raises(ValueError, match="none of which can be read"):
        pm.inspect(model, tmp_path / "photos")
    with pytest.raises(ValueError, match="listed_from: got 0"):
        pm.inspect(model, tmp_path / "photos", listed_from=0)
