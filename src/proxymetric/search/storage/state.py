"""One state of an index: what its manifest names of each file, which no later change alters."""

from __future__ import annotations

import copy
import functools
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from proxymetric.core.quantisation import bytes_per_vector, from_int8
from proxymetric.search.batches import Batch
from proxymetric.search.conditions import CLASS_COLUMN, Condition, Dictionary, is_text, matches, value_key
from proxymetric.search.manifest import FILE, Manifest
from proxymetric.search.storage.blocks import (
    Block,
    check_blocks,
    damage,
    damaged_blocks,
    facts_of,
    mapped_bytes,
    mapped_rows,
)
from proxymetric.search.storage.change_log import Entry, Row, read_log
from proxymetric.search.storage.item_table import ItemTable

OPEN_ATTEMPTS = 20
"""the log may be merged between the reading of the manifest and the opening of its files"""
CHECKED_AT_OPENING = 64 * 2**20
"""bytes of an index up to which all checksums are compared when it is opened; above, they are in the background"""
VECTOR_FILES: dict[str, tuple[str, ...]] = {"float32": ("float32",), "int8": ("int8",), "binary": ("bits", "int8")}
"""kind of vectors -> the endings of the files that hold them"""
NUMBERS: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "int8": np.dtype(np.int8),
    "bits": np.dtype(np.uint8),
}
"""ending of a file of vectors -> its numbers"""
MOST_MASKS = 16
"""answers to conditions that are kept: a page of results is asked for with the same ones"""
BLOCKS_AT_ONCE, PAUSE = 16, 0.02
"""blocks that are compared in the background before a pause, and its seconds"""


def items_file(manifest: Manifest) -> str:
    """The name of the database of items."""
    return f"items-{manifest.base:08d}.sqlite"


def columns_file(manifest: Manifest) -> str:
    """The name of the file of columns."""
    return f"columns-{manifest.base:08d}.int32"


def log_file(manifest: Manifest) -> str:
    """The name of the log."""
    return f"log-{manifest.base:08d}.bin"


def pictures_file(manifest: Manifest) -> str:
    """The name of the file of thumbnails."""
    return f"thumbnails-{manifest.store:08d}.bin"


def vector_files(manifest: Manifest) -> dict[str, str]:
    """The names of the files of vectors, by their endings."""
    return {ending: f"vectors-{manifest.store:08d}.{ending}" for ending in VECTOR_FILES[manifest.vectors["kind"]]}


def width_of(ending: str, dim: int) -> int:
    """The numbers of a row in a file of vectors.

    Example:
        >>> width_of("float32", 512), width_of("bits", 512)
        (512, 64)
    """
    return bytes_per_vector("binary", dim) if ending == "bits" else dim


def growing_files(manifest: Manifest) -> dict[str, int]:
    """The files that grow, and the bytes of each that belong to the state."""
    sizes = {
        name: manifest.rows * width_of(ending, manifest.dim) * NUMBERS[ending].itemsize
        for ending, name in vector_files(manifest).items()
    }
    return {**sizes, pictures_file(manifest): manifest.pictures, log_file(manifest): manifest.log}


def all_files(manifest: Manifest) -> set[str]:
    """The names of all files of a state."""
    return {*growing_files(manifest), *manifest.files, *manifest.derived, FILE}


class Changes(NamedTuple):
    """What the log says, in memory.

    Attributes:
        rows: row -> item, for items that are new or have other labels, metadata or thumbnails than in the table.
        values: row -> its metadata.
        numbers: id -> row; None for an id of the table that was removed.
        dead: rows whose item was removed or has another row.
        blocks: what was appended to other files.
    """

    rows: dict[int, Row]
    values: dict[int, dict[str, Any]]
    numbers: dict[str, int | None]
    dead: frozenset[int]
    blocks: tuple[Block, ...]

    @classmethod
    def none(cls) -> Self:
        """An empty log."""
        return cls({}, {}, {}, frozenset(), ())

    def extended(self, entries: Iterable[Entry]) -> Changes:
        """What it says with more entries."""
        rows, values, numbers = dict(self.rows), dict(self.values), dict(self.numbers)
        dead, blocks = set(self.dead), list(self.blocks)
        for entry in entries:
            for number, item in entry.dead:
                rows.pop(number, None)
                values.pop(number, None)
                numbers[item] = None
                dead.add(number)
            for row in entry.rows:
                rows[row.number], values[row.number], numbers[row.id] = row, row.values(), row.number
            blocks += entry.blocks
        return Changes(rows, values, numbers, frozenset(dead), tuple(blocks))


class Check:
    """The comparison of files with their checksums, at once or in the background.

    The states of an index that a process opens one after the other share it.
    """

    def __init__(self) -> None:
        self.fault: str | None = None
        """what is damaged, once it was seen"""
        self.files: set[str] = set()
        """files that were written once and compared"""

    def sealed(self, folder: Path, manifest: Manifest) -> None:
        """Compare the files that were written once and were not compared yet.

        Raises:
            ValueError: one is damaged.
        """
        for name, facts in {**manifest.files, **manifest.derived}.items():
            if name not in self.files and facts_of(folder / name) != facts:
                raise ValueError(damage(folder / name, "differs from what was written"))
            self.files.add(name)

    def in_background(self, folder: Path, manifest: Manifest, blocks: Sequence[Block]) -> None:
        """Compare the same while the index is being searched."""

        def compare() -> None:
            try:
                self._slowly(folder, manifest, blocks)
            except ValueError as error:
                self.fault = str(error)
            except OSError:  # another process has merged the log: the next state is compared
                pass

        threading.Thread(target=compare, name="checksums", daemon=True).start()

    def _slowly(self, folder: Path, manifest: Manifest, blocks: Sequence[Block]) -> None:
        """Compare block by block, with pauses, so that searches have the processor."""
        self.sealed(folder, manifest)
        for start in range(0, len(blocks), BLOCKS_AT_ONCE):
            check_blocks(folder, blocks[start : start + BLOCKS_AT_ONCE])
            time.sleep(PAUSE)


class State:
    """A state of an index; it is read by any thread and never changes.

    Args:
        folder: the folder of the index.
        manifest: its manifest.
        earlier: a state that this process has opened before, of which unchanged parts are taken.
        is_checked: whether checksums are compared; the writer of the files does not.

    Raises:
        FileNotFoundError: a file is missing, perhaps because the log was merged a moment ago.
        ValueError: a file is damaged.
    """

    def __init__(
        self, folder: Path, manifest: Manifest, earlier: State | None = None, *, is_checked: bool = True
    ) -> None:
        self.folder, self.manifest = folder, manifest
        same = earlier if earlier is not None and earlier.manifest.identity == manifest.identity else None
        before = same if same is not None and same.manifest.base == manifest.base else None
        for name, (size, _) in {**manifest.files, **manifest.derived}.items():
            if (actual := (folder / name).stat().st_size) != size:
                raise ValueError(damage(folder / name, f"has {actual:,} bytes, expected {size:,}"))
        has_same_files = same is not None and same.manifest.store == manifest.store
        self.check: Check = same.check if same is not None and has_same_files else Check()
        is_small = total_bytes(manifest) <= CHECKED_AT_OPENING
        if is_checked and (is_small or before is not None):
            self.check.sealed(folder, manifest)
        self.table: ItemTable = (
            ItemTable(folder / items_file(manifest), folder / columns_file(manifest))
            if before is None
            else before.table
        )
        """the items of the last merge"""
        entries = list(
            read_log(folder / log_file(manifest), manifest.log, 0 if before is None else before.manifest.log)
        )
        self.changes: Changes = (Changes.none() if before is None else before.changes).extended(entries)
        """the changes since"""
        self.arrays = _arrays(folder, manifest)
        """ending of a file of vectors -> its numbers (rows, width)"""
        self._pictures = mapped_bytes(folder / pictures_file(manifest), manifest.pictures)
        if not is_checked:
            return
        if before is not None:
            check_blocks(folder, [block for entry in entries for block in entry.blocks])
        elif is_small:
            check_blocks(folder, self.blocks())
        else:
            self.check.in_background(folder, manifest, self.blocks())

    def blocks(self) -> list[Block]:
        """The blocks of the files that grow."""
        return [*self.table.blocks(), *self.changes.blocks]

    def grown_to(self, rows: int, pictures: int) -> State:
        """This state with more rows and thumbnails in its files, which a change has appended and not committed yet."""
        grown = copy.copy(self)
        grown.manifest = replace(self.manifest, rows=rows, pictures=pictures)
        grown.arrays = _arrays(self.folder, grown.manifest)
        grown._pictures = mapped_bytes(self.folder / pictures_file(grown.manifest), pictures)
        return grown

    def floats(self, numbers: Any) -> np.ndarray:
        """Vectors of some rows, (M, dim) float32 of unit length; small ones are read back from their 8-bit numbers."""
        if "float32" in self.arrays:
            return self.arrays["float32"][numbers]
        return from_int8(torch.from_numpy(self.arrays["int8"][numbers])).numpy()

    def raise_fault(self) -> None:
        """Refuse to answer once a damaged file was seen.

        Raises:
            ValueError: a file is damaged.
        """
        if self.check.fault is not None:
            raise ValueError(self.check.fault)

    def __len__(self) -> int:
        return self.manifest.count

    @functools.cached_property
    def is_living(self) -> np.ndarray:
        """(rows,) whether a row has an item."""
        living = np.zeros(self.manifest.rows, dtype=bool)
        living[: self.table.rows] = self.table.is_living
        living[list(self.changes.rows)] = True
        living[list(self.changes.dead)] = False
        return living

    @functools.cached_property
    def living(self) -> np.ndarray:
        """(count,) the rows with items."""
        return np.flatnonzero(self.is_living)

    @property
    def has_dead(self) -> bool:
        """Whether there are rows without an item."""
        return self.manifest.count < self.manifest.rows

    def number_of(self, item: str) -> int | None:
        """Return the row of an id; None if there is none."""
        return self.numbers_of([item]).get(item)

    def numbers_of(self, ids: Sequence[str]) -> dict[str, int]:
        """Return the rows of those ids that there are."""
        changed = self.changes.numbers
        stored = self.table.numbers_of([item for item in ids if item not in changed and is_text(item)])
        return {
            item: number
            for item in ids
            if (number := changed[item] if item in changed else stored.get(item)) is not None
        }

    def at(self, numbers: Sequence[int]) -> list[Row]:
        """Return the items of some rows, in the order of the rows given."""
        changed = self.changes.rows
        stored = iter(self.table.at([number for number in numbers if number not in changed]))
        return [changed[number] if number in changed else next(stored) for number in numbers]

    def __iter__(self) -> Iterator[Row]:
        """Iterate over all items, in the order of their rows.

        Raises:
            ValueError: an item is missing.
        """
        changed, dead, last, count = self.changes.rows, self.changes.dead, self.table.rows, 0
        for row in self.table:
            if row.number not in dead:
                count += 1
                yield changed.get(row.number, row)
        newer = sorted(number for number in changed if number >= last)
        self._check_count(count + len(newer))
        yield from (changed[number] for number in newer)

    def texts(self, column: str) -> list[str]:
        """Return `id` or `stamp` of all items, in the order of their rows.

        Raises:
            ValueError: an item is missing.
        """
        changed, dead, last = self.changes.rows, self.changes.dead, self.table.rows
        texts = [
            getattr(changed[number], column) if number in changed else text
            for number, text in self.table.texts(column)
            if number not in dead
        ] + [getattr(changed[number], column) for number in sorted(changed) if number >= last]
        self._check_count(len(texts))
        return texts

    def _check_count(self, count: int) -> None:
        if count != self.manifest.count:
            fault = f"has {count:,} items instead of {self.manifest.count:,}"
            raise ValueError(damage(self.folder / items_file(self.manifest), fault))

    def labels(self) -> list[str | None]:
        """Return the labels of all items, in the order of their rows."""
        names: list[str | None] = [*self.table.dictionary(CLASS_COLUMN).values, None]
        living = self.table.is_living.copy()
        living[[number for number in self.changes.dead if number < len(living)]] = False
        labels = [names[code] for code in self.table.codes[self.table.places[CLASS_COLUMN]][living].tolist()]
        changed = sorted(self.changes.rows)
        places = np.cumsum(living) - 1
        for number in changed:
            if number < len(living):
                labels[places[number]] = self.changes.rows[number].label
        return labels + [self.changes.rows[number].label for number in changed if number >= len(living)]

    def thumbnail(self, row: Row) -> bytes | None:
        """Return the thumbnail of an item (JPEG); None without one.

        Raises:
            ValueError: it is not what was written.
        """
        if not row.length:
            return None
        content = bytes(self._pictures[row.start : row.start + row.length])
        if zlib.crc32(content) != row.picture_crc:
            raise ValueError(
                damage(
                    self.folder / pictures_file(self.manifest), f"has another thumbnail of {row.id!r} than was written"
                )
            )
        return content

    def matching(self, conditions: Sequence[Condition]) -> np.ndarray:
        """Say for each row whether it has an item that matches all conditions, (rows,) bool; do not write to it."""
        key = tuple((each.column, each.operator, *map(value_key, each.values)) for each in conditions)
        if (known := self._masks.get(key)) is not None:
            return known
        mask = self.is_living.copy()
        for condition in conditions:
            mask[: self.table.rows] &= self._in_table(condition)
            numbers, codes, dictionary = self._changed(condition.column)
            if len(numbers):
                mask[numbers] &= _by_code(dictionary, condition)[codes]
        if len(self._masks) >= MOST_MASKS:
            self._masks.clear()
        self._masks[key] = mask
        return mask

    def _in_table(self, condition: Condition) -> np.ndarray:
        """Whether the rows of the table match; those that have changed since match any condition."""
        if condition.column in self.table.places:
            codes = self.table.codes[self.table.places[condition.column]]
            matching = _by_code(self.table.dictionary(condition.column), condition)[codes]
        else:
            matching = np.full(self.table.rows, matches(None, condition))
        numbers, _, _ = self._changed(condition.column)
        matching[numbers[numbers < self.table.rows]] = True
        return matching

    def _changed(self, column: str) -> tuple[np.ndarray, np.ndarray, Dictionary]:
        """The rows of the log, the codes of their values in a column, and the values of these codes."""
        if column not in self._changed_columns:
            changed = self.changes.rows
            known: dict[Any, int] = {}
            different: list[Any] = []
            codes = np.empty(len(changed), np.int64)
            for place, (number, row) in enumerate(changed.items()):
                value = row.label if column == CLASS_COLUMN else self.changes.values[number].get(column)
                if value is None:
                    codes[place] = -1
                    continue
                codes[place] = code = known.setdefault(value_key(value), len(known))
                if code == len(different):
                    different.append(value)
            numbers = np.fromiter(changed, np.int64, len(changed))
            self._changed_columns[column] = numbers, codes, Dictionary(different)
        return self._changed_columns[column]

    @functools.cached_property
    def _masks(self) -> dict[tuple[Any, ...], np.ndarray]:
        return {}

    @functools.cached_property
    def _changed_columns(self) -> dict[str, tuple[np.ndarray, np.ndarray, Dictionary]]:
        return {}


def _arrays(folder: Path, manifest: Manifest) -> dict[str, np.ndarray]:
    """The files of vectors, mapped into memory."""
    return {
        ending: mapped_rows(folder / name, manifest.rows, width_of(ending, manifest.dim), NUMBERS[ending])
        for ending, name in vector_files(manifest).items()
    }


def _by_code(dictionary: Dictionary, condition: Condition) -> np.ndarray:
    """Whether the value of each code matches; the last two places are those of `NO_ITEM` and `NO_VALUE`."""
    return np.concatenate([dictionary.matching(condition), [False, matches(None, condition)]])


def open_state(folder: Path, earlier: State | None = None) -> State:
    """Open the newest state of an index.

    Args:
        folder: the folder of the index.
        earlier: a state that this process has opened before.

    Raises:
        ValueError: the folder is not an index, or a file is missing or damaged.
    """
    for attempt in range(OPEN_ATTEMPTS):
        manifest = Manifest.read(folder)
        try:
            state = State(folder, manifest, earlier)
            # Another index may have taken the name of the folder meanwhile, with files of the same names.
            if Manifest.read(folder).identity == manifest.identity:
                return state
        except FileNotFoundError as error:
            # Another process has merged the log since the manifest was read, or files are missing.
            if attempt == OPEN_ATTEMPTS - 1:
                raise ValueError(
                    f"index: got {folder}, where {error.filename} is missing; expected all files that {FILE} names; "
                    "`proxymetric index --rebuild` makes them anew"
                ) from None
        except ValueError:
            if attempt == OPEN_ATTEMPTS - 1 or Manifest.read(folder).identity == manifest.identity:
                raise
    raise ValueError(f"index: got {folder}, whose name others took again and again; expected an index that stays")


def batch_of(state: State, ids: Sequence[str]) -> Batch:
    """Return those items of `ids` that a state has, to write them again."""
    numbers = list(state.numbers_of(ids).values())
    rows = state.at(numbers)
    return Batch(
        [row.id for row in rows],
        state.floats(np.array(numbers, dtype=np.int64)),
        [row.label for row in rows],
        [row.metadata for row in rows],
        [row.stamp for row in rows],
        [state.thumbnail(row) for row in rows],
    )


def stored_bytes(kind: str, dim: int) -> int:
    """The bytes of a vector on disk; "binary" keeps the 8-bit numbers too.

    Example:
        >>> [stored_bytes(kind, 512) for kind in VECTOR_FILES]
        [2048, 512, 576]
    """
    return bytes_per_vector(kind, dim) + (bytes_per_vector("int8", dim) if kind == "binary" else 0)


def total_bytes(manifest: Manifest) -> int:
    """The bytes of all files of a state."""
    return sum(growing_files(manifest).values()) + sum(
        size for size, _ in {**manifest.files, **manifest.derived}.values()
    )


def damaged_files(folder: Path, manifest: Manifest, derived: bool = True) -> list[str]:
    """Return the files of a state that are missing or not as they were written.

    Args:
        folder: the folder of the index.
        manifest: its manifest.
        derived: the files of the map and of the engine too.
    """
    sealed = {**manifest.files, **(manifest.derived if derived else {})}
    wrong = [
        name for name, facts in sealed.items() if not (folder / name).is_file() or facts_of(folder / name) != facts
    ]
    if {items_file(manifest), columns_file(manifest)} & set(wrong):
        return wrong
    try:
        blocks = ItemTable(folder / items_file(manifest), folder / columns_file(manifest)).blocks()
        for entry in read_log(folder / log_file(manifest), manifest.log):
            blocks += entry.blocks
    except (ValueError, OSError):
        return [*wrong, log_file(manifest)]
    lengths = growing_files(manifest)
    del lengths[log_file(manifest)]
    ends = dict.fromkeys(lengths, 0)
    for block in blocks:
        if block.file in ends:
            ends[block.file] = max(ends[block.file], block.start + block.length)
    wrong += [name for name, length in lengths.items() if ends[name] != length]
    return [*wrong, *dict.fromkeys(block.file for block in damaged_blocks(folder, blocks) if block.file not in wrong)]
