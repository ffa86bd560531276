"""The benchmarks of the papers, as their authors ship them or as plain class folders.

Classes of the test are never trained on, except MNIST's, whose official test has the same ten digits:

================================  ======================================  ========================================
set                               training                                test
================================  ======================================  ========================================
CUB-200-2011 (cub)                classes 1-100, 5,864 images             classes 101-200, 5,924 images
Cars196 (cars)                    classes 1-98, 8,054 images              classes 99-196, 8,131 images
Stanford Online Products (sop)    11,318 classes, 59,551 images           11,316 classes, 60,502 images
In-Shop (in-shop)                 3,997 classes, 25,882 images            3,985 classes: 14,218 queries are looked
                                                                          for in a gallery of 12,612 images
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

    looks: Callable[[Path], bool]
    """whether a folder is laid out like it"""
    read: Callable[[Path], ImageSet]
    """its images; a ValueError says what is wrong with the folder"""
    inside: tuple[str, ...]
    """names under which its folder often lies in the folder that people give"""


BENCHMARKS = {
    "cub": Benchmark(partial(cub_cars.looks, layout="cub"), partial(cub_cars.read, layout="cub"), ("CUB_200_2011",)),
    "cars": Benchmark(partial(cub_cars.looks, layout="cars"), partial(cub_cars.read, layout="cars"), ("cars196",)),
    "sop": Benchmark(products.looks, products.read, ("Stanford_Online_Products",)),
    "in-shop": Benchmark(in_shop.looks, in_shop.read, ("In-shop Clothes Retrieval Benchmark", "In-Shop", "inshop")),
    "inaturalist": Benchmark(inaturalist.looks, inaturalist.read, ("iNaturalist", "Inaturalist", "inaturalist")),
    "omniglot": Benchmark(omniglot.looks, omniglot.read, ("omniglot", "omniglot-py")),
    "mnist": Benchmark(mnist.looks, mnist.read, ("mnist", "MNIST")),
}


def detect(root: Path) -> str | None:
    """The benchmark that `root`, or a folder inside it with a benchmark's usual name, is laid out like, or None."""
    here = next((layout for layout, benchmark in BENCHMARKS.items() if benchmark.looks(root)), None)
    if here is not None:
        return here
    inside = {layout: folder for layout in BENCHMARKS if (folder := _inside(root, layout)) is not None}
    if len(inside) > 1:
        raise ValueError(
            f"{root} holds {'both ' if len(inside) == 2 else ''}{' and '.join(f.name for f in inside.values())}; say "
            f"which with {' or '.join(f'layout={layout!r}' for layout in inside)}, or give the folder inside"
        )
    return next(iter(inside), None)


def from_benchmark(root: Path, layout: str) -> ImageSet:
    """The benchmark `layout` in `root`, or in a folder inside it with the benchmark's usual name."""
    benchmark = BENCHMARKS[layout]
    if benchmark.looks(root):
        return benchmark.read(root)
    named = next((root / name for name in benchmark.inside if (root / name).is_dir()), root)
    return benchmark.read(_inside(root, layout) or named)


def _inside(root: Path, layout: str) -> Path | None:
    benchmark = BENCHMARKS[layout]
    folders = (root / name for name in benchmark.inside)
    return next((folder for folder in folders if folder.is_dir() and benchmark.looks(folder)), None)
