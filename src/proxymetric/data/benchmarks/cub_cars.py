"""CUB-200-2011 and Cars196: the first half of the classes trains, the second half tests."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from proxymetric.data.folders import class_folders, image_files, require_files
from proxymetric.data.images import ImageSet

COUNTS = {"cub": 200, "cars": 196}
_LISTS = ("images.txt", "image_class_labels.txt", "classes.txt")
_NUMBERED = re.compile(r"\d+\.")


def looks(root: Path, layout: str) -> bool:
    """Whether `root` is laid out like `layout`, "cub" or "cars".

    Lists mean CUB, unless there are 196 classes; numbered class folders count only when there are exactly 200 or 196.
    """
    if (root / "cars_annos.mat").is_file():
        return layout == "cars"
    if all((root / name).is_file() for name in _LISTS):
        cars = len(_numbered_lines(root / "classes.txt")) == COUNTS["cars"]
        return cars == (layout == "cars")
    return len(_numbered_folders(root)) == COUNTS[layout]


def read(root: Path, layout: str) -> ImageSet:
    """CUB-200-2011 (`layout="cub"`: 5,864 + 5,924 images) or Cars196 (`"cars"`: 8,054 + 8,131 images) in `root`.

    Read in this order: `cars_annos.mat` with `car_ims/` (Cars196's official form); `images.txt`,
    `image_class_labels.txt` and `classes.txt` with `images/` (CUB's official form); class folders `001.Name`, in
    `images/` or directly (with a `classes.txt`, the names come from there).
    """
    if layout == "cars" and (root / "cars_annos.mat").is_file():
        return _from_annotations(root)
    if all((root / name).is_file() for name in _LISTS):
        return _from_lists(root, layout)
    if _numbered_folders(root):
        return _from_numbered_folders(root, layout)
    official = "cars_annos.mat and car_ims/" if layout == "cars" else f"{', '.join(_LISTS)} and images/"
    raise ValueError(
        f"{root} is not laid out as {'cars196' if layout == 'cars' else 'CUB_200_2011'}. Looked for {official}, or "
        f"class folders such as {root / 'images' / '001.Name'}"
    )


def _from_lists(root: Path, layout: str) -> ImageSet:
    names = _numbered_lines(root / "classes.txt")
    files = _numbered_lines(root / "images.txt")
    labels = _numbered_lines(root / "image_class_labels.txt")
    if files.keys() != labels.keys():
        odd = sorted(files.keys() ^ labels.keys())
        raise ValueError(
            f"{root / 'images.txt'} lists {len(files)} images and {root / 'image_class_labels.txt'} {len(labels)}; "
            f"{len(odd)} numbers are in one of them only, first {odd[0]}"
        )
    order = {number: label for label, number in enumerate(names)}
    unknown = [(number, label) for number, label in labels.items() if not (label.isdigit() and int(label) in order)]
    if unknown:
        raise ValueError(
            f"{root / 'image_class_labels.txt'} gives {len(unknown)} images a class that {root / 'classes.txt'} does "
            f"not name, first image {unknown[0][0]} with class {unknown[0][1]!r}"
        )
    paths = [root / "images" / file for file in files.values()]
    require_files(paths, root, root / "images.txt")
    return _halved(layout, [order[int(labels[n])] for n in files], list(names.values()), paths, root)


def _from_annotations(root: Path) -> ImageSet:
    from scipy.io import loadmat

    file = root / "cars_annos.mat"
    content = loadmat(str(file), squeeze_me=True)
    if "annotations" not in content or "class_names" not in content:
        found = ", ".join(name for name in content if not name.startswith("__"))
        raise ValueError(f"{file} needs the variables annotations and class_names, found {found or 'none'}")
    rows = np.atleast_1d(content["annotations"])
    missing = {"relative_im_path", "class"} - set(rows.dtype.names or ())
    if missing:
        raise ValueError(f"{file}: annotations has no field {', '.join(sorted(missing))}, only {rows.dtype.names}")
    names = [str(name) for name in np.atleast_1d(content["class_names"])]
    labels = [int(number) - 1 for number in rows["class"]]
    if labels and not 0 <= min(labels) <= max(labels) < len(names):
        raise ValueError(f"{file}: classes run from {min(labels) + 1} to {max(labels) + 1}, but {len(names)} are named")
    paths = [root / str(path) for path in rows["relative_im_path"]]
    require_files(paths, root, file)
    return _halved("cars", labels, names, paths, root)


def _from_numbered_folders(root: Path, layout: str) -> ImageSet:
    folders = _numbered_folders(root)
    names = [folder.name for folder in folders]
    if (root / "classes.txt").is_file():
        listed = _numbered_lines(root / "classes.txt")
        numbers = [int(folder.name.split(".")[0]) for folder in folders]
        if list(listed) != numbers:
            odd = sorted(set(listed) ^ set(numbers))
            raise ValueError(
                f"{root / 'classes.txt'} names {len(listed)} classes and there are {len(folders)} class folders; "
                f"they differ at number {odd[0] if odd else numbers[0]}"
            )
        names = list(listed.values())
    labels: list[int] = []
    paths: list[Path] = []
    for label, folder in enumerate(folders):
        files = image_files(folder)
        labels += [label] * len(files)
        paths += files
    return _halved(layout, labels, names, paths, root)


def _halved(layout: str, labels: list[int], names: list[str], paths: list[Path], root: Path) -> ImageSet:
    if len(names) < 2:
        raise ValueError(f"{root} names {len(names)} classes; at least two are needed")
    if not paths:
        raise ValueError(f"{root} names {len(names)} classes but holds no images")
    test = tuple(range(len(names) // 2, len(names)))
    return ImageSet(layout, np.array(labels), names, paths=paths, test_classes=test, root=root)


def _numbered_lines(file: Path) -> dict[int, str]:
    """`1 first\\n2 second` as {1: "first", 2: "second"}, in the order of the file."""
    lines: dict[int, str] = {}
    for at, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        number, _, rest = line.strip().partition(" ")
        if not number:
            continue
        if not number.isdigit() or not rest.strip():
            raise ValueError(f"{file}, line {at}: expected a number, a space and a name, got {line!r}")
        lines[int(number)] = rest.strip()
    return lines


def _numbered_folders(root: Path) -> list[Path]:
    """Class folders `001.Name` of `root/images` or `root`, by number; [] unless all folders there are numbered."""
    place = root / "images" if (root / "images").is_dir() else root
    folders = class_folders(place)
    if not all(_NUMBERED.match(folder.name) for folder in folders):
        return []
    return sorted(folders, key=lambda folder: int(folder.name.split(".")[0]))
