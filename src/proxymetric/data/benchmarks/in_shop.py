"""In-Shop Clothes Retrieval, a part of DeepFashion: photographs of clothes, with queries and a gallery."""

from __future__ import annotations

from pathlib import Path

from proxymetric.data.benchmarks.lists import ListedImage, lines_of, make_image_set
from proxymetric.data.images import ImageSet

_LIST = "list_eval_partition.txt"
_HEADER = ["image_name", "item_id", "evaluation_status"]
_STATUSES = ("train", "query", "gallery")


def matches(root: Path) -> bool:
    """Return whether `root` or `root/Eval` has the list of this benchmark.

    Other parts of DeepFashion, and CelebA, have lists of the same name, so the header is also compared.
    """
    file = _list_of(root)
    if file is None:
        return False
    with file.open(encoding="utf-8-sig", errors="replace") as lines:
        return [line.split() for _, line in zip(range(2), lines)][1:] == [_HEADER]


def read(root: Path, complete: bool = True) -> ImageSet:
    """Read the clothes listed in `list_eval_partition.txt`, in `root` or `root/Eval`.

    The official set has 3,997 items with 25,882 images for training, and 3,985 items for the test, with 14,218 queries
    and a gallery of 12,612 images; `gallery` distinguishes the two. The list begins with the number of images and the
    header `image_name item_id evaluation_status`. Images are in `root` or `root/Img` under the listed names, such as
    `img/WOMEN/Dresses/id_00000002/02_1_front.jpg`. Classes are sorted by item.

    Args:
        root: the folder.
        complete: whether every listed image must be a file.

    Raises:
        ValueError: the list is missing or incomplete, or images are missing.
    """
    file = _list_of(root)
    if file is None:
        raise ValueError(
            f"data: got {root}, expected the layout of In-Shop: {_LIST} or Eval/{_LIST}, and img/ or Img/img/"
        )
    lines = lines_of(file)
    if len(lines) < 2 or lines[1][1] != _HEADER:
        header = " ".join(lines[1][1]) if len(lines) > 1 else ""
        raise ValueError(
            f"{file}, line 2: got {header!r}, expected the header {' '.join(_HEADER)!r}; lists of other benchmarks "
            "have the same name"
        )
    rows = []
    for line_number, words in lines[2:]:
        if len(words) != len(_HEADER) or words[2] not in _STATUSES:
            raise ValueError(
                f"{file}, line {line_number}: got {' '.join(words)!r}, expected an image, an item and one of "
                f"{', '.join(_STATUSES)}"
            )
        rows.append(ListedImage(words[0], words[1], test=words[2] != "train", gallery=words[2] == "gallery"))
    stated_count = lines[0][1][0]
    if stated_count != str(len(rows)):
        raise ValueError(f"{file}: got {len(rows)} images, expected {stated_count} as on line 1; is the file complete?")
    for status, gallery in (("query", False), ("gallery", True)):
        if not any(row.test and row.gallery == gallery for row in rows):
            raise ValueError(f"{file}: got no images with the status {status}, expected at least one")
    rows.sort(key=lambda row: row.class_name)
    images = root / "Img" if not (root / rows[0].file).exists() and (root / "Img").is_dir() else root
    return make_image_set("in-shop", rows, root, images, file, complete)


def _list_of(root: Path) -> Path | None:
    """Return the list in `root` or `root/Eval`; None if there is none."""
    return next((file for file in (root / _LIST, root / "Eval" / _LIST) if file.is_file()), None)
