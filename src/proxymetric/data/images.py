"""Labelled images in files or arrays: the class from which the rest of the package reads images."""

from __future__ import annotations

import hashlib
import io
import operator
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np
from PIL import Image

from proxymetric.data.decoding import BadImage, Box, read_encoded, read_image
from proxymetric.system.files import printable


class EncodedImages(Protocol):
    """N encoded images that are not files of their own, such as those of a table; each is read when it is needed."""

    def __len__(self) -> int: ...

    def content(self, index: int) -> bytes:
        """Return the bytes of image `index`, as in a file; an `OSError` says why they cannot be read."""

    def title(self, index: int) -> str:
        """Return the name of image `index` in messages."""

    def subset(self, rows: np.ndarray) -> EncodedImages:
        """Return the images `rows`, in this order."""

    def identity(self) -> str:
        """Return a text that is the same for the same images and differs for others."""


@dataclass(frozen=True, eq=False, repr=False)
class ImageSet:
    """N labelled images of C classes: as files (`paths`), as pixels (`arrays`), or encoded in a table (`encoded`).

    Args:
        name: the name of the set in reports.
        labels: (N,) integers 0..C-1.
        classes: the C class names, in the order of the labels.
        paths: N image files.
        arrays: (N, H, W) grey or (N, H, W, 3) RGB, uint8.
        encoded: N encoded images, see `EncodedImages`.
        boxes: (N, 4) integers x1, y1, x2, y2: only this part of each image file is read, in pixels of the upright image
            (`decoding.Box`). Rows of the same file with other boxes are different images. None: whole images.
        test_classes: labels of the official test classes; `()` if there are none.
        root: the folder that `paths` are relative to in `identity`.
        test_images: (N,) bool, True for the test images, if the data comes with a split of its images (MNIST, folders
            with train/ and test/), in which a class may have both training and test images; None otherwise.
        gallery: (N,) bool, for a test with queries and a gallery (In-Shop): True for the images of the gallery; the
            other test images are queries. None: each test image is a query against all others.
        validation_images: (N,) bool, True for the images that choose the epoch, if the data comes with such images (a
            folder val/); None otherwise.
        distractors: (N,) bool, True for test images that are found but are never queries; None: there are none.
        columns: other columns of a CSV, by name: (N,) texts, such as the camera of each image.
        notes: sentences about what was found and left out when the set was opened.
        unlisted: folders that could not be listed, with the reason.

    Example:
        >>> grey = np.zeros((3, 8, 8), np.uint8)
        >>> images = ImageSet("dots", np.array([0, 1, 1]), ["one", "two"], arrays=grey)
        >>> len(images), images.read(2).mode, images.title(2), images.label_of(2)
        (3, 'RGB', 'dots#2', 1)
        >>> images
        ImageSet('dots', 3 images, 2 classes)
        >>> image, label = images[2]
        >>> image.size, label
        ((8, 8), 1)
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
    validation_images: np.ndarray | None = None
    distractors: np.ndarray | None = None
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    unlisted: dict[str, str] = field(default_factory=dict)
    encoded: EncodedImages | None = None
    boxes: np.ndarray | None = None
    hint: str = ""
    """what to try if the set has too few classes"""

    def __post_init__(self) -> None:
        places = [place for place in (self.paths, self.arrays, self.encoded) if place is not None]
        assert len(places) == 1, "exactly one of paths, arrays and encoded is expected"
        object.__setattr__(self, "labels", np.asarray(self.labels, dtype=np.int64))
        count = len(places[0])
        assert self.labels.shape == (count,), (self.labels.shape, count)
        assert count == 0 or (self.labels.min() >= 0 and self.labels.max() < len(self.classes))
        assert all(0 <= c < len(self.classes) for c in self.test_classes)
        assert self.boxes is None or (self.paths is not None and self.boxes.shape == (count, 4))
        for mask in (self.test_images, self.gallery, self.validation_images, self.distractors):
            assert mask is None or (mask.dtype == bool and mask.shape == (count,)), (
                "a mask with one bool per image is expected"
            )

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        return f"ImageSet({self.name!r}, {len(self)} images, {len(self.classes)} classes)"

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        """Return image `index`, decoded, upright and RGB, and its label.

        Raises:
            BadImage: the file cannot be read.
            IndexError: there is no such image.
            TypeError: `index` is not an integer; `subset` selects several images.
        """
        try:
            row = operator.index(index)
        except TypeError:
            raise TypeError(
                f"index: got {type(index).__name__}, expected an integer; `subset` selects several images"
            ) from None
        if not -len(self) <= row < len(self):
            raise IndexError(f"index: got {row}, expected a number in {-len(self)}..{len(self) - 1}")
        row %= len(self)
        return self.read(row), self.label_of(row)

    def read(self, index: int, min_side: int | None = None) -> Image.Image:
        """Return image `index`, decoded, upright and RGB.

        Args:
            index: number of the image.
            min_side: decode a JPEG at a reduced size with at least this shorter side (`read_image`); None: full size.

        Raises:
            BadImage: the file cannot be read.
        """
        if self.arrays is not None:
            return Image.fromarray(self.arrays[index]).convert("RGB")
        if self.encoded is not None:
            try:
                content = self.content(index)
            except OSError as error:
                raise BadImage(self.title(index), error.strerror or str(error)) from error
            return read_encoded(io.BytesIO(content), self.title(index), min_side)
        assert self.paths is not None
        return read_image(self.paths[index], self.title(index), min_side, self.box(index))

    def box(self, index: int) -> Box | None:
        """Return the box of image `index`; None for a whole image."""
        if self.boxes is None:
            return None
        x1, y1, x2, y2 = self.boxes[index].tolist()
        return x1, y1, x2, y2

    def content(self, index: int) -> bytes:
        """Return the bytes of the encoded image `index`; an `OSError` says why they cannot be read.

        Raises:
            ValueError: the set holds pixels.
        """
        if self.encoded is not None:
            return self.encoded.content(index)
        if self.paths is None:
            raise ValueError(f"content: got the set {self.name!r} of pixels, expected encoded images")
        if not self.paths[index].is_file():
            raise OSError(f"{self.title(index)} is no file")  # reading a pipe would wait for ever
        return self.paths[index].read_bytes()

    def label_of(self, index: int) -> int:
        """Return the label of image `index`."""
        return int(self.labels[index])

    def title(self, index: int) -> str:
        """Return the path of image `index` as printable text, and its box; for arrays, the set's name and the index."""
        if self.encoded is not None:
            return self.encoded.title(index)
        if self.paths is None:
            return f"{self.name}#{index}"
        box = self.box(index)
        return printable(str(self.paths[index])) + ("" if box is None else f" [{','.join(map(str, box))}]")

    def of_classes(self, ids: Iterable[int]) -> ImageSet:
        """Return the set with only the classes `ids`; labels are renumbered from 0 in the order given.

        `test_classes` is kept if both training and test classes remain, `gallery` if any gallery image remains.

        Raises:
            ValueError: `ids` contains a label twice or an unknown label.
        """
        ids = [int(c) for c in ids]
        class_count = len(self.classes)
        if len(set(ids)) != len(ids) or any(not 0 <= c < class_count for c in ids):
            raise ValueError(f"ids: got {ids}, expected different labels in 0..{class_count - 1}")
        new_labels = np.full(class_count, -1, dtype=np.int64)
        new_labels[ids] = np.arange(len(ids))
        selection = self.subset(np.flatnonzero(new_labels[self.labels] >= 0) if class_count else np.arange(0))
        test_classes = tuple(int(new_labels[c]) for c in self.test_classes if new_labels[c] >= 0)
        return replace(
            selection,
            labels=new_labels[selection.labels],
            classes=[self.classes[c] for c in ids],
            test_classes=test_classes if len(test_classes) < len(ids) else (),
        )

    def subset(self, indices: Iterable[int] | np.ndarray) -> ImageSet:
        """Return the set with only the images `indices`; labels and classes do not change.

        `test_images` and `validation_images` are kept if they are True for some but not all of the chosen images,
        `gallery` and `distractors` if any such image remains.

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
        invalid_rows = rows[(rows < 0) | (rows >= len(self))]
        if len(invalid_rows):
            raise ValueError(f"indices: got {int(invalid_rows[0])}, expected numbers in 0..{len(self) - 1}")
        test, validation = (
            mask[rows] if mask is not None and mask[rows].any() and not mask[rows].all() else None
            for mask in (self.test_images, self.validation_images)
        )
        gallery = None if self.gallery is None else self.gallery[rows]
        distractors = None if self.distractors is None else self.distractors[rows]
        return replace(
            self,
            labels=self.labels[rows],
            paths=None if self.paths is None else [self.paths[i] for i in rows],
            arrays=None if self.arrays is None else self.arrays[rows],
            encoded=None if self.encoded is None else self.encoded.subset(rows),
            boxes=None if self.boxes is None else self.boxes[rows],
            test_images=test,
            validation_images=validation,
            gallery=gallery if gallery is not None and gallery.any() else None,
            distractors=distractors if distractors is not None and distractors.any() else None,
            columns={name: values[rows] for name, values in self.columns.items()},
        )

    def identity(self) -> str:
        """Return the sha256 of the set's content: class names, labels, division, boxes, and files or pixels.

        A file contributes its relative path and its size. Moving the folder therefore does not change the result;
        nor does an edit that keeps the size of a file.
        """
        digest = hashlib.sha256()
        digest.update("\n".join(self.classes).encode("utf-8", "surrogateescape"))
        digest.update(self.labels.astype("<i8").tobytes())
        masks = {"test": self.test_images, "gallery": self.gallery, "validation": self.validation_images}
        masks["distractors"] = self.distractors
        for name, mask in masks.items():
            if mask is not None:
                digest.update(name.encode() + mask.tobytes())
        if self.boxes is not None:
            digest.update(b"boxes" + self.boxes.astype("<i8").tobytes())
        if self.arrays is not None:
            digest.update(repr(self.arrays.shape).encode())
            digest.update(np.ascontiguousarray(self.arrays).tobytes())
        elif self.encoded is not None:
            digest.update(self.encoded.identity().encode())
        else:
            assert self.paths is not None
            for path in self.paths:
                name = os.path.relpath(path, self.root) if self.root is not None else str(path)
                try:
                    size = path.stat().st_size
                except OSError:
                    size = -1
                # File names that are not UTF-8 hold surrogates; they stand for the bytes of the name.
                digest.update(f"\n{Path(name).as_posix()} {size}".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()


def singletons(images: ImageSet) -> list[str]:
    """Return the names of the classes with a single image, which can be trained on but not retrieved.

    Example:
        >>> singletons(ImageSet("dots", np.array([0, 1, 1]), ["one", "two"], arrays=np.zeros((3, 8, 8), np.uint8)))
        ['one']
    """
    counts = np.bincount(images.labels, minlength=len(images.classes))
    return [name for name, count in zip(images.classes, counts) if count == 1]
