"""The items of an index without their vectors: a read-only database that many processes can share."""

from __future__ import annotations

import errno
import json
import os
import sqlite3
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from proxymetric.signatures import one_of

SCHEMA = """
CREATE TABLE items (
  row INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, label TEXT, metadata TEXT NOT NULL,
  stamp TEXT NOT NULL, pack INTEGER, start INTEGER, length INTEGER
)
"""
CLASS_COLUMN = "class"
"""the column of `where` that stands for the label"""
ROWS_PER_QUERY = 500
"""SQLite allows about a thousand values in a statement"""


class Row(NamedTuple):
    """What an index keeps of an item besides its vector."""

    id: str
    label: str | None
    metadata: str
    """a JSON object"""
    stamp: str
    """size and time of the file, by which a change is noticed; empty for items that are not files"""
    pack: int | None = None
    """number of the file that holds the thumbnail; None without one"""
    start: int | None = None
    length: int | None = None


def write_rows(file: Path, rows: Iterable[Row]) -> None:
    """Write a new database; the rows are numbered from 0 in their order.

    Args:
        file: a file that does not exist.
        rows: the rows; no id may come twice.
    """
    connection = sqlite3.connect(file, isolation_level=None)
    try:
        # The file is written anew in a folder that nobody reads yet, so that no journal is necessary.
        connection.execute("PRAGMA journal_mode = OFF")
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("BEGIN")
        connection.execute(SCHEMA)
        numbered = ((number, *row) for number, row in enumerate(rows))
        connection.executemany("INSERT INTO items VALUES (?, ?, ?, ?, ?, ?, ?, ?)", numbered)
        connection.execute("COMMIT")
    finally:
        connection.close()


class Rows:
    """The rows of a database that `write_rows` wrote; any thread may ask.

    The file is closed when nothing refers to the rows any more, so that a thread can read a replaced state to its end.

    Args:
        file: the database.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not such a database.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "items.sqlite"
        >>> write_rows(file, [Row("a.jpg", "cat", "{}", ""), Row("b.jpg", "dog", '{"shop": "Ulm"}', "")])
        >>> rows = Rows(file)
        >>> rows.number_of("b.jpg"), rows.matching({"shop": "Ulm"}), rows.at([0])[0].label
        (1, [1], 'cat')
    """

    def __init__(self, file: Path) -> None:
        self._lock = threading.Lock()
        try:
            self._connection = sqlite3.connect(
                f"file:{quote(str(file.absolute()))}?mode=ro&immutable=1", uri=True, check_same_thread=False
            )
            # A connection refers to itself, so that its file would stay open until the garbage collector runs.
            weakref.finalize(self, self._connection.close).atexit = False
            self.count = self._ask("SELECT count(*) FROM items")[0][0]
        except sqlite3.Error as error:
            if not file.exists():  # another process has replaced the generation
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(file)) from None
            raise ValueError(f"index: got {file}, which cannot be read ({error}), expected a database") from None

    def __iter__(self) -> Iterator[Row]:
        """Iterate over all rows, in their order."""
        for start in range(0, self.count, ROWS_PER_QUERY):
            yield from self.at(range(start, min(start + ROWS_PER_QUERY, self.count)))

    def at(self, numbers: Sequence[int]) -> list[Row]:
        """Return the rows of these numbers, in the order of the numbers."""
        rows: dict[int, Row] = {}
        for start in range(0, len(numbers), ROWS_PER_QUERY):
            some = numbers[start : start + ROWS_PER_QUERY]
            marks = ",".join("?" * len(some))
            rows |= {row[0]: Row(*row[1:]) for row in self._ask(f"SELECT * FROM items WHERE row IN ({marks})", *some)}
        return [rows[number] for number in numbers]

    def number_of(self, item: str) -> int | None:
        """Return the number of the row with an id; None if there is none."""
        if not _is_text(item):
            return None
        rows = self._ask("SELECT row FROM items WHERE id = ?", item)
        return rows[0][0] if rows else None

    def stamps(self) -> dict[str, tuple[int, str]]:
        """Return the number and the stamp of each id."""
        return {item: (row, stamp) for item, row, stamp in self._ask("SELECT id, row, stamp FROM items")}

    def labels(self) -> list[str | None]:
        """Return the label of each row."""
        return [label for (label,) in self._ask("SELECT label FROM items ORDER BY row")]

    def matching(self, where: Mapping[str, str], differs: Mapping[str, str] | None = None) -> list[int]:
        """Return the sorted numbers of the rows with some values and without others; `class` stands for the label.

        Args:
            where: values that the rows must have.
            differs: values that they must not have; a row without a value in the column stays.
        """
        conditions, values = ["1"], []
        for wanted, pairs in ((True, where), (False, differs or {})):
            for column, value in pairs.items():
                if not _is_text(value) or not _is_text(column):
                    if wanted:
                        return []
                    continue
                text = "label" if column == CLASS_COLUMN else "CAST(json_extract(metadata, ?) AS TEXT)"
                conditions.append(f"{text} IS ?" if wanted else f"{text} IS NOT ?")
                values += [value] if column == CLASS_COLUMN else [f'$."{column}"', value]
        return [row for (row,) in self._ask(f"SELECT row FROM items WHERE {' AND '.join(conditions)}", *values)]

    def value_of(self, number: int, column: str) -> str | None:
        """Return the value of a row in a column, as text; None if it has none."""
        text = "label" if column == CLASS_COLUMN else "CAST(json_extract(metadata, ?) AS TEXT)"
        values = [] if column == CLASS_COLUMN else [f'$."{column}"']
        rows = self._ask(f"SELECT {text} FROM items WHERE row = ?", *values, number)
        return rows[0][0] if rows else None

    def _ask(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._lock:
            return self._connection.execute(statement, values).fetchall()


def check_columns(where: Mapping[str, Any], columns: Sequence[str], argument: str = "where") -> None:
    """Refuse a column that no item has.

    Args:
        where: columns and values.
        columns: the metadata columns of the index.
        argument: name of the argument, for the error.

    Raises:
        ValueError: the column is unknown; the message names the columns.
    """
    for column in where:
        one_of(argument, column, [CLASS_COLUMN, *columns])


def queries_alike(
    count: int, differs: Mapping[str, str | Sequence[str | None] | None]
) -> dict[tuple[tuple[str, str], ...], list[int]]:
    """Group queries by what must differ from their results, so that those with equal values are searched at once.

    Args:
        count: number of queries.
        differs: column -> the value of the queries, one for all or a list.

    Returns:
        Columns and values -> numbers of the queries.

    Raises:
        ValueError: a list has another length.

    Example:
        >>> queries_alike(3, {"camera": ["left", None, "left"]})
        {(('camera', 'left'),): [0, 2], (): [1]}
    """
    lists = {
        column: [values] * count if values is None or isinstance(values, str) else list(values)
        for column, values in differs.items()
    }
    for column, values in lists.items():
        if len(values) != count:
            raise ValueError(
                f"differs: got {len(values)} values of {column} for {count} queries, expected one for each"
            )
    groups: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for query in range(count):
        pairs = [(column, values[query]) for column, values in lists.items()]
        groups.setdefault(tuple((column, value) for column, value in pairs if value is not None), []).append(query)
    return groups


def as_metadata(content: Mapping[str, Any] | None) -> str:
    """Return the JSON of an item's metadata.

    Raises:
        ValueError: a key or a value cannot be stored.

    Example:
        >>> as_metadata({"price": 3, "shop": "Ulm"})
        '{"price": 3, "shop": "Ulm"}'
    """
    for key, value in (content or {}).items():
        if not isinstance(key, str) or '"' in key or not key or key == CLASS_COLUMN or not _is_text(key):
            raise ValueError(f"metadata: got the key {key!r}, expected text without quotation marks, not 'class'")
        if not isinstance(value, str | int | float | bool | None):
            raise ValueError(f"metadata: got {key}={value!r}, expected text, a number, a bool or None")
        if isinstance(value, str) and not _is_text(value):
            raise ValueError(f"metadata: got {key}={value!r}, expected text that UTF-8 can encode")
    try:
        return json.dumps(dict(content or {}), ensure_ascii=False, sort_keys=True, allow_nan=False)
    except ValueError:
        raise ValueError(f"metadata: got {content!r}, expected finite numbers") from None


def _is_text(value: str) -> bool:
    """Whether SQLite can compare a text: no surrogates."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
