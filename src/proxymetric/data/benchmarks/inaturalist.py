"""iNaturalist 2018 as a retrieval benchmark: plants and animals, split by species."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from proxymetric.data.benchmarks.lists import ListedImage, lines_of, make_image_set
from proxymetric.data.images import ImageSet

_LISTS = {"Inaturalist_train_set1.txt": False, "Inaturalist_test_set1.txt": True}
_FOLDER = "Inat_dataset_splits"


def matches(root: Path) -> bool:
    """Return whether `root` or `root/Inat_dataset_splits` has the two lists."""
    return _lists_of(root) is not None


def read(root: Path, complete: bool = True) -> ImageSet:
    """Read the species listed in `Inaturalist_train_set1.txt` and `Inaturalist_test_set1.txt` (Brown et al., 2020).

    The official set has 5,690 species with 325,846 images for training and 2,452 species with 136,093 images for the
    test, which together are the training and validation images of iNaturalist 2018. The lists are in `root` or
    `root/Inat_dataset_splits`. A line is the path of an image below `root`, such as
    `train_val2018/Aves/3305/0b1f.jpg`; the species is its folder, `Aves/3305`. If a label follows the path, the species
    is that label.

    Args:
        root: the folder.
        complete: whether every listed image must be a file.

    Raises:
        ValueError: a list is missing or damaged, or images are missing.
    """
    folder = _lists_of(root)
    if folder is None:
        raise ValueError(
            f"data: got {root}, expected the layout of iNaturalist's retrieval benchmark: {' and '.join(_LISTS)} in "
            f"this folder or in {_FOLDER}/, and train_val2018/"
        )
    rows = []
    for name, test in _LISTS.items():
        for line_number, words in lines_of(folder / name):
            path = PurePosixPath(words[0])
            if len(words) > 2 or len(path.parts) < 3:
                raise ValueError(
                    f"{folder / name}, line {line_number}: got {' '.join(words)!r}, expected a path such as "
                    "train_val2018/Aves/3305/0b1f.jpg"
                )
            species = words[1] if len(words) == 2 else "/".join(path.parts[-3:-1])
            rows.append(ListedImage(words[0], species, test))
    rows.sort(key=lambda row: (row.test, row.class_name))
    return make_image_set("inaturalist", rows, root, root, folder, complete)


def _lists_of(root: Path) -> Path | None:
    """Return the folder with both lists; None if there is none."""
    folders = (root, root / _FOLDER)
    return next((folder for folder in folders if all((folder / name).is_file() for name in _LISTS)), None)
