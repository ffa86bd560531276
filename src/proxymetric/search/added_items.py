"""Items of an index that are no files of its folder: `index add-class` or Python code added them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from proxymetric.search.batches import Batch
from proxymetric.search.manifest import Manifest
from proxymetric.search.storage.state import State, batch_of, damaged_files, items_file

if TYPE_CHECKING:
    from proxymetric.search.stored_index import StoredIndex


def check_added(index: StoredIndex, model: str, ids: Sequence[str]) -> None:
    """Refuse to rebuild an index whose added items cannot stay.

    Args:
        index: the index.
        model: fingerprint of the model that makes the new vectors.
        ids: the items that are no files; none of them can be embedded again.

    Raises:
        ValueError: another model made their vectors, or these are damaged.
    """
    if not ids:
        return
    if model != index.model:
        label = index[ids[0]].label
        such = f"{ids[0]!r}" if label is None else f"{ids[0]!r} of the class {label!r}"
        raise ValueError(
            f"model: got the model {model[:12]}, but another one made the vectors of {index.folder}, which has "
            f"{_counted(len(ids))} without a file, such as {such}, that cannot be embedded again; expected the model "
            "of the index, or --drop-added to drop them (`proxymetric index add-class` adds photos again)"
        )
    if damaged := damaged_files(index.folder, index.manifest, derived=False):
        raise ValueError(_damaged(index.folder, damaged, ids))


def rescue_added(folder: Path, manifest: Manifest) -> list[Batch]:
    """Read the added items of an index that cannot be opened.

    Args:
        folder: the folder of the index.
        manifest: its manifest.

    Returns:
        One batch with them; nothing if there are none.

    Raises:
        ValueError: there are such items, or there may be, but files that hold them are damaged or missing.
    """
    if manifest.added == 0:
        return []
    try:
        items = State(folder, replace(manifest, derived={}, rows=0, pictures=0), is_checked=False)
        ids = sorted(row.id for row in items if not row.stamp)
    except (ValueError, OSError):
        count = _counted(manifest.added)
        raise ValueError(
            f"index: got {folder}, whose list of items ({items_file(manifest)}) cannot be read, and which has {count} "
            "without a file that cannot be embedded again; expected the file as it was, or --drop-added to drop these "
            "items (`proxymetric index add-class` adds photos again)"
        ) from None
    if damaged := damaged_files(folder, manifest, derived=False):
        raise ValueError(_damaged(folder, damaged, ids))
    return [batch_of(State(folder, replace(manifest, derived={}), is_checked=False), ids)]


def _damaged(folder: Path, damaged: Sequence[str], ids: Sequence[str]) -> str:
    return (
        f"index: got {folder}, where {', '.join(damaged)} is damaged or missing, and which has "
        f"{_counted(len(ids))} without a file, such as {ids[0]!r}, that cannot be embedded again; expected the files "
        "as they were, or --drop-added to drop these items (`proxymetric index add-class` adds photos again)"
    )


def _counted(number: int) -> str:
    return f"{number:,} item{'' if number == 1 else 's'}"
