"""Omniglot: handwritten characters of fifty alphabets, twenty drawings of each."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from proxymetric.data.folders import class_folders, image_files
from proxymetric.data.images import ImageSet

_PARTS = (("images_background", "images_evaluation"), ("background", "evaluation"))


def matches(root: Path) -> bool:
    """Return whether `root` has the folders of both parts."""
    return _parts_of(root) is not None


def read(root: Path) -> ImageSet:
    """Read the characters of `images_background/` (training) and `images_evaluation/` (test) in `root`.

    The official set has 964 characters for training and 659 characters of other alphabets for the test, with twenty
    drawings each (19,280 and 13,180). A character is a folder of drawings, in the folder of its alphabet
    (`images_background/Greek/character01`, called `Greek/character01`) or directly in its part. The parts may also be
    called `background/` and `evaluation/`.

    Raises:
        ValueError: a part is missing or has fewer than two characters.
    """
    parts = _parts_of(root)
    if parts is None:
        folders = " or ".join(f"{training}/ and {test}/" for training, test in _PARTS)
        raise ValueError(
            f"data: got {root}, expected the layout of Omniglot: {folders}, with ALPHABET/CHARACTER/*.png inside"
        )
    labels: list[int] = []
    classes: list[str] = []
    paths: list[Path] = []
    counts = []
    for part in parts:
        first_class = len(classes)
        for folder in class_folders(part):
            for character in class_folders(folder) or [folder]:
                files = image_files(character)
                if files:
                    labels += [len(classes)] * len(files)
                    classes.append(character.relative_to(part).as_posix())
                    paths += files
        counts.append(len(classes) - first_class)
        if counts[-1] < 2:
            raise ValueError(f"{part}: got {counts[-1]} characters, expected at least two as ALPHABET/CHARACTER/*.png")
    test = tuple(range(counts[0], sum(counts)))
    return ImageSet("omniglot", np.array(labels), classes, paths=paths, test_classes=test, root=root)


def _parts_of(root: Path) -> tuple[Path, Path] | None:
    """Return the folders for training and test; None if they do not exist."""
    pairs = ((root / training, root / test) for training, test in _PARTS)
    return next((pair for pair in pairs if all(part.is_dir() for part in pair)), None)
