"""Stanford Online Products: photographs of things for sale."""

from __future__ import annotations

from pathlib import Path

from proxymetric.data.benchmarks.lists import Row, lines_of, listed
from proxymetric.data.images import ImageSet

_LISTS = {"Ebay_train.txt": False, "Ebay_test.txt": True}
_HEADER = ["image_id", "class_id", "super_class_id", "path"]


def looks(root: Path) -> bool:
    """Whether `root` holds the two lists."""
    return all((root / name).is_file() for name in _LISTS)


def read(root: Path) -> ImageSet:
    """The products listed by `Ebay_train.txt` and `Ebay_test.txt` in `root`, with their photographs beside them.

    Officially 11,318 classes and 59,551 images to train, 11,316 classes and 60,502 images to test. Lines are
    `image_id class_id super_class_id path` under that header, paths such as `bicycle_final/111085122871_0.JPG`; a
    class is called by the kind of thing and its number, `bicycle 1`.
    """
    if not looks(root):
        raise ValueError(
            f"{root} is not laid out as Stanford_Online_Products. Looked for {' and '.join(_LISTS)}, and folders such "
            "as bicycle_final/"
        )
    numbered: list[tuple[int, Row]] = []
    names: dict[int, str] = {}
    for name, test in _LISTS.items():
        lines = lines_of(root / name)
        if not lines or lines[0][1] != _HEADER:
            got = " ".join(lines[0][1]) if lines else ""
            raise ValueError(f"{root / name}: expected the header {' '.join(_HEADER)!r} on line 1, got {got!r}")
        for at, words in lines[1:]:
            if len(words) != len(_HEADER) or not words[1].isdigit():
                raise ValueError(f"{root / name}, line {at}: expected {' '.join(_HEADER)!r}, got {' '.join(words)!r}")
            number, thing = int(words[1]), Path(words[3]).parent.name.removesuffix("_final")
            numbered.append((number, Row(words[3], names.setdefault(number, f"{thing} {number}"), test)))
    numbered.sort(key=lambda row: row[0])
    return listed("sop", [row for _, row in numbered], root, root, root)
