"""MNIST: handwritten digits, from the official files or from class folders."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import numpy as np

from proxymetric.data.folders import class_folders, image_files
from proxymetric.data.images import ImageSet

CLASSES = [str(digit) for digit in range(10)]
_FILES = (("train-images", "train-labels"), ("t10k-images", "t10k-labels"))
_DIMENSIONS = {"images": 3, "labels": 1}


def looks(root: Path) -> bool:
    """Whether `root` holds the official files, or `train/` and `test/` with the folders 0 to 9 and no others."""
    if all(_file(root, name) is not None for pair in _FILES for name in pair):
        return True
    parts = (root / "train", root / "test")
    return all(part.is_dir() and [folder.name for folder in class_folders(part)] == CLASSES for part in parts)


def read(root: Path) -> ImageSet:
    """The digits in `root`: officially 60,000 images to train and 10,000 to test, 28 x 28 grey levels.

    Read from `train-images-idx3-ubyte`, `train-labels-idx1-ubyte`, `t10k-images-idx3-ubyte` and
    `t10k-labels-idx1-ubyte`, packed (.gz) or not, in `root` or `root/raw`; or from class folders `train/0` .. `test/9`.
    Both parts have all ten digits, so the test is a set of images (`test_images`), not of classes. Fashion-MNIST and
    Kuzushiji-MNIST come in files of the same names and open the same way.
    """
    if all(_file(root, name) is not None for pair in _FILES for name in pair):
        return _from_files(root)
    if (root / "train").is_dir() and (root / "test").is_dir():
        return _from_folders(root)
    missing = [f"{name}-idx{_rank(name)}-ubyte" for pair in _FILES for name in pair if _file(root, name) is None]
    raise ValueError(
        f"{root} is not laid out as MNIST. Looked for {', '.join(missing)} (or .gz), or for class folders train/0 to "
        "train/9 and test/0 to test/9"
    )


def _from_files(root: Path) -> ImageSet:
    images, labels = [], []
    for pair in _FILES:
        files = [file for name in pair if (file := _file(root, name)) is not None]
        pixels, digits = (_numbers(file, _rank(name)) for file, name in zip(files, pair, strict=True))
        if len(pixels) != len(digits):
            raise ValueError(f"{files[0]} holds {len(pixels)} images, but {files[1]} {len(digits)} labels")
        if len(digits) and digits.max() > 9:
            raise ValueError(f"{files[1]} holds the label {digits.max()}; digits are 0 to 9")
        images.append(pixels)
        labels.append(digits)
    if images[0].shape[1:] != images[1].shape[1:]:
        raise ValueError(f"{root} holds training images of {images[0].shape[1:]} pixels and others for the test")
    test = np.arange(len(labels[0]) + len(labels[1])) >= len(labels[0])
    arrays = np.concatenate(images)
    return ImageSet("mnist", np.concatenate(labels), CLASSES, arrays=arrays, root=root, test_images=test)


def _from_folders(root: Path) -> ImageSet:
    labels: list[int] = []
    paths: list[Path] = []
    counts = []
    for part in ("train", "test"):
        names = [folder.name for folder in class_folders(root / part)]
        if names != CLASSES:
            raise ValueError(f"{root / part} should hold the folders 0 to 9 and no others, got {', '.join(names)}")
        for digit in CLASSES:
            files = image_files(root / part / digit)
            if not files:
                raise ValueError(f"{root / part / digit} holds no images")
            labels += [int(digit)] * len(files)
            paths += files
        counts.append(len(paths))
    test = np.arange(counts[1]) >= counts[0]
    return ImageSet("mnist", np.array(labels), CLASSES, paths=paths, root=root, test_images=test)


def _rank(name: str) -> int:
    return _DIMENSIONS[name.split("-")[1]]


def _file(root: Path, name: str) -> Path | None:
    """`name`'s file in `root` or `root/raw`: packed or not, and with the dot that some programs unpack it with."""
    ends = [f"{joint}idx{_rank(name)}-ubyte{packed}" for joint in "-." for packed in ("", ".gz")]
    places = [place / (name + end) for place in (root, root / "raw") for end in ends]
    return next((place for place in places if place.is_file()), None)


def _numbers(file: Path, rank: int) -> np.ndarray:
    """The array of bytes in an IDX file: two zeros, type 8, number of dimensions; 4-byte sizes; the values."""
    content = file.read_bytes()
    if content[:2] == b"\x1f\x8b":
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{file} cannot be unpacked: {error}") from None
    head = 4 + 4 * rank
    if len(content) < head or content[:4] != bytes([0, 0, 8, rank]):
        begins = content[:4].hex(" ") or "nothing"
        raise ValueError(f"{file} is not an IDX file of bytes with {rank} dimensions; it begins with {begins}")
    shape = tuple(int(size) for size in np.frombuffer(content, ">u4", rank, 4))
    if len(content) != head + int(np.prod(shape)):
        raise ValueError(
            f"{file} announces {' x '.join(map(str, shape))} values and holds {len(content) - head}; is it complete?"
        )
    return np.frombuffer(content, np.uint8, offset=head).reshape(shape)
