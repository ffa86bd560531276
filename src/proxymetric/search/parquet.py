"""The items and vectors of an index as a Parquet file (needs the extra `parquet`), for any other database."""

from __future__ import annotations

import importlib.util
import itertools
import json
from pathlib import Path

import numpy as np

from proxymetric.search.stored_index import StoredIndex
from proxymetric.system.files import check_output, replacing

ROWS_PER_GROUP = 8_192
MAGIC = b"PAR1"


def check_parquet(file: str | Path) -> Path:
    """Check, before any work, that a Parquet file can be written.

    Raises:
        ValueError: pyarrow is not installed, or the file is something else.
    """
    if importlib.util.find_spec("pyarrow") is None:
        raise ValueError(
            "parquet: pyarrow is not installed; expected the extra `parquet`: pip install 'proxymetric[parquet]'"
        )
    return check_output("--parquet", Path(file), "a Parquet file", _is_parquet)


def write_parquet(index: StoredIndex, file: str | Path) -> Path:
    """Write the columns `id`, `class`, `metadata` (JSON) and `vector` (float32, of unit length), some rows at a time.

    Args:
        index: the index.
        file: the file; an earlier Parquet file is replaced, any other file is kept.

    Returns:
        The file.

    Raises:
        ValueError: the file exists and is not Parquet, or pyarrow is not installed.
    """
    target = check_parquet(file)
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema(
        [
            pa.field("id", pa.string(), nullable=False),
            pa.field("class", pa.string()),
            pa.field("metadata", pa.string(), nullable=False),
            pa.field("vector", pa.list_(pa.float32(), index.dim), nullable=False),
        ],
        metadata={"model": index.model},
    )
    with replacing(target) as temporary, pq.ParquetWriter(temporary, schema) as writer:
        remaining = index.items()
        while items := list(itertools.islice(remaining, ROWS_PER_GROUP)):
            rows = slice(items[0].row, items[-1].row + 1)
            numbers = np.ascontiguousarray(index.vectors[rows].numpy()).reshape(-1)
            columns = [
                pa.array([item.id for item in items], pa.string()),
                pa.array([item.label for item in items], pa.string()),
                pa.array([json.dumps(item.metadata, ensure_ascii=False) for item in items], pa.string()),
                pa.FixedSizeListArray.from_arrays(pa.array(numbers, pa.float32()), index.dim),
            ]
            writer.write_batch(pa.record_batch(columns, schema=schema))
    return target


def _is_parquet(file: Path) -> bool:
    with open(file, "rb") as opened:
        return opened.read(4) == MAGIC
