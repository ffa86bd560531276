"""People's own images: a folder for each class, or a CSV of file and class."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import numpy as np

from proxymetric.data.images import ImageSet

ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
_FILE_COLUMNS = ("file", "path", "image")
_CLASS_COLUMNS = ("class", "label")


def image_files(folder: Path) -> list[Path]:
    """Every image file under `folder`, at any depth, sorted; hidden files and folders are left out."""
    found = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(parent) / name for name in files if not name.startswith(".") and name.lower().endswith(ENDINGS)]
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def class_folders(root: Path) -> list[Path]:
    """The folders directly under `root` that are not hidden, sorted by name."""
    return sorted((p for p in root.iterdir() if p.is_dir() and not p.name.startswith(".")), key=lambda p: p.name)


def from_folder(root: Path) -> ImageSet:
    """`root/<class>/**/*.jpg` (or .jpeg .png .webp .bmp .gif .tif .tiff): a class is a folder, its name is the class's.

    Classes are sorted by name, images by path. Folders without any image are no class.
    """
    classes: list[str] = []
    paths: list[Path] = []
    labels: list[int] = []
    for folder in class_folders(root):
        files = image_files(folder)
        if files:
            labels += [len(classes)] * len(files)
            classes.append(folder.name)
            paths += files
    looked_for = f"one folder for each class, such as {root / 'CLASS' / 'photo.jpg'} ({', '.join(ENDINGS)})"
    if not paths:
        loose = sum(p.is_file() and p.name.lower().endswith(ENDINGS) for p in root.iterdir())
        beside = f"; {loose} images lie directly in it, in no class folder" if loose else ""
        raise ValueError(f"{root} holds no labelled images{beside}. Looked for {looked_for}")
    if len(classes) < 2:
        inner = [p for p in class_folders(root / classes[0]) if image_files(p)]
        hint = (
            f"; did you mean {root / classes[0]}, which has {len(inner)} folders of images?" if len(inner) > 1 else ""
        )
        raise ValueError(
            f"{root} holds images of one class only ({classes[0]!r}); at least two classes are needed{hint or '.'} "
            f"Looked for {looked_for}"
        )
    return ImageSet(root.resolve().name, np.array(labels), classes, paths=paths, root=root)


def from_csv(file: Path) -> ImageSet:
    """A table with a header line and the columns `file` (or path, image) and `class` (or label).

    Files are relative to the folder of the CSV. Commas, semicolons or tabs separate; other columns are ignored.
    """
    root = file.parent
    with file.open(newline="", encoding="utf-8-sig") as lines:
        header = lines.readline()
        separator = max(",;\t", key=header.count)
        names = [name.strip().lower() for name in next(csv.reader([header], delimiter=separator), [])]
        columns = [
            next((names.index(name) for name in wanted if name in names), None)
            for wanted in (_FILE_COLUMNS, _CLASS_COLUMNS)
        ]
        if columns[0] is None or columns[1] is None:
            raise ValueError(
                f"{file} needs a header line with the columns file and class (or path/image and label), "
                f"found {', '.join(repr(name) for name in names) or 'an empty file'}"
            )
        rows = []
        for number, row in enumerate(csv.reader(lines, delimiter=separator), 2):
            if not any(cell.strip() for cell in row):
                continue
            cells = [row[column].strip() if column < len(row) else "" for column in columns if column is not None]
            if not all(cells):
                missing = "file" if not cells[0] else "class"
                raise ValueError(f"{file}, line {number}: the {missing} is missing in {separator.join(row)!r}")
            rows.append(cells)
    if not rows:
        raise ValueError(f"{file} has a header line but no rows")
    paths = [root / name for name, _ in rows]
    require_files(paths, root, file)
    classes = sorted({name for _, name in rows})
    if len(classes) < 2:
        raise ValueError(f"{file} names one class only ({classes[0]!r}); at least two classes are needed")
    index = {name: label for label, name in enumerate(classes)}
    return ImageSet(file.stem, np.array([index[name] for _, name in rows]), classes, paths=paths, root=root)


def require_files(paths: list[Path], root: Path, listed_in: Path) -> None:
    """Refuse a list that names files which are not there: how many, and the first three."""
    missing = [path for path in paths if not path.is_file()]
    if missing:
        first = ", ".join(Path(os.path.relpath(path, root)).as_posix() for path in missing[:3])
        more = ", ..." if len(missing) > 3 else ""
        raise ValueError(
            f"{listed_in} names {len(missing)} of {len(paths)} files that do not exist under {root}: {first}{more}"
        )
