"""Data sets of Hugging Face, saved to disk for real: columns, splits, lazy decoding, and refusals in sentences."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from proxymetric.data import EvalFeed, EvalView, open_data
from proxymetric.data.hugging_face import from_hugging_face
from proxymetric.runs.train import train
from proxymetric.system.watcher import Silent
from training_runs import TINY

datasets = pytest.importorskip("datasets", reason="the extra `hf` is not installed")


@pytest.fixture(scope="module", autouse=True)
def offline(tmp_path_factory):
    """No network, and a cache of its own; the client reads its settings when it is imported."""
    patch = pytest.MonkeyPatch()
    patch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    patch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    datasets.disable_progress_bars()
    yield
    patch.undo()


def files_of(photos: Path) -> tuple[list[str], list[str]]:
    files = sorted(photos.rglob("*.*g"))
    return [str(file) for file in files], [file.parent.name for file in files]


def table(files: list[str], names: list[str], image: str = "image", label: str = "label") -> "datasets.Dataset":
    classes = datasets.ClassLabel(names=sorted(set(names)))
    columns = {"id": list(range(len(files))), image: files, label: [classes.str2int(name) for name in names]}
    features = datasets.Features({"id": datasets.Value("int64"), image: datasets.Image(), label: classes})
    return datasets.Dataset.from_dict(columns, features=features)


@pytest.fixture(scope="module")
def saved(photos, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hugging") / "photos"
    table(*files_of(photos)).save_to_disk(folder)
    return folder


def test_the_images_are_those_of_the_folder(photos, saved):
    ours, theirs = open_data(f"hf:{saved}"), open_data(photos)
    assert ours.name == "photos"
    assert ours.classes == theirs.classes
    order = np.argsort([str(path) for path in theirs.paths])
    assert ours.labels.tolist() == theirs.labels[order].tolist()
    for k in (0, 7, len(ours) - 1):
        assert np.array_equal(np.asarray(ours.read(k)), np.asarray(theirs.read(int(order[k]))))
    assert ours.title(3).endswith("photos?split=all#3")
    part = ours.subset([5, 2])
    assert np.array_equal(np.asarray(part.read(1)), np.asarray(ours.read(2)))
    assert ours.identity() == open_data(f"hf:{saved}?image=image&label=label").identity() != part.identity()


@pytest.mark.slow
@pytest.mark.usefixtures("only_training")
def test_a_run_trains_and_evaluates(saved, tmp_path):
    from terminal import proxymetric

    settings = TINY | {"train.epochs": 1}
    run = train(f"hf:{saved}", out=tmp_path / "run", settings=settings, watcher=Silent())
    assert 0 < run.scores["R@1"] <= 1
    answer = proxymetric("evaluate", tmp_path / "run", "--metrics", "R@1", "--device", "cpu")
    assert answer.code == 0, answer
    assert f"{100 * run.scores['R@1']:.1f}" in answer.out


def test_splits_divide_the_images(photos, tmp_path):
    files, names = files_of(photos)
    halves = {"train": slice(0, None, 2), "test": slice(1, None, 2), "extra": slice(0, 4)}
    tables = {part: table(files[rows], names[rows]) for part, rows in halves.items()}
    classes = tables["train"].features["label"]
    tables = {part: rows.cast_column("label", classes) for part, rows in tables.items() if part != "extra"} | {
        "extra": tables["train"].select(range(3))
    }
    datasets.DatasetDict(tables).save_to_disk(tmp_path / "split")
    images = open_data(f"hf:{tmp_path / 'split'}")
    assert images.test_images.sum() == len(files[1::2])
    assert len(images) == len(files)
    assert any("splits that are left out: extra" in note for note in images.notes), images.notes
    assert images.title(len(files[::2])).endswith("?split=test#0")
    only = open_data(f"hf:{tmp_path / 'split'}?split=test")
    assert (len(only), only.test_images) == (len(files[1::2]), None)
    with pytest.raises(ValueError, match=r"split: got 'tets', expected one of .*; did you mean 'test'"):
        open_data(f"hf:{tmp_path / 'split'}?split=tets")


def test_rows_that_cannot_be_used_are_left_out(tmp_path):
    def encoded(colour: str, side: int = 8) -> bytes:
        buffer = io.BytesIO()
        Image.new("RGB", (side, side), colour).save(buffer, "png")
        return buffer.getvalue()

    cells = [encoded("red"), encoded("blue"), b"no image", None, encoded("red"), encoded("blue")]
    images = [None if cell is None else {"bytes": cell, "path": None} for cell in cells]
    features = datasets.Features({"picture": datasets.Image(), "class": datasets.Value("string")})
    columns = {"picture": images, "class": ["red", "blue", "red", "blue", None, " red "]}
    datasets.Dataset.from_dict(columns, features=features).save_to_disk(tmp_path / "rows")
    opened = open_data(f"hf:{tmp_path / 'rows'}")
    assert (opened.classes, opened.labels.tolist()) == (["blue", "red"], [1, 0, 1, 0, 1])
    assert "1 of 6 rows have no label and are left out" in opened.notes[0]
    feed = EvalFeed(opened, EvalView(8, resize=8))
    assert sum(len(batch.labels) for batch in feed) == 3
    reasons = list(feed.bad.values())
    assert "the image format is not recognised" in reasons[0]
    assert reasons[1] == "the row holds no image"


def test_the_limit_on_pixels_holds(saved, monkeypatch):
    from proxymetric.data import BadImage

    images = open_data(f"hf:{saved}")
    monkeypatch.setenv("PROXYMETRIC_MAX_PIXELS", "10")
    with pytest.raises(BadImage, match="expected at most 10"):
        images.read(0)


def test_what_is_not_clear_is_refused(photos, saved, tmp_path):
    files, names = files_of(photos)
    two = table(files, names).add_column("fine", list(range(len(files))))
    two = two.cast_column("fine", datasets.ClassLabel(num_classes=len(files)))
    two.save_to_disk(tmp_path / "two")
    table(files, names).remove_columns("image").save_to_disk(tmp_path / "none")
    table(files[:1], names[:1]).save_to_disk(tmp_path / "one")
    for source, message in (
        (f"hf:{tmp_path / 'two'}", r"got the label columns label, fine, expected one, or its name: .*\?label=label"),
        (f"hf:{tmp_path / 'none'}", "no image column among id, label"),
        (f"hf:{tmp_path / 'one'}", "got one class only"),
        (f"hf:{saved}?imge=a", "key: got 'imge', expected one of .*; did you mean 'image'"),
        (f"hf:{saved}?label=lable", "label: got 'lable', expected one of id, image, label; did you mean 'label'"),
        (f"hf:{photos}", "expected a folder that save_to_disk wrote; for a folder of images, leave out 'hf:'"),
        ("hf:nobody/nothing", "not a folder here and cannot be loaded from the hub .* and a network"),
    ):
        with pytest.raises(ValueError, match=message):
            from_hugging_face(source)
    assert len(open_data(f"hf:{tmp_path / 'two'}?label=fine").classes) == len(files)
    with pytest.raises(ValueError, match="layout: got 'folder' for 'hf:"):
        open_data(f"hf:{saved}", layout="folder")


def test_a_damaged_folder_is_refused(saved, tmp_path):
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "dataset_info.json").write_text("{}")
    (tmp_path / "damaged" / "state.json").write_text(json.dumps({"_data_files": 3}))
    with pytest.raises(ValueError, match="data: got 'hf:"):
        open_data(f"hf:{tmp_path / 'damaged'}")
