"""Labelled images in files or arrays: the class from which the rest of the package reads images."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps


class BadImage(ValueError):
    """An image cannot be read.

    Args:
        path: the path or title of the image.
        reason: why it cannot be read.

    Example:
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
    """N labelled images of C classes, either as files (`paths`) or as pixels (`arrays`).

    Args:
        name: the name of the set in reports.
        labels: (N,) integers 0..C-1.
        classes: the C class names, in the order of the labels.
        paths: N image files.
        arrays: (N, H, W) grey or (N, H, W, 3) RGB, uint8.
        test_classes: labels of the official test classes; `()` if there are none.
        root: the folder that `paths` are relative to in `identity`.
        test_images: (N,) bool, the official test images of a benchmark whose training and test share their classes
            (MNIST); None otherwise.
        gallery: (N,) bool, for a test with queries and a gallery (In-Shop): True for the images of the gallery; the
            other test images are queries. None: each test image is a query against all others.

    Example:
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
        assert (self.paths is None) != (self.arrays is None), "exactly one of paths and arrays is expected"
        object.__setattr__(self, "labels", np.asarray(self.labels, dtype=np.int64))
        count = len(self.paths) if self.paths is not None else len(self.arrays)  # type: ignore[arg-type]
        assert self.labels.shape == (count,), (self.labels.shape, count)
        assert count == 0 or (self.labels.min() >= 0 and self.labels.max() < len(self.classes))
        assert all(0 <= c < len(self.classes) for c in self.test_classes)
        for mask in (self.test_images, self.gallery):
            assert mask is None or (mask.dtype == bool and mask.shape == (count,)), (
                "a mask with one bool per image is expected"
            )

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> Image.Image:
        """Return image `index`, decoded, upright and RGB.

        Raises:
            BadImage: the file cannot be read.
        """
        if self.arrays is not None:
            return Image.fromarray(self.arrays[index]).convert("RGB")
        assert self.paths is not None
        return read_image(self.paths[index], self.title(index))

    def label_of(self, index: int) -> int:
        """Return the label of image `index`."""
        return int(self.labels[index])

    def title(self, index: int) -> str:
        """Return the path of image `index`; for arrays, the name of the set and the index."""
        return f"{self.name}#{index}" if self.paths is None else str(self.paths[index])

    def of_classes(self, ids: Iterable[int]) -> ImageSet:
        """Return the set with only the classes `ids`; labels are renumbered from 0 in the order given.

        `test_classes` is kept if both training and test classes remain, `gallery` if any gallery image remains.

        Raises:
            ValueError: `ids` contains a label twice or an unknown label.
        """
        ids = [int(c) for c in ids]
        known = len(self.classes)
        if len(set(ids)) != len(ids) or any(not 0 <= c < known for c in ids):
            raise ValueError(f"ids: got {ids}, expected different labels in 0..{known - 1}")
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
        """Return the set with only the images `indices`; labels and classes do not change.

        `test_images` is kept if both training and test images remain, `gallery` if any gallery image remains.

        Args:
            indices: image indices in any order, or one bool per image.

        Raises:
            ValueError: an index does not exist.

        Example:
            >>> images = ImageSet("dots", np.array([0, 1, 1]), ["one", "two"], arrays=np.zeros((3, 8, 8), np.uint8))
            >>> images.subset([2, 0]).labels
            array([1, 0])
        """
        rows = np.asarray(indices if isinstance(indices, np.ndarray) else list(indices))
        if rows.dtype == bool:
            if rows.shape != (len(self),):
                raise ValueError(f"indices: got bools of shape {rows.shape}, expected indices or {len(self)} bools")
            rows = np.flatnonzero(rows)
        rows = rows.astype(np.int64)
        wrong = rows[(rows < 0) | (rows >= len(self))]
        if len(wrong):
            raise ValueError(f"indices: got {int(wrong[0])}, expected numbers in 0..{len(self) - 1}")
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
        """Return the sha256 of the set's content: class names, labels, test images, gallery, and files or pixels.

        A file contributes its relative path and its size. Moving the folder therefore does not change the result;
        nor does an edit that keeps the size of a file.
        """
        digest = hashlib.sha256()
        digest.update("\n".join(self.classes).encode())
        digest.update(self.labels.astype("<i8").tobytes())
        for name, mask in (("test", self.test_images), ("gallery", self.gallery)):
            if mask is not None:
                digest.update(name.encode() + mask.tobytes())
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
    """Read an image file and return it decoded, upright and in RGB, with transparent parts on white.

    Args:
        path: the file.
        title: name of the image in errors; None means the path.

    Raises:
        BadImage: the file cannot be read.
    """
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
        raise BadImage(title, "the image format is not recognised") from None
    except Exception as error:
        # Decoders raise many types of errors for a damaged file: OSError, SyntaxError, struct.error.
        # `strerror` is the operating system's message for a missing or forbidden file; it does not contain the path.
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise BadImage(title, reason or type(error).__name__) from error


def upright(image: str | Path | Image.Image, title: str) -> Image.Image:
    """Return an image from a path or a PIL image, upright and RGB as from `read_image`.

    Args:
        image: a path or a PIL image.
        title: name of the image in errors.

    Raises:
        BadImage: the image cannot be read.
        ValueError: `image` is neither a path nor a PIL image.

    Example:
        >>> upright(Image.new("L", (4, 2)), "images[0]").mode
        'RGB'
    """
    if isinstance(image, str | Path):
        return read_image(image)
    if not isinstance(image, Image.Image):
        raise ValueError(f"{title}: got {type(image).__name__}, expected a path or a PIL image")
    try:
        return as_rgb(ImageOps.exif_transpose(image))
    except Exception as error:  # a PIL image may be opened but not decoded yet
        raise BadImage(getattr(image, "filename", "") or title, " ".join(str(error).split())) from error


def as_rgb(image: Image.Image) -> Image.Image:
    """Convert `image` to RGB: transparent parts become white, and 16-bit grey is scaled to 8 bits, not clipped."""
    if image.mode == "RGB":
        return image
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        values = np.asarray(image, dtype=np.float64)
        if values.size and values.max() > 255:
            values = values / 257
        return Image.fromarray(np.clip(values, 0, 255).astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        background = Image.new("RGBA", rgba.size, "white")
        return Image.alpha_composite(background, rgba).convert("RGB")
    return image.convert("RGB")


def singletons(images: ImageSet) -> list[str]:
    """Return the names of the classes with a single image, which can be trained on but not retrieved.

    Example:
        >>> singletons(ImageSet("dots", np.array([0, 1, 1]), ["one", "two"], arrays=np.zeros((3, 8, 8), np.uint8)))
        ['one']
    """
    counts = np.bincount(images.labels, minlength=len(images.classes))
    return [name for name, count in zip(images.classes, counts) if count == 1]
