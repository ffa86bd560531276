"""Items with their vectors in a Parquet file (needs the extra `parquet`): for any other database, and back again."""

from __future__ import annotations

import importlib.util
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from proxymetric.search.batches import Batch, new_items, unit_rows
from proxymetric.search.stored_index import StoredIndex
from proxymetric.system.files import check_output, replacing

ROWS_PER_GROUP = 8_192
MAGIC = b"PAR1"
MODEL, FACTS = b"model", b"proxymetric"
"""keys of the metadata of a file: the fingerprint of the model, and what else `Facts` says"""
UNIT_TOLERANCE = 1e-5
"""how much the length of a vector may differ from 1 by rounding; those of 8-bit numbers differ more"""

DAMAGES = (ValueError, TypeError, KeyError, AttributeError, OSError)
"""what the reading of a damaged file raises beside the exceptions of pyarrow"""


class DamagedParquet(ValueError):
    """A Parquet file is not what was written, or something else wrote it."""


@dataclass(frozen=True)
class Facts:
    """What a Parquet file says about its items.

    Args:
        model: fingerprint of the model that made the vectors; empty if unknown.
        dim: dimensions of the vectors.
        source: where that model lies, see `Manifest.run`.
        photos: the folder of the images; None if there is none.
        layout: which of its folders are classes, see `class_rule`.
        listing: digest of the paths of all images, see `embedding_blocks`; empty for the items of an index.
        images: number of images of the listing.
        block_images: images of a block.
        block: number of this block.
        blocks: number of blocks.
        rows: number of items of this file.
        unreadable: images of the block that cannot be read: id -> stamp and reason.
    """

    model: str
    dim: int
    source: Mapping[str, str] = field(default_factory=dict)
    photos: str | None = None
    layout: str = "auto"
    listing: str = ""
    images: int = 0
    block_images: int = 0
    block: int = 0
    blocks: int = 1
    rows: int = 0
    unreadable: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def origin(self) -> tuple[Any, ...]:
        """What all blocks of a folder have in common."""
        return self.model, self.dim, self.listing, self.images, self.block_images, self.blocks


def check_pyarrow() -> None:
    """Refuse, before any work, to read or write Parquet files without pyarrow.

    Raises:
        ValueError: pyarrow is not installed.
    """
    if importlib.util.find_spec("pyarrow") is None:
        raise ValueError(
            "parquet: pyarrow is not installed; expected the extra `parquet`: pip install 'proxymetric[parquet]'"
        )


def check_parquet(file: str | Path) -> Path:
    """Check, before any work, that a Parquet file can be written.

    Raises:
        ValueError: pyarrow is not installed, or the file is something else.
    """
    check_pyarrow()
    return check_output("--parquet", Path(file), "a Parquet file", _is_parquet)


def write_parquet(index: StoredIndex, file: str | Path) -> Path:
    """Write all items of an index, some rows at a time, in the columns of `write_items`.

    Args:
        index: the index.
        file: the file; an earlier Parquet file is replaced, any other file is kept.

    Returns:
        The file; `Index.from_parquet` reads it.

    Raises:
        ValueError: the file exists and is not Parquet, or pyarrow is not installed.
    """
    target, manifest, ids = check_parquet(file), index.manifest, index.ids
    facts = Facts(index.model, index.dim, manifest.run, manifest.photos, manifest.layout, rows=len(ids))
    parts = (index.batch(ids[start : start + ROWS_PER_GROUP]) for start in range(0, len(ids), ROWS_PER_GROUP))
    return write_items(target, facts, parts)


def write_items(file: Path, facts: Facts, parts: Iterable[Batch]) -> Path:
    """Write items atomically.

    The columns are `id`, `class`, `metadata` (JSON), `stamp` (size and time of the image file; empty for what is no
    file), `vector` (float32, of unit length) and `thumbnail` (JPEG). Every page of a column has a checksum.

    Args:
        file: the file; an earlier one is replaced.
        facts: what it says about its items.
        parts: the items.

    Returns:
        The file.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema(
        [
            pa.field("id", pa.string(), nullable=False),
            pa.field("class", pa.string()),
            pa.field("metadata", pa.string(), nullable=False),
            pa.field("stamp", pa.string(), nullable=False),
            pa.field("vector", pa.list_(pa.float32(), facts.dim), nullable=False),
            pa.field("thumbnail", pa.binary()),
        ],
        metadata={MODEL: facts.model.encode(), FACTS: _sealed(facts)},
    )
    # Texts that recur are kept once; the least and the greatest thumbnail would be written three times.
    texts = {"use_dictionary": ["class", "metadata"], "write_statistics": ["id", "class"]}
    with replacing(file) as temporary, pq.ParquetWriter(temporary, schema, write_page_checksum=True, **texts) as writer:
        for part in parts:
            numbers = np.ascontiguousarray(part.vectors, dtype=np.float32).reshape(-1)
            columns = [
                pa.array(part.ids, pa.string()),
                pa.array(part.labels, pa.string()),
                pa.array(part.metadata, pa.string()),
                pa.array(part.stamps, pa.string()),
                pa.FixedSizeListArray.from_arrays(pa.array(numbers, pa.float32()), facts.dim),
                pa.array(part.thumbnails, pa.binary()),
            ]
            writer.write_batch(pa.record_batch(columns, schema=schema))
    return file


def read_facts(file: Path) -> Facts:
    """Read what a Parquet file says about its items, without reading the items.

    Raises:
        DamagedParquet: it is damaged, or no file of `proxymetric`.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file) as opened:
            metadata = opened.schema_arrow.metadata or {}
            facts = _unsealed(metadata.get(FACTS, b""))
            if metadata.get(MODEL, b"").decode() != facts.model or opened.metadata.num_rows != facts.rows:
                raise ValueError("its footer contradicts itself")
            return facts
    except (pa.ArrowException, *DAMAGES) as error:
        raise _damaged(file, error) from None


def read_items(file: Path, facts: Facts) -> Iterator[Batch]:
    """Read the items of a Parquet file, some at a time; they are compared with their checksums.

    Args:
        file: the file.
        facts: what `read_facts` returned for it.

    Raises:
        DamagedParquet: it is damaged, or its items cannot be those of an index.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    count = 0
    try:
        with pq.ParquetFile(file, page_checksum_verification=True) as opened:
            for part in opened.iter_batches(ROWS_PER_GROUP, use_threads=False):
                vectors = _vectors(part.column("vector"), facts.dim)
                batch = _batch_of(part.drop_columns(["vector"]).to_pydict(), vectors)
                count += len(batch.ids)
                yield batch
        if count != facts.rows:
            raise ValueError(f"it has {count:,} items, expected {facts.rows:,}")
    except (pa.ArrowException, *DAMAGES) as error:
        raise _damaged(file, error) from None


def read_stamps(file: Path, facts: Facts, *, verify: bool = False) -> dict[str, str]:
    """Read the ids of the items of a Parquet file with their stamps.

    Args:
        file: the file.
        facts: what `read_facts` returned for it.
        verify: read the other columns too, and compare them with their checksums.

    Raises:
        DamagedParquet: it is damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    stamps: dict[str, str] = {}
    names = ["id", "stamp"]
    try:
        with pq.ParquetFile(file, page_checksum_verification=True) as opened:
            for part in opened.iter_batches(ROWS_PER_GROUP, columns=None if verify else names, use_threads=False):
                stamps.update(zip(*(part.column(name).to_pylist() for name in names), strict=True))
        if len(stamps) != facts.rows:
            raise ValueError(f"it has {len(stamps):,} items, expected {facts.rows:,}")
    except (pa.ArrowException, *DAMAGES) as error:
        raise _damaged(file, error) from None
    return stamps


def _vectors(column: Any, dim: int) -> np.ndarray:
    """The vectors with the bits that they have, apart from those that have not the length 1."""
    vectors: np.ndarray = column.flatten().to_numpy(zero_copy_only=False).reshape(len(column), dim).copy()
    others = ~np.isclose(np.linalg.norm(vectors, axis=1), 1, rtol=0, atol=UNIT_TOLERANCE)
    vectors[others] = unit_rows(torch.from_numpy(vectors[others]))
    return vectors


def _batch_of(columns: Mapping[str, Any], vectors: np.ndarray) -> Batch:
    """The items of columns, checked as new items are; the bits of the vectors stay as they were."""
    metadata = [json.loads(content) for content in columns["metadata"]]
    dim, ids = vectors.shape[1], columns["id"]
    batch = new_items(dim, ids, torch.from_numpy(vectors), columns["class"], metadata, columns["thumbnail"])
    return batch._replace(vectors=vectors, stamps=[str(stamp) for stamp in columns["stamp"]])


def _sealed(facts: Facts) -> bytes:
    """Facts as JSON behind their CRC-32: a footer has no checksum of its own."""
    content = json.dumps(asdict(facts), sort_keys=True).encode()
    return b"%08x %s" % (zlib.crc32(content), content)


def _unsealed(content: bytes) -> Facts:
    if not content:
        raise ValueError("`embed --parquet` or `index --parquet` did not write it")
    crc, _, text = content.partition(b" ")
    if crc != b"%08x" % zlib.crc32(text):
        raise ValueError("its footer is not what was written")
    return Facts(**json.loads(text))


def _damaged(file: Path, error: Exception) -> DamagedParquet:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return DamagedParquet(
        f"parquet: got {file}, which is damaged or another kind of file ({reason}); expected a file that `proxymetric "
        "embed --parquet` or `proxymetric index --parquet` wrote"
    )


def _is_parquet(file: Path) -> bool:
    with open(file, "rb") as opened:
        return opened.read(4) == MAGIC
