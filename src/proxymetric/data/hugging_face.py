"""Image sets from Hugging Face `datasets` (extra `hf`): a folder of `save_to_disk`, or a name on the hub.

`hf:PLACE?key=value&...`, where the keys are `image` and `label` (columns), `split` and `config`. Without keys, the
columns are found by their types. Images are decoded when they are needed, by this package's decoder and within its
limits.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import numpy as np

from proxymetric.arguments.signatures import one_of
from proxymetric.data.folders import first_names
from proxymetric.data.images import EncodedImages, ImageSet
from proxymetric.data.parts import divide, part_of
from proxymetric.system.files import printable

PREFIX = "hf:"
KEYS = ("image", "label", "split", "config")
LABEL_NAMES = ("label", "labels", "class", "class_name", "target")
"""names of columns of text or whole numbers that are taken as the label, where no column has the type ClassLabel"""


def is_hugging_face(source: str) -> bool:
    """Return whether a source of data names a data set of Hugging Face.

    Example:
        >>> is_hugging_face("hf:photos?label=breed"), is_hugging_face("photos")
        (True, False)
    """
    return source.startswith(PREFIX)


def place_of(source: str) -> str:
    """Return the folder or name of a source, without its keys.

    Example:
        >>> place_of("hf:shop/photos?label=breed")
        'shop/photos'
    """
    return source.removeprefix(PREFIX).partition("?")[0]


def from_hugging_face(source: str) -> ImageSet:
    """Open a data set of Hugging Face.

    Splits called train, validation and test (see `data.parts`) divide the images; other splits are left out. Rows
    without a label are left out too.

    Args:
        source: "hf:PLACE", with a folder of `save_to_disk` or the name of a data set on the hub, and keys such as
            "hf:photos?image=picture&label=breed&split=train".

    Raises:
        ValueError: `datasets` is not installed, the data set cannot be opened, or its columns are not clear.
    """
    place, keys = place_of(source), _keys(source)
    tables = _load(source, place, keys.get("config"))
    if "split" in keys:
        one_of(f"{source}: split", keys["split"], tables)
        tables = {keys["split"]: tables[keys["split"]]}
    parts = {name: part_of(name) for name in tables}
    notes: list[str] = []
    if len(tables) > 1:
        unknown = [name for name, part in parts.items() if part is None]
        if len(unknown) == len(tables):
            raise ValueError(
                f"{source}: got the splits {', '.join(tables)}, expected names such as train and test, or one of them: "
                f"{PREFIX}{place}?split={next(iter(tables))}"
            )
        if unknown:
            notes.append(f"{source}: splits that are left out: {first_names(unknown)}")
            tables = {name: table for name, table in tables.items() if name not in unknown}
    first = next(iter(tables.values()))
    image = keys.get("image") or _image_column(source, first.features)
    label = keys.get("label") or _label_column(source, first.features)
    for key, column in (("image", image), ("label", label)):
        one_of(f"{source}: {key}", column, first.features)
    names = np.concatenate([_class_names(table, label) for table in tables.values()])
    if not (names != "").any():
        raise ValueError(f"{source}: got no labels in the column {label!r}, expected a label for each image")
    order = _class_order(first.features[label], names)
    if len(order) < 2:
        raise ValueError(f"{source}: got one class only ({order[0]!r}), expected at least two classes")
    kept = np.flatnonzero(names != "")
    if len(kept) < len(names):
        notes.append(f"{source}: {len(names) - len(kept)} of {len(names)} rows have no label and are left out")
    index = {name: number for number, name in enumerate(order)}
    images = ImageSet(
        name=printable(Path(place).name),
        labels=np.array([index[name] for name in names[kept]]),
        classes=[printable(name) for name in order],
        encoded=TableImages(place, tables, image).subset(kept),
        notes=tuple(notes),
    )
    if len(tables) < 2:
        return images
    part_of_rows = np.repeat([str(parts[name]) for name in tables], [len(table) for table in tables.values()])[kept]
    divided = divide(images, part_of_rows, source, f"{PREFIX}{place}?split={next(iter(tables))}")
    return replace(divided, notes=(*divided.notes[len(notes) :], *notes))


class TableImages(EncodedImages):
    """The images of some tables of `datasets`, one after another; the tables stay on disk.

    Args:
        name: name of the data set, for titles.
        tables: the splits by name.
        column: the column of images.
    """

    def __init__(self, name: str, tables: dict[str, Any], column: str) -> None:
        from datasets import Image

        self.name = name
        self.column = column
        self.tables = {
            split: table.select_columns([column]).cast_column(column, Image(decode=False)).with_format(None)
            for split, table in tables.items()
        }
        self._starts = np.cumsum([0, *(len(table) for table in tables.values())])
        self._rows = np.arange(self._starts[-1])

    def __len__(self) -> int:
        return len(self._rows)

    def content(self, index: int) -> bytes:
        """Return the bytes of image `index`: from the table, or from the file that the table names."""
        split, row = self._place(index)
        cell = self.tables[split][row][self.column]
        if cell is None:
            raise OSError("the row holds no image")
        if cell["bytes"] is not None:
            return cell["bytes"]
        return Path(str(cell["path"])).read_bytes()

    def title(self, index: int) -> str:
        """Return the name of the data set, the split and the row."""
        split, row = self._place(index)
        return printable(f"{PREFIX}{self.name}?split={split}#{row}")

    def subset(self, rows: np.ndarray) -> TableImages:
        """Return the images `rows`, in this order."""
        chosen = object.__new__(TableImages)
        chosen.__dict__.update(self.__dict__)
        chosen._rows = self._rows[rows]
        return chosen

    def identity(self) -> str:
        """Return a digest of the numbers of bytes of the images, as for files."""
        import pyarrow.compute

        sizes = []
        for table in self.tables.values():
            cells = table.with_format("arrow")[:].column(self.column)
            lengths = pyarrow.compute.binary_length(pyarrow.compute.struct_field(cells, "bytes"))
            sizes.append(lengths.fill_null(-1).to_numpy().astype("<i8"))
        return hashlib.sha256(np.concatenate(sizes)[self._rows].tobytes()).hexdigest()

    def _place(self, index: int) -> tuple[str, int]:
        """Return the split and the row of image `index`."""
        row = int(self._rows[index])
        number = int(np.searchsorted(self._starts, row, side="right")) - 1
        return list(self.tables)[number], row - int(self._starts[number])


def _keys(source: str) -> dict[str, str]:
    """Return the keys after the question mark of a source."""
    keys = dict(parse_qsl(source.partition("?")[2], keep_blank_values=True))
    for key in keys:
        one_of(f"{source}: key", key, KEYS)
    return keys


def _load(source: str, place: str, config: str | None) -> dict[str, Any]:
    """Return the splits of a data set: from disk if `place` is a folder, through the hub's client otherwise."""
    try:
        import datasets
    except ImportError:
        raise ValueError(
            f"data: got {source!r}, but datasets is not installed; expected pip install 'proxymetric[hf]'"
        ) from None
    path = Path(place).expanduser()
    if path.exists():
        try:
            loaded = datasets.load_from_disk(str(path))
        except (FileNotFoundError, NotADirectoryError):
            raise ValueError(
                f"data: got {source!r}, expected a folder that save_to_disk wrote; for a folder of images, leave out "
                f"{PREFIX!r}"
            ) from None
        except Exception as error:
            raise ValueError(f"data: got {source!r}, which cannot be read ({_sentence(error)})") from error
    else:
        try:
            loaded = datasets.load_dataset(place, config)
        except Exception as error:  # the client raises errors of many libraries
            raise ValueError(
                f"data: got {source!r}, which is not a folder here and cannot be loaded from the hub "
                f"({type(error).__name__}: {_sentence(error)}); expected a folder of save_to_disk, or a name on the "
                "hub and a network"
            ) from error
    if isinstance(loaded, datasets.DatasetDict):
        return {name: table for name, table in loaded.items() if len(table)}
    return {str(loaded.split or "all"): loaded}


def _sentence(error: Exception) -> str:
    """Return the first line of an error's text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _image_column(source: str, features: Any) -> str:
    """Return the only column of images."""
    from datasets import Image

    columns = [name for name, feature in features.items() if isinstance(feature, Image)]
    if len(columns) != 1:
        got = f"the image columns {', '.join(columns)}" if columns else f"no image column among {', '.join(features)}"
        raise ValueError(f"{source}: got {got}, expected one, or its name: {_with_key(source, 'image', columns)}")
    return columns[0]


def _label_column(source: str, features: Any) -> str:
    """Return the only column of class labels, or else the column that is called like one."""
    from datasets import ClassLabel, Value

    columns = [name for name, feature in features.items() if isinstance(feature, ClassLabel)]
    if not columns:
        columns = [n for n, feature in features.items() if isinstance(feature, Value) and n.lower() in LABEL_NAMES]
    if len(columns) != 1:
        got = f"the label columns {', '.join(columns)}" if columns else f"no label column among {', '.join(features)}"
        raise ValueError(f"{source}: got {got}, expected one, or its name: {_with_key(source, 'label', columns)}")
    return columns[0]


def _with_key(source: str, key: str, columns: list[str]) -> str:
    return f"{source}{'&' if '?' in source else '?'}{key}={columns[0] if columns else 'COLUMN'}"


def _class_names(table: Any, column: str) -> np.ndarray:
    """Return the class name of each row; an empty text for a row without a label."""
    from datasets import ClassLabel

    feature = table.features[column]
    values = table.with_format(None)[column][:]
    if isinstance(feature, ClassLabel):
        return np.array(["" if v is None or v < 0 else feature.int2str(int(v)) for v in values], dtype=object)
    if any(isinstance(value, list | dict | float) for value in values):
        raise ValueError(f"label: got the column {column!r} of {feature}, expected texts or whole numbers")
    return np.array(["" if value is None else str(value).strip() for value in values], dtype=object)


def _class_order(feature: Any, names: np.ndarray) -> list[str]:
    """Return the names of the classes that have images: in the order of ClassLabel, of numbers, or of the alphabet."""
    from datasets import ClassLabel

    present = {str(name) for name in names} - {""}
    if isinstance(feature, ClassLabel):
        return [name for name in feature.names if name in present]
    return sorted(present, key=int) if all(name.lstrip("-").isdigit() for name in present) else sorted(present)
