"""Packs: one NumPy file of encoded images or pixels is data wherever labelled images are."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from proxymetric.data import BadImage, open_data
from proxymetric.data.splits import split
from proxymetric.system.files import read_json
from terminal import bytes_of, finished_run, proxymetric, refused, train


def packed(photos: Path, file: Path, damaged: bool = False, **others: object) -> Path:
    """A pack of a folder of class folders; its third image may be damaged."""
    paths = sorted(photos.rglob("*.png"))
    contents = [path.read_bytes() for path in paths]
    if damaged:
        contents[2] = contents[2][:30]
    names = sorted({path.parent.name for path in paths})
    arrays = {
        "blob": np.frombuffer(b"".join(contents), np.uint8),
        "offset": np.cumsum([0, *map(len, contents)]),
        "label": np.array([names.index(path.parent.name) for path in paths], np.int16),
        "path": np.array([path.relative_to(photos).as_posix() for path in paths]).astype("S"),
        "class_name": np.array([*names, "a class without images"]).astype("S"),
    }
    np.savez(file, **{name: array for name, array in (arrays | others).items() if array is not None})
    return file


def test_a_pack_holds_the_images_of_its_folder(photos, tmp_path):
    folder, pack = open_data(photos), open_data(packed(photos, tmp_path / "photos.npz"))
    assert (pack.name, pack.classes, pack.labels.tolist()) == ("photos", folder.classes, folder.labels.tolist())
    assert pack.title(9) == f"{tmp_path / 'photos.npz'}#class1/1.png"
    for index in (0, 9, len(pack) - 1):
        assert np.array_equal(np.asarray(pack.read(index)), np.asarray(folder.read(index)))
    chosen = pack.subset([9, 0])
    assert np.array_equal(np.asarray(chosen.read(0)), np.asarray(folder.read(9)))
    again = open_data(packed(photos, tmp_path / "again.npz"))
    damaged = open_data(packed(photos, tmp_path / "damaged.npz", damaged=True))
    assert pack.identity() == again.identity() != damaged.identity()
    with pytest.raises(BadImage, match=r"class0/2.png"):
        damaged.read(2)


def test_pixels_and_texts_and_splits(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (8, 6, 5, 3), dtype=np.uint8)
    labels, file = np.array([*"aabbccdd"]), tmp_path / "pixels.npz"
    np.savez(file, images=pixels, y=labels)
    images = open_data(file)
    assert images.classes == [*"abcd"]
    assert np.array_equal(np.asarray(images.read(3)), pixels[3])
    np.savez(file, x=pixels[..., 0], label=labels, is_train=np.arange(8) < 4)
    parts = split(open_data(file), 0.0)
    assert parts.test is not None
    assert (parts.train.classes, parts.test.classes) == (["a", "b"], ["c", "d"])
    np.savez(file, x=pixels, label=np.repeat([3, 7], 4), split=np.array(["train", "train", "test", "test"] * 2))
    images = open_data(file)
    assert images.classes == ["3", "7"]
    assert images.test_images.tolist() == [False, False, True, True] * 2


PIXELS = np.zeros((4, 6, 6), np.uint8)


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({}, "got no arrays, expected the arrays blob, offset and label, or x and label"),
        ({"x": PIXELS}, "got x uint8[4, 6, 6], expected the arrays"),
        ({"x": PIXELS, "label": [0, 1, 2]}, "expected uint8 pixels (N, H, W) or (N, H, W, 3) with N labels"),
        ({"x": PIXELS.astype(float), "label": [0, 0, 1, 1]}, "expected uint8 pixels"),
        ({"x": PIXELS, "label": [0.5, 0, 1, 1]}, "a whole number or a text for each image"),
        ({"x": PIXELS, "label": [0, 0, 0, 0]}, "got 1 classes, expected at least two"),
        ({"x": PIXELS, "label": [0, 0, 1, 2], "classes": ["a", "b"]}, "got the label 2, expected numbers in 0..1"),
        ({"x": PIXELS, "label": [0, 0, 1, 1], "classes": ["a", "a"]}, "got the class name 'a' for two labels"),
        ({"x": PIXELS, "label": [0, 0, 1, 1], "split": ["train", "x", "y", "z"]}, "got the split 'x', expected one of"),
        ({"blob": PIXELS, "label": [0, 0, 1, 1]}, "expected the arrays blob, offset and label"),
        ({"blob": np.zeros(9, np.uint8), "offset": [0, 2, 1, 3, 9], "label": [0, 0, 1, 1]}, "N + 1 rising places"),
        ({"blob": np.zeros(9, np.uint8), "offset": [0, 2, 4, 6, 10], "label": [0, 0, 1, 1]}, "N + 1 rising places"),
    ],
)
def test_what_is_no_pack_is_refused_in_a_sentence(arrays, said, tmp_path):
    np.savez(tmp_path / "pack.npz", **arrays)
    refused(train(tmp_path / "pack.npz", tmp_path / "run"), str(tmp_path / "pack.npz"), said)


def test_files_that_are_not_numpy_are_refused(photos, tmp_path):
    file = tmp_path / "pack.npz"
    whole = packed(photos, tmp_path / "whole.npz").read_bytes()
    pickled = io.BytesIO()
    np.savez(pickled, x=np.array([{}, None]), label=[0, 1])
    for content in (b"", b"no archive", whole[: len(whole) // 2], pickled.getvalue()):
        file.write_bytes(content)
        refused(train(file, tmp_path / "run"), "which cannot be read as a NumPy file")
    refused(train(tmp_path / "wole.npz", tmp_path / "run"), "did you mean", "whole.npz")
    answer = proxymetric("evaluate", tmp_path, "--data", tmp_path / "whole.npz", "--layout", "csv")
    assert answer.code == 1


def test_a_run_and_an_inspection_take_a_pack(photos, tmp_path):
    pack = packed(photos, tmp_path / "photos.npz", damaged=True)
    run = finished_run(pack, tmp_path / "run")
    result = read_json(run / "result.json")
    assert result["data"]["name"] == "photos"
    assert list(result["bad_images"]) == [f"{pack}#class0/2.png"]
    out = tmp_path / "inspected"
    answer = proxymetric("inspect", run, pack, "--out", out)
    assert answer.code == 0, answer
    assert f"cannot be read: {pack}#class0/2.png" in answer.out
    assert "80 images of 10 classes" in answer.out
    assert f"{pack}#class0/2.png,class0," in (out / "unreadable.csv").read_text()
    before = bytes_of(out / "vectors")
    answer = proxymetric("inspect", run, pack, "--out", out)
    assert answer.code == 0, answer
    assert bytes_of(out / "vectors") == before, "nothing is embedded again"
    assert Image.open(io.BytesIO(open_data(pack).encoded.content(0))).size == (16, 16)
