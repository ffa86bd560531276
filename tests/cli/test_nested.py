"""A nested run: its scores by dimension, and vectors that `embed`, `index` and `search` cut."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import proxymetric as pm
from proxymetric.core.normalisation import unit
from proxymetric.plots import write_report
from proxymetric.search import Index, VectorFile
from proxymetric.system.files import read_json
from terminal import finished_run, proxymetric, refused, train

HELD_OUT = ("--set", "data.validation=0.5")


@pytest.fixture(scope="module")
def run(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A nested run. Only read it."""
    return finished_run(photos, tmp_path_factory.mktemp("runs") / "nested", *HELD_OUT, "--dim", 8, "--nested", "2,4,8")


@pytest.fixture(scope="module")
def files(photos: Path) -> list[Path]:
    return sorted(photos.rglob("*.png")) or sorted(photos.rglob("*.jpg"))


def test_the_result_has_the_scores_of_each_size(run):
    result = read_json(run / "result.json")
    assert result["recipe"]["loss"]["nested"] == [2, 4, 8]
    kinds = [(each["dim"], each["vectors"], each["bytes"]) for each in result["sizes"]]
    assert kinds[:3] == [(2, "float32", 8), (2, "int8", 2), (2, "binary", 8)]
    assert kinds[6:] == [(8, "float32", 32), (8, "int8", 8), (8, "binary", 8)]
    assert result["sizes"][6]["scores"] == result["rows"]["trained encoder"]
    assert result["sizes"][0]["scores"] != result["sizes"][6]["scores"]


def test_the_report_has_a_table_and_a_picture_of_the_sizes(run, tmp_path):
    sizes = read_json(run / "result.json")["sizes"]
    empty = {"facts": {}, "table": [], "curve": [], "gallery": [], "scatter": None, "notes": []}
    page = write_report(tmp_path / "report.html", title="Nested", sizes=sizes, **empty).read_text()
    assert "Smaller vectors" in page
    assert page.count("<circle") == len(sizes) == 9
    assert page.count("<polyline") == 3
    assert '<th scope="row">4 dimensions, int8' in page
    assert "Smaller vectors" not in write_report(tmp_path / "report.html", title="Plain", **empty).read_text()


def test_evaluate_scores_each_size_as_training_did(run):
    answer = proxymetric("evaluate", run, "--metrics", "R@1,MAP@R", "--no-untrained", "--no-report")
    assert answer.code == 0, answer
    rows = re.findall(r"^(\d) dimensions, (\w+), \d+ bytes +([\d.]+) +([\d.]+)$", answer.out, re.MULTILINE)
    records = read_json(run / "result.json")["sizes"]
    assert [(int(dim), kind) for dim, kind, *_ in rows] == [(each["dim"], each["vectors"]) for each in records]
    for (_, _, *values), each in zip(rows, records, strict=True):
        wanted = [100 * each["scores"][metric] for metric in ("R@1", "MAP@R")]
        assert [float(value) for value in values] == pytest.approx(wanted, abs=0.06)


def test_a_model_cuts_its_vectors_and_normalises_them_again(run, files):
    model = pm.load(run, device="cpu")
    whole, some = model.embed(files[:5]), model.embed(files[:5], dim=4)
    torch.testing.assert_close(some, unit(whole[:, :4]))
    cut = model.cut_to(4)
    torch.testing.assert_close(cut.embed(files[:5]), some)
    prints = {each.fingerprint() for each in (model, cut, model.cut_to(2))}
    assert len(prints) == 3
    assert model.cut_to(8).fingerprint() == model.fingerprint()
    with pytest.raises(ValueError, match="dim: got 3, expected one of 2, 4, 8, the dimensions that this model was"):
        model.embed(files[:1], dim=3)
    with pytest.raises(ValueError, match="dim: got 8, expected one of 2, 4, the dimensions"):
        cut.cut_to(8)


def test_embed_and_query_cut(run, photos, files, tmp_path):
    file = tmp_path / "photos.safetensors"
    answer = proxymetric("embed", run, photos, "--out", file, "--dim", 2)
    assert answer.code == 0, answer
    assert "vectors of 2 dimensions" in answer.out
    assert VectorFile.load(file).vectors.shape[1] == 2
    answer = proxymetric("search", run, files[0], "--in", file, "-k", 1)
    assert answer.code == 0, answer
    refused(proxymetric("embed", run, photos, "--out", file, "--dim", 3), "dim: got 3", "expected one of 2, 4, 8")


def test_index_cuts_and_stays_cut(run, photos, files, tmp_path):
    folder = tmp_path / "photos.index"
    answer = proxymetric("index", run, photos, "--out", folder, "--dim", 4, "--map", "none")
    assert answer.code == 0, answer
    assert Index(folder).dim == 4
    answer = proxymetric("index", run, photos, "--out", folder)
    assert answer.code == 0, answer
    assert "0 added, 0 updated, 0 deleted" in answer.out
    answer = proxymetric("search", folder, files[0], "-k", 2)
    assert answer.code == 0, answer
    refused(proxymetric("index", run, photos, "--out", folder, "--dim", 2), "dim: got 2, but", "have 4", "--rebuild")
    answer = proxymetric("index", run, photos, "--out", folder, "--dim", 2, "--rebuild")
    assert answer.code == 0, answer
    assert Index(folder).dim == 2


def test_an_index_draws_bytes_against_what_is_found(run, photos, tmp_path):
    folder = tmp_path / "photos.index"
    for vectors in ("float32", "int8"):
        answer = proxymetric("index", run, photos, "--out", folder, "--map", "none", "--vectors", vectors)
        assert answer.code == 0, answer
        assert f"bytes against what is found: {folder / 'vectors.png'}" in answer.out
        picture = np.asarray(Image.open(folder / "vectors.png").convert("RGB"))
        for colour in ((49, 87, 213), (180, 83, 10), (15, 127, 134)):
            assert (picture == colour).all(axis=2).sum() > 20, "a line for each kind of numbers"
    answer = proxymetric("index", run, photos, "--out", folder)
    assert "vectors.png" not in answer.out, "nothing has changed"


def test_a_slim_file_knows_its_sizes(run, tmp_path):
    answer = proxymetric("export", run, "--slim", tmp_path / "slim.safetensors")
    assert answer.code == 0, answer
    assert pm.load(tmp_path / "slim.safetensors", device="cpu").nested == [2, 4, 8]


def test_a_run_that_is_not_nested_warns(photos, files, tmp_path_factory, tmp_path):
    run = finished_run(photos, tmp_path / "plain", *HELD_OUT, "--dim", 8)
    assert "sizes" not in read_json(run / "result.json")
    model = pm.load(run, device="cpu")
    with pytest.warns(UserWarning, match="dim: got 3 for a model whose vectors were not trained to be cut; expected"):
        assert model.embed(files[:2], dim=3).shape == (2, 3)
    with pytest.raises(ValueError, match="dim: got 9, expected a whole number from 1 to 8"):
        model.embed(files[:2], dim=9)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--dim", 8, "--nested", "2,4"), "nested: got [2, 4] for vectors of 8 dimensions, expected a last size of 8"),
        (("--dim", 8, "--nested", "few"), "nested: got 'few', expected a list of dimensions"),
    ],
)
def test_wrong_sizes_are_refused_before_anything_is_written(words, said, photos, tmp_path):
    refused(train(photos, tmp_path / "run", *words), said)
    assert not (tmp_path / "run").exists()
