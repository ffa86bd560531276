"""Load Parquet files of items into an index: blocks that many machines embedded, or the items of another index."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from proxymetric.search.batches import Batch, as_metadata
from proxymetric.search.image_blocks import block_files, check_same
from proxymetric.search.items import Changed
from proxymetric.search.parquet import Facts, check_pyarrow, read_facts, read_items, read_stamps
from proxymetric.search.storage.state import stored_bytes
from proxymetric.search.stored_index import StoredIndex
from proxymetric.system.files import read_json_object, write_json

CHUNK_BYTES = 256 * 2**20
"""vectors and thumbnails that one change of the index adds; a kill loses no more"""
CHOICES = "loading.json"
"""the file in the folder of an index that is being loaded: its engine, its map and its kind of vectors"""


class ItemFile(NamedTuple):
    """A Parquet file of items."""

    file: Path
    facts: Facts


def item_files(place: Path) -> list[ItemFile]:
    """Find the files that are loaded: the blocks of a folder, all of them, or a single file.

    Raises:
        ValueError: there is no such file, a block is missing or damaged, or two models made the blocks.
    """
    check_pyarrow()
    if not place.exists():
        raise ValueError(f"parquet: got {place}, which does not exist; expected a folder that `embed --parquet` wrote")
    files = block_files(place) if place.is_dir() else [place]
    if not files:
        raise ValueError(f"parquet: got {place}, which has no blocks; expected a folder that `embed --parquet` wrote")
    items = [ItemFile(file, read_facts(file)) for file in files]
    expected = items[0].facts
    for file, facts in items:
        check_same(facts, expected, file)
    missing = sorted({*range(expected.blocks)} - {facts.block for _, facts in items}) if place.is_dir() else []
    if missing:
        more = f", and {len(missing) - 1:,} more" if len(missing) > 1 else ""
        raise ValueError(
            f"parquet: got {place}, where block {missing[0]} of {expected.blocks} is missing{more}; expected all of "
            f"0 to {expected.blocks - 1}: `proxymetric embed --parquet` embeds what is missing"
        )
    if not any(facts.rows for _, facts in items):
        raise ValueError(f"parquet: got {place}, none of whose images could be read; expected some that can be decoded")
    return items


def load_items(
    index: StoredIndex,
    items: Sequence[ItemFile],
    *,
    say: Callable[[str], None],
    progress: Callable[[int, int], None] | None = None,
) -> Changed:
    """Load the items of Parquet files into an index; map and engine are left as they are.

    An item that is there with the same stamp stays, so that a call that was killed is continued by the next one.
    Another item of the same id gets vector and thumbnail, and keeps its label and its metadata.

    Args:
        index: the index.
        items: the files.
        say: called with a sentence about the work.
        progress: called with the number of items that are loaded and the number of items.

    Returns:
        The numbers of items, and the images that could not be read.

    Raises:
        ValueError: a file is damaged, or the index was made of another folder.
    """
    facts, result = items[0].facts, Changed()
    known, total, done = index.stamps(), sum(each.facts.rows for each in items), 0
    stamps = [(each, read_stamps(*each)) for each in items]
    _check_folder(index, facts, known, [part for _, part in stamps])
    todo = [
        (each, {item for item, stamp in part.items() if known.get(item) != stamp or item not in known})
        for each, part in stamps
    ]
    number = sum(len(new) for _, new in todo)
    say(f"to load: {number:,} of {total:,} items")
    for batches in _chunks(_parts(todo)):
        ids = [item for batch in batches for item in batch.ids]
        with_labels = [_with_labels(batch, index, known) for batch in batches]
        index.change(with_labels, photos=facts.photos, layout=facts.layout, run=dict(facts.source))
        updated, done = sum(item in known for item in ids), done + len(ids)
        result.updated, result.added = result.updated + updated, result.added + len(ids) - updated
        if progress is not None:
            progress(done, number)
    result.unchanged = total - done
    for each in items:
        result.bad |= {name: reason for name, (_, reason) in each.facts.unreadable.items()}
    return result


def begin(index: StoredIndex) -> None:
    """Let an empty index do without map, engine and small vectors until its items are loaded.

    They are made once then, of all items. What the index will have is noted for the call that continues a killed one.
    """
    manifest, file = index.manifest, index.folder / CHOICES
    if manifest.count or file.exists():
        return
    plain = {"kind": "float32", "bytes": stored_bytes("float32", index.dim)}
    write_json(file, {"engine": manifest.engine, "vectors": manifest.vectors["kind"], "map": manifest.map["method"]})
    index.change(engine={"name": "exact"}, map={"method": "none"}, vectors=plain)


def noted_choices(index: StoredIndex) -> dict[str, Any]:
    """What `begin` noted; nothing for an index that had items."""
    file = index.folder / CHOICES
    return read_json_object(file) if file.exists() else {}


def end(index: StoredIndex) -> None:
    """The index has what was noted."""
    (index.folder / CHOICES).unlink(missing_ok=True)


def _check_folder(
    index: StoredIndex, facts: Facts, known: Mapping[str, str], stamps: Sequence[Mapping[str, str]]
) -> None:
    """Refuse to mix images of two folders in one index: the next `index IMAGES` would delete those of one of them."""
    earlier = index.manifest.photos
    if earlier in (None, facts.photos):
        return
    present = {*itertools.chain.from_iterable(stamps)}
    others = [item for item, stamp in known.items() if stamp and item not in present]
    if others:
        raise ValueError(
            f"parquet: got items of {facts.photos}, but {index.folder} was made of {earlier}, whose images such as "
            f"{others[0]} are not among them; expected items of {earlier}, or another --out"
        )


def _parts(todo: Iterable[tuple[ItemFile, set[str]]]) -> Iterator[Batch]:
    """The items that are to be loaded."""
    for each, new in todo:
        for batch in read_items(*each) if new else ():
            rows = [row for row, item in enumerate(batch.ids) if item in new]
            if len(rows) == len(batch.ids):
                yield batch
            elif rows:
                lists = [[values[row] for row in rows] for values in (batch.ids, *batch[2:])]
                yield Batch(lists[0], batch.vectors[rows], *lists[1:])  # type: ignore[arg-type]


def _chunks(batches: Iterable[Batch]) -> Iterator[list[Batch]]:
    """Batches that become one change of the index."""
    chunk: list[Batch] = []
    size = 0
    for batch in batches:
        chunk.append(batch)
        size += batch.vectors.nbytes + sum(len(thumbnail or b"") for thumbnail in batch.thumbnails)
        if size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _with_labels(batch: Batch, index: StoredIndex, known: Mapping[str, str]) -> Batch:
    """Items of which those that the index has keep their label and metadata."""
    if not any(item in known for item in batch.ids):
        return batch
    earlier = {item: index[item] for item in batch.ids if item in known}
    labels = [earlier[item].label if item in earlier else label for item, label in zip(batch.ids, batch.labels)]
    metadata = [
        as_metadata(earlier[item].metadata) if item in earlier else content
        for item, content in zip(batch.ids, batch.metadata)
    ]
    return batch._replace(labels=labels, metadata=metadata)
