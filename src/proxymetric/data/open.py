"""Opening of image sets: embedded sets, folders, CSV files, packs, benchmarks and data sets of Hugging Face."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from proxymetric.arguments.signatures import did_you_mean, neighbour, one_of
from proxymetric.data.benchmarks import BENCHMARKS, detect, from_benchmark
from proxymetric.data.csv_files import from_csv
from proxymetric.data.decoding import max_pixels
from proxymetric.data.digits import digits
from proxymetric.data.folders import class_folders, first_names, from_folder
from proxymetric.data.glyphs import glyphs
from proxymetric.data.hugging_face import from_hugging_face, is_hugging_face
from proxymetric.data.images import ImageSet
from proxymetric.data.packs import from_pack

EMBEDDED: dict[str, Callable[[], ImageSet]] = {"glyphs": glyphs, "digits": digits}
GLYPHS = re.compile(r"glyphs:(\d+)")
"""the name of a drawn set with a number of characters"""
FILES = (".csv", ".npz")
LAYOUTS = ("auto", "folder", "nested", "csv", *BENCHMARKS)


def open_data(source: str | Path, layout: str = "auto") -> ImageSet:
    """Open the labelled images at `source`.

    Args:
        source: "glyphs" or "digits" (embedded, nothing is downloaded; "glyphs:60" has 60 characters), a folder, or a
            .csv file, or a pack (.npz, `data.packs`). Write "./glyphs" for a folder of your own with this name.
            "hf:PLACE" is a folder that Hugging Face's `save_to_disk` wrote, or a name on its hub
            (`data.hugging_face`; needs the extra `hf`).
        layout: "folder" (one folder per class, with images at any depth), "nested" (one class for each folder that
            holds images itself), "csv" (columns file and class), or a benchmark in the form that its authors
            distribute: "cub" (CUB-200-2011), "cars" (Cars196), "sop" (Stanford Online Products), "in-shop" (In-Shop
            Clothes Retrieval), "inaturalist" (the retrieval split of iNaturalist 2018), "omniglot" or "mnist". "auto"
            detects the layout; a folder with train/ and test/ (or val/, or query/ and gallery/), each with class
            folders, is opened as a split.

    Returns:
        The images. Their `notes` say in sentences what was found, and what was left out.

    Raises:
        ValueError: the data does not exist or does not have this layout.

    Example:
        >>> open_data("digits").classes
        ['0', '1', '2', '3', '4', '5', '6', '7', '8', '9']
        >>> open_data("digits", layout="fodler")
        Traceback (most recent call last):
        ...
        ValueError: layout: got 'fodler', expected one of auto, folder, ..., mnist; did you mean 'folder'?
    """
    one_of("layout", layout, LAYOUTS)
    max_pixels()  # refuses a wrong value before the first image is read
    if isinstance(source, str) and source in EMBEDDED and layout == "auto":
        return _add_note(EMBEDDED[source]())
    if isinstance(source, str) and (match := GLYPHS.fullmatch(source)):
        if layout != "auto":
            raise ValueError(f"layout: got {layout!r} for {source!r}, expected 'auto': the set is drawn, not read")
        return _add_note(glyphs(int(match[1])))
    if isinstance(source, str) and is_hugging_face(source):
        if layout != "auto":
            raise ValueError(f"layout: got {layout!r} for {source!r}, expected 'auto': its columns say what is what")
        return _add_note(from_hugging_face(source))
    path = Path(source).expanduser()
    _check_exists(path, source)
    try:
        return _add_note(_open_path(path, layout))
    except PermissionError as error:
        if path.is_dir():
            class_folders(path)  # refuses a folder that cannot be listed
        raise ValueError(
            f"data: got {error.filename or path}, which cannot be read ({error.strerror}), expected files and folders "
            "that you may read"
        ) from None


def check_source(source: str | Path) -> None:
    """Refuse the name of images that do not exist, without opening any.

    Args:
        source: as for `open_data`.

    Raises:
        ValueError: nothing is named, or there is no such folder or file.

    Example:
        >>> check_source("glyhps")
        Traceback (most recent call last):
        ...
        ValueError: data: got 'glyhps', which does not exist, expected a folder, ...; did you mean 'glyphs'?
    """
    if not source:
        raise ValueError("data: got nothing, expected --data with a folder, a CSV file, glyphs or digits")
    is_name = isinstance(source, str) and (
        source in EMBEDDED or GLYPHS.fullmatch(source) is not None or is_hugging_face(source)
    )
    if not is_name:
        _check_exists(Path(source).expanduser(), source)


def _check_exists(path: Path, source: str | Path) -> None:
    """Refuse a folder or a file that does not exist."""
    if not path.exists():
        similar = neighbour(path, lambda item: item.is_dir() or item.suffix.lower() in FILES)
        hint = similar or did_you_mean(source, EMBEDDED)
        raise ValueError(
            f"data: got {str(source)!r}, which does not exist, expected a folder, a .csv or .npz file or one of the "
            f"embedded sets {' and '.join(EMBEDDED)}{hint}"
        )


def _open_path(path: Path, layout: str) -> ImageSet:
    """Open a folder, a CSV file or a pack that exists."""
    if path.is_file() and path.suffix.lower() == ".npz":
        if layout != "auto":
            raise ValueError(f"layout: got {layout!r} for the pack {path}, expected 'auto'")
        return from_pack(path)
    if layout == "auto":
        layout = "csv" if path.is_file() else detect(path) or "auto"
    if path.is_dir() and layout == "csv":
        raise ValueError(f"layout: got 'csv' for the folder {path}, expected a .csv file")
    if path.is_file():
        if layout != "csv":
            raise ValueError(f"layout: got {layout!r} for the file {path}, expected a folder")
        if path.suffix.lower() != ".csv":
            raise ValueError(
                f"data: got the file {path}, expected a folder, a .csv file of files and classes, or a .npz pack"
            )
        return from_csv(path)
    if layout in BENCHMARKS:
        return from_benchmark(path, layout)
    return from_folder(path, layout)


def _add_note(images: ImageSet) -> ImageSet:
    """Add a note with the first class names, so that a wrong folder is noticed."""
    note = f"{len(images.classes)} classes: {first_names(images.classes)}"
    return replace(images, notes=(*images.notes, note))
