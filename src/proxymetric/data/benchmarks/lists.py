"""Lists of images in text files, as large benchmarks ship them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from proxymetric.data.folders import require_files
from proxymetric.data.images import ImageSet


class Row(NamedTuple):
    """One image of a list: its file relative to the images' folder, its class, and what it is for."""

    file: str
    kind: str
    test: bool
    gallery: bool = False


def lines_of(file: Path) -> list[tuple[int, list[str]]]:
    """The lines of `file` that are not empty: number from 1, and the words."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{file} is not a text file (UTF-8)") from None
    return [(at, words) for at, line in enumerate(text.splitlines(), 1) if (words := line.split())]


def listed(name: str, rows: list[Row], root: Path, images: Path, listed_in: Path) -> ImageSet:
    """The image set of `rows`: classes in the order of their first row, those of test rows are the test's.

    Arguments:
        root: the folder that paths are shown relative to.
        images: the folder that the rows' files lie in.
        listed_in: the list, or the folder of lists, for messages.
    """
    training = {row.kind for row in rows if not row.test}
    testing = {row.kind for row in rows if row.test}
    for what, kinds in (("training", training), ("test", testing)):
        if len(kinds) < 2:
            raise ValueError(f"{listed_in} lists {len(kinds)} {what} classes; at least two are needed")
    both = [row.kind for row in rows if row.kind in training and row.kind in testing]
    if both:
        raise ValueError(
            f"{listed_in} lists {len(set(both))} classes for the training and for the test, first {both[0]!r}; "
            "the two must not share classes"
        )
    paths = [images / row.file for row in rows]
    require_files(paths, root, listed_in)
    classes = list(dict.fromkeys(row.kind for row in rows))
    label = {kind: at for at, kind in enumerate(classes)}
    gallery = np.array([row.gallery for row in rows])
    return ImageSet(
        name=name,
        labels=np.array([label[row.kind] for row in rows]),
        classes=classes,
        paths=paths,
        test_classes=tuple(at for at, kind in enumerate(classes) if kind in testing),
        root=root,
        gallery=gallery if gallery.any() else None,
    )
