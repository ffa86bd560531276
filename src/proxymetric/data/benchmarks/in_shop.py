"""In-Shop Clothes Retrieval, of DeepFashion: clothes worn by models, queries looked for in a gallery."""

from __future__ import annotations

from pathlib import Path

from proxymetric.data.benchmarks.lists import Row, lines_of, listed
from proxymetric.data.images import ImageSet

_LIST = "list_eval_partition.txt"
_HEADER = ["image_name", "item_id", "evaluation_status"]
_STATUS = ("train", "query", "gallery")


def looks(root: Path) -> bool:
    """Whether `root` or its `Eval/` holds this benchmark's list (others of DeepFashion, and CelebA, share its name)."""
    file = _list_of(root)
    if file is None:
        return False
    with file.open(encoding="utf-8-sig", errors="replace") as lines:
        return [line.split() for _, line in zip(range(2), lines)][1:] == [_HEADER]


def read(root: Path) -> ImageSet:
    """The clothes listed by `list_eval_partition.txt`, in `root` or `root/Eval`.

    Officially 3,997 items with 25,882 images to train; for the test 3,985 items, 14,218 queries that are looked for
    among 12,612 images of the gallery: `gallery` says which is which. The list begins with the number of images and
    the header `image_name item_id evaluation_status`; images lie in `root` or `root/Img` under the listed names, such
    as `img/WOMEN/Dresses/id_00000002/02_1_front.jpg`. Classes are sorted by item.
    """
    file = _list_of(root)
    if file is None:
        raise ValueError(f"{root} is not laid out as In-Shop. Looked for {_LIST} or Eval/{_LIST}, and img/ or Img/img/")
    lines = lines_of(file)
    if len(lines) < 2 or lines[1][1] != _HEADER:
        got = " ".join(lines[1][1]) if len(lines) > 1 else ""
        raise ValueError(
            f"{file}: expected the header {' '.join(_HEADER)!r} on line 2, got {got!r}; lists of other benchmarks have "
            "the same name"
        )
    rows = []
    for at, words in lines[2:]:
        if len(words) != len(_HEADER) or words[2] not in _STATUS:
            raise ValueError(
                f"{file}, line {at}: expected an image, an item and one of {', '.join(_STATUS)}, "
                f"got {' '.join(words)!r}"
            )
        rows.append(Row(words[0], words[1], test=words[2] != "train", gallery=words[2] == "gallery"))
    said = lines[0][1][0]
    if said != str(len(rows)):
        raise ValueError(f"{file} announces {said} images on line 1 and lists {len(rows)}; is the file complete?")
    for what, gallery in (("query", False), ("gallery", True)):
        if not any(row.test and row.gallery == gallery for row in rows):
            raise ValueError(f"{file} lists no image of the {what}")
    rows.sort(key=lambda row: row.kind)
    images = root / "Img" if not (root / rows[0].file).exists() and (root / "Img").is_dir() else root
    return listed("in-shop", rows, root, images, file)


def _list_of(root: Path) -> Path | None:
    return next((file for file in (root / _LIST, root / "Eval" / _LIST) if file.is_file()), None)
