"""Image sets from a CSV of files and classes."""

from __future__ import annotations

import csv
import io
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from proxymetric.arguments.signatures import did_you_mean
from proxymetric.data.csv_boxes import COLUMNS, box_columns, check_inside, read_box
from proxymetric.data.decoding import Box
from proxymetric.data.folders import (
    HEIC_ENDINGS,
    first_names,
    is_file,
    missing_files,
    other_endings,
    require_files,
    unread_types,
)
from proxymetric.data.images import ImageSet
from proxymetric.data.parts import PART_NAMES, divide, part_of
from proxymetric.data.text_files import read_text
from proxymetric.system.files import printable

_FILE_COLUMNS = ("file", "path", "image")
_CLASS_COLUMNS = ("class", "label")
_SPLIT_COLUMN = "split"


class _Row(NamedTuple):
    """One image of a CSV."""

    file: str
    class_name: str
    part: str | None
    box: Box | None
    others: dict[str, str]
    line: str
    """file and line, for messages"""


def from_csv(file: Path) -> ImageSet:
    """Read a CSV with a header line and the columns `file` (or path, image) and `class` (or label).

    Files are relative to the folder of the CSV. Columns are separated by commas, semicolons or tabs. A column `split`
    with train, val, test, query, gallery or distractor divides the images (see `data.parts`). Other columns, such as
    the camera, are kept as text in `ImageSet.columns`. The columns x1, y1, x2 and y2 cut a box out of each image, in
    pixels of the upright image (`data.csv_boxes`). Files that do not exist are treated like images that cannot be read:
    they stay in the set, and feeds leave them out. Rows without a file are left out at once.

    Raises:
        ValueError: the file is not text in UTF-8 or UTF-16, a column or a class is missing, a box lies outside its
            image, none of the image files exists, or there are fewer than two classes.
    """
    rows, empty_lines = _rows(file)
    root = file.parent
    paths = [root / row.file for row in rows]
    if not any(is_file(path) for path in paths):
        require_files(paths, root, file)
    classes = sorted({row.class_name for row in rows})
    if len(classes) < 2:
        raise ValueError(f"{file}: got one class only ({classes[0]!r}), expected at least two classes")
    index = {name: label for label, name in enumerate(classes)}
    labels = np.array([index[row.class_name] for row in rows])
    columns = {name: np.array([row.others[name] for row in rows]) for name in rows[0].others}
    boxes = [row.box for row in rows if row.box is not None]
    if boxes:
        check_inside(paths, boxes, [row.line for row in rows])
    images = ImageSet(
        printable(file.stem), labels, classes, paths=paths, root=root, columns=columns,
        boxes=np.array(boxes) if boxes else None,
    )  # fmt: skip
    images = replace(images, notes=tuple(_notes(file, paths, empty_lines, bool(boxes))))
    if rows[0].part is not None:
        parts = np.array([row.part for row in rows])
        images = divide(images, parts, f"{file}, column {_SPLIT_COLUMN}", "rename the column")
    return images


def _notes(file: Path, paths: list[Path], empty_lines: list[int], has_boxes: bool) -> list[str]:
    """Say what is left out, and that boxes are used."""
    notes = []
    if empty_lines:
        lines = first_names([str(line) for line in empty_lines])
        notes.append(f"{file}: rows without a file, left out: {len(empty_lines)} (line {lines})")
    missing = missing_files(paths, file.parent)
    if missing:
        notes.append(
            f"{file}: {len(missing)} of {len(paths)} files do not exist and are left out: {first_names(missing)}"
        )
    unread = Counter(ending for ending in other_endings([path.name for path in paths]) if ending in HEIC_ENDINGS)
    if unread:
        notes.append(f"{file}: {unread_types(unread)}")
    if has_boxes:
        notes.append(f"{file}: the columns {', '.join(COLUMNS)} are boxes, of which each is an image")
    return notes


def _rows(file: Path) -> tuple[list[_Row], list[int]]:
    """Read and check the rows of a CSV; return also the lines of the rows without a file, which are left out."""
    lines = io.StringIO(read_text(file), newline="")
    header = lines.readline()
    separator = max(",;\t", key=header.count)
    try:
        names = [name.strip().lower() for name in next(csv.reader([header], delimiter=separator), [])]
    except csv.Error as error:
        raise ValueError(
            f"{file}, line 1: got a header that cannot be read ({error}), expected the columns file and class"
        ) from None
    file_column = next((names.index(name) for name in _FILE_COLUMNS if name in names), None)
    class_column = next((names.index(name) for name in _CLASS_COLUMNS if name in names), None)
    split_column = names.index(_SPLIT_COLUMN) if _SPLIT_COLUMN in names else None
    if file_column is None or class_column is None:
        raise ValueError(
            f"{file}: got {', '.join(repr(name) for name in names) or 'an empty file'}, expected a header line "
            "with the columns file and class (or path/image and label)"
        )
    corners = box_columns(names, file)
    rows: list[_Row] = []
    empty_lines: list[int] = []
    known_columns = (file_column, class_column, split_column, *(corners or ()))
    reader = csv.reader(lines, delimiter=separator)
    try:
        for cells in reader:
            cells = [cell.strip() for cell in cells]
            if not any(cells):
                continue
            line = f"{file}, line {reader.line_num + 1}"
            cells += [""] * (len(names) - len(cells))
            if not cells[file_column]:
                empty_lines.append(reader.line_num + 1)
                continue
            if not cells[class_column]:
                raise ValueError(f"{line}: got {separator.join(cells)!r} without a class, expected a file and a class")
            part = None if split_column is None else _part(cells[split_column], line)
            others = {name: cells[number] for number, name in enumerate(names) if name and number not in known_columns}
            box = None if corners is None else read_box([cells[corner] for corner in corners], line)
            rows.append(_Row(cells[file_column], cells[class_column], part, box, others, line))
    except csv.Error as error:
        raise ValueError(
            f"{file}, line {reader.line_num + 1}: got a row that cannot be read ({error}), expected a file and a "
            "class; is a quotation mark missing?"
        ) from None
    if not rows:
        got = f"{len(empty_lines)} rows without a file" if empty_lines else "a header line and no rows"
        raise ValueError(f"{file}: got {got}, expected a row for each image")
    return rows, empty_lines


def _part(value: str, line: str) -> str:
    """Return the part that a cell of the column `split` names."""
    part = part_of(value)
    if part is None:
        raise ValueError(
            f"{line}: got the split {value!r}, expected one of {', '.join(PART_NAMES)}"
            f"{did_you_mean(value, PART_NAMES)} (if the column means something else, rename it)"
        )
    return part
