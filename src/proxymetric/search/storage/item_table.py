"""The items of an index as of the last merge of its log: a read-only database that many processes share."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sqlite3
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from proxymetric.search.conditions import CLASS_COLUMN, Dictionary, value_key, value_of
from proxymetric.search.storage.blocks import Block, damage, mapped_rows
from proxymetric.search.storage.change_log import Row

SCHEMA = """
CREATE TABLE items (
  number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, label TEXT, metadata TEXT NOT NULL, stamp TEXT NOT NULL,
  start INTEGER NOT NULL, length INTEGER NOT NULL, picture_crc INTEGER NOT NULL, crc INTEGER NOT NULL
);
CREATE TABLE columns (name TEXT NOT NULL, place INTEGER PRIMARY KEY, dictionary TEXT NOT NULL);
CREATE TABLE blocks (file TEXT NOT NULL, start INTEGER NOT NULL, length INTEGER NOT NULL, crc INTEGER NOT NULL);
"""
ROWS_PER_QUERY = 500
"""SQLite allows about a thousand values in a statement"""
NO_VALUE, NO_ITEM = -1, -2
"""codes of a row whose item has no value in a column, and of a row without an item"""


class ItemTable:
    """The items of the last merge, and their columns as codes for filters; any thread may ask.

    The file is closed when nothing refers to the table any more, so that a thread can read a replaced state to its end.

    Args:
        items: the database.
        columns: the file of codes.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is not what was written.
    """

    def __init__(self, items: Path, columns: Path) -> None:
        self._lock, self._file = threading.Lock(), items
        try:
            self._connection = sqlite3.connect(
                f"file:{quote(str(items.absolute()))}?mode=ro&immutable=1", uri=True, check_same_thread=False
            )
            # A connection refers to itself, so that its file would stay open until the garbage collector runs.
            weakref.finalize(self, self._connection.close).atexit = False
            self.places: dict[str, int] = dict(self._ask("SELECT name, place FROM columns"))
        except (sqlite3.Error, ValueError):
            if not items.exists():  # another process has merged the log
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(items)) from None
            raise
        self.rows = columns.stat().st_size // (4 * max(1, len(self.places)))
        """rows of vectors when it was written"""
        self.codes = mapped_rows(columns, len(self.places), self.rows, np.dtype(np.int32))
        """(columns, rows) the code of each row's value; `NO_VALUE`, `NO_ITEM`"""
        self._dictionaries: dict[str, Dictionary] = {}

    @property
    def is_living(self) -> np.ndarray:
        """(rows,) whether a row has an item."""
        living: np.ndarray = self.codes[self.places[CLASS_COLUMN]] != NO_ITEM
        return living

    def dictionary(self, column: str) -> Dictionary:
        """The different values of a column, in the order of their codes."""
        if column not in self._dictionaries:
            ((text,),) = self._ask("SELECT dictionary FROM columns WHERE name = ?", column)
            self._dictionaries[column] = Dictionary(json.loads(text))
        return self._dictionaries[column]

    def at(self, numbers: Sequence[int]) -> list[Row]:
        """Return the items of these rows, in the order of the rows.

        Raises:
            ValueError: one of them is missing, or is not what was written.
        """
        rows: dict[int, Row] = {}
        for start in range(0, len(numbers), ROWS_PER_QUERY):
            some = [int(number) for number in numbers[start : start + ROWS_PER_QUERY]]
            marks = ",".join("?" * len(some))
            for values in self._ask(f"SELECT * FROM items WHERE number IN ({marks})", *some):
                rows[values[0]] = self._checked(values)
        if missing := [number for number in numbers if number not in rows]:
            raise ValueError(damage(self._file, f"has no row {missing[0]}"))
        return [rows[number] for number in numbers]

    def __iter__(self) -> Iterator[Row]:
        """Iterate over all items, in the order of their rows."""
        last = -1
        while rows := self._ask("SELECT * FROM items WHERE number > ? ORDER BY number LIMIT ?", last, 4_096):
            yield from map(self._checked, rows)
            last = rows[-1][0]

    def numbers_of(self, ids: Sequence[str]) -> dict[str, int]:
        """Return the rows of those ids that there are."""
        numbers: dict[str, int] = {}
        for start in range(0, len(ids) if self.rows else 0, ROWS_PER_QUERY):
            some = ids[start : start + ROWS_PER_QUERY]
            marks = ",".join("?" * len(some))
            numbers |= self._ask(f"SELECT id, number FROM items WHERE id IN ({marks})", *some)
        return numbers

    def blocks(self) -> list[Block]:
        """Return the blocks of the files that grow, as of the merge."""
        return [Block(*block) for block in self._ask("SELECT * FROM blocks")]

    def texts(self, column: str) -> list[tuple[int, Any]]:
        """Return a column of the database for each row: `id`, `stamp`; in the order of the rows."""
        assert column in ("id", "stamp")
        return self._ask(f"SELECT number, {column} FROM items ORDER BY number")

    def _checked(self, values: tuple[Any, ...]) -> Row:
        row = Row(*values[:-1])
        with contextlib.suppress(TypeError):  # bytes, where text was written
            if row.crc() == values[-1]:
                return row
        raise ValueError(damage(self._file, f"differs from what was written in row {row.number!r:.30}"))

    def _ask(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        try:
            with self._lock:
                return self._connection.execute(statement, values).fetchall()
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            raise ValueError(damage(self._file, f"cannot be read ({error})")) from None


def write_items(items: Path, columns: Path, rows: Iterable[Row], count: int, blocks: Sequence[Block]) -> list[str]:
    """Write the database and the codes of all columns.

    Args:
        items: the database; it does not exist.
        columns: the file of codes; it does not exist.
        rows: the items, in the order of their rows.
        count: the rows of vectors; those without an item are dead.
        blocks: the blocks of the files that grow.

    Returns:
        The names of the metadata columns, sorted.
    """
    codes: dict[str, np.ndarray] = {CLASS_COLUMN: np.full(count, NO_ITEM, np.int32)}
    dictionaries: dict[str, dict[Any, int]] = {CLASS_COLUMN: {}}

    def stored() -> Iterator[tuple[Any, ...]]:
        labels, label_codes = dictionaries[CLASS_COLUMN], codes[CLASS_COLUMN]
        for row in rows:
            number = row.number
            label_codes[number] = NO_VALUE if row.label is None else labels.setdefault(row.label, len(labels))
            if row.metadata != "{}":
                for column, value in row.values().items():
                    if value is None:
                        continue
                    if column not in codes:
                        codes[column], dictionaries[column] = np.full(count, NO_VALUE, np.int32), {}
                    known, key = dictionaries[column], value if type(value) is str else value_key(value)
                    codes[column][number] = known.setdefault(key, len(known))
            yield *row, row.crc()

    connection = sqlite3.connect(items, isolation_level=None)
    try:
        # The file is written anew under a name that nobody reads yet, so that no journal is necessary.
        connection.execute("PRAGMA journal_mode = OFF")
        connection.execute("PRAGMA synchronous = OFF")
        connection.executescript(SCHEMA)
        connection.execute("BEGIN")
        connection.executemany("INSERT INTO items VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", stored())
        names = sorted(codes)
        texts = [json.dumps([value_of(key) for key in dictionaries[name]], ensure_ascii=False) for name in names]
        connection.executemany("INSERT INTO columns VALUES (?, ?, ?)", zip(names, range(len(names)), texts))
        connection.executemany("INSERT INTO blocks VALUES (?, ?, ?, ?)", blocks)
        connection.execute("COMMIT")
    finally:
        connection.close()
    with open(columns, "xb") as opened:
        for name in names:
            opened.write(codes[name].data)
    return [name for name in names if name != CLASS_COLUMN]
