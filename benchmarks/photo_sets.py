"""Lays out three public photograph sets from clones of the repositories that hold them, one folder for each class.

    git clone --bare https://github.com/3ba2ii/Flower-Classifier flowers.git
    python benchmarks/photo_sets.py flowers flowers.git SETS/flowers

Some photographs of each class are taken, evenly spaced in the order of their names, and stored with a shorter side of
at most 256 pixels. The sets were chosen before anything was scored on them, for being unlike each other: flowers in
nature, goods on the shelves of shops, land seen from the air. None of them is tuned to anywhere else in this
repository. `pets` is a spare, whose classes ImageNet knows.
"""

from __future__ import annotations

import argparse
import io
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

SIDE = 256
"""most pixels of the shorter side of a stored photograph"""


class Origin(NamedTuple):
    """Where a set comes from."""

    repository: str
    commit: str
    photographs: str
    """pattern of the files, in which the group `label` is the class"""
    per_class: int
    about: str


ORIGINS = {
    "flowers": Origin(
        "3ba2ii/Flower-Classifier",
        "e0447ae3a8e54baaa61061833afa4679e8a7f786",
        r"flowers/(?:train|valid|test)/(?P<label>\d+)/[^/]+\.jpg",
        15,
        "Oxford 102 Flowers (Nilsback & Zisserman, 2008)",
    ),
    "groceries": Origin(
        "marcusklasson/GroceryStoreDataset",
        "fc80ba90f803d79d0383df52c5a4ac5de99ff6fc",
        r"dataset/(?:train|val|test)/(?:[^/]+/)*(?P<label>[^/]+)/[^/]+\.jpg",
        20,
        "Grocery Store Dataset (Klasson, Zhang & Kjellstrom, 2019), MIT licence",
    ),
    "aerial": Origin(
        "zlima/testtensor",
        "f6a0f74645eab10754425bff50747e508290dee1",
        r"AID/(?P<label>\w+)/[^/]+\.jpg",
        50,
        "AID, aerial scenes (Xia et al., 2017)",
    ),
    "pets": Origin(
        "ml4py/dataset-iiit-pet",
        "ebb5f9e482d0597e7eb4a92f24c7275e83b96140",
        r"images/(?P<label>\w+)_\d+\.jpg",
        40,
        "Oxford-IIIT Pet (Parkhi et al., 2012), CC BY-SA 4.0",
    ),
}


def git(clone: Path, *words: str) -> bytes:
    """What a command of git prints about a clone."""
    return subprocess.run(["git", "-C", str(clone), *words], capture_output=True, check=True).stdout


def photographs(origin: Origin, names: list[str]) -> dict[str, list[str]]:
    """The photographs that are taken of each class.

    Example:
        >>> origin = Origin("me/mine", "0" * 40, r"(?P<label>[ab])/[^/]+[.]jpg", 2, "mine")
        >>> photographs(origin, ["a/1.jpg", "a/2.jpg", "a/3.jpg", "b/1.jpg", "b/notes.txt"])
        {'a': ['a/1.jpg', 'a/3.jpg'], 'b': ['b/1.jpg']}
    """
    by_class: dict[str, list[str]] = {}
    for name in sorted(names):
        if match := re.fullmatch(origin.photographs, name):
            by_class.setdefault(match["label"], []).append(name)
    taken = {}
    for label, files in sorted(by_class.items()):
        places = np.linspace(0, len(files) - 1, min(origin.per_class, len(files))).round().astype(int)
        taken[label] = [files[place] for place in places]
    return taken


def lay_out(origin: Origin, clone: Path, folder: Path) -> dict[str, int]:
    """Write the photographs of a set into class folders; photographs that are there already stay.

    Returns:
        The number of photographs of each class.
    """
    names = git(clone, "ls-tree", "-r", "-z", "--name-only", origin.commit).decode().split("\0")
    taken = photographs(origin, names)
    for label, files in taken.items():
        (folder / label).mkdir(parents=True, exist_ok=True)
        for name in files:
            place = folder / label / f"{Path(name).parent.as_posix().replace('/', '-')}-{Path(name).name}"
            if not place.exists():
                with Image.open(io.BytesIO(git(clone, "cat-file", "blob", f"{origin.commit}:{name}"))) as photograph:
                    image = photograph.convert("RGB")
                scale = SIDE / min(image.size)
                if scale < 1:
                    size = [max(SIDE, round(scale * side)) for side in image.size]
                    image = image.resize((size[0], size[1]), Image.Resampling.BICUBIC)
                temporary = place.with_suffix(".part")
                image.save(temporary, "JPEG", quality=95)
                temporary.replace(place)
    return {label: len(files) for label, files in taken.items()}


def main() -> None:
    """Lay out one set."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set", choices=list(ORIGINS))
    parser.add_argument("clone", type=Path, help="a clone of the repository of the set, bare or not")
    parser.add_argument("folder", type=Path)
    words = parser.parse_args()
    origin = ORIGINS[words.set]
    counts = lay_out(origin, words.clone, words.folder)
    print(f"{words.set}: {sum(counts.values())} photographs of {len(counts)} classes, {origin.about}")


if __name__ == "__main__":
    main()
