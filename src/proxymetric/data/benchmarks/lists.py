"""Lists of images in text files, the form in which large benchmarks are distributed."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from proxymetric.data.folders import require_files
from proxymetric.data.images import ImageSet
from proxymetric.data.text_files import read_text


class ListedImage(NamedTuple):
    """One image of a list."""

    file: str
    """path relative to the folder of the images"""
    class_name: str
    """name of its class"""
    test: bool
    """whether it is for the test"""
    gallery: bool = False
    """whether it belongs to the gallery of the test"""


def lines_of(file: Path) -> list[tuple[int, list[str]]]:
    """Return the line number (from 1) and the words of each non-empty line of `file`."""
    return [(number, words) for number, line in enumerate(read_text(file).splitlines(), 1) if (words := line.split())]


def make_image_set(
    name: str, rows: list[ListedImage], root: Path, images: Path, listed_in: Path, complete: bool = True
) -> ImageSet:
    """Make an image set from listed images; classes are in the order of their first image.

    Args:
        name: the name of the set.
        rows: the listed images; the classes of test images are the test classes.
        root: the folder that paths are shown relative to.
        images: the folder that the files of `rows` are relative to.
        listed_in: the list, or the folder of lists, for messages.
        complete: whether every listed image must be a file.

    Raises:
        ValueError: training or test has fewer than two classes, a class is in both, or files are missing.
    """
    training_classes = {row.class_name for row in rows if not row.test}
    test_classes = {row.class_name for row in rows if row.test}
    for part, class_names in (("training", training_classes), ("test", test_classes)):
        if len(class_names) < 2:
            raise ValueError(f"{listed_in}: got {len(class_names)} {part} classes, expected at least two")
    shared = [row.class_name for row in rows if row.class_name in training_classes and row.class_name in test_classes]
    if shared:
        raise ValueError(
            f"{listed_in}: got {len(set(shared))} classes for both training and test, first {shared[0]!r}, "
            "expected no class for both"
        )
    paths = [images / row.file for row in rows]
    if complete:
        require_files(paths, root, listed_in)
    classes = list(dict.fromkeys(row.class_name for row in rows))
    label_of = {class_name: label for label, class_name in enumerate(classes)}
    gallery = np.array([row.gallery for row in rows])
    return ImageSet(
        name=name,
        labels=np.array([label_of[row.class_name] for row in rows]),
        classes=classes,
        paths=paths,
        test_classes=tuple(label for label, class_name in enumerate(classes) if class_name in test_classes),
        root=root,
        gallery=gallery if gallery.any() else None,
    )
