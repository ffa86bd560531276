"""The benchmarks of the papers, in the form that their authors distribute or as plain class folders.

Test classes are not trained on, except in MNIST, whose official test has the same ten digits:

================================  ======================================  ========================================
set                               training                                test
================================  ======================================  ========================================
CUB-200-2011 (cub)                classes 1-100, 5,864 images             classes 101-200, 5,924 images
Cars196 (cars)                    classes 1-98, 8,054 images              classes 99-196, 8,131 images
Stanford Online Products (sop)    11,318 classes, 59,551 images           11,316 classes, 60,502 images
In-Shop (in-shop)                 3,997 classes, 25,882 images            3,985 classes: 14,218 queries, gallery of
                                                                          12,612 images
iNaturalist 2018 (inaturalist)    5,690 classes, 325,846 images           2,452 classes, 136,093 images
Omniglot (omniglot)               964 characters, 19,280 images           659 characters, 13,180 images
MNIST (mnist)                     60,000 images                           10,000 images
================================  ======================================  ========================================
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from proxymetric.data.benchmarks import cub_cars, in_shop, inaturalist, mnist, omniglot, products
from proxymetric.data.images import ImageSet


class Benchmark(NamedTuple):
    """How one benchmark is recognised and read."""

    matches: Callable[[Path], bool]
    """whether a folder has the layout of the benchmark"""
    read: Callable[..., ImageSet]
    """reads the images; raises a ValueError that says what is wrong with the folder"""
    folder_names: tuple[str, ...]
    """usual names of the benchmark's folder, which may be inside the folder that the user gives"""
    has_lists: bool = True
    """whether the images are listed, so that listed ones may be missing (argument `complete` of `read`)"""


BENCHMARKS = {
    "cub": Benchmark(partial(cub_cars.matches, layout="cub"), partial(cub_cars.read, layout="cub"), ("CUB_200_2011",)),
    "cars": Benchmark(partial(cub_cars.matches, layout="cars"), partial(cub_cars.read, layout="cars"), ("cars196",)),
    "sop": Benchmark(products.matches, products.read, ("Stanford_Online_Products",)),
    "in-shop": Benchmark(in_shop.matches, in_shop.read, ("In-shop Clothes Retrieval Benchmark", "In-Shop", "inshop")),
    "inaturalist": Benchmark(inaturalist.matches, inaturalist.read, ("iNaturalist", "Inaturalist", "inaturalist")),
    "omniglot": Benchmark(omniglot.matches, omniglot.read, ("omniglot", "omniglot-py"), has_lists=False),
    "mnist": Benchmark(mnist.matches, mnist.read, ("mnist", "MNIST"), has_lists=False),
}


def detect(root: Path) -> str | None:
    """Return the layout of the benchmark in `root`, or in a folder inside it with a usual name; None if there is none.

    Raises:
        ValueError: several benchmarks are inside `root`.
    """
    layout_of_root = next((layout for layout, benchmark in BENCHMARKS.items() if benchmark.matches(root)), None)
    if layout_of_root is not None:
        return layout_of_root
    folders_inside = {layout: folder for layout in BENCHMARKS if (folder := _folder_inside(root, layout)) is not None}
    if len(folders_inside) > 1:
        raise ValueError(
            f"data: got {root} with {' and '.join(folder.name for folder in folders_inside.values())} inside, expected "
            f"one of these folders, or {' or '.join(f'layout={layout!r}' for layout in folders_inside)}"
        )
    return next(iter(folders_inside), None)


def from_benchmark(root: Path, layout: str, complete: bool = True) -> ImageSet:
    """Read the benchmark `layout` from `root`, or from a folder inside it with a usual name.

    Args:
        root: the folder.
        layout: a key of `BENCHMARKS`.
        complete: whether every listed image must be a file.

    Raises:
        ValueError: the folder does not have this layout.
    """
    benchmark = BENCHMARKS[layout]
    read = partial(benchmark.read, complete=complete) if benchmark.has_lists else benchmark.read
    if benchmark.matches(root):
        return read(root)
    named_folder = next((root / name for name in benchmark.folder_names if (root / name).is_dir()), root)
    return read(_folder_inside(root, layout) or named_folder)


def _folder_inside(root: Path, layout: str) -> Path | None:
    """Return the folder inside `root` with a usual name and the layout of a benchmark; None if there is none."""
    benchmark = BENCHMARKS[layout]
    folders = (root / name for name in benchmark.folder_names)
    return next((folder for folder in folders if folder.is_dir() and benchmark.matches(folder)), None)
