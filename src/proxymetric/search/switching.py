"""Put an index that was built beside another one in its place, and go back."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import uuid
from pathlib import Path

from proxymetric.search.batches import as_metadata
from proxymetric.search.index import Index
from proxymetric.search.manifest import sync_folder
from proxymetric.search.storage.changes import Edit
from proxymetric.system.text import visible

AT_FDCWD, EXCHANGE = -100, 2
"""of renameat2 on Linux; renamex_np on macOS has the same number for an exchange"""


def switch(folder: str | Path, other: str | Path, *, drop_missing: bool = False) -> Index:
    """Exchange the names of two indexes in one step, such as after another model has embedded the same images.

    The classes and the metadata of the index in use go with its name: they are written to the other one first. Called
    again, it goes back. A service follows; each of its answers is from one of the two.

    Args:
        folder: the index that is in use.
        other: the index that takes its name; then it has the name `other`.
        drop_missing: items that the other index lacks drop out.

    Returns:
        The index that has the name `folder` now.

    Raises:
        ValueError: the other index lacks items, a folder is not an index or is being changed, or the system cannot
            exchange two folders.

    Example:
        >>> import tempfile, torch
        >>> place = Path(tempfile.mkdtemp())
        >>> for name, model in (("shop.index", "before"), ("new.index", "after")):
        ...     index = Index.create(place / name, dim=2, model=model)
        ...     index.add(["a"], torch.ones(1, 2), metadata=[{"model": model}])
        >>> index = switch(place / "shop.index", place / "new.index")                      # doctest: +SKIP
        >>> index.model, index["a"].metadata                                               # doctest: +SKIP
        ('after', {'model': 'before'})
    """
    used, beside = Index(folder), Index(other)
    if os.path.samefile(used.folder, beside.folder):
        raise ValueError(f"other: got {beside.folder}, which is the index itself; expected another one")
    with used.writing(), beside.writing():
        missing = [item for item in used.ids if item not in beside]
        if missing and not drop_missing:
            raise ValueError(
                f"other: got {beside.folder}, which lacks {len(missing):,} of the {len(used):,} items of "
                f"{used.folder}, such as {visible(missing[0])!r}; expected all of them, or --drop-missing"
            )
        edits = {}
        for item in (item for item in used.items() if item.id in beside):
            before = beside[item.id]
            if (item.label, item.metadata) != (before.label, before.metadata):
                edits[item.id] = Edit(item.label, as_metadata(item.metadata))
        # Of a copy that has changed since, files of the same name differ: readers must see another index.
        is_copy = beside.manifest.identity == used.manifest.identity
        if edits or is_copy:
            identity = uuid.uuid4().hex if is_copy else beside.manifest.identity
            beside.change(edits=edits, identity=identity)
        _exchange(used.folder, beside.folder)
    return Index(folder)


def _exchange(first: Path, second: Path) -> None:
    """Exchange the names of two folders in one step."""
    try:
        library = ctypes.CDLL(None, use_errno=True)
        names = os.fsencode(first.absolute()), os.fsencode(second.absolute())
        if sys.platform == "darwin":
            failed = library.renamex_np(*names, EXCHANGE)
        else:
            failed = library.renameat2(AT_FDCWD, names[0], AT_FDCWD, names[1], EXCHANGE)
    except (AttributeError, TypeError):  # another system
        failed = -1
        ctypes.set_errno(errno.ENOSYS)
    if failed:
        raise ValueError(
            f"other: got {second}, whose name cannot be exchanged with that of {first} "
            f"({os.strerror(ctypes.get_errno())}); expected both on one local disk"
        )
    for folder in {first.absolute().parent, second.absolute().parent}:
        sync_folder(folder)
