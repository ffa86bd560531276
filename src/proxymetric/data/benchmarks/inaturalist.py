"""iNaturalist 2018 as a retrieval benchmark: plants and animals, split by species."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from proxymetric.data.benchmarks.lists import Row, lines_of, listed
from proxymetric.data.images import ImageSet

_LISTS = {"Inaturalist_train_set1.txt": False, "Inaturalist_test_set1.txt": True}
_FOLDER = "Inat_dataset_splits"


def looks(root: Path) -> bool:
    """Whether `root` or its `Inat_dataset_splits/` holds the two lists."""
    return _lists_of(root) is not None


def read(root: Path) -> ImageSet:
    """The species listed by `Inaturalist_train_set1.txt` and `Inaturalist_test_set1.txt` (Brown et al., 2020).

    Officially 5,690 species with 325,846 images to train and 2,452 with 136,093 to test, together all that iNaturalist
    2018 has for training and validation. The lists lie in `root` or `root/Inat_dataset_splits`; a line is the path of
    an image below `root`, such as `train_val2018/Aves/3305/0b1f.jpg`, and the species is its folder, `Aves/3305`. A
    label may follow the path and is the species then.
    """
    folder = _lists_of(root)
    if folder is None:
        raise ValueError(
            f"{root} is not laid out as iNaturalist's retrieval benchmark. Looked for {' and '.join(_LISTS)}, in it or "
            f"in {_FOLDER}/, and train_val2018/"
        )
    rows = []
    for name, test in _LISTS.items():
        for at, words in lines_of(folder / name):
            path = PurePosixPath(words[0])
            if len(words) > 2 or len(path.parts) < 3:
                raise ValueError(
                    f"{folder / name}, line {at}: expected a path such as train_val2018/Aves/3305/0b1f.jpg, "
                    f"got {' '.join(words)!r}"
                )
            rows.append(Row(words[0], words[1] if len(words) == 2 else "/".join(path.parts[-3:-1]), test))
    rows.sort(key=lambda row: (row.test, row.kind))
    return listed("inaturalist", rows, root, root, folder)


def _lists_of(root: Path) -> Path | None:
    folders = (root, root / _FOLDER)
    return next((folder for folder in folders if all((folder / name).is_file() for name in _LISTS)), None)
