"""Data that comes with a split: folders train/, val/, test/, query/, gallery/, and the column `split` of a CSV."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from proxymetric.data import open_data, split
from proxymetric.runs.score import EmbeddedSet


def write(root: Path, *folders: str, images: int = 2) -> Path:
    for folder in folders:
        (root / folder).mkdir(parents=True, exist_ok=True)
        for k in range(images):
            Image.new("RGB", (8, 8), (k, 0, len(folder))).save(root / folder / f"{k}.png")
    return root


def names(images) -> list[str] | None:
    return None if images is None else images.classes


def notes(images) -> str:
    return "\n".join(images.notes)


@pytest.mark.parametrize(
    "spelling", [("train", "val", "test"), ("Training", "valid", "TEST"), ("train", "dev", "testing")]
)
def test_train_val_and_test_are_a_split(tmp_path, spelling):
    first, second, third = spelling
    write(tmp_path, f"{first}/a", f"{first}/b", f"{first}/c", f"{second}/d", f"{second}/e", f"{third}/f", f"{third}/g")
    images = open_data(tmp_path)
    assert images.classes == list("abcdefg")
    for fraction, seed in ((0.2, 0), (0.5, 3)):
        assert [names(part) for part in split(images, fraction, seed=seed)] == [list("abc"), list("de"), list("fg")]
    assert [names(part) for part in split(images, 0.0)] == [list("abcde"), None, list("fg")]
    assert [names(part) for part in split(images, 0.0, test="none")] == [list("abcdefg"), None, None]
    said = notes(images)
    assert f"{first}/" in said
    assert "a split, 6 images of 3 classes to train on, 4 images of 2 classes to choose the epoch" in said
    assert "4 images of 2 classes for the test" in said
    assert "data.layout=folder" in said


def test_without_val_classes_of_train_are_held_out(tmp_path):
    write(tmp_path, *(f"train/c{k}" for k in range(6)), "test/x", "test/y")
    parts = split(open_data(tmp_path), 0.4)
    assert (len(parts.train.classes), len(parts.validation.classes), parts.test.classes) == (4, 2, ["x", "y"])
    write(tmp_path / "two", "train/a", "train/b", "val/c", "val/d")
    assert [names(part) for part in split(open_data(tmp_path / "two"))] == [list("ab"), list("cd"), None]


def test_classes_that_are_in_train_and_test_are_said(tmp_path):
    write(tmp_path, "train/a", "train/b", "train/c", "val/a", "val/b", "test/a", "test/b", "test/new", images=3)
    images = open_data(tmp_path)
    parts = split(images)
    assert [names(part) for part in parts] == [["a", "b", "c"], ["a", "b"], ["a", "b", "new"]]
    folders = [{path.relative_to(tmp_path).parts[0] for path in part.paths} for part in parts]
    assert folders == [{"train"}, {"val"}, {"test"}]
    assert "2 of the 3 test classes are training classes too, such as 'a'" in notes(images)
    assert "known classes" in notes(images)


def test_query_and_gallery_within_test_or_beside_train(tmp_path):
    write(tmp_path / "in", "train/a", "train/b", "train/c", "test/query/x", "test/query/y", "test/gallery/x")
    write(tmp_path / "in", "test/gallery/y", "test/gallery/z", images=3)
    write(tmp_path / "on", "train/a", "train/b", "train/c", "query/x", "query/y", "gallery/x", "gallery/y")
    for root, count in ((tmp_path / "in", 8), (tmp_path / "on", 4)):
        images = open_data(root)
        test = split(images, 0.0).test
        assert int(test.gallery.sum()) == count
        assert test.classes[:2] == ["x", "y"]
        assert EmbeddedSet(test, np.zeros((len(test), 2)), np.arange(len(test))).gallery is not None
        assert EmbeddedSet(images, np.zeros((len(images), 2)), np.arange(len(images))).gallery is None
    write(tmp_path / "half", "train/a", "train/b", "query/x", "query/y")
    with pytest.raises(ValueError, match="got the parts query, expected either test, or both query and gallery"):
        open_data(tmp_path / "half")


def test_parts_without_training_are_one_set(tmp_path):
    images = open_data(write(tmp_path, "query/x", "query/y", "gallery/x", "gallery/y"))
    assert (images.classes, images.test_images, int(images.gallery.sum())) == (["x", "y"], None, 4)
    assert "no training images" in notes(images)


def test_a_split_needs_class_folders_and_two_classes_in_each_part(tmp_path):
    write(tmp_path / "loose", "train", "test")
    with pytest.raises(
        ValueError, match=r"look like a split, but .*test has 2 images outside class folders.*layout=folder"
    ):
        open_data(tmp_path / "loose")
    assert open_data(tmp_path / "loose", layout="folder").classes == ["test", "train"]
    write(tmp_path / "one", "train/a", "train/b", "test/c")
    with pytest.raises(ValueError, match=r"got one class only \('c'\) for the test, expected at least two classes"):
        open_data(tmp_path / "one")
    (tmp_path / "empty" / "val" / "x").mkdir(parents=True)
    write(tmp_path / "empty", "train/a", "train/b")
    with pytest.raises(ValueError, match="val has no images"):
        open_data(tmp_path / "empty")


def test_a_class_called_train_is_a_class_beside_others(tmp_path):
    assert open_data(write(tmp_path / "toys", "train", "bus", "plane")).classes == ["bus", "plane", "train"]
    images = open_data(write(tmp_path / "both", "train", "test", "plane"))
    assert images.classes == ["plane", "test", "train"]
    assert "test and train hold no class folders and are taken as classes" in notes(images)


def test_other_folders_beside_a_split_are_named(tmp_path):
    write(tmp_path, "train/a", "train/b", "test/c", "test/d", "iconic/a", "iconic/b")
    images = open_data(tmp_path)
    assert len(images) == 8
    assert "left out, because they are not part of the split: iconic" in notes(images)


def test_a_misspelt_part_is_not_a_class(tmp_path):
    write(tmp_path, "train/a", "train/b", "train/c", "tset/d", "tset/e")
    with pytest.raises(ValueError, match="beside tset, which is not a part of a split") as error:
        open_data(tmp_path)
    said = str(error.value)
    assert f"expected {tmp_path}/train/CLASS/photo.jpg and {tmp_path}/test/CLASS/photo.jpg, or --set data" in said
    assert said.endswith("; tset: did you mean 'test'?")
    assert open_data(tmp_path, layout="folder").classes == ["train", "tset"]
    write(tmp_path / "toys", "train/2020", "train/2021", "bus")
    assert open_data(tmp_path / "toys").classes == ["bus", "train"]
    write(tmp_path, "test/d", "test/e", "vlaid/f")
    assert "not part of the split: toys, tset, vlaid; tset: did you mean 'test'?; vlaid: did you" in notes(
        open_data(tmp_path)
    )


def test_nested_classes_get_a_sentence_and_a_layout(tmp_path):
    for part, classes in (("train", "abcd"), ("test", "efgh")):
        for k, name in enumerate(classes):
            write(tmp_path, f"{part}/{'Fruit' if k < 2 else 'Milk'}/{name}")
    images = open_data(tmp_path)
    assert images.classes == ["Fruit", "Milk"]
    note = (
        "train: all images lie deeper than the 2 class folders, in 4 folders such as Fruit/a, Fruit/b, Milk/c, ...; all"
    )
    assert note in notes(images).replace("test:", "train:").replace("e, Fruit/f, Milk/g", "a, Fruit/b, Milk/c")
    assert notes(images).count("--set data.layout=nested (evaluate, index: --layout nested)") == 1
    parts = split(open_data(tmp_path, layout="nested"), 0.0)
    assert parts.train.classes == ["Fruit/a", "Fruit/b", "Milk/c", "Milk/d"]
    assert parts.test.classes == ["Fruit/e", "Fruit/f", "Milk/g", "Milk/h"]
    plain = open_data(tmp_path / "train")
    assert "data.layout=nested" in notes(plain)
    assert open_data(tmp_path / "train", layout="nested").classes == ["Fruit/a", "Fruit/b", "Milk/c", "Milk/d"]
    assert "nested" not in notes(open_data(write(tmp_path / "plain", "a", "b")))
    assert "nested" not in notes(open_data(tmp_path / "train", layout="folder")), "the user has decided"


@pytest.mark.parametrize(
    ("folders", "asks"),
    [
        (("audi/a3", "audi/a4", "vw/golf"), True),  # a make with one model
        (("dog/2024-01", "dog/2024-02", "cat/2024-01"), True),  # sessions: the names do not tell
        (("audi/cars/a3", "audi/cars/a4", "vw/cars/golf"), True),
        (("dog/images", "cat/images"), False),  # the same classes either way
        (("dog/2024-01", "dog/2024-02", "cat"), False),  # images beside folders: a class with sessions
    ],
)
def test_folders_in_class_folders_are_one_class_and_said(tmp_path, folders, asks):
    images = open_data(write(tmp_path, *folders))
    assert images.classes == sorted({folder.split("/")[0] for folder in folders})
    assert ("data.layout=nested" in notes(images)) == asks
    with pytest.raises(ValueError, match="learning needs 4 classes") as error:
        split(images)
    assert ("data.layout=nested" in str(error.value)) == asks


def test_the_division_is_part_of_the_identity(tmp_path):
    write(tmp_path, "a", "b", "c", "d")
    rows = [(f"{name}/{k}.png", name, "train" if name in "ab" else "test") for name in "abcd" for k in range(2)]
    known = set()
    for swap in ({}, {"test": "val"}, {"test": "train"}):
        lines = "\n".join(f"{file},{name},{swap.get(part, part)}" for file, name, part in rows)
        (tmp_path / "m.csv").write_text(f"file,class,split\n{lines}\n")
        known.add(open_data(tmp_path / "m.csv").identity())
    assert len(known) == 3


def test_a_column_called_split_is_honoured(tmp_path):
    write(tmp_path, *"abcdef")
    parts = dict(zip("abcdef", ("train", "Train", "val", "validation", "test", "TEST"), strict=True))
    lines = "\n".join(f"{name}/{k}.png;{name};{parts[name]}" for name in "abcdef" for k in range(2))
    (tmp_path / "m.csv").write_text(f"file;class;Split\n{lines}\n")
    images = open_data(tmp_path / "m.csv")
    assert [names(part) for part in split(images)] == [["a", "b"], ["c", "d"], ["e", "f"]]
    assert "column split: a split, 4 images of 2 classes to train on" in notes(images)
    (tmp_path / "m.csv").write_text(f"file;class;split\n{lines}\na/0.png;a;tset\n")
    with pytest.raises(
        ValueError, match=r"m.csv, line 14: got the split 'tset', expected one of .*; did you mean 'test'"
    ):
        open_data(tmp_path / "m.csv")
