"""Labelled images, wherever they lie: one small class that the rest of the package reads from."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps


class BadImage(ValueError):
    """An image that cannot be read; `path` says which, `reason` why.

    >>> str(BadImage("a.jpg", "the file is empty"))
    'a.jpg: the file is empty'
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


@dataclass(frozen=True, eq=False)
class ImageSet:
    """N labelled images of C classes, as files (`paths`) or as pixels (`arrays`), exactly one of the two.

    Arguments:
        name: what the set is called in reports.
        labels: (N,) integers 0..C-1.
        classes: the C class names, in the order of the labels.
        paths: N image files.
        arrays: (N, H, W) grey or (N, H, W, 3) RGB, uint8.
        test_classes: labels of the classes that the set's own benchmark keeps for the test; `()` when it has none.
        test_images: (N,) bool, the images that a benchmark keeps for the test whose test shares its classes with the
            training (MNIST); None otherwise.
        gallery: (N,) bool, for a test with two sides (In-Shop): True are the images that are searched, the others of
            the test are queries. None where every image is searched for all the others.
        root: the folder that `paths` are named relative to (in `title` and `identity`).

    >>> grey = np.zeros((3, 8, 8), np.uint8)
    >>> images = ImageSet("dots", np.array([0, 1, 1]), ["one", "two"], arrays=grey)
    >>> len(images), images.read(2).mode, images.title(2), images.label_of(2)
    (3, 'RGB', 'dots#2', 1)
    >>> images.of_classes([1]).classes
    ['two']
    """

    name: str
    labels: np.ndarray
    classes: list[str]
    paths: list[Path] | None = None
    arrays: np.ndarray | None = None
    test_classes: tuple[int, ...] = ()
    root: Path | None = None
    test_images: np.ndarray | None = None
    gallery: np.ndarray | None = None

    def __post_init__(self) -> None:
        assert (self.paths is None) != (self.arrays is None), "one of paths and arrays"
        object.__setattr__(self, "labels", np.asarray(self.labels, dtype=np.int64))
        count = len(self.paths) if self.paths is not None else len(self.arrays)  # type: ignore[arg-type]
        assert self.labels.shape == (count,), (self.labels.shape, count)
        assert count == 0 or (self.labels.min() >= 0 and self.labels.max() < len(self.classes))
        assert all(0 <= c < len(self.classes) for c in self.test_classes)
        for mask in (self.test_images, self.gallery):
            assert mask is None or (mask.dtype == bool and mask.shape == (count,)), "a bool for each image"

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> Image.Image:
        """Image `index`, fully decoded, upright, RGB; raises `BadImage`."""
        if self.arrays is not None:
            return Image.fromarray(self.arrays[index]).convert("RGB")
        assert self.paths is not None
        return read_image(self.paths[index], self.title(index))

    def label_of(self, index: int) -> int:
        """The label of image `index`."""
        return int(self.labels[index])

    def title(self, index: int) -> str:
        """How a person finds image `index`: its path, or the set's name and its number."""
        return f"{self.name}#{index}" if self.paths is None else str(self.paths[index])

    def of_classes(self, ids: Iterable[int]) -> ImageSet:
        """The images of the classes `ids` alone; labels are renumbered 0.. in the order given.

        The benchmark's own split is kept while classes of both its sides remain, `gallery` while it has an image.
        """
        ids = [int(c) for c in ids]
        known = len(self.classes)
        if len(set(ids)) != len(ids) or any(not 0 <= c < known for c in ids):
            raise ValueError(f"ids must be different labels in 0..{known - 1}, got {ids}")
        renumber = np.full(known, -1, dtype=np.int64)
        renumber[ids] = np.arange(len(ids))
        chosen = self.subset(np.flatnonzero(renumber[self.labels] >= 0) if known else np.arange(0))
        test = tuple(int(renumber[c]) for c in self.test_classes if renumber[c] >= 0)
        return replace(
            chosen,
            labels=renumber[chosen.labels],
            classes=[self.classes[c] for c in ids],
            test_classes=test if len(test) < len(ids) else (),
        )

    def subset(self, indices: Iterable[int] | np.ndarray) -> ImageSet:
        """The images `indices` (numbers in any order, or a bool for each image) alone; labels and classes stay.

        `test_images` is kept while images of both its sides remain, `gallery` while it has an image.

        >>> images = ImageSet("dots", np.array([0, 1, 1]), ["one", "two"], arrays=np.zeros((3, 8, 8), np.uint8))
        >>> images.subset([2, 0]).labels
        array([1, 0])
        """
        rows = np.asarray(indices if isinstance(indices, np.ndarray) else list(indices))
        if rows.dtype == bool:
            if rows.shape != (len(self),):
                raise ValueError(f"indices must be numbers, or {len(self)} bools, got bools of shape {rows.shape}")
            rows = np.flatnonzero(rows)
        rows = rows.astype(np.int64)
        wrong = rows[(rows < 0) | (rows >= len(self))]
        if len(wrong):
            raise ValueError(f"indices must lie in 0..{len(self) - 1}, got {int(wrong[0])}")
        test = None if self.test_images is None else self.test_images[rows]
        gallery = None if self.gallery is None else self.gallery[rows]
        return replace(
            self,
            labels=self.labels[rows],
            paths=None if self.paths is None else [self.paths[i] for i in rows],
            arrays=None if self.arrays is None else self.arrays[rows],
            test_images=test if test is not None and test.any() and not test.all() else None,
            gallery=gallery if gallery is not None and gallery.any() else None,
        )

    def identity(self) -> str:
        """sha256 of what the set holds: class names, labels, sides, and relative paths with file sizes, or the pixels.

        Where the folder lies does not matter. A file edited without changing its size is not noticed.
        """
        digest = hashlib.sha256()
        digest.update("\n".join(self.classes).encode())
        digest.update(self.labels.astype("<i8").tobytes())
        for what, mask in (("test", self.test_images), ("gallery", self.gallery)):
            if mask is not None:
                digest.update(what.encode() + mask.tobytes())
        if self.arrays is not None:
            digest.update(repr(self.arrays.shape).encode())
            digest.update(np.ascontiguousarray(self.arrays).tobytes())
        else:
            assert self.paths is not None
            for path in self.paths:
                shown = os.path.relpath(path, self.root) if self.root is not None else str(path)
                size = path.stat().st_size if path.exists() else -1
                digest.update(f"\n{Path(shown).as_posix()} {size}".encode())
        return digest.hexdigest()


def read_image(path: str | Path, title: str | None = None) -> Image.Image:
    """The image file `path`, fully decoded, upright, RGB, transparency on white; raises `BadImage` (named `title`)."""
    title = str(path) if title is None else title
    try:
        if os.path.getsize(path) == 0:
            raise BadImage(title, "the file is empty")
        with Image.open(path) as image:
            image.load()
            return as_rgb(ImageOps.exif_transpose(image))
    except (BadImage, MemoryError):
        raise
    except Image.UnidentifiedImageError:
        raise BadImage(title, "not an image that can be recognised") from None
    except (
        Exception
    ) as error:  # a damaged file makes decoders raise almost anything: OSError, SyntaxError, struct.error
        # The system's own words for a file that is not there or must not be read, without the path it adds.
        said = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise BadImage(title, said or type(error).__name__) from error


def upright(image: str | Path | Image.Image, title: str) -> Image.Image:
    """An image as people hand it over, a path or a PIL image, as `read_image` gives it; raises `BadImage`.

    >>> upright(Image.new("L", (4, 2)), "images[0]").mode
    'RGB'
    """
    if isinstance(image, str | Path):
        return read_image(image)
    if not isinstance(image, Image.Image):
        raise ValueError(f"{title}: got {type(image).__name__}, expected a path or a PIL image")
    try:
        return as_rgb(ImageOps.exif_transpose(image))
    except Exception as error:  # one that was opened but not decoded yet
        raise BadImage(getattr(image, "filename", "") or title, " ".join(str(error).split())) from error


def as_rgb(image: Image.Image) -> Image.Image:
    """`image` as RGB: transparent parts on white, 16-bit grey scaled to 8 bits rather than clipped."""
    if image.mode == "RGB":
        return image
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        values = np.asarray(image, dtype=np.float64)
        if values.size and values.max() > 255:
            values = values / 257
        return Image.fromarray(np.clip(values, 0, 255).astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        ink = image.convert("RGBA")
        paper = Image.new("RGBA", ink.size, "white")
        return Image.alpha_composite(paper, ink).convert("RGB")
    return image.convert("RGB")


def singletons(images: ImageSet) -> list[str]:
    """Names of the classes with one image only: they can be trained on, but nothing can be found for them.

    >>> singletons(ImageSet("dots", np.array([0, 1, 1]), ["one", "two"], arrays=np.zeros((3, 8, 8), np.uint8)))
    ['one']
    """
    counts = np.bincount(images.labels, minlength=len(images.classes))
    return [name for name, count in zip(images.classes, counts) if count == 1]
