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
from typing import Any, NamedTuple
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
        self._lock, self.file = threading.Lock(), items
        try:
            self._connection = sqlite3.connect(_read_only(items), uri=True, check_same_thread=False)
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
            raise ValueError(damage(self.file, f"has no row {missing[0]}"))
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
        raise ValueError(damage(self.file, f"differs from what was written in row {row.number!r:.30}"))

    def _ask(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        try:
            with self._lock:
                return self._connection.execute(statement, values).fetchall()
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            raise ValueError(damage(self.file, f"cannot be read ({error})")) from None


class Kept(NamedTuple):
    """What a merge takes over from an earlier table.

    Attributes:
        table: the table.
        gone: its rows that are not taken over: their items were removed, or come again with other values.
    """

    table: ItemTable
    gone: Sequence[int]


def write_items(
    items: Path, columns: Path, rows: Iterable[Row], count: int, blocks: Sequence[Block], kept: Kept | None = None
) -> list[str]:
    """Write the database and the codes of all columns.

    Args:
        items: the database; it does not exist.
        columns: the file of codes; it does not exist.
        rows: the items, in the order of their rows; without those that are kept.
        count: the rows of vectors; those without an item are dead.
        blocks: the blocks of the files that grow.
        kept: the items of an earlier table that stay as they are, copied without being read one by one.

    Returns:
        The names of the metadata columns, sorted.
    """
    coded = _Columns(count, kept)
    connection = sqlite3.connect(items, isolation_level=None, uri=True)
    try:
        # The file is written anew under a name that nobody reads yet, so that no journal is necessary.
        connection.execute("PRAGMA journal_mode = OFF")
        connection.execute("PRAGMA synchronous = OFF")
        connection.executescript(SCHEMA)
        if kept is not None:
            connection.execute("ATTACH ? AS earlier", (_read_only(kept.table.file),))
        connection.execute("BEGIN")
        if kept is not None:
            connection.execute("CREATE TEMP TABLE gone (number INTEGER PRIMARY KEY)")
            connection.executemany("INSERT INTO gone VALUES (?)", ((int(number),) for number in kept.gone))
            connection.execute(
                "INSERT INTO items SELECT * FROM earlier.items WHERE number NOT IN (SELECT number FROM gone) "
                "ORDER BY number"
            )
        connection.executemany("INSERT INTO items VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", coded.through(rows))
        written = coded.used()
        texts = (
            (name, place, json.dumps(values, ensure_ascii=False)) for place, (name, _, values) in enumerate(written)
        )
        connection.executemany("INSERT INTO columns VALUES (?, ?, ?)", texts)
        connection.executemany("INSERT INTO blocks VALUES (?, ?, ?, ?)", blocks)
        connection.execute("COMMIT")
    finally:
        connection.close()
    with open(columns, "xb") as opened:
        for _, codes, _ in written:
            opened.write(codes.data)
    return [name for name, _, _ in written if name != CLASS_COLUMN]


class _Columns:
    """The columns of items as codes of their different values, while a table is written."""

    def __init__(self, count: int, kept: Kept | None) -> None:
        self._count = count
        self._codes: dict[str, np.ndarray] = {}
        self._places: dict[str, dict[Any, int]] = {}
        self._column(CLASS_COLUMN, NO_ITEM)
        if kept is None:
            return
        table, gone = kept
        for name, place in table.places.items():
            codes = self._column(name)
            codes[: table.rows] = table.codes[place]
            codes[gone] = NO_ITEM if name == CLASS_COLUMN else NO_VALUE
            self._places[name] = {value_key(value): code for code, value in enumerate(table.dictionary(name).values)}

    def _column(self, name: str, empty: int = NO_VALUE) -> np.ndarray:
        if name not in self._codes:
            self._codes[name], self._places[name] = np.full(self._count, empty, np.int32), {}
        return self._codes[name]

    def through(self, rows: Iterable[Row]) -> Iterator[tuple[Any, ...]]:
        """Yield items as they are stored, and remember their values."""
        labels, label_codes = self._places[CLASS_COLUMN], self._codes[CLASS_COLUMN]
        for row in rows:
            number = row.number
            label_codes[number] = NO_VALUE if row.label is None else labels.setdefault(row.label, len(labels))
            if row.metadata != "{}":
                for name, value in row.values().items():
                    if value is None:
                        continue
                    codes, key = self._column(name), value if type(value) is str else value_key(value)
                    known = self._places[name]
                    codes[number] = known.setdefault(key, len(known))
            yield *row, row.crc()

    def used(self) -> list[tuple[str, np.ndarray, list[Any]]]:
        """Name, codes and values of each column of which an item has a value, sorted; nothing of others is left."""
        columns = []
        for name, codes in sorted(self._codes.items()):
            values = [value_of(key) for key in self._places[name]]
            is_used = np.zeros(len(values), dtype=bool)
            is_used[codes[codes >= 0]] = True
            if not is_used.any() and name != CLASS_COLUMN:
                continue
            new_codes = np.concatenate([np.cumsum(is_used) - 1, [NO_ITEM, NO_VALUE]]).astype(np.int32)
            columns.append(
                (name, new_codes[codes], [value for value, used in zip(values, is_used, strict=True) if used])
            )
        return columns


def _read_only(file: Path) -> str:
    """The address of a database that nobody changes."""
    return f"file:{quote(str(file.absolute()))}?mode=ro&immutable=1"
