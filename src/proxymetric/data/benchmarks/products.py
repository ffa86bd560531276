"""Stanford Online Products: photographs of products for sale."""

from __future__ import annotations

from pathlib import Path

from proxymetric.data.benchmarks.lists import ListedImage, lines_of, make_image_set
from proxymetric.data.images import ImageSet

_LISTS = {"Ebay_train.txt": False, "Ebay_test.txt": True}
_HEADER = ["image_id", "class_id", "super_class_id", "path"]


def matches(root: Path) -> bool:
    """Return whether `root` has the two lists."""
    return all((root / name).is_file() for name in _LISTS)


def read(root: Path, complete: bool = True) -> ImageSet:
    """Read the products listed in `Ebay_train.txt` and `Ebay_test.txt` in `root`; the photographs are in `root` too.

    The official set has 11,318 classes with 59,551 images for training and 11,316 classes with 60,502 images for the
    test. A list has the header `image_id class_id super_class_id path` and one line for each image, with a path such as
    `bicycle_final/111085122871_0.JPG`. The name of a class is its category and its number, `bicycle 1`.

    Args:
        root: the folder.
        complete: whether every listed image must be a file.

    Raises:
        ValueError: a list is missing or damaged, or images are missing.
    """
    if not matches(root):
        raise ValueError(
            f"data: got {root}, expected the layout of Stanford_Online_Products: {' and '.join(_LISTS)}, and folders "
            "such as bicycle_final/"
        )
    numbered_images: list[tuple[int, ListedImage]] = []
    names: dict[int, str] = {}
    for name, test in _LISTS.items():
        lines = lines_of(root / name)
        if not lines or lines[0][1] != _HEADER:
            header = " ".join(lines[0][1]) if lines else ""
            raise ValueError(f"{root / name}, line 1: got {header!r}, expected the header {' '.join(_HEADER)!r}")
        for line_number, words in lines[1:]:
            if len(words) != len(_HEADER) or not words[1].isdigit():
                raise ValueError(
                    f"{root / name}, line {line_number}: got {' '.join(words)!r}, expected {' '.join(_HEADER)!r}"
                )
            number = int(words[1])
            category = Path(words[3]).parent.name.removesuffix("_final")
            numbered_images.append(
                (number, ListedImage(words[3], names.setdefault(number, f"{category} {number}"), test))
            )
    numbered_images.sort(key=lambda row: row[0])
    return make_image_set("sop", [row for _, row in numbered_images], root, root, root, complete)
