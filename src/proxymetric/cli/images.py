"""Arguments that are images: one image, several, or a folder of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from proxymetric.system.text import visible

if TYPE_CHECKING:
    from proxymetric.system.terminal import Terminal

ImagesFolder = Annotated[Path, typer.Argument(metavar="IMAGES", help="Folder of images; subfolders are searched too.")]


def check_images(images: Sequence[Path], every: bool = False) -> None:
    """Refuse folders, and files that are not there, before a model is loaded.

    Args:
        images: what should be image files.
        every: refuse a single missing file; otherwise only if all are missing, and the others are searched.

    Raises:
        ValueError: see above.
    """
    from proxymetric.arguments.signatures import neighbour
    from proxymetric.data.folders import ENDINGS

    if not images:
        raise ValueError("IMAGE: got none, expected an image file")
    for image in images:
        if image.is_dir():
            patterns = (f"{folders}*{ending}" for folders in ("", "*/") for ending in ENDINGS)
            example = next((pattern for pattern in patterns if next(image.glob(pattern), None) is not None), None)
            such = f", such as {image / example}" if example else ""
            raise ValueError(f"IMAGE: got {image}, which is a folder; expected image files{such}")
    missing = [image for image in images if not image.exists()]
    if missing and (every or len(missing) == len(images)):
        hint = neighbour(missing[0], lambda each: each.name.lower().endswith(ENDINGS))
        raise ValueError(f"IMAGE: got {visible(missing[0])}, which does not exist; expected an image file{hint}")


def index_of(images: Path, out: Path | None, terminal: Terminal) -> Path:
    """Return where the index of a folder is kept, and say so before anything slow is imported.

    Args:
        images: the folder.
        out: the folder of the index; None: in the working directory, under the name of `images`.
        terminal: where it is said.
    """
    target = Path(f"{images.resolve().name}.index") if out is None else out
    terminal.say(f"the index of {images} is kept in {target.resolve()}")
    return target


def check_served(folder: Path) -> None:
    """Refuse what is no folder, and can neither be an index nor hold images."""
    from proxymetric.arguments.signatures import neighbour

    if not folder.is_dir():
        missing = "is a file" if folder.exists() else "does not exist"
        hint = "" if folder.exists() else neighbour(folder, Path.is_dir)
        raise ValueError(
            f"serve: got {folder}, which {missing}; expected a folder of images, or one that `proxymetric index` "
            f"wrote{hint}"
        )


def is_image(place: str) -> bool:
    """Whether a word is the name of an image and of no folder: what no model can be."""
    from proxymetric.data.folders import ENDINGS

    return place.lower().endswith(ENDINGS) and not Path(place).is_dir()


def check_searched(place: Path) -> None:
    """Refuse what `search --in` cannot search: a single image, or nothing."""
    from proxymetric.arguments.signatures import neighbour
    from proxymetric.data.folders import ENDINGS

    expected = "expected a folder of images or a file of `embed`"
    if place.is_file() and place.name.lower().endswith(ENDINGS):
        raise ValueError(f"--in: got {place}, which is an image; {expected}; the form is: search RUN IMAGE --in IMAGES")
    if not place.exists():
        raise ValueError(f"--in: got {place}, which does not exist; {expected}{neighbour(place, Path.exists)}")
