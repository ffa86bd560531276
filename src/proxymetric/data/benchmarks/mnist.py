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


def matches(root: Path) -> bool:
    """Return whether `root` has the official files, or `train/` and `test/` with the folders 0 to 9 and no others."""
    if all(_file(root, name) is not None for pair in _FILES for name in pair):
        return True
    parts = (root / "train", root / "test")
    return all(part.is_dir() and [folder.name for folder in class_folders(part)] == CLASSES for part in parts)


def read(root: Path) -> ImageSet:
    """Read the digits in `root`: officially 60,000 training and 10,000 test images of 28 x 28 grey pixels.

    The images come from `train-images-idx3-ubyte`, `train-labels-idx1-ubyte`, `t10k-images-idx3-ubyte` and
    `t10k-labels-idx1-ubyte`, compressed (.gz) or not, in `root` or `root/raw`, or from class folders `train/0` ..
    `test/9`. Both parts have all ten digits, so the test is given as images (`test_images`), not as classes.
    Fashion-MNIST and Kuzushiji-MNIST have files of the same names and are read in the same way.

    Raises:
        ValueError: files are missing or damaged.
    """
    if all(_file(root, name) is not None for pair in _FILES for name in pair):
        return _from_files(root)
    if (root / "train").is_dir() and (root / "test").is_dir():
        return _from_folders(root)
    missing = [f"{name}-idx{_rank(name)}-ubyte" for pair in _FILES for name in pair if _file(root, name) is None]
    raise ValueError(
        f"data: got {root}, expected the layout of MNIST: {', '.join(missing)} (or .gz), or class folders train/0 to "
        "train/9 and test/0 to test/9"
    )


def _from_files(root: Path) -> ImageSet:
    images, labels = [], []
    for pair in _FILES:
        files = [file for name in pair if (file := _file(root, name)) is not None]
        pixels, digits = (_numbers(file, _rank(name)) for file, name in zip(files, pair, strict=True))
        if len(pixels) != len(digits):
            raise ValueError(f"{files[0]}: got {len(pixels)} images, expected {len(digits)} as in {files[1]}")
        if len(digits) and digits.max() > 9:
            raise ValueError(f"{files[1]}: got the label {digits.max()}, expected 0 to 9")
        images.append(pixels)
        labels.append(digits)
    if images[0].shape[1:] != images[1].shape[1:]:
        raise ValueError(
            f"{root}: got test images of {images[1].shape[1:]} pixels, expected {images[0].shape[1:]} as for training"
        )
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
            raise ValueError(f"{root / part}: got the folders {', '.join(names)}, expected 0 to 9 and no others")
        for digit in CLASSES:
            files = image_files(root / part / digit)
            if not files:
                raise ValueError(f"{root / part / digit}: got no images, expected at least one")
            labels += [int(digit)] * len(files)
            paths += files
        counts.append(len(paths))
    test = np.arange(counts[1]) >= counts[0]
    return ImageSet("mnist", np.array(labels), CLASSES, paths=paths, root=root, test_images=test)


def _rank(name: str) -> int:
    """Return the number of dimensions of a file's array."""
    return _DIMENSIONS[name.split("-")[1]]


def _file(root: Path, name: str) -> Path | None:
    """Return the file `name` in `root` or `root/raw`, compressed or not; None if there is none.

    Some programs replace the hyphen before "idx" by a dot when they uncompress the file; both names are accepted.
    """
    endings = [f"{separator}idx{_rank(name)}-ubyte{suffix}" for separator in "-." for suffix in ("", ".gz")]
    candidates = [folder / (name + ending) for folder in (root, root / "raw") for ending in endings]
    return next((file for file in candidates if file.is_file()), None)


def _numbers(file: Path, rank: int) -> np.ndarray:
    """Read the array of bytes in an IDX file: two zeros, type 8, number of dimensions; 4-byte sizes; the values."""
    content = file.read_bytes()
    if content[:2] == b"\x1f\x8b":
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{file}: got a damaged .gz file ({error}), expected a complete one") from None
    header = 4 + 4 * rank
    if len(content) < header or content[:4] != bytes([0, 0, 8, rank]):
        start = content[:4].hex(" ") or "nothing"
        raise ValueError(
            f"{file}: got {start} as its first bytes, expected an IDX file of bytes with {rank} dimensions"
        )
    shape = tuple(int(size) for size in np.frombuffer(content, ">u4", rank, 4))
    if len(content) != header + int(np.prod(shape)):
        raise ValueError(
            f"{file}: got {len(content) - header} values, expected {' x '.join(map(str, shape))} as in its header; "
            "is it complete?"
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)
