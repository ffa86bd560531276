"""Image sets from one NumPy file (.npz): encoded images one after another, or an array of pixels, with labels."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from proxymetric.data.images import EncodedImages, ImageSet
from proxymetric.data.parts import PART_NAMES, divide, part_of
from proxymetric.system.files import printable

PIXELS, LABELS, NAMES = ("x", "images"), ("label", "labels", "y"), ("class_name", "classes")
"""names that an array of a pack may have"""
EXPECTED = "expected the arrays blob, offset and label, or x and label"


def from_pack(file: Path) -> ImageSet:
    """Read a pack: a NumPy file with the arrays below.

    `blob` (bytes) and `offset` (N + 1): image i is the file `blob[offset[i]:offset[i + 1]]`, such as a JPEG; or `x` (or
    `images`): (N, H, W) grey or (N, H, W, 3) RGB pixels, uint8. `label` (or `labels`, `y`): N whole numbers or texts.
    Further arrays may be there: `class_name` (or `classes`), the names of labels that are numbers; `path`, the names of
    the images; and `split` (N texts such as train and test), or `is_train` (N bools).

    Raises:
        ValueError: the file is not a NumPy file, an array is missing or does not fit, or there is one class only.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "dots.npz"
        >>> np.savez(file, x=np.zeros((3, 8, 8), np.uint8), label=["a", "b", "b"])
        >>> from_pack(file)
        ImageSet('dots', 3 images, 2 classes)
    """
    arrays = _read(file)
    labels = _first(arrays, LABELS)
    if labels is None or labels.ndim != 1 or labels.dtype.kind not in "iuUS":
        raise ValueError(f"{file}: got {_described(arrays)}, {EXPECTED} (a whole number or a text for each image)")
    numbers, classes = _classes(file, labels, _first(arrays, NAMES))
    if len(classes) < 2:
        raise ValueError(f"{file}: got {len(classes)} classes, expected at least two")
    if len(set(classes)) < len(classes):
        twice = next(name for name in classes if classes.count(name) > 1)
        raise ValueError(f"{file}: got the class name {twice!r} for two labels, expected a name for each label")
    images = ImageSet(printable(file.stem), numbers, classes, **_pictures(file, arrays, len(labels)))
    parts = _parts(file, arrays, len(labels))
    if parts is None:
        return images
    source = f"{file}, array {'split' if 'split' in arrays else 'is_train'}"
    return divide(images, parts, source, "write the file without this array")


class PackedImages(EncodedImages):
    """Encoded images that lie one after another in an array.

    Args:
        file: name of the file, for titles.
        blob: the bytes.
        offset: (N + 1,) where each image begins, and where the last one ends.
        names: N names; None: the images have numbers.
    """

    def __init__(self, file: str, blob: np.ndarray, offset: np.ndarray, names: list[str] | None) -> None:
        self.file, self.blob, self.offset, self.names = file, blob, offset, names
        self._rows = np.arange(len(offset) - 1)

    def __len__(self) -> int:
        return len(self._rows)

    def content(self, index: int) -> bytes:
        """Return the bytes of image `index`."""
        row = int(self._rows[index])
        return self.blob[self.offset[row] : self.offset[row + 1]].tobytes()

    def title(self, index: int) -> str:
        """Return the name of image `index`: that of the file, and its own name or number."""
        row = int(self._rows[index])
        return printable(f"{self.file}#{row if self.names is None else self.names[row]}")

    def subset(self, rows: np.ndarray) -> PackedImages:
        """Return the images `rows`, in this order."""
        chosen = PackedImages(self.file, self.blob, self.offset, self.names)
        chosen._rows = self._rows[rows]
        return chosen

    def identity(self) -> str:
        """Return a digest of the bytes of the images."""
        digest = hashlib.sha256()
        for row in self._rows.tolist():
            digest.update(self.blob[self.offset[row] : self.offset[row + 1]].tobytes())
        return digest.hexdigest()


def _read(file: Path) -> dict[str, np.ndarray]:
    """Read all arrays of a file."""
    try:
        with np.load(file, allow_pickle=False) as content:
            return {name: content[name] for name in content.files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, AttributeError, TypeError) as error:
        if isinstance(error, PermissionError):
            raise
        raise ValueError(f"data: got {file}, which cannot be read as a NumPy file; {EXPECTED}") from None


def _first(arrays: dict[str, np.ndarray], names: tuple[str, ...]) -> np.ndarray | None:
    return next((arrays[name] for name in names if name in arrays), None)


def _described(arrays: dict[str, np.ndarray]) -> str:
    return ", ".join(f"{name} {array.dtype}{list(array.shape)}" for name, array in arrays.items()) or "no arrays"


def _texts(values: np.ndarray) -> list[str]:
    """An array of texts, bytes or numbers as texts."""
    return [
        printable(value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else str(value))
        for value in values.tolist()
    ]


def _classes(file: Path, labels: np.ndarray, names: np.ndarray | None) -> tuple[np.ndarray, list[str]]:
    """The label of each image as a number, and the names of the classes that have images."""
    if labels.dtype.kind in "US":
        classes, numbers = np.unique(np.array(_texts(labels)), return_inverse=True)
        return numbers.reshape(-1), [str(name) for name in classes]
    values, numbers = np.unique(labels, return_inverse=True)
    if names is None:
        return numbers.reshape(-1), [str(value) for value in values]
    if len(values) and not 0 <= values[0] <= values[-1] < len(names):
        outside = int(values[0] if values[0] < 0 else values[-1])
        raise ValueError(f"{file}: got the label {outside}, expected numbers in 0..{len(names) - 1}, one for each name")
    texts = _texts(names)
    return numbers.reshape(-1), [texts[int(value)] for value in values]


def _pictures(file: Path, arrays: dict[str, np.ndarray], count: int) -> dict[str, Any]:
    """The images, as an argument of `ImageSet`."""
    pixels = _first(arrays, PIXELS)
    if pixels is not None:
        is_image = pixels.dtype == np.uint8 and (pixels.ndim == 3 or (pixels.ndim == 4 and pixels.shape[3] == 3))
        if not is_image or len(pixels) != count or 0 in pixels.shape:
            raise ValueError(
                f"{file}: got {_described(arrays)}, expected uint8 pixels (N, H, W) or (N, H, W, 3) with N labels"
            )
        return {"arrays": pixels}
    blob, offset = arrays.get("blob"), arrays.get("offset")
    if blob is None or offset is None:
        raise ValueError(f"{file}: got {_described(arrays)}, {EXPECTED}")
    is_pack = blob.dtype == np.uint8 and blob.ndim == 1 and offset.dtype.kind in "iu" and offset.shape == (count + 1,)
    if not is_pack or offset[0] < 0 or offset[-1] > len(blob) or (np.diff(offset.astype(np.int64)) < 0).any():
        raise ValueError(
            f"{file}: got {_described(arrays)}, expected blob of uint8 and offset of N + 1 rising places in it"
        )
    names = _texts(arrays["path"]) if "path" in arrays and arrays["path"].shape == (count,) else None
    return {"encoded": PackedImages(str(file), blob, offset.astype(np.int64), names)}


def _parts(file: Path, arrays: dict[str, np.ndarray], count: int) -> np.ndarray | None:
    """The part of each image; None if the pack is not divided."""
    if "split" in arrays:
        texts = _texts(arrays["split"])
        unknown = [text for text in texts if part_of(text) is None]
        if unknown or len(texts) != count:
            got = f"the split {unknown[0]!r}" if unknown else f"{len(texts)} splits for {count} images"
            raise ValueError(f"{file}: got {got}, expected one of {', '.join(PART_NAMES)} for each image")
        return np.array([part_of(text) for text in texts])
    if "is_train" in arrays and arrays["is_train"].dtype == bool and arrays["is_train"].shape == (count,):
        return np.where(arrays["is_train"], "train", "test")
    return None
