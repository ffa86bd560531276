"""Input files on the command line: odd names, splits, missing files, folders without read permission."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from conftest import write_photos
from proxymetric.system.files import read_json
from terminal import TINY, proxymetric, refused, train

pytestmark = pytest.mark.usefixtures("no_page")
CAFE = os.fsdecode(b"caf\xe9")
"""a name that a Windows program wrote in latin-1"""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Six classes of four photos, to be changed."""
    return write_photos(tmp_path / "data", classes=6, images=4)


def rename(data: Path) -> Path:
    """Give a class folder, a good image and a bad image names that are not UTF-8."""
    (data / "class1").rename(data / CAFE)
    (data / "class2" / "0.png").rename(data / "class2" / f"{CAFE}.png")
    (data / "class3" / f"{CAFE}.jpg").write_bytes(b"no image")
    return data


def test_names_that_are_not_utf_8_train_and_are_shown(tmp_path, data):
    rename(data)
    run = tmp_path / "run"
    for more in (["--set", "data.validation=0.4"], ["--frozen", "--overwrite"]):
        answer = train(data, run, *more)
        assert answer.code == 0, answer
        assert "class3/caf\\xe9.jpg (the image format is not recognised" in answer.err
        bad = read_json(run / "result.json")["bad_images"]
        assert any(name.endswith("caf\\xe9.jpg") for name in bad)
    assert train(data, run, "--frozen", "--resume", "--epochs", "2").code == 0
    assert proxymetric("evaluate", run, "--data", data, "--no-report").code == 0
    answer = proxymetric("embed", run, data, "--out", tmp_path / "x.safetensors")
    assert "left out, cannot be read: " in answer.err
    assert "caf\\xe9.jpg (the image format is not recognised" in answer.err
    for place in (data, tmp_path / "x.safetensors"):
        answer = proxymetric("search", run, "--in", place, data / "class2" / f"{CAFE}.png", "-k", "30")
        assert answer.code == 0, answer
        assert "caf\\xe9/0.png" in answer.out.replace("\n", "")
        answer.out.encode()


@pytest.mark.release
def test_names_that_are_not_utf_8_in_a_real_process_with_a_report(tmp_path, data):
    rename(data)
    environment = os.environ | {"PYTHONIOENCODING": "utf-8:strict"}
    command = [sys.executable, "-m", "proxymetric", "train", "--data", data, "--out", tmp_path / "run", *TINY]
    answer = subprocess.run(
        [*command, "--set", "data.validation=0.7"], capture_output=True, env=environment, check=False
    )
    assert answer.returncode == 0, answer.stderr
    assert b"caf\\xe9.jpg" in answer.stderr
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "\ufffd" not in page
    assert "caf\\xe9.jpg could not be read" in page


def test_a_run_folder_that_is_not_utf_8_is_refused_before_anything_is_written(tmp_path, photos):
    refused(train(photos, tmp_path / CAFE), "out: got ", "caf\\xe9, a name that is not UTF-8")
    assert not list(tmp_path.iterdir())


def test_the_identity_of_ordinary_names_is_that_of_earlier_versions(tmp_path):
    from proxymetric.data import open_data

    for name in ("a/1.png", "a/ü 2.png", "b/1.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"12345")
    expected = "ea9c73d035746dec62f2773b51a9924e1cc13718894661ffc4888323bec189e3"
    assert open_data(tmp_path).identity() == expected


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that any user may enter and write to."""
    folder = Path(tempfile.mkdtemp(prefix="proxymetric-shared-"))
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


@contextlib.contextmanager
def nobody() -> Iterator[None]:
    """Run as a user without rights, because root may read every folder."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_folders_and_files_that_may_not_be_read_are_named_and_counted(shared):
    data = write_photos(shared / "data", classes=8, images=4)
    assert train(data, shared / "first").code == 0  # imports modules that another user may not read
    for words in (("evaluate", shared / "first"), ("embed", shared / "first", data, "--out", shared / "y.safetensors")):
        assert proxymetric(*words).code == 0
    hidden, inner = data / "class3", data / "class4" / "inner"
    inner.mkdir()
    (data / "class5" / "0.png").chmod(0)
    (data / "empty").mkdir()
    for folder in (hidden, inner):
        folder.chmod(0)
    try:
        with nobody():
            answer = train(data, shared / "run")
            assert answer.code == 0, answer
            assert (
                f"folders that cannot be listed and are left out: 2, {hidden} (Permission denied), {inner}"
                in answer.err
            )
            assert f"{data}: folders without images: 1, empty" in answer.err
            bad = read_json(shared / "run" / "result.json")["bad_images"]
            assert bad[str(hidden)] == bad[str(inner)] == bad[str(data / "class5" / "0.png")] == "Permission denied"
            answer = proxymetric("evaluate", shared / "run", "--data", data, "--no-report")
            assert "left out: 2" in answer.err
            answer = proxymetric("embed", shared / "run", data, "--out", shared / "x.safetensors")
            assert f"left out, cannot be listed: {hidden} (Permission denied)" in answer.err
            assert f"left out, cannot be read: {data / 'class5' / '0.png'} (Permission denied)" in answer.err
        data.chmod(0)
        with nobody():
            answer = train(data, shared / "other")
            refused(answer, f"data: got {data}, a folder that cannot be listed (Permission denied)")
            answer = proxymetric("evaluate", shared / "first", "--data", data)
            refused(answer, f"data: got {data}, a folder that cannot be listed (Permission denied)")
    finally:
        for folder in (data, hidden, inner):
            folder.chmod(0o755)


def test_too_few_classes_name_the_folder_that_may_not_be_listed(shared):
    data = write_photos(shared / "data", classes=3, images=4)
    assert train(data, shared / "first", "--set", "data.validation=0").code == 0  # imports what nobody may not read
    (data / "class1").chmod(0)
    try:
        with nobody():
            answer = train(data, shared / "run")
        refused(
            answer,
            "got 2 classes (class0, class2), 0 for the test and 2 for validation",
            f"cannot be listed and are left out: 1, {data / 'class1'} (Permission denied)",
        )
    finally:
        (data / "class1").chmod(0o755)


def csv_of(data: Path, *, encoding: str = "utf-8", more: str = "") -> Path:
    file = data / "photos.csv"
    rows = "".join(f"{p.relative_to(data).as_posix()},{p.parent.name}ü\n" for p in sorted(data.rglob("*.png")))
    file.write_text(f"file,class\n{rows}{more}", encoding=encoding)
    return file


def test_a_csv_with_a_missing_file_trains_without_it(tmp_path, data):
    answer = train(csv_of(data, more="gone/1.png,class0ü\n"), tmp_path / "run")
    assert answer.code == 0, answer
    assert "1 of 25 files do not exist and are left out: gone/1.png" in answer.err
    answer = proxymetric("evaluate", tmp_path / "run", "--data", data / "photos.csv", "--split", "all", "--no-report")
    assert answer.code == 0, answer
    assert f"left out, cannot be read: {data / 'gone' / '1.png'} (No such file or directory)" in answer.err


def test_a_csv_in_utf_16_is_read_and_others_are_named(tmp_path, data):
    answer = train(csv_of(data, encoding="utf-16"), tmp_path / "run")
    assert answer.code == 0, answer
    assert "class0ü, class1ü, class2ü" in answer.err
    file = csv_of(data, encoding="cp1252")
    refused(train(file, tmp_path / "other"), f"{file}: got bytes that are not UTF-8 on line 2, expected", "CSV UTF-8")
    file = csv_of(data, encoding="utf-16-le")
    refused(train(file, tmp_path / "other"), f"{file}: got ", "UTF-16 with a byte order mark")
    file.write_bytes(b"\xff\xfef")
    refused(train(file, tmp_path / "other"), f"{file}: got bytes that are not UTF-16")
    file = csv_of(data, more='"' + "x" * 200_000 + '",class1ü\n')
    refused(
        train(file, tmp_path / "other"), f"{file}, line 26: got a row that cannot be read (field larger", "quotation"
    )
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\x00\x01\xff\xfe\x9c", "is not UTF-8 text"),
        (b"\xff\xfes\x00e\x00e\x00d\x00", "is not UTF-8 text"),
        (b"seed = " + b"[" * 5000 + b"]" * 5000, "nested too deeply"),
        (b"seed = \n", "expected valid TOML: "),
        (b"seed = " + b"1" * 5000, "expected valid TOML: "),
    ],
)
def test_toml_that_cannot_be_read_is_named(tmp_path, photos, content, said):
    file = tmp_path / "recipe.toml"
    file.write_bytes(content)
    refused(train(photos, tmp_path / "run", "--recipe", file), str(file), said)
    refused(proxymetric("study", file, "--dry-run"), str(file), said)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("value", "said"), [("[" * 5000 + "]" * 5000, "nested too deeply"), ("1" * 5000, "settings: got 1111111111")]
)
def test_settings_that_cannot_be_read(tmp_path, photos, value, said):
    refused(train(photos, tmp_path / "run", "--set", f"seed={value}"), said)


def divided(root: Path, *, shared: bool) -> Path:
    """Data that is already split: twelve classes, or the images of six classes."""
    photos = write_photos(root / "photos", classes=12, images=4)
    for k in range(12):
        source = photos / f"class{k}"
        part = "train" if k < 6 else "val" if k < 9 else "test"
        for j, file in enumerate(sorted(source.iterdir())):
            place = root / "split" / (("train", "train", "val", "test")[j] if shared else part) / source.name
            place.mkdir(parents=True, exist_ok=True)
            file.rename(place / file.name)
    if shared:
        for part in ("val", "test"):
            for k in range(12):
                (root / "split" / part / f"class{k}" / "again.png").write_bytes(
                    next((root / "split" / part / f"class{k}").iterdir()).read_bytes()
                )
    return root / "split"


def test_a_split_trains_and_is_evaluated_as_one(tmp_path):
    data = divided(tmp_path, shared=False)
    answer = train(data, tmp_path / "run", "--set", "train.keep=trained")
    assert answer.code == 0, answer
    assert "24 images of 6 classes to train on, 12 images of 3 classes held out to choose the epoch" in answer.err
    assert "12 images of 3 classes to test on" in answer.err
    assert "a split" in answer.err
    assert "12 classes: class0, class1, class10, ..." in answer.err
    result = read_json(tmp_path / "run" / "result.json")
    assert result["evaluated_on"] == "test"
    assert result["data"]["test"].items() >= {"images": 12, "classes": 3}.items()
    answer = proxymetric("evaluate", tmp_path / "run", "--no-report")
    assert "12 images of 3 classes (none of them trained on)" in answer.out
    assert (
        "12 images of 3 classes (none of them trained on, but they chose the epoch)"
        in proxymetric("evaluate", tmp_path / "run", "--split", "validation", "--no-report").out
    )
    other = shutil.copytree(data, tmp_path / "other")
    Image.new("RGB", (16, 16)).save(other / "test" / "class9" / "more.png")
    answer = proxymetric("evaluate", tmp_path / "run", "--data", other, "--no-report")
    assert answer.code == 0, answer
    assert "13 images of 3 classes (its test images; --split all scores all of them)" in answer.out
    assert "a split" in answer.err
    assert (
        "49 images of 12 classes"
        in proxymetric("evaluate", tmp_path / "run", "--data", other, "--split", "all", "--no-report").out
    )


def test_a_classification_split_scores_known_classes_and_says_so(tmp_path):
    data = divided(tmp_path, shared=True)
    answer = train(data, tmp_path / "run", "--refit")
    assert answer.code == 0, answer
    assert "12 of the 12 test classes are training classes too" in answer.err
    assert "on 24 images not trained on (12 of their 12 classes are training classes), %" in " ".join(
        answer.out.split()
    )
    result = read_json(tmp_path / "run" / "result.json")
    assert result["data"]["test"].items() >= {"images": 24, "classes": 12, "training_classes": 12}.items()
    answer = proxymetric("evaluate", tmp_path / "run", "--no-report")
    assert "images not trained on; 12 of their 12 classes are training classes" in " ".join(answer.out.split())


def test_evaluate_says_what_it_opened(tmp_path, photos):
    assert train(photos, tmp_path / "run").code == 0
    answer = proxymetric("evaluate", tmp_path / "run", "--data", photos, "--no-report")
    assert "10 classes: class0, class1, class2, ..." in answer.err
