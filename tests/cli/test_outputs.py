"""Files that verbs write: they never replace a file that they did not write, and refuse before the work begins."""

from __future__ import annotations

import os
import shutil
import stat
import tarfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from conftest import write_photos
from proxymetric.search import VectorFile
from proxymetric.studies.collected import read_runs, write_runs
from proxymetric.system.files import write_json
from terminal import bytes_of, proxymetric, refused, train

pytestmark = pytest.mark.usefixtures("no_page")
GLYPHS = Path(__file__).resolve().parents[2] / "studies" / "glyphs.toml"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


@pytest.fixture
def few(tmp_path: Path) -> Path:
    return write_photos(tmp_path / "few", classes=2, images=2)


def foreign(kind: str, folder: Path, name: str) -> Path:
    """Create something at `folder/name` that no verb may replace."""
    path = folder / name
    if kind == "file":
        path.write_bytes(b"somebody's file")
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        os.mkfifo(path)
    elif kind == "dangling link":
        path.symlink_to(folder / "nowhere" / name)
    else:
        (folder / "target").write_bytes(b"somebody's file")
        path.symlink_to(folder / "target")
    return path


KINDS = ("file", "folder", "device", "link", "dangling link")


def same(path: Path, kind: str) -> None:
    """Whether the thing that `foreign` created is unchanged."""
    if kind in ("file", "link"):
        assert path.read_bytes() == b"somebody's file"
    assert path.is_symlink() == ("link" in kind)
    if kind == "device":
        assert stat.S_ISFIFO(path.stat().st_mode)
    if kind == "folder":
        assert path.is_dir()


# embed


@pytest.mark.parametrize("kind", KINDS)
def test_embed_replaces_nothing_of_others(finished, few, tmp_path, kind):
    path = foreign(kind, tmp_path, "all.safetensors")
    answer = proxymetric("embed", finished, few, "--out", path)
    refused(answer, f"out: got {path}", "expected")
    assert "embedding" not in answer.out
    same(path, kind)


@pytest.mark.parametrize("name", ["photo.jpg", "vec.npy", "vectors"])
def test_embed_writes_safetensors_and_says_so(finished, few, tmp_path, name):
    refused(proxymetric("embed", finished, few, "--out", tmp_path / name), ".safetensors", name)
    assert not (tmp_path / name).exists()


def test_embed_keeps_a_checkpoint_and_the_weights_of_a_backbone(run, few, tmp_path):
    save_file({"conv": torch.ones(2)}, tmp_path / "resnet.safetensors")
    before = bytes_of(tmp_path)
    for file in (run / "best.safetensors", tmp_path / "resnet.safetensors"):
        refused(proxymetric("embed", run, few, "--out", file), f"out: got {file}", "expected a new file")
        refused(proxymetric("embed", run, few, "--out", file, "--overwrite"), f"out: got {file}")
    assert bytes_of(tmp_path) == before


def test_vectors_of_another_model_are_kept_unless_asked(finished, photos, few, tmp_path):
    file, other = tmp_path / "all.safetensors", tmp_path / "other"
    assert proxymetric("embed", finished, few, "--out", file).code == 0
    assert proxymetric("embed", finished, few, "--out", file).code == 0, "the same model may write again"
    assert train(photos, other, "--seed", 1).code == 0
    before = file.read_bytes()
    refused(
        proxymetric("embed", other, few, "--out", file), f"out: got {file}", "vectors of another model", "--overwrite"
    )
    assert file.read_bytes() == before
    assert proxymetric("embed", other, few, "--out", file, "--overwrite").code == 0
    assert file.read_bytes() != before


def test_a_link_to_our_vectors_stays_a_link(finished, few, tmp_path):
    file, link = tmp_path / "all.safetensors", tmp_path / "link.safetensors"
    assert proxymetric("embed", finished, few, "--out", file).code == 0
    link.symlink_to(file)
    assert proxymetric("embed", finished, few, "--out", link).code == 0
    assert link.is_symlink()
    assert len(VectorFile.load(file)) == 4


# export


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("words", [("--slim", "m.safetensors"), ("--torch", "m.pt2"), ("--onnx", "m.onnx")])
def test_export_with_overwrite_replaces_only_exports(finished, tmp_path, kind, words):
    option, name = words
    path = foreign(kind, tmp_path, name)
    refused(proxymetric("export", finished, option, path, "--overwrite"), f"{option}: got {path}", "expected")
    same(path, kind)


@pytest.mark.slow
def test_export_with_overwrite_replaces_its_own_files(finished, tmp_path):
    files = ("--slim", tmp_path / "m.safetensors", "--torch", tmp_path / "m.pt2")
    assert proxymetric("export", finished, *files).code == 0
    refused(proxymetric("export", finished, *files), "which exists", "--overwrite")
    assert proxymetric("export", finished, *files, "--overwrite").code == 0


# report


@pytest.mark.parametrize("kind", KINDS)
def test_report_replaces_no_page_of_others(run, kind):
    path = foreign(kind, run, "report.html")
    refused(proxymetric("evaluate", run, "--redraw"), f"report.html: got {path}", "expected")
    same(path, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_training_replaces_no_page_of_others(photos, run, kind):
    path = foreign(kind, run, "report.html")
    for words in (("--resume", "--epochs", 2), ("--overwrite",)):
        refused(train(photos, run, *words), str(path), "expected")
    same(path, kind)


# demo


def test_demo_replaces_no_run_of_somebody(run):
    before = bytes_of(run)
    refused(proxymetric("demo", "--out", run), f"out: got {run}", "expected")
    assert bytes_of(run) == before


# mlrc and studies


def test_mlrc_replaces_no_result_of_others(photos, tmp_path):
    (tmp_path / "mlrc").mkdir()
    path = foreign("file", tmp_path / "mlrc", "result.json")
    words = (
        "--protocol",
        "mlrc",
        "--data",
        photos,
        "--out",
        tmp_path / "mlrc",
        "--backbone",
        "small",
        "--set",
        "data.test=0.5",
    )
    refused(proxymetric("train", *words), str(path), "expected")
    same(path, "file")


@pytest.mark.parametrize("kind", KINDS)
def test_study_replaces_no_archive_of_others(tmp_path, kind):
    path = foreign(kind, tmp_path, "a.tar.gz")
    words = ("study", GLYPHS, "--out", tmp_path / "out", "--archive", path)
    refused(proxymetric(*words), f"--archive: got {path}", "expected")
    same(path, kind)
    assert not (tmp_path / "out").exists()


def test_study_replaces_no_archive_of_another_study(tmp_path):
    (tmp_path / "study.json").write_text("{}")
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "study.json", "another/study.json")
    words = ("study", GLYPHS, "--out", tmp_path / "out", "--archive", tmp_path / "a.tar.gz")
    refused(proxymetric(*words), "--archive: got", "an archive of the study 'glyphs'")


RESULTS = Path(__file__).resolve().parents[2] / "results" / "cub-proxy-methods"
EAGER = GLYPHS.with_name("cub-proxy-methods.toml")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["tables.md", "tables.tex"])
def test_study_replaces_no_tables_of_others(tmp_path, kind, name):
    (tmp_path / "tables").mkdir()
    path = foreign(kind, tmp_path / "tables", name)
    words = ("study", EAGER, "--results", RESULTS, "--tables", tmp_path / "tables")
    refused(proxymetric(*words), f"--tables: got {path}", "expected")
    same(path, kind)
    assert not list((tmp_path / "tables").glob("*.png"))


def test_study_writes_no_tables_among_folders_of_photos(tmp_path):
    (tmp_path / "photos" / "wren").mkdir(parents=True)
    words = ("study", EAGER, "--results", RESULTS, "--tables", tmp_path / "photos")
    refused(proxymetric(*words), "--tables: got", "which holds other folders and no tables; expected a new or empty")
    assert [each.name for each in (tmp_path / "photos").iterdir()] == ["wren"]


@pytest.mark.slow
def test_study_replaces_its_own_tables(tmp_path):
    words = ("study", EAGER, "--results", RESULTS, "--tables", tmp_path / "tables")
    assert proxymetric(*words).code == 0
    assert proxymetric(*words).code == 0


@pytest.mark.parametrize("kind", KINDS)
def test_collected_results_of_others_stay(tmp_path, kind):
    source = tmp_path / "source"
    name, run = next(iter(read_runs(RESULTS).items()))
    write_json(source / "runs" / name / "result.json", run)
    (tmp_path / "results").mkdir()
    path = foreign(kind, tmp_path / "results", "runs.jsonl")
    words = ("study", EAGER, "--collect", source, "--results", tmp_path / "results", "--overwrite")
    refused(proxymetric(*words), f"results: got {path}", "expected")
    same(path, kind)


def test_lines_of_others_stay(tmp_path):
    name, run = next(iter(read_runs(RESULTS).items()))
    write_json(tmp_path / "source" / "runs" / name / "result.json", run)
    write_runs(tmp_path / "results", {"a marathon": {"minutes": 250}})
    path = tmp_path / "results" / "runs.jsonl"
    before = path.read_bytes()
    words = ("study", EAGER, "--collect", tmp_path / "source", "--results", tmp_path / "results")
    refused(proxymetric(*words), f"--results: got {path}, which exists and is not the collected results of a study")
    assert path.read_bytes() == before
