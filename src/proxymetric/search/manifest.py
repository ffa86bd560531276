"""The manifest of an index: the one file that says which files belong to it, replaced as the last step of a change."""

from __future__ import annotations

import os
import zlib
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from proxymetric.arguments.signatures import neighbour
from proxymetric.core.quantisation import KINDS
from proxymetric.system.files import read_json, write_json

FORMAT = 2
"""1: without `vectors`, whose numbers all had 32 bits. 2: with it"""
FILE = "manifest.json"
EARLIER_LAYOUT = "folder"
"""the layout of an index that names none: earlier versions took the folders directly under PHOTOS as classes"""


@dataclass(frozen=True)
class Manifest:
    """What an index says about itself.

    Args:
        generation: number of the folder with the vectors and items; each change makes a new one.
        count: number of items.
        dim: dimensions of the vectors.
        model: `Model.fingerprint` of the model that made the vectors; empty if unknown.
        run: where that model lies: `run`, `which` and `weights`; empty if unknown.
        photos: the folder that was indexed; None for an index that was filled from Python.
        engine: name and settings of the engine.
        map: method of the map (`pca`, `tsne` or `none`) and how many points were placed since it was made.
        columns: the metadata columns.
        files: size and CRC-32 of each file of the generation.
        packs: size and CRC-32 of each file of thumbnails.
        vectors: kind of the vectors' numbers (`float32`, `int8` or `binary`), bytes of a vector, and what was lost.
        layout: which folders of `photos` are classes, or the benchmark that it is, as `data.layout` says for training.
        added: number of items that are no files, which only the index has; None in an index of an earlier version.
    """

    generation: int
    count: int
    dim: int
    model: str = ""
    run: dict[str, str] = field(default_factory=dict)
    photos: str | None = None
    engine: dict[str, Any] = field(default_factory=lambda: {"name": "exact"})
    map: dict[str, Any] = field(default_factory=lambda: {"method": "none"})
    columns: list[str] = field(default_factory=list)
    files: dict[str, list[int]] = field(default_factory=dict)
    packs: dict[str, list[int]] = field(default_factory=dict)
    vectors: dict[str, Any] = field(default_factory=lambda: {"kind": "float32"})
    layout: str = "auto"
    added: int | None = None
    format: int = FORMAT

    def write(self, folder: Path) -> None:
        """Replace the manifest of an index atomically, and wait until the disk has it."""
        write_json(folder / FILE, asdict(self))
        sync_folder(folder)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest of an index.

        Raises:
            ValueError: the folder is not an index, or an index of a later version.
        """
        what = "a folder that `proxymetric index` wrote"
        if not (folder / FILE).is_file():
            missing = "which does not exist" if not folder.exists() else f"which has no {FILE}"
            raise ValueError(f"index: got {folder}, {missing}; expected {what}{neighbour(folder, is_index)}")
        content = read_json(folder / FILE)
        if isinstance(content, dict) and isinstance(content.get("format"), int) and content["format"] > FORMAT:
            raise ValueError(
                f"index: got {folder} of format {content['format']}, expected format {FORMAT}; a later version of "
                "proxymetric wrote it: update proxymetric"
            )
        try:
            manifest = cls(**{"layout": EARLIER_LAYOUT} | content)
        except TypeError:
            manifest = None
        annotated = {f.name: f.type.split("[")[0] for f in fields(cls) if isinstance(f.type, str)}
        kinds = {"int": int, "str": str, "dict": dict, "list": list}
        if manifest is None or not all(
            isinstance(getattr(manifest, name), kinds[kind]) for name, kind in annotated.items() if kind in kinds
        ):
            raise ValueError(f"index: got {folder}, whose {FILE} is damaged; expected {what}")
        if fault := manifest.fault():
            raise ValueError(f"index: got {folder}, whose {FILE} is damaged ({fault}); expected {what}")
        return manifest

    def fault(self) -> str:
        """Say what is wrong inside the tables of a manifest; empty if nothing is.

        Example:
            >>> Manifest(1, 2, 3, files={"../vectors.npy": [1, 2]}).fault()
            "files: got '../vectors.npy', expected the name of a file"
            >>> Manifest(1, 2, 3, vectors={"kimd": "int8"}).fault()
            'vectors: got no kind, expected one of float32, int8, binary'
        """
        for name, least in (("generation", 0), ("count", 0), ("dim", 1), ("added", 0)):
            number = getattr(self, name)
            if number is not None and (type(number) is not int or number < least):
                return f"{name}: got {number!r:.60}, expected a number of at least {least}"
        for name, table in (("engine", self.engine), ("map", self.map), ("vectors", self.vectors)):
            key = {"engine": "name", "map": "method", "vectors": "kind"}[name]
            if not isinstance(table.get(key), str):
                known = f"one of {', '.join(KINDS)}" if name == "vectors" else "text"
                return f"{name}: got no {key}, expected {known}"
        if self.vectors["kind"] not in KINDS:
            return f"vectors: got {self.vectors['kind']!r:.60}, expected one of {', '.join(KINDS)}"
        if not isinstance(self.photos, str | None):
            return f"photos: got {self.photos!r:.60}, expected text or null"
        for name in self.files:
            if not name or name in (".", "..") or set("/\\\0:") & set(name):
                return f"files: got {name!r:.60}, expected the name of a file"
        for number in self.packs:
            if not (number.isascii() and number.isdecimal()):
                return f"packs: got {number!r:.60}, expected a number"
        for facts in (*self.files.values(), *self.packs.values()):
            if not isinstance(facts, list) or len(facts) != 2 or not all(type(fact) is int for fact in facts):
                return f"files: got {facts!r:.60}, expected a size and a checksum"
        if not all(isinstance(text, str) for text in (*self.columns, *self.run.values())):
            return "columns, run: got what is no text, expected texts"
        return ""


def is_index(folder: Path) -> bool:
    """Return whether a folder looks like an index."""
    return (folder / FILE).is_file()


def facts_of(file: Path) -> list[int]:
    """Return the size and the CRC-32 of a file."""
    crc = 0
    with open(file, "rb") as opened:
        while block := opened.read(2**20):
            crc = zlib.crc32(block, crc)
    return [file.stat().st_size, crc]


def sync_file(file: Path) -> None:
    """Wait until the disk has the content of a file."""
    with open(file, "rb+") as opened:
        os.fsync(opened.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the disk has the names in a folder; a system without this, such as Windows, does nothing."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
