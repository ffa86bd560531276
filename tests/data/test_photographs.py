"""Facts about the images of a set, for files of known sizes."""

import io
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from proxymetric.data import ImageSet, photographs
from proxymetric.data.photographs import describe_photographs


def write(file: Path, width: int, height: int) -> int:
    """Write a JPEG and return the number of its bytes."""
    buffer = io.BytesIO()
    Image.effect_noise((width, height), 50).convert("RGB").save(buffer, "JPEG")
    file.write_bytes(buffer.getvalue())
    return len(buffer.getvalue())


def test_the_median_side_and_the_mean_bytes(tmp_path: Path) -> None:
    sizes = [write(tmp_path / f"{k}.jpg", width, height) for k, (width, height) in enumerate([(9, 5), (4, 30), (7, 8)])]
    files = [tmp_path / f"{k}.jpg" for k in range(3)]
    images = ImageSet("three", np.zeros(3, np.int64), ["a"], paths=files, root=tmp_path)
    assert describe_photographs(images) == {
        "images": 3,
        "shorter_side": 5,
        "bytes_per_image": round(sum(sizes) / 3),
    }


def test_images_that_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    size = write(tmp_path / "good.jpg", 6, 8)
    (tmp_path / "bad.jpg").write_bytes(b"no image")
    os.mkfifo(tmp_path / "pipe.jpg")  # reading it would wait for ever
    files = [tmp_path / name for name in ("bad.jpg", "good.jpg", "missing.jpg", "pipe.jpg")]
    images = ImageSet("some", np.zeros(4, np.int64), ["a"], paths=files, root=tmp_path)
    assert describe_photographs(images) == {"images": 4, "shorter_side": 6, "bytes_per_image": size}
    assert describe_photographs(images.subset([0, 2, 3])) == {"images": 3}


def test_of_many_images_a_sample_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "one.jpg", 6, 8)
    opened = []
    monkeypatch.setattr(photographs, "SAMPLE", 4)
    monkeypatch.setattr(ImageSet, "content", lambda self, row: opened.append(row) or self.paths[row].read_bytes())
    images = ImageSet("many", np.zeros(10, np.int64), ["a"], paths=[tmp_path / "one.jpg"] * 10, root=tmp_path)
    assert describe_photographs(images)["images"] == 10
    assert opened == [0, 3, 6, 9]
