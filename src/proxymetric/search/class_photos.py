"""Add a class to an index from a few photos."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from proxymetric.data.decoding import BadImage, read_image
from proxymetric.data.folders import ENDINGS
from proxymetric.search.folder_sync import batch_of, photo_id, thumbnail_of
from proxymetric.search.index import Index
from proxymetric.search.items import Embedder
from proxymetric.system.files import printable
from proxymetric.system.text import visible

ADDED = "added:"
"""how the id of a photo from elsewhere begins, so that it is not the id of a file of the folder"""


def add_class(index: Index, model: Embedder, name: str, images: Sequence[Path]) -> list[str]:
    """Add photos of a class to an index: all of them in one step, or none if there is a mistake.

    The id of a photo is its path in the folder that was indexed; for a photo that lies elsewhere, `added:`, the class
    and the name of the file.

    Args:
        index: the index; the class may be new, or get more photos.
        model: the model that made its vectors.
        name: the class.
        images: image files.

    Returns:
        The ids.

    Raises:
        ValueError: `check_name` refuses the name, the index has one of the ids already, or another model made its
            vectors.
        BadImage: a photo cannot be read.
    """
    check_name(name)
    if not images:
        raise ValueError("images: got none, expected at least one image of the class")
    index.check_model(model)
    ids = [_id(index, name, photo) for photo in images]
    for item, photo in zip(ids, images, strict=True):
        if ids.count(item) > 1:
            raise ValueError(f"images: got {visible(str(photo))} and another file for the id {item!r}, expected one")
    if known := [item for item in ids if item in index]:
        raise ValueError(
            f"images: got {', '.join(repr(item) for item in known[:5])}{', ...' if len(known) > 5 else ''}, which the "
            "index has already; expected new images"
        )
    vectors: list[Tensor] = []
    thumbnails: dict[int, bytes] = {}

    def keep_thumbnail(row: int, image: Image.Image) -> None:
        thumbnails[row] = thumbnail_of(image)

    with contextlib.closing(model.parts(list(images), batch=batch_of(model), on_image=keep_thumbnail)) as parts:
        for part in parts:
            for error in part.bad.values():
                raise error
            vectors.append(part.vectors)
    pictures = [thumbnails[row] for row in range(len(ids))]
    index.add(ids, torch.cat(vectors), labels=[name] * len(ids), thumbnails=pictures)
    return ids


def check_name(name: str) -> None:
    """Refuse what is not the name of a class.

    Raises:
        ValueError: it is empty, cannot be printed, or is an image file: the name was forgotten.
    """
    if not name.strip() or not name.isprintable():
        raise ValueError(f"name: got {visible(name)!r}, expected the name of a class, of printable characters")
    if name.lower().endswith(ENDINGS) and Path(name).is_file():
        raise ValueError(
            f"name: got {name!r}, which is an image file; expected the name of the class, and then its images; the "
            "order is: index add-class INDEX NAME IMAGE"
        )


def id_of(index: Index, photo: Path) -> str | None:
    """The id of an image file in an index; None for an image that lies elsewhere and was not added.

    A file of the indexed folder has its id even if it came later than the index. A photo that `add_class` added from
    elsewhere is recognised by its name and its thumbnail.
    """
    if (item := _id_in_folder(index, photo)) is not None:
        return item
    ending = visible(printable(f"/{photo.name}"))
    candidates = [item for item in index.added if item.startswith(ADDED) and item.endswith(ending)]
    if not candidates:
        return None
    try:
        thumbnail = thumbnail_of(read_image(photo, str(photo)))
    except BadImage:
        return None
    return next((item for item in candidates if index.thumbnail(item) == thumbnail), None)


def _id(index: Index, name: str, photo: Path) -> str:
    """The id of a photo that is to be added."""
    return _id_in_folder(index, photo) or visible(printable(f"{ADDED}{name}/{photo.name}"))


def _id_in_folder(index: Index, photo: Path) -> str | None:
    """The path of a photo in the folder that was indexed; None if it lies elsewhere."""
    folder = index.manifest.photos
    try:
        return None if folder is None else photo_id(photo.resolve(), Path(folder))
    except ValueError:
        return None
