"""Image sets from your own files: one folder per class, or a CSV of files and classes."""

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
    """Return every image file under `folder`, at any depth, sorted; hidden files and folders are left out."""
    paths = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths += [Path(parent) / name for name in files if not name.startswith(".") and name.lower().endswith(ENDINGS)]
    return sorted(paths, key=lambda path: path.relative_to(folder).as_posix())


def class_folders(root: Path) -> list[Path]:
    """Return the folders directly under `root` that are not hidden, sorted by name."""
    return sorted((p for p in root.iterdir() if p.is_dir() and not p.name.startswith(".")), key=lambda p: p.name)


def from_folder(root: Path) -> ImageSet:
    """Read a folder of class folders: `root/<class>/**/*.jpg` (or .jpeg .png .webp .bmp .gif .tif .tiff).

    Each class has the name of its folder. Classes are sorted by name and images by path. Folders without images are
    ignored.

    Raises:
        ValueError: there are fewer than two classes.
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
    layout = f"one folder for each class, such as {root / 'CLASS' / 'photo.jpg'} ({', '.join(ENDINGS)})"
    if not paths:
        loose = sum(p.is_file() and p.name.lower().endswith(ENDINGS) for p in root.iterdir())
        outside = f" and {loose} images outside class folders" if loose else ""
        raise ValueError(f"data: got {root} with no labelled images{outside}, expected {layout}")
    if len(classes) < 2:
        inner = [p for p in class_folders(root / classes[0]) if image_files(p)]
        hint = (
            f"; did you mean {root / classes[0]}, which has {len(inner)} folders of images?" if len(inner) > 1 else ""
        )
        raise ValueError(
            f"data: got {root} with images of one class only ({classes[0]!r}), expected at least two classes: "
            f"{layout}{hint}"
        )
    return ImageSet(root.resolve().name, np.array(labels), classes, paths=paths, root=root)


def from_csv(file: Path) -> ImageSet:
    """Read a CSV with a header line and the columns `file` (or path, image) and `class` (or label).

    Files are relative to the folder of the CSV. Columns are separated by commas, semicolons or tabs; other columns are
    ignored.

    Raises:
        ValueError: a column, a cell or an image file is missing, or there are fewer than two classes.
    """
    root = file.parent
    with file.open(newline="", encoding="utf-8-sig") as lines:
        header = lines.readline()
        separator = max(",;\t", key=header.count)
        names = [name.strip().lower() for name in next(csv.reader([header], delimiter=separator), [])]
        columns = [
            next((names.index(name) for name in accepted if name in names), None)
            for accepted in (_FILE_COLUMNS, _CLASS_COLUMNS)
        ]
        if columns[0] is None or columns[1] is None:
            raise ValueError(
                f"{file}: got {', '.join(repr(name) for name in names) or 'an empty file'}, expected a header line "
                "with the columns file and class (or path/image and label)"
            )
        rows = []
        for number, row in enumerate(csv.reader(lines, delimiter=separator), 2):
            if not any(cell.strip() for cell in row):
                continue
            cells = [row[column].strip() if column < len(row) else "" for column in columns if column is not None]
            if not all(cells):
                missing = "file" if not cells[0] else "class"
                raise ValueError(
                    f"{file}, line {number}: got {separator.join(row)!r} without a {missing}, expected a file and a "
                    "class"
                )
            rows.append(cells)
    if not rows:
        raise ValueError(f"{file}: got a header line and no rows, expected a row for each image")
    paths = [root / name for name, _ in rows]
    require_files(paths, root, file)
    classes = sorted({name for _, name in rows})
    if len(classes) < 2:
        raise ValueError(f"{file}: got one class only ({classes[0]!r}), expected at least two classes")
    index = {name: label for label, name in enumerate(classes)}
    return ImageSet(file.stem, np.array([index[name] for _, name in rows]), classes, paths=paths, root=root)


def require_files(paths: list[Path], root: Path, listed_in: Path) -> None:
    """Raise an error if listed files do not exist.

    Args:
        paths: the listed files.
        root: the folder that paths are shown relative to.
        listed_in: the file with the list, for the error message.

    Raises:
        ValueError: files are missing; the message gives their number and names the first three.
    """
    missing = [path for path in paths if not path.is_file()]
    if missing:
        first = ", ".join(Path(os.path.relpath(path, root)).as_posix() for path in missing[:3])
        more = ", ..." if len(missing) > 3 else ""
        raise ValueError(
            f"{listed_in}: got {len(missing)} of {len(paths)} files that do not exist, expected all of them under "
            f"{root}; missing: {first}{more}"
        )
