"""Remove classes and single images from an index."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from proxymetric.arguments.signatures import did_you_mean
from proxymetric.search.index import Index
from proxymetric.system.text import visible


def remove(index: Index, classes: Sequence[str] = (), ids: Sequence[str] = ()) -> list[str]:
    """Remove classes and single images from an index: all of them in one step, or none if there is a mistake.

    Args:
        index: the index.
        classes: classes whose images are removed.
        ids: images that are removed.

    Returns:
        The ids of the removed images, in the order of the index.

    Raises:
        ValueError: the index does not have a class or an id, there is nothing to remove, or no image would be left.

    Example:
        >>> import tempfile, torch
        >>> index = Index.create(Path(tempfile.mkdtemp()) / "birds", dim=2)
        >>> index.add(["a.jpg", "b.jpg", "c.jpg"], torch.rand(3, 2), labels=["wren", "wren", "owl"])
        >>> remove(index, classes=["wren"]), index.ids
        (['a.jpg', 'b.jpg'], ['c.jpg'])
    """
    if not classes and not ids:
        raise ValueError("remove: got no image and no class, expected ids of images, or --class NAME")
    known = index.classes
    for name in classes:
        if name not in known:
            raise ValueError(
                f"class: got {visible(name)!r}, expected one of the {len(known):,} classes of {index.folder}"
                f"{did_you_mean(name, known)}"
            )
    for item in ids:
        if item not in index:
            raise ValueError(
                f"id: got {visible(item)!r}, expected the id of an image in {index.folder}, as `search` prints it"
                f"{did_you_mean(item, index.ids)}"
            )
    unwanted = set(ids)
    labels = zip(index.ids, index.labels, strict=True)
    removed = [item for item, label in labels if item in unwanted or (label is not None and label in classes)]
    if len(removed) == len(index):
        raise ValueError(f"remove: got all {len(index):,} images of {index.folder}, expected some that stay")
    index.delete(removed)
    return removed


def still_there(index: Index, ids: Sequence[str]) -> int:
    """Count the removed images whose files still lie in the indexed folder: `proxymetric index` adds them again."""
    photos = index.manifest.photos
    return 0 if photos is None else sum((Path(photos) / item).is_file() for item in ids)
