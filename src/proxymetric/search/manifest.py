"""The manifest of an index: the one file that says which files belong to it, replaced as the last step of a change."""

from __future__ import annotations

import json
import os
import uuid
import zlib
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from proxymetric.arguments.signatures import neighbour
from proxymetric.core.quantisation import KINDS
from proxymetric.system.files import read_json, write_json

FORMAT = 3
"""1 and 2: all files were written anew for each change. 3: files that grow, and a log"""
FILE = "manifest.json"
CHECKSUM = "checksum"
"""the CRC-32 of the other entries"""


@dataclass(frozen=True)
class Manifest:
    """What an index says about itself.

    Args:
        generation: the number of the state; each change makes a new one.
        count: number of items.
        dim: dimensions of the vectors.
        model: `Model.fingerprint` of the model that made the vectors; empty if unknown.
        run: where that model lies: `run`, `which` and `weights`; empty if unknown.
        photos: the folder that was indexed; None for an index that was filled from Python.
        engine: name and settings of the engine, and facts about it.
        map: method of the map (`pca`, `tsne` or `none`), the rows that were there when it was made (`rows`), and how
            many of them were placed since all points were computed together (`placed`).
        columns: the metadata columns.
        vectors: kind of the vectors' numbers (`float32`, `int8` or `binary`), bytes of a vector, and what was lost.
        layout: which folders of `photos` are classes, or the benchmark that it is, as `data.layout` says for training.
        added: number of items that are no files, which only the index has.
        rows: rows in the files of vectors, of removed items too.
        pictures: bytes of the file of thumbnails.
        log: bytes of the log.
        base: the generation of the last merge, which is in the names of the files of items and of the log.
        store: the generation in the names of the files of vectors and thumbnails.
        files: size and CRC-32 of the files of items.
        derived: size and CRC-32 of the files of the map and of the engine, which can be made anew from the others.
        identity: of this index; another one in its place has another.
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
    vectors: dict[str, Any] = field(default_factory=lambda: {"kind": "float32"})
    layout: str = "auto"
    added: int = 0
    rows: int = 0
    pictures: int = 0
    log: int = 0
    base: int = 0
    store: int = 0
    files: dict[str, list[int]] = field(default_factory=dict)
    derived: dict[str, list[int]] = field(default_factory=dict)
    identity: str = field(default_factory=lambda: uuid.uuid4().hex)
    format: int = FORMAT

    def write(self, folder: Path) -> None:
        """Replace the manifest of an index atomically, and wait until the disk has it."""
        content = asdict(self)
        write_json(folder / FILE, content | {CHECKSUM: _checksum(content)})
        sync_folder(folder)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest of an index.

        Raises:
            ValueError: the folder is not an index, an index of another version, or its manifest is damaged.
        """
        what = "a folder that `proxymetric index` wrote"
        if not (folder / FILE).is_file():
            missing = "which does not exist" if not folder.exists() else f"which has no {FILE}"
            raise ValueError(f"index: got {folder}, {missing}; expected {what}{neighbour(folder, is_index)}")
        content = read_json(folder / FILE)
        if isinstance(content, dict) and isinstance(number := content.get("format"), int) and number != FORMAT:
            what_to_do = "update proxymetric" if number > FORMAT else "make the index anew with `proxymetric index`"
            version = "a later" if number > FORMAT else "an earlier"
            raise ValueError(
                f"index: got {folder} of format {number}, expected format {FORMAT}; {version} version of proxymetric "
                f"wrote it: {what_to_do}"
            )
        given = content.pop(CHECKSUM, None) if isinstance(content, dict) else None
        try:
            manifest = cls(**content)
        except TypeError:
            manifest = None
        annotated = {f.name: f.type.split("[")[0] for f in fields(cls) if isinstance(f.type, str)}
        kinds = {"int": int, "str": str, "dict": dict, "list": list}
        if manifest is None or not all(
            isinstance(getattr(manifest, name), kinds[kind]) for name, kind in annotated.items() if kind in kinds
        ):
            raise ValueError(f"index: got {folder}, whose {FILE} is damaged; expected {what}")
        fault = manifest.fault() or ("" if given == _checksum(content) else "its checksum is that of another content")
        if fault:
            raise ValueError(f"index: got {folder}, whose {FILE} is damaged ({fault}); expected {what}")
        return manifest

    def fault(self) -> str:
        """Say what is wrong inside the tables of a manifest; empty if nothing is.

        Example:
            >>> Manifest(1, 2, 3, files={"../items.sqlite": [1, 2]}).fault()
            "files: got '../items.sqlite', expected the name of a file"
            >>> Manifest(1, 2, 3, vectors={"kimd": "int8"}).fault()
            'vectors: got no kind, expected one of float32, int8, binary'
        """
        numbers = ("generation", "count", "added", "rows", "pictures", "log", "base", "store")
        for name, least in (("dim", 1), *((name, 0) for name in numbers)):
            number = getattr(self, name)
            if type(number) is not int or number < least:
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
        for table in (self.files, self.derived):
            for name, facts in table.items():
                if not name or name in (".", "..") or set("/\\\0:") & set(name):
                    return f"files: got {name!r:.60}, expected the name of a file"
                if not isinstance(facts, list) or len(facts) != 2 or not all(type(fact) is int for fact in facts):
                    return f"files: got {facts!r:.60}, expected a size and a checksum"
        if not all(isinstance(text, str) for text in (*self.columns, *self.run.values())):
            return "columns, run: got what is no text, expected texts"
        return ""


def is_index(folder: Path) -> bool:
    """Return whether a folder looks like an index."""
    return (folder / FILE).is_file()


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


def _checksum(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True, ensure_ascii=False).encode("utf-8", "backslashreplace"))
