"""The metadata of images from a CSV file."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from proxymetric.arguments.signatures import did_you_mean
from proxymetric.data.text_files import read_text
from proxymetric.search.batches import as_metadata, check_column
from proxymetric.search.conditions import CLASS_COLUMN
from proxymetric.search.storage.changes import Edit

if TYPE_CHECKING:
    from proxymetric.search.stored_index import StoredIndex

FILE_COLUMN, ID_COLUMN = "file", "id"
"""the columns that say which item a line is about: the first one is the path of its file in the indexed folder"""


class MetadataChange(NamedTuple):
    """What a CSV file changed.

    Attributes:
        changed: the number of items that have another label or other metadata now.
        unchanged: the number of the other items that it names.
        unknown: the ids that the index does not have, in the order of the file.
    """

    changed: int
    unchanged: int
    unknown: list[str]


def read_metadata(file: str | Path) -> dict[str, dict[str, str]]:
    """Read a CSV with a header line and the column `file`; the other columns are the metadata of that file.

    Args:
        file: the CSV; columns are separated by commas, semicolons or tabs. Files are relative to the indexed folder.

    Returns:
        The metadata by file; empty cells are left out. The column `class`, if there is one, has the labels.

    Raises:
        ValueError: a line cannot be read, there is no column `file`, a column has no name or one that another has, a
            line has too many cells or no file, or a file comes twice.

    Example:
        >>> import tempfile
        >>> table = Path(tempfile.mkdtemp()) / "items.csv"
        >>> _ = table.write_text("file,shop\\ncat/1.jpg,Ulm\\n")
        >>> read_metadata(table)
        {'cat/1.jpg': {'shop': 'Ulm'}}
    """
    cells = _cells(Path(file), (FILE_COLUMN,))
    return {name: {column: value for column, value in row.items() if value} for name, row in cells.items()}


def change_metadata(index: StoredIndex, file: str | Path) -> MetadataChange:
    """Give items the metadata of a CSV file, in one step; nothing is embedded.

    The columns of the file take the place of those of the same name, and an empty cell removes the value; items keep
    the columns that the file does not have. The column `class` gives labels.

    Args:
        index: the index.
        file: a CSV as for `read_metadata`; the column `file` or `id` has the id of an item. Ids that the index does not
            have are left out.

    Raises:
        ValueError: see `read_metadata`, or no line is about an item of the index.

    Example:
        >>> import tempfile, torch
        >>> from proxymetric.search import Index
        >>> folder = Path(tempfile.mkdtemp())
        >>> index = Index.create(folder / "shop.index", dim=2)
        >>> index.add(["a", "b"], torch.eye(2), metadata=[{"price": 3}, {"price": 5, "shop": "Ulm"}])
        >>> _ = (folder / "prices.csv").write_text("id,price\\na,4\\nb,\\nc,9\\n")
        >>> change_metadata(index, folder / "prices.csv")
        MetadataChange(changed=2, unchanged=0, unknown=['c'])
        >>> index["a"].metadata, index["b"].metadata
        ({'price': '4'}, {'shop': 'Ulm'})
    """
    lines = _cells(Path(file), (ID_COLUMN, FILE_COLUMN))
    with index.writing():
        known = [item for item in lines if item in index]
        if not known:
            example = f", such as {index.at(0).id!r}" if len(index) else ""
            first = next(iter(lines), "no line")
            raise ValueError(
                f"metadata: got {file}, which names {first!r} and no item of {index.folder}; expected ids of this "
                f"index{example}{did_you_mean(first, index.ids)}"
            )
        edits: dict[str, Edit] = {}
        for item in known:
            cells, earlier = dict(lines[item]), index[item]
            label = (cells.pop(CLASS_COLUMN) or None) if CLASS_COLUMN in cells else earlier.label
            values = {column: value for column, value in (earlier.metadata | cells).items() if value != ""}
            edit = Edit(label, as_metadata(values))
            if edit != Edit(earlier.label, as_metadata(earlier.metadata)):
                edits[item] = edit
        if edits:
            index.change(edits=edits)
    return MetadataChange(len(edits), len(known) - len(edits), [item for item in lines if item not in set(known)])


def _cells(file: Path, names: tuple[str, ...]) -> dict[str, dict[str, str]]:
    """Read a CSV: for each item its cells, by their columns; `names` are the columns that may name the item."""
    text = read_text(file)
    first_line = text.split("\n", 1)[0]
    separator = max(",;\t", key=first_line.count)
    table = csv.DictReader(io.StringIO(text, newline=""), delimiter=separator)
    try:
        return _by_item(table, file, names)
    except csv.Error as error:
        raise ValueError(
            f"{file}, line {table.line_num}: got a row that cannot be read ({error}), expected a file and its "
            "metadata; is a quotation mark missing?"
        ) from None


def _by_item(table: csv.DictReader[str], file: Path, names: tuple[str, ...]) -> dict[str, dict[str, str]]:
    """Check the columns of a table, and return its rows by the items that they are about."""
    columns = [column.strip() for column in table.fieldnames or []]
    table.fieldnames = columns
    key = next((name for name in names if name in columns), None)
    if key is None:
        expected = " or ".join(map(repr, reversed(names)))
        raise ValueError(f"{file}: got the columns {', '.join(columns) or '(none)'}, expected a column {expected}")
    for column in columns:
        if columns.count(column) > 1:
            raise ValueError(f"{file}: got the column {column!r} twice, expected different names")
        if column not in (key, CLASS_COLUMN):
            check_column(column, str(file))
    metadata: dict[str, dict[str, str]] = {}
    for row in table:
        if None in row:
            raise ValueError(f"{file}, line {table.line_num}: got more cells than columns, expected {len(columns)}")
        name = row.pop(key)
        if not name:
            what = "the path of an image" if key == FILE_COLUMN else "the id of an item"
            raise ValueError(f"{file}, line {table.line_num}: got no {key!r}, expected {what}")
        if name in metadata:
            raise ValueError(f"{file}, line {table.line_num}: got {name!r} again, expected each {key} once")
        metadata[name] = {column: value or "" for column, value in row.items()}
    return metadata
