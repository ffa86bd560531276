"""The picture of an index: bytes of a vector against what searches find."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from proxymetric.plots import write_small_vectors
from proxymetric.search.manifest import FILE as MANIFEST
from proxymetric.search.measuring import FIRST, Sample, drawn_rows, measure_sizes
from proxymetric.search.stored_index import StoredIndex

PICTURE = "vectors.png"
"""the file in the folder of an index"""


def draw_sizes(index: StoredIndex, nested: Sequence[int] = ()) -> Path | None:
    """Draw bytes of a vector against MAP@R (without labels, against recall@10) into the folder of an index.

    Vectors of 32 bits are measured with fewer bits too, and cut to the sizes that their model was trained for. Smaller
    ones were measured when they were made, while the 32-bit vectors still existed.

    Args:
        index: the index.
        nested: sizes that the model was trained for.

    Returns:
        The picture; None if there is nothing to draw, or the index has not changed since it was drawn.
    """
    file, manifest = index.folder / PICTURE, index.folder / MANIFEST
    for leftover in index.folder.glob(f".{PICTURE}.*.part"):  # of a process that was killed
        leftover.unlink(missing_ok=True)
    if not len(index) or (file.is_file() and file.stat().st_mtime_ns > manifest.stat().st_mtime_ns):
        return None
    if index.manifest.vectors["kind"] == "float32":
        rows, labels = drawn_rows(len(index)), index.labels
        dims = [*(size for size in nested if size < index.dim), index.dim]
        records = measure_sizes(Sample(index.vectors[rows], [labels[row] for row in rows]), dims)
    else:
        records = index.manifest.vectors.get("lost", {}).get("sizes", [])
    if not records:
        return None
    has_labels = all("MAP@R" in each["scores"] for each in records)
    return write_small_vectors(file, records, "MAP@R" if has_labels else f"recall@{FIRST}")
