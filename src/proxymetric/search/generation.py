"""One state of an index on disk: its vectors, items, thumbnails and map, which never change once they are written."""

from __future__ import annotations

import contextlib
import mmap
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from proxymetric.search.atlas import update_map
from proxymetric.search.batches import Batch
from proxymetric.search.engines import Earlier, build_engine, clean_engine
from proxymetric.search.manifest import FILE, Manifest, facts_of, is_index, sync_file, sync_folder
from proxymetric.search.measuring import measure_loss
from proxymetric.search.rows import Row, Rows, write_rows
from proxymetric.search.stored_vectors import (
    FILES,
    StoredVectors,
    VectorRows,
    check_engine,
    mapped,
    stored_bytes,
    write_vectors,
)
from proxymetric.system.files import NotSaved, is_disk_full, not_saved
from proxymetric.system.text import visible

GENERATIONS, THUMBNAILS = "generations", "thumbnails"
ITEMS, POINTS = "items.sqlite", "map.npy"
LIVE_SHARE = 0.5
"""a file of thumbnails of which less than this share is used is not kept"""
MAX_PACKS, KEPT_PACKS = 16, 8
"""with more files of thumbnails than the first number, all but the largest are joined; the second is how many remain"""


class Generation:
    """The files of one generation, mapped into memory: processes that open the same index share its pages.

    Args:
        folder: the folder of the index.
        manifest: its manifest.

    Raises:
        FileNotFoundError: a file is missing, perhaps because a change has replaced the generation.
        ValueError: a file is damaged.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        place = generation_folder(folder, manifest.generation)
        for file, facts in _files(folder, manifest):
            if (size := file.stat().st_size) != facts[0]:
                raise ValueError(
                    f"index: got {file} with {size:,} bytes, expected {facts[0]:,}: it was damaged after it was "
                    "written; `proxymetric index --rebuild` makes it anew"
                )
        self.manifest = manifest
        self.stored = StoredVectors(place, manifest.vectors["kind"], manifest.count, manifest.dim)
        self.points = mapped(place / POINTS, (manifest.count, 2)) if POINTS in manifest.files else None
        self.rows = Rows(place / ITEMS)
        self.engine = self.stored.engine(manifest.engine)
        self._packs = {int(number): _mapped_bytes(_pack(folder, int(number))) for number in manifest.packs}

    def thumbnail(self, row: Row) -> bytes | None:
        """Return the thumbnail of an item (JPEG); None without one."""
        if row.pack is None or row.start is None or row.length is None:
            return None
        return bytes(self._packs[row.pack][row.start : row.start + row.length])

    def batch(self, ids: Sequence[str]) -> Batch:
        """Return those items of `ids` that there are, to write them again to a state that is made anew."""
        numbers = [number for item in ids if (number := self.rows.number_of(item)) is not None]
        rows = self.rows.at(numbers)
        return Batch(
            [row.id for row in rows],
            self.stored[np.array(numbers, dtype=np.int64)],
            [row.label for row in rows],
            [row.metadata for row in rows],
            [row.stamp for row in rows],
            [self.thumbnail(row) for row in rows],
        )


def empty(folder: Path, manifest: Manifest) -> None:
    """Write the first generation of an index, which has no items."""
    commit(folder, manifest, None, [], {})


def commit(
    folder: Path,
    manifest: Manifest,
    before: Generation | None,
    batches: Sequence[Batch],
    edits: Mapping[str, tuple[str | None, str]],
    kept: set[str] | None = None,
    say: Callable[[str], None] | None = None,
) -> Manifest:
    """Write a new generation and make it the state of the index, in one step for every reader.

    Args:
        folder: the folder of the index; the caller holds its lock.
        manifest: what the new manifest says, apart from counts and files.
        before: the generation before the change; None if nothing of it is kept.
        batches: items that are added or replaced.
        edits: label and metadata of kept items that get new ones.
        kept: ids of the old items that stay; None: all that no batch replaces.
        say: called with the name of each stage when it begins.

    Returns:
        The manifest that was written.

    Raises:
        NotSaved: the disk is full; the index is as it was, and nothing of the new generation is left.
    """
    number = manifest.generation + 1
    try:
        written = _write(folder, number, manifest, before, batches, edits, kept, say or (lambda stage: None))
    except BaseException as error:
        _remove(folder, number)
        if is_disk_full(error) or isinstance(error, sqlite3.OperationalError):
            state = "its earlier state is unchanged" if is_index(folder) else "there is no earlier state"
            raise not_saved(folder, error, state) from error
        raise
    try:
        written.write(folder)
    except NotSaved:
        _remove(folder, number)
        raise
    clean(folder, written)
    clean_engine(written.engine)
    return written


def _write(
    folder: Path,
    number: int,
    manifest: Manifest,
    before: Generation | None,
    batches: Sequence[Batch],
    edits: Mapping[str, tuple[str | None, str]],
    kept: set[str] | None,
    say: Callable[[str], None],
) -> Manifest:
    """Write all files of a new generation; return its manifest, which is not written yet."""
    _remove(folder, number)  # what a process that was killed may have left
    place, partial = generation_folder(folder, number), _partial(folder, number)
    partial.mkdir(parents=True)
    new_ids = {item: (index, row) for index, batch in enumerate(batches) for row, item in enumerate(batch.ids)}
    earlier = {} if before is None else before.rows.stamps()
    staying = [item for item in earlier if item not in new_ids and (kept is None or item in kept)]
    stamps = {item: earlier[item][1] for item in staying}
    stamps |= {item: stamp for batch in batches for item, stamp in zip(batch.ids, batch.stamps, strict=True)}
    order = sorted(stamps)
    sources: list[VectorRows] = [np.empty((0, manifest.dim), np.float32) if before is None else before.stored]
    sources += [batch.vectors for batch in batches]
    places = np.array(
        [(new_ids[item][0] + 1, new_ids[item][1]) if item in new_ids else (0, earlier[item][0]) for item in order],
        dtype=np.int64,
    ).reshape(len(order), 2)
    kind = manifest.vectors["kind"]
    check_engine(kind, manifest.engine)
    say(f"writing the vectors and thumbnails of {len(order):,} images")
    write_vectors(partial, kind, sources, places, manifest.dim)
    columns: set[str] = set()
    packs = _write_items(folder, partial, number, manifest, before, batches, edits, places, columns)
    stored = StoredVectors(partial, kind, len(order), manifest.dim)
    old_rows = np.where(places[:, 0] == 0, places[:, 1], -1)
    is_same_map = before is not None and before.manifest.map["method"] == manifest.map["method"]
    old_points = before.points if before is not None and is_same_map else None
    array = stored.floats if manifest.map["method"] != "none" or kind == "float32" else np.empty((0, manifest.dim))
    if array.size and manifest.map["method"] != "none":
        say(f"making the map ({manifest.map['method']})")
    points, map_facts = update_map(manifest.map, array, old_rows, old_points)
    if points is not None:
        np.save(partial / POINTS, points)
    engine_before = None
    if before is not None:
        earlier_folder = generation_folder(folder, before.manifest.generation)
        engine_before = Earlier(before.manifest.engine, earlier_folder, old_rows)
    if manifest.engine["name"] != "exact":
        say(f"building the engine {manifest.engine['name']}")
    engine, engine_files = build_engine(manifest.engine, array, partial, engine_before)
    names = [*FILES[kind], ITEMS, *([POINTS] if points is not None else []), *engine_files]
    for name in names:
        sync_file(partial / name)
    written = replace(
        manifest,
        generation=number,
        count=len(order),
        engine=engine,
        vectors=_vector_facts(manifest, before, stored, sources, places, partial),
        map=map_facts,
        columns=sorted(columns),
        files={name: facts_of(partial / name) for name in names},
        packs=packs,
        added=sum(not stamp for stamp in stamps.values()),
    )
    sync_folder(partial)
    partial.rename(place)
    sync_folder(place.parent)
    return written


def _remove(folder: Path, number: int) -> None:
    """Remove the files of a generation that no manifest names."""
    for place in (_partial(folder, number), generation_folder(folder, number)):
        shutil.rmtree(place, ignore_errors=True)
    with contextlib.suppress(OSError):
        _pack(folder, number).unlink()


def _vector_facts(
    manifest: Manifest,
    before: Generation | None,
    stored: StoredVectors,
    sources: Sequence[VectorRows],
    places: np.ndarray,
    partial: Path,
) -> dict[str, Any]:
    """What the manifest says about the vectors: kind, bytes, and what is lost, measured while the 32-bit ones exist."""
    facts: dict[str, Any] = {"kind": stored.kind, "bytes": stored_bytes(stored.kind, stored.dim)}
    if stored.kind == "float32" or not len(places):
        return facts
    if (places[:, 0] > 0).all() or (before is not None and before.manifest.vectors["kind"] == "float32"):
        facts["lost"] = measure_loss(stored, sources, places, Rows(partial / ITEMS).labels())
    elif "lost" in manifest.vectors:
        # Some vectors were read back from their codes: what was measured when the index was made still counts.
        facts["lost"] = manifest.vectors["lost"]
    return facts


def clean(folder: Path, manifest: Manifest) -> None:
    """Remove the files of earlier generations and of killed changes; readers that have them open keep them."""
    current = generation_folder(folder, manifest.generation)
    for place in current.parent.iterdir():
        if place != current:
            shutil.rmtree(place, ignore_errors=True)
    for file in folder.glob(f".{FILE}.*.part"):
        file.unlink(missing_ok=True)
    packs = {_pack(folder, int(number)) for number in manifest.packs}
    if (folder / THUMBNAILS).is_dir():
        for file in (folder / THUMBNAILS).iterdir():
            if file not in packs:
                with contextlib.suppress(OSError):
                    file.unlink()


def damaged_files(folder: Path, manifest: Manifest) -> list[str]:
    """Return the files that are missing or not as they were written."""
    return [
        str(file.relative_to(folder))
        for file, facts in _files(folder, manifest)
        if not file.is_file() or facts_of(file) != facts
    ]


def damaged_items(folder: Path, manifest: Manifest) -> list[str]:
    """Return the files of vectors, items and thumbnails that are missing or damaged; engine and map do not count."""
    return damaged_files(folder, _without_engine(manifest))


def open_without_engine(folder: Path, manifest: Manifest) -> Generation:
    """Open the vectors, items and thumbnails of an index whose engine or map cannot be opened."""
    return Generation(folder, _without_engine(manifest))


def _without_engine(manifest: Manifest) -> Manifest:
    needed = (*FILES[manifest.vectors["kind"]], ITEMS)
    files = {name: facts for name, facts in manifest.files.items() if name in needed}
    return replace(manifest, engine={"name": "exact"}, files=files)


def generation_folder(folder: Path, number: int) -> Path:
    """Return the folder of a generation."""
    return folder / GENERATIONS / f"{number:08d}"


def _partial(folder: Path, number: int) -> Path:
    """The folder of a generation that is being written."""
    place = generation_folder(folder, number)
    return place.with_name(f".{place.name}.part")


def _files(folder: Path, manifest: Manifest) -> Iterator[tuple[Path, list[int]]]:
    for name, facts in manifest.files.items():
        yield generation_folder(folder, manifest.generation) / name, facts
    for number, facts in manifest.packs.items():
        yield _pack(folder, int(number)), facts


def _pack(folder: Path, number: int) -> Path:
    return folder / THUMBNAILS / f"{number:08d}.pack"


def _write_items(
    folder: Path,
    partial: Path,
    number: int,
    manifest: Manifest,
    before: Generation | None,
    batches: Sequence[Batch],
    edits: Mapping[str, tuple[str | None, str]],
    places: np.ndarray,
    columns: set[str],
) -> dict[str, list[int]]:
    """Write the items and a file of new thumbnails; return the facts of the files of thumbnails that are in use."""
    old_rows = [] if before is None else list(before.rows)
    live_bytes: dict[int, int] = {}
    for source, place in places.tolist():
        if source == 0 and (pack := old_rows[place].pack) is not None:
            live_bytes[pack] = live_bytes.get(pack, 0) + (old_rows[place].length or 0)
    if unknown := [pack for pack in live_bytes if str(pack) not in manifest.packs]:
        assert before is not None
        raise before.rows.damaged(f"it names the thumbnails {unknown[0]!r:.60}, which the manifest does not have")
    rewritten = {pack for pack, size in live_bytes.items() if size < LIVE_SHARE * manifest.packs[str(pack)][0]}
    if len(live_bytes) > MAX_PACKS:  # each is an open file of every process that has the index open
        rewritten.update(sorted(live_bytes, key=lambda pack: live_bytes[pack])[:-KEPT_PACKS])
    known_metadata: set[str] = set()
    pack_file = _pack(folder, number)
    pack_file.parent.mkdir(exist_ok=True)
    with open(pack_file, "wb") as pack_bytes:

        def stored(thumbnail: bytes | None) -> tuple[int | None, int | None, int | None]:
            if not thumbnail:
                return None, None, None
            start = pack_bytes.tell()
            pack_bytes.write(thumbnail)
            return number, start, len(thumbnail)

        def rows() -> Iterator[Row]:
            for source, place in places.tolist():
                if source:
                    batch = batches[source - 1]
                    row = Row(
                        batch.ids[place],
                        batch.labels[place],
                        batch.metadata[place],
                        batch.stamps[place],
                        *stored(batch.thumbnails[place]),
                    )
                else:
                    row = old_rows[place]
                    if row.id in edits:
                        row = row._replace(label=edits[row.id][0], metadata=edits[row.id][1])
                    if row.pack in rewritten:
                        assert before is not None
                        pack, start, length = stored(before.thumbnail(row))
                        row = row._replace(pack=pack, start=start, length=length)
                if row.metadata not in known_metadata:
                    known_metadata.add(row.metadata)
                    columns.update(row.values())
                yield row

        write_rows(partial / ITEMS, rows())
    used = {pack: manifest.packs[str(pack)] for pack in live_bytes.keys() - rewritten}
    if pack_file.stat().st_size:
        sync_file(pack_file)
        sync_folder(pack_file.parent)
        used[number] = facts_of(pack_file)
    else:
        pack_file.unlink()
    return {str(pack): facts for pack, facts in sorted(used.items())}


def _mapped_bytes(file: Path) -> mmap.mmap:
    with open(file, "rb") as opened:
        return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)


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
        unfinished = (".lock", f".{FILE}", GENERATIONS, THUMBNAILS)  # what a process that was killed may have left
        other = next((name for name in names if not name.startswith(unfinished)), None)
        if other is not None:
            raise ValueError(
                f"{argument}: got {folder}, which is not an index and holds {visible(other)}; expected a new folder or "
                "an index"
            )
