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

from proxymetric.arguments.signatures import one_of

SCHEMA = """
CREATE TABLE items (
  row INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, label TEXT, metadata TEXT NOT NULL,
  stamp TEXT NOT NULL, pack INTEGER, start INTEGER, length INTEGER
)
"""
Value = str | int | float
"""a value of metadata; bool is an int"""
CLASS_COLUMN = "class"
"""the column of `where` that stands for the label"""
REMEDY = "`proxymetric index --rebuild` makes it anew"
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

    def values(self) -> dict[str, Any]:
        """Return the metadata as a table.

        Raises:
            ValueError: it is not a JSON object: the database was changed.
        """
        try:
            content = json.loads(self.metadata)
        except (ValueError, RecursionError):
            content = None
        if not isinstance(content, dict):
            raise ValueError(
                f"index: got the item {self.id!r} with the metadata {self.metadata!r:.60}, expected a JSON object; its "
                f"database is damaged; {REMEDY}"
            )
        return content

    def has_types(self) -> bool:
        """Whether the values are texts and numbers where they should be."""
        texts, numbers = (self.id, self.metadata, self.stamp), (self.pack, self.start, self.length)
        return (
            all(isinstance(text, str) for text in texts)
            and isinstance(self.label, str | None)
            and all(isinstance(number, int | None) for number in numbers)
        )


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
        self._lock, self._file = threading.Lock(), file
        try:
            self._connection = sqlite3.connect(
                f"file:{quote(str(file.absolute()))}?mode=ro&immutable=1", uri=True, check_same_thread=False
            )
            # A connection refers to itself, so that its file would stay open until the garbage collector runs.
            weakref.finalize(self, self._connection.close).atexit = False
            self.count = self._ask("SELECT count(*) FROM items")[0][0]
        except (sqlite3.Error, ValueError):
            if not file.exists():  # another process has replaced the generation
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(file)) from None
            raise

    def __iter__(self) -> Iterator[Row]:
        """Iterate over all rows, in their order."""
        for start in range(0, self.count, ROWS_PER_QUERY):
            yield from self.at(range(start, min(start + ROWS_PER_QUERY, self.count)))

    def at(self, numbers: Sequence[int]) -> list[Row]:
        """Return the rows of these numbers, in the order of the numbers.

        Raises:
            ValueError: the database was changed: it does not have one of these rows, or one has values of other types.
        """
        rows: dict[int, Row] = {}
        for start in range(0, len(numbers), ROWS_PER_QUERY):
            some = numbers[start : start + ROWS_PER_QUERY]
            marks = ",".join("?" * len(some))
            rows |= {row[0]: Row(*row[1:]) for row in self._ask(f"SELECT * FROM items WHERE row IN ({marks})", *some)}
        if missing := [number for number in numbers if number not in rows]:
            raise self.damaged(f"it has no row {missing[0]}")
        if wrong := [number for number, row in rows.items() if not row.has_types()]:
            raise self.damaged(f"row {wrong[0]} has a value of another type")
        return [rows[number] for number in numbers]

    def number_of(self, item: str) -> int | None:
        """Return the number of the row with an id; None if there is none."""
        if not is_text(item):
            return None
        rows = self._ask("SELECT row FROM items WHERE id = ?", item)
        return rows[0][0] if rows else None

    def stamps(self) -> dict[str, tuple[int, str]]:
        """Return the number and the stamp of each id."""
        return {item: (row, stamp) for item, row, stamp in self._ask("SELECT id, row, stamp FROM items")}

    def added(self) -> list[str]:
        """Return the sorted ids of the rows without a stamp, which are no files of the folder."""
        return [item for (item,) in self._ask("SELECT id FROM items WHERE stamp = '' ORDER BY row")]

    def labels(self) -> list[str | None]:
        """Return the label of each row."""
        labels = [label for (label,) in self._ask("SELECT label FROM items ORDER BY row")]
        if wrong := [label for label in labels if not isinstance(label, str | None)]:
            raise self.damaged(f"it has the label {wrong[0]!r:.60}")
        return labels

    def matching(self, where: Mapping[str, Value], differs: Mapping[str, Value] | None = None) -> list[int]:
        """Return the sorted numbers of the rows with some values and without others; `class` stands for the label.

        Args:
            where: values that the rows must have.
            differs: values that they must not have; a row without a value in the column stays.
        """
        conditions, parameters = ["1"], []
        for negation, pairs in (("", where), ("NOT ", differs or {})):
            for column, value in pairs.items():
                condition, values = _has_value(column, value)
                conditions.append(negation + condition)
                parameters += values
        return [row for (row,) in self._ask(f"SELECT row FROM items WHERE {' AND '.join(conditions)}", *parameters)]

    def value_of(self, number: int, column: str) -> str | None:
        """Return the value of a row in a column, as text; None if it has none."""
        text = "label" if column == CLASS_COLUMN else "CAST(json_extract(metadata, ?) AS TEXT)"
        values = [] if column == CLASS_COLUMN else [f'$."{column}"']
        rows = self._ask(f"SELECT {text} FROM items WHERE row = ?", *values, number)
        return rows[0][0] if rows else None

    def _ask(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        try:
            with self._lock:
                return self._connection.execute(statement, values).fetchall()
        except sqlite3.DatabaseError as error:
            raise self.damaged(error) from None

    def damaged(self, fault: object) -> ValueError:
        """Return the error that says what is wrong in the database."""
        return ValueError(
            f"index: got {self._file}, which cannot be read ({fault}), expected the database as it was written; "
            f"{REMEDY}"
        )


def _has_value(column: str, value: Value) -> tuple[str, list[Any]]:
    """The condition that a row has a value in a column, and its parameters.

    A number is equal to its text, and true and false to the words: the values of a CSV file are all texts.
    """
    if not is_text(column) or (isinstance(value, str) and not is_text(value)):
        return "0", []
    if column == CLASS_COLUMN:
        return "(label IS ?)", [str(value)]
    path = f'$."{column}"'
    text = json.dumps(value) if isinstance(value, bool) else str(value)
    parameters: list[Any]
    conditions, parameters = ["CAST(json_extract(metadata, ?) AS TEXT) IS ?"], [path, text]
    if text in ("true", "false"):
        conditions.append("json_type(metadata, ?) IS ?")
        parameters += [path, text]
    elif not isinstance(value, str):
        conditions.append("json_extract(metadata, ?) IS ?")
        parameters += [path, value]
    return f"({' OR '.join(conditions)})", parameters


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
    count: int, differs: Mapping[str, Value | Sequence[Value | None] | None]
) -> dict[tuple[tuple[str, Value], ...], list[int]]:
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
        column: [values] * count if values is None or isinstance(values, str | int | float) else list(values)
        for column, values in differs.items()
    }
    for column, values in lists.items():
        if len(values) != count:
            raise ValueError(
                f"differs: got {len(values)} values of {column} for {count} queries, expected one for each"
            )
    groups: dict[tuple[tuple[str, Value], ...], list[int]] = {}
    for query in range(count):
        pairs = [(column, values[query]) for column, values in lists.items()]
        groups.setdefault(tuple((column, value) for column, value in pairs if value is not None), []).append(query)
    return groups


def check_column(name: object, argument: str = "metadata") -> None:
    """Refuse a name that a metadata column cannot have.

    Args:
        name: the name.
        argument: name of the argument or file, for the error.

    Raises:
        ValueError: it is no printable text, has quotation marks or backslashes, or is `class`.
    """
    if name == CLASS_COLUMN:
        raise ValueError(f"{argument}: got the column 'class', which is the label of an item; expected another name")
    if not isinstance(name, str) or not name or not name.isprintable() or '"' in name or "\\" in name:
        raise ValueError(
            f"{argument}: got the column {name!r}, expected printable text without quotation marks and backslashes"
        )


def as_metadata(content: Mapping[str, Any] | None) -> str:
    """Return the JSON of an item's metadata.

    Raises:
        ValueError: a key or a value cannot be stored.

    Example:
        >>> as_metadata({"price": 3, "shop": "Ulm"})
        '{"price": 3, "shop": "Ulm"}'
    """
    for key, value in (content or {}).items():
        check_column(key)
        if not isinstance(value, str | int | float | bool | None):
            raise ValueError(f"metadata: got {key}={value!r}, expected text, a number, a bool or None")
        if isinstance(value, str) and not is_text(value):
            raise ValueError(f"metadata: got {key}={value!r}, expected text that UTF-8 can encode, without NUL")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError(f"metadata: got {key}={value}, expected a whole number of at most 64 bits, or text")
    try:
        return json.dumps(dict(content or {}), ensure_ascii=False, sort_keys=True, allow_nan=False)
    except ValueError:
        raise ValueError(f"metadata: got {content!r}, expected finite numbers") from None


def is_text(value: str) -> bool:
    """Whether SQLite can compare a text: no surrogates, and no NUL, where a comparison ends."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in value
