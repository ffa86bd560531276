"""CUB-200-2011 and Cars196: the first half of the classes is for training, the second half for the test."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from proxymetric.data.folders import class_folders, image_files, require_files
from proxymetric.data.images import ImageSet
from proxymetric.data.text_files import read_text

TITLES = {"cub": "CUB-200-2011", "cars": "Cars196"}
CLASS_COUNTS = {"cub": 200, "cars": 196}
IMAGE_COUNTS = {"cub": 11_788, "cars": 16_185}
_LISTS = ("images.txt", "image_class_labels.txt", "classes.txt")
_NUMBER_PREFIX = re.compile(r"\d+\.")


def matches(root: Path, layout: str) -> bool:
    """Return whether `root` has the layout "cub" or "cars".

    Lists with 196 classes are those of Cars, all others those of CUB. Numbered class folders match only if there are
    exactly 200 (CUB) or 196 (Cars) of them.
    """
    if (root / "cars_annos.mat").is_file():
        return layout == "cars"
    if all((root / name).is_file() for name in _LISTS):
        cars = len(_numbered_lines(root / "classes.txt")) == CLASS_COUNTS["cars"]
        return cars == (layout == "cars")
    return len(_numbered_folders(root)) == CLASS_COUNTS[layout]


def read(root: Path, layout: str, complete: bool = True) -> ImageSet:
    """Read CUB-200-2011 ("cub": 5,864 + 5,924 images) or Cars196 ("cars": 8,054 + 8,131 images) from `root`.

    The first of these forms that exists is read:

    - `cars_annos.mat` with `car_ims/` (the official form of Cars196);
    - `images.txt`, `image_class_labels.txt` and `classes.txt` with `images/` (the official form of CUB);
    - class folders `001.Name` in `images/` or in `root`; if there is a `classes.txt`, the class names come from it.

    If images are missing, the notes of the set say how many.

    Args:
        root: the folder.
        layout: "cub" or "cars".
        complete: whether every listed image must be a file.

    Raises:
        ValueError: the folder does not have this layout, its lists contradict each other, or there are no lists and
            class folders are missing.
    """
    if layout == "cars" and (root / "cars_annos.mat").is_file():
        return _from_annotations(root, complete)
    if all((root / name).is_file() for name in _LISTS):
        return _from_lists(root, layout, complete)
    if _numbered_folders(root):
        return _from_numbered_folders(root, layout)
    official = "cars_annos.mat and car_ims/" if layout == "cars" else f"{', '.join(_LISTS)} and images/"
    raise ValueError(
        f"data: got {root}, expected the layout of {'cars196' if layout == 'cars' else 'CUB_200_2011'}: {official}, or "
        f"class folders such as {root / 'images' / '001.Name'}"
    )


def _from_lists(root: Path, layout: str, complete: bool) -> ImageSet:
    names = _numbered_lines(root / "classes.txt")
    files = _numbered_lines(root / "images.txt")
    labels = _numbered_lines(root / "image_class_labels.txt")
    if files.keys() != labels.keys():
        unmatched = sorted(files.keys() ^ labels.keys())
        raise ValueError(
            f"{root / 'images.txt'}: got {len(files)} images, expected the {len(labels)} images of "
            f"{root / 'image_class_labels.txt'}; {len(unmatched)} image numbers are in only one of the two files, "
            f"first {unmatched[0]}"
        )
    order = {number: label for label, number in enumerate(names)}
    unknown_labels = [
        (number, label) for number, label in labels.items() if not (label.isdigit() and int(label) in order)
    ]
    if unknown_labels:
        raise ValueError(
            f"{root / 'image_class_labels.txt'}: got {len(unknown_labels)} images of unknown classes, first image "
            f"{unknown_labels[0][0]} of class {unknown_labels[0][1]!r}, expected classes that are in "
            f"{root / 'classes.txt'}"
        )
    paths = [root / "images" / file for file in files.values()]
    if complete:
        require_files(paths, root, root / "images.txt")
    return _make_halved_set(layout, [order[int(labels[n])] for n in files], list(names.values()), paths, root)


def _from_annotations(root: Path, complete: bool) -> ImageSet:
    from scipy.io import loadmat

    file = root / "cars_annos.mat"
    content = loadmat(str(file), squeeze_me=True)
    if "annotations" not in content or "class_names" not in content:
        variables = ", ".join(name for name in content if not name.startswith("__"))
        raise ValueError(f"{file}: got the variables {variables or 'none'}, expected annotations and class_names")
    rows = np.atleast_1d(content["annotations"])
    missing = {"relative_im_path", "class"} - set(rows.dtype.names or ())
    if missing:
        raise ValueError(
            f"{file}: annotations: got the fields {rows.dtype.names}, expected {', '.join(sorted(missing))} as well"
        )
    names = [str(name) for name in np.atleast_1d(content["class_names"])]
    labels = [int(number) - 1 for number in rows["class"]]
    if labels and not 0 <= min(labels) <= max(labels) < len(names):
        raise ValueError(f"{file}: got classes from {min(labels) + 1} to {max(labels) + 1}, expected 1 to {len(names)}")
    paths = [root / str(path) for path in rows["relative_im_path"]]
    if complete:
        require_files(paths, root, file)
    return _make_halved_set("cars", labels, names, paths, root)


def _from_numbered_folders(root: Path, layout: str) -> ImageSet:
    folders = _numbered_folders(root)
    if len(folders) != CLASS_COUNTS[layout]:
        raise ValueError(
            f"data: got {root} with {len(folders)} class folders, expected the {CLASS_COUNTS[layout]} of "
            f"{TITLES[layout]}; was the archive unpacked to its end? For other images: data.layout='folder', and "
            "data.test=0.5 to test on half of the classes"
        )
    names = [folder.name for folder in folders]
    if (root / "classes.txt").is_file():
        listed_names = _numbered_lines(root / "classes.txt")
        numbers = [int(folder.name.split(".")[0]) for folder in folders]
        if list(listed_names) != numbers:
            unmatched = sorted(set(listed_names) ^ set(numbers))
            raise ValueError(
                f"{root / 'classes.txt'}: got {len(listed_names)} classes, expected the {len(folders)} class folders; "
                f"they differ at number {unmatched[0] if unmatched else numbers[0]}"
            )
        names = list(listed_names.values())
    labels: list[int] = []
    paths: list[Path] = []
    for label, folder in enumerate(folders):
        files = image_files(folder)
        labels += [label] * len(files)
        paths += files
    return _make_halved_set(layout, labels, names, paths, root)


def _make_halved_set(layout: str, labels: list[int], names: list[str], paths: list[Path], root: Path) -> ImageSet:
    """Return an image set in which the second half of the classes is for the test."""
    if len(names) < 2:
        raise ValueError(f"{root}: got {len(names)} classes, expected at least two")
    if not paths:
        raise ValueError(f"{root}: got {len(names)} classes and no images, expected images of these classes")
    test = tuple(range(len(names) // 2, len(names)))
    notes: tuple[str, ...] = ()
    if len(paths) != IMAGE_COUNTS[layout]:
        notes = (
            f"{root}: {len(paths):,} images of {len(names)} classes; {TITLES[layout]} has {IMAGE_COUNTS[layout]:,} of "
            f"{CLASS_COUNTS[layout]}, so scores are not those of the whole set",
        )
    return ImageSet(layout, np.array(labels), names, paths=paths, test_classes=test, root=root, notes=notes)


def _numbered_lines(file: Path) -> dict[int, str]:
    """Return the lines `1 first`, `2 second` as {1: "first", 2: "second"}, in the order of the file."""
    lines: dict[int, str] = {}
    for line_number, line in enumerate(read_text(file).splitlines(), 1):
        number, _, name = line.strip().partition(" ")
        if not number:
            continue
        if not number.isdigit() or not name.strip():
            raise ValueError(f"{file}, line {line_number}: got {line!r}, expected a number, a space and a name")
        lines[int(number)] = name.strip()
    return lines


def _numbered_folders(root: Path) -> list[Path]:
    """Return the class folders `001.Name` of `root/images` or `root` by number; [] unless all folders are numbered."""
    parent = root / "images" if (root / "images").is_dir() else root
    folders = class_folders(parent)
    if not all(_NUMBER_PREFIX.match(folder.name) for folder in folders):
        return []
    return sorted(folders, key=lambda folder: int(folder.name.split(".")[0]))
