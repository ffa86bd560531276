"""Changes of an index: what is appended, when the log is merged, and how the files are written anew."""

from __future__ import annotations

import contextlib
import itertools
import sqlite3
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from proxymetric.core.quantisation import bit_codes, int8_codes
from proxymetric.search.batches import Batch
from proxymetric.search.conditions import CLASS_COLUMN
from proxymetric.search.manifest import FILE, Manifest, is_index, sync_file, sync_folder
from proxymetric.search.storage.blocks import Block, append, check_blocks, facts_of, joined
from proxymetric.search.storage.change_log import Entry, Row
from proxymetric.search.storage.item_table import Kept, write_items
from proxymetric.search.storage.state import (
    NUMBERS,
    State,
    all_files,
    columns_file,
    growing_files,
    items_file,
    log_file,
    pictures_file,
    vector_files,
    width_of,
)
from proxymetric.system.files import NotSaved, is_disk_full, not_saved
from proxymetric.system.text import visible

LEAST_LOG, MOST_LOG, LOG_SHARE = 1_024, 16_384, 0.25
"""the log is merged when it has more rows than this share of the items, within these limits"""
MOST_DEAD = 0.2
"""the files of vectors and thumbnails are written anew at a merge when more than this share of their rows is dead"""
SMALL_STORE = 64 * 2**20
"""bytes of vectors up to which that is done at every merge that finds a dead row"""
COPY_ROWS = 8_192
"""rows that are copied at once"""
OURS = ("items-", "columns-", "log-", "vectors-", "thumbnails-", "map-", "engine-", f".{FILE}.")
"""how the names of the files of an index begin"""


class Edit(NamedTuple):
    """What an item gets that keeps its vector."""

    label: str | None
    metadata: str
    """a JSON object"""
    thumbnail: bytes | None = None
    """a JPEG file"""
    keeps_thumbnail: bool = True
    """whether it keeps the thumbnail that it has"""


class Change(NamedTuple):
    """Several changes that are made at once.

    Attributes:
        batches: items that are added, or take the place of items of the same id.
        edits: id -> what the item gets.
        deleted: ids of items that are removed.
    """

    batches: Sequence[Batch] = ()
    edits: Mapping[str, Edit] = {}
    deleted: Collection[str] = ()


Part = tuple[list[Row], Mapping[str, np.ndarray], list[bytes | None]]
"""items that are copied together, their stored vectors and their thumbnails"""
Derive = Callable[[State, State | None, np.ndarray | None], Manifest]
"""makes the map and the engine of a state that is not committed yet; takes the state, the one before, and for each row
its row before (-1: new; None: as it was); returns the manifest with their facts and files"""


def create(folder: Path, manifest: Manifest) -> None:
    """Write the first state of an index, which has no items.

    Raises:
        NotSaved: the disk is full; nothing is left.
    """
    with _undone(folder, None):
        written = _with_table(folder, replace(manifest, generation=1, base=1, store=1), [], 0, [])
        written.write(folder)


def commit(state: State, change: Change, manifest: Manifest, derive: Derive, *, renew: bool = False) -> None:
    """Make a change, in one step for every reader.

    Args:
        state: the newest state; the caller holds the lock of its folder.
        change: what changes.
        manifest: the facts of the new state, apart from counts and files.
        derive: makes the map and the engine where the log is merged.
        renew: make them in any case.

    Raises:
        NotSaved: the disk is full; the index is as it was.
    """
    folder, before = state.folder, state.manifest
    with _undone(folder, before):
        manifest = replace(manifest, generation=before.generation + 1)
        gone = [*(item for batch in change.batches for item in batch.ids), *change.deleted]
        dead = [(number, item) for item, number in state.numbers_of(gone).items()]
        entry = Entry(manifest.generation, _edited(state, change.edits), dead, [])
        manifest = _store_edits(folder, manifest, change.edits, entry)
        for batch in change.batches:
            manifest = _store(folder, manifest, batch, entry)
        without_file = _without_file(state, [*(number for number, _ in dead), *(row.number for row in entry.rows)])
        manifest = replace(
            manifest,
            count=before.count + sum(len(batch.ids) for batch in change.batches) - len(dead),
            added=before.added - without_file + sum(not row.stamp for row in entry.rows),
        )
        changed = len(state.changes.rows) + len(state.changes.dead) + len(entry.rows) + len(dead)
        is_long = changed > min(MOST_LOG, max(LEAST_LOG, LOG_SHARE * state.table.rows))
        if is_long or manifest.rows > 2 * manifest.count:
            manifest = _merged(state, manifest, entry, derive)
        else:
            log = append(folder / log_file(before), before.log, [entry.to_bytes()]) if _says_something(entry) else []
            length = before.log + sum(block.length for block in log)
            manifest = replace(manifest, log=length, columns=_columns(state, entry))
            if renew:
                manifest = derive(State(folder, manifest, state, is_checked=False), state, None)
        manifest.write(folder)
    clean(folder, manifest)


def write_anew(
    folder: Path,
    state: State | None,
    manifest: Manifest,
    derive: Derive,
    batches: Sequence[Batch] | None = None,
) -> None:
    """Write all files anew: nothing of a removed item is left in them.

    Args:
        folder: the folder of the index; the caller holds its lock.
        state: the newest state; None if it cannot be opened.
        manifest: its manifest, with the facts of the new state apart from counts and files.
        derive: makes the map and the engine.
        batches: the items of the new state; None: those that there are.

    Raises:
        NotSaved: the disk is full; the index is as it was.
        ValueError: a file is damaged.
    """
    with _undone(folder, manifest):
        manifest = replace(manifest, generation=manifest.generation + 1)
        if batches is None:
            assert state is not None
            manifest = _copied(state, manifest, Entry(manifest.generation, [], [], []), derive)
        else:
            count = sum(len(batch.ids) for batch in batches)
            manifest, _ = _anew(folder, manifest, _new_parts(manifest, batches), count)
            manifest = derive(State(folder, manifest, is_checked=False), state, np.full(count, -1))
        manifest.write(folder)
    clean(folder, manifest)


def clean(folder: Path, manifest: Manifest) -> None:
    """Remove the files of earlier states and of killed changes; readers that have them open keep them."""
    names = all_files(manifest)
    for file in folder.iterdir():
        if file.name.startswith(OURS) and file.name not in names and not file.is_dir():
            with contextlib.suppress(OSError):
                file.unlink()


def cut_off(folder: Path, manifest: Manifest) -> None:
    """Remove from the files that grow what their state does not name: a killed change has left it."""
    for name, length in growing_files(manifest).items():
        with contextlib.suppress(FileNotFoundError):
            if (folder / name).stat().st_size > length:
                with open(folder / name, "r+b") as opened:
                    opened.truncate(length)


def encoded(kind: str, vectors: np.ndarray) -> dict[str, np.ndarray]:
    """Vectors as they are stored: ending of a file -> its rows."""
    floats = torch.from_numpy(np.ascontiguousarray(vectors, dtype=np.float32))
    encode = {"float32": lambda: floats, "int8": lambda: int8_codes(floats), "bits": lambda: bit_codes(floats)}
    endings = {"float32": ("float32",), "int8": ("int8",), "binary": ("bits", "int8")}[kind]
    return {ending: encode[ending]().numpy() for ending in endings}


@contextlib.contextmanager
def _undone(folder: Path, before: Manifest | None) -> Iterator[None]:
    """Remove what a change that fails has written; a full disk is named."""
    try:
        yield
    except BaseException as error:
        if before is None:
            for file in folder.iterdir():
                if file.name.startswith(OURS):
                    file.unlink(missing_ok=True)
        else:
            with contextlib.suppress(ValueError):  # the disk may have the new manifest although it reported an error
                before = Manifest.read(folder)
            clean(folder, before)
            cut_off(folder, before)
        if not isinstance(error, NotSaved) and (is_disk_full(error) or isinstance(error, sqlite3.OperationalError)):
            state = "its earlier state is unchanged" if is_index(folder) else "there is no earlier state"
            raise not_saved(folder, error, state) from error
        raise


def _store(folder: Path, manifest: Manifest, batch: Batch, entry: Entry) -> Manifest:
    """Append the vectors and thumbnails of new items; add them to the entry."""
    first = manifest.rows
    manifest = _append_rows(folder, manifest, encoded(manifest.vectors["kind"], batch.vectors), entry.blocks)
    manifest, places = _append_pictures(folder, manifest, batch.thumbnails, entry.blocks)
    columns = zip(batch.ids, batch.labels, batch.metadata, batch.stamps, places, strict=True)
    entry.rows.extend(
        Row(first + number, item, label, metadata, stamp, *place)
        for number, (item, label, metadata, stamp, place) in enumerate(columns)
    )
    return manifest


def _append_rows(folder: Path, manifest: Manifest, arrays: Mapping[str, np.ndarray], blocks: list[Block]) -> Manifest:
    count = 0
    for ending, name in vector_files(manifest).items():
        array = np.ascontiguousarray(arrays[ending])
        count = len(array)
        length = manifest.rows * width_of(ending, manifest.dim) * NUMBERS[ending].itemsize
        blocks += append(folder / name, length, [array.data] if array.size else [])
    return replace(manifest, rows=manifest.rows + count)


def _append_pictures(
    folder: Path, manifest: Manifest, thumbnails: Sequence[bytes | None], blocks: list[Block]
) -> tuple[Manifest, list[tuple[int, int, int]]]:
    """Append thumbnails; return for each its start, length and CRC-32."""
    places, start = [], manifest.pictures
    for content in thumbnails:
        places.append((start, len(content), zlib.crc32(content)) if content else (0, 0, 0))
        start += len(content or b"")
    if start > manifest.pictures or not manifest.pictures:
        content = b"".join(filter(None, thumbnails))
        blocks += append(folder / pictures_file(manifest), manifest.pictures, [content] if content else [])
    return replace(manifest, pictures=start), places


def _edited(state: State, edits: Mapping[str, Edit]) -> list[Row]:
    """The items with their new labels and metadata."""
    ids = list(edits)
    rows = state.at(list(state.numbers_of(ids).values()))
    return [row._replace(label=edits[item].label, metadata=edits[item].metadata) for item, row in zip(ids, rows)]


def _store_edits(folder: Path, manifest: Manifest, edits: Mapping[str, Edit], entry: Entry) -> Manifest:
    """Append the new thumbnails of edited items."""
    places = [place for place, edit in enumerate(edits.values()) if not edit.keeps_thumbnail]
    if not places:
        return manifest
    thumbnails = [edit.thumbnail for edit in edits.values() if not edit.keeps_thumbnail]
    manifest, stored = _append_pictures(folder, manifest, thumbnails, entry.blocks)
    for place, (start, length, crc) in zip(places, stored, strict=True):
        entry.rows[place] = entry.rows[place]._replace(start=start, length=length, picture_crc=crc)
    return manifest


def _columns(state: State, entry: Entry) -> list[str]:
    """The metadata columns of which an item has a value after a change, sorted."""
    names = {
        name for row in entry.rows if row.metadata != "{}" for name, value in row.values().items() if value is not None
    }
    if not entry.dead and all(row.number >= state.manifest.rows for row in entry.rows):
        return sorted({*state.manifest.columns, *names})
    changes, stored = state.changes.extended([entry]), state.table
    for values in changes.values.values():
        names.update(name for name, value in values.items() if value is not None)
    unchanged = stored.is_living.copy()
    for numbers in (changes.dead, changes.rows):
        unchanged[[number for number in numbers if number < stored.rows]] = False
    for name in {*stored.places} - {CLASS_COLUMN} - names:
        if (stored.codes[stored.places[name]][unchanged] >= 0).any():
            names.add(name)
    return sorted(names)


def _without_file(state: State, numbers: Sequence[int]) -> int:
    """How many of some rows had an item that is no file."""
    return sum(not row.stamp for row in state.at([number for number in numbers if number < state.manifest.rows]))


def _says_something(entry: Entry) -> bool:
    return bool(entry.rows or entry.dead or entry.blocks)


def _merged(state: State, manifest: Manifest, entry: Entry, derive: Derive) -> Manifest:
    """Write the items anew, and with many dead rows the vectors and thumbnails too."""
    dead = manifest.rows - manifest.count
    vectors = sum(growing_files(manifest).values())
    if dead > MOST_DEAD * manifest.rows or (dead and vectors <= SMALL_STORE):
        return _copied(state, manifest, entry, derive)
    state.check.sealed(state.folder, state.manifest)  # what is copied was compared before
    blocks = joined(state.folder, [*state.blocks(), *entry.blocks])
    manifest = replace(manifest, base=manifest.generation, log=0)
    changes, table = state.changes.extended([entry]), state.table
    rows = (changes.rows[number] for number in sorted(changes.rows))
    gone = [number for number in {*changes.rows, *changes.dead} if number < table.rows]
    manifest = _with_table(state.folder, manifest, rows, manifest.rows, blocks, Kept(table, gone))
    return derive(State(state.folder, manifest, is_checked=False), state, None)


def _rows(state: State, entry: Entry) -> Iterator[Row]:
    """All items after a change, in the order of their rows."""
    changed, dead = {row.number: row for row in entry.rows}, {number for number, _ in entry.dead}
    for row in state:
        if row.number not in dead:
            yield changed.pop(row.number, row)
    yield from (changed[number] for number in sorted(changed))


def _with_table(
    folder: Path,
    manifest: Manifest,
    rows: Iterable[Row],
    count: int,
    blocks: Sequence[Block],
    kept: Kept | None = None,
) -> Manifest:
    """Write the items, their columns and an empty log; return the manifest with them."""
    items, columns = folder / items_file(manifest), folder / columns_file(manifest)
    for file in (items, columns):
        file.unlink(missing_ok=True)
    names = write_items(items, columns, rows, count, blocks, kept)
    append(folder / log_file(manifest), 0, [])
    for name in growing_files(manifest):
        if not (folder / name).exists():
            append(folder / name, 0, [])
    for file in (items, columns):
        sync_file(file)
    sync_folder(folder)
    return replace(manifest, columns=names, files={file.name: facts_of(file) for file in (items, columns)})


def _copied(state: State, manifest: Manifest, entry: Entry, derive: Derive) -> Manifest:
    """Copy what lives of a state and of a change to new files."""
    manifest, sources = _anew(state.folder, manifest, _parts(state, manifest, entry), manifest.count)
    return derive(State(state.folder, manifest, is_checked=False), state, sources)


def _anew(folder: Path, manifest: Manifest, parts: Iterable[Part], count: int) -> tuple[Manifest, np.ndarray]:
    """Write all files of a state anew, with consecutive rows; return the manifest, and the row before of each row."""
    number = manifest.generation
    manifest = replace(manifest, base=number, store=number, log=0, count=count, derived={}, rows=0, pictures=0)
    target, added = manifest, 0
    blocks: list[Block] = []
    sources: list[np.ndarray] = [np.empty(0, np.int64)]

    def rows() -> Iterator[Row]:
        nonlocal target, added
        for some, arrays, thumbnails in parts:
            first = target.rows
            target = _append_rows(folder, target, arrays, blocks)
            target, places = _append_pictures(folder, target, thumbnails, blocks)
            sources.append(np.array([row.number for row in some], dtype=np.int64))
            added += sum(not row.stamp for row in some)
            for row, (start, length, crc) in zip(some, places, strict=True):
                yield row._replace(number=first, start=start, length=length, picture_crc=crc)
                first += 1

    written = _with_table(folder, manifest, rows(), count, blocks)
    manifest = replace(target, added=added, columns=written.columns, files=written.files)
    return manifest, np.concatenate(sources)


def _parts(state: State, manifest: Manifest, entry: Entry) -> Iterator[Part]:
    """The items of a state after a change, some at a time; their bytes are checked before they are copied."""
    folder, kind = state.folder, manifest.vectors["kind"]
    check_blocks(folder, [*state.blocks(), *entry.blocks])
    grown = state.grown_to(manifest.rows, manifest.pictures)
    rows = _rows(state, entry)
    while some := list(itertools.islice(rows, COPY_ROWS)):
        numbers = np.array([row.number for row in some])
        same = kind == state.manifest.vectors["kind"]
        arrays = (
            {ending: array[numbers] for ending, array in grown.arrays.items()}
            if same
            else encoded(kind, grown.floats(numbers))
        )
        yield some, arrays, [grown.thumbnail(row) for row in some]


def _new_parts(manifest: Manifest, batches: Sequence[Batch]) -> Iterator[Part]:
    """The items of batches; those of the same id come once, in the last of them."""
    for batch in batches:
        rows = [
            Row(-1, item, label, metadata, stamp)
            for item, label, metadata, stamp in zip(batch.ids, batch.labels, batch.metadata, batch.stamps, strict=True)
        ]
        yield rows, encoded(manifest.vectors["kind"], batch.vectors), batch.thumbnails


def check_place(folder: Path, argument: str = "folder") -> None:
    """Refuse a place for an index that holds something else.

    Args:
        folder: the place.
        argument: name of the argument, for the error.

    Raises:
        ValueError: it is a file, or a folder that is neither empty nor an index.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{argument}: got {folder}, which is a file; expected a new folder or an index")
    if folder.is_dir() and not is_index(folder):
        names = [place.name for place in folder.iterdir()]
        unfinished = (".lock", *OURS)  # what a process that was killed may have left
        other = next((name for name in names if not name.startswith(unfinished)), None)
        if other is not None:
            raise ValueError(
                f"{argument}: got {folder}, which is not an index and holds {visible(other)}; expected a new folder or "
                "an index"
            )
