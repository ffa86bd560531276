"""The metadata of images from a CSV file."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from proxymetric.data.text_files import read_text
from proxymetric.search.batches import check_column
from proxymetric.search.conditions import CLASS_COLUMN

FILE_COLUMN = "file"


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
    file = Path(file)
    text = read_text(file)
    first_line = text.split("\n", 1)[0]
    separator = max(",;\t", key=first_line.count)
    table = csv.DictReader(io.StringIO(text, newline=""), delimiter=separator)
    try:
        return _by_file(table, file)
    except csv.Error as error:
        raise ValueError(
            f"{file}, line {table.line_num}: got a row that cannot be read ({error}), expected a file and its "
            "metadata; is a quotation mark missing?"
        ) from None


def _by_file(table: csv.DictReader[str], file: Path) -> dict[str, dict[str, str]]:
    """Check the columns of a table, and return its rows by their files."""
    columns = [column.strip() for column in table.fieldnames or []]
    table.fieldnames = columns
    if FILE_COLUMN not in columns:
        raise ValueError(f"{file}: got the columns {', '.join(columns) or '(none)'}, expected a column 'file'")
    for column in columns:
        if columns.count(column) > 1:
            raise ValueError(f"{file}: got the column {column!r} twice, expected different names")
        if column not in (FILE_COLUMN, CLASS_COLUMN):
            check_column(column, str(file))
    metadata: dict[str, dict[str, str]] = {}
    for row in table:
        if None in row:
            raise ValueError(f"{file}, line {table.line_num}: got more cells than columns, expected {len(columns)}")
        name = row.pop(FILE_COLUMN)
        if not name:
            raise ValueError(f"{file}, line {table.line_num}: got no {FILE_COLUMN!r}, expected the path of an image")
        if name in metadata:
            raise ValueError(f"{file}, line {table.line_num}: got {name!r} again, expected each file once")
        metadata[name] = {column: value for column, value in row.items() if value}
    return metadata
