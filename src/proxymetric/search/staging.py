"""Embedded images that wait to become part of an index, so that indexing continues where it was killed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import torch

from proxymetric.search.batches import Batch
from proxymetric.system.files import replacing
from proxymetric.system.tensor_files import read_tensors, write_tensors

STAGING = "staging"


class Staging:
    """A folder of parts: each is a file with some embedded images.

    Args:
        folder: the folder of the index.
        model: fingerprint of the model; parts of another model are removed.

    Example:
        >>> import tempfile
        >>> staging = Staging(Path(tempfile.mkdtemp()), model="m")
        >>> staging.write(Batch(["a"], np.ones((1, 1), np.float32), ["cat"], ["{}"], ["7-1"], [b"jpeg"]))
        >>> Staging(staging.folder.parent, model="m").batches[0].thumbnails
        [b'jpeg']
    """

    def __init__(self, folder: Path, model: str) -> None:
        self.folder, self.model = folder / STAGING, model
        self.batches: list[Batch] = []
        """the parts, in the order in which they were written"""
        self._next = 0
        for file in sorted(self.folder.glob("*.safetensors")) if self.folder.is_dir() else []:
            batch = self._read(file)
            if batch is None:
                file.unlink()
            else:
                self.batches.append(batch)
                self._next = int(file.stem) + 1

    def write(self, batch: Batch) -> None:
        """Write a part, atomically."""
        thumbnails = [thumbnail or b"" for thumbnail in batch.thumbnails]
        tensors = {
            "vectors": torch.from_numpy(batch.vectors),
            "thumbnails": torch.frombuffer(bytearray(b"".join(thumbnails) or b"\0"), dtype=torch.uint8),
        }
        items = [batch.ids, batch.labels, batch.metadata, batch.stamps, [len(content) for content in thumbnails]]
        with replacing(self.folder / f"{self._next:08d}.safetensors") as temporary:
            write_tensors(temporary, tensors, {"items": json.dumps(items), "model": self.model})
        self._next += 1
        self.batches.append(batch)

    def _read(self, file: Path) -> Batch | None:
        """Read a part; None for one that is damaged or of another model: its images are embedded again."""
        try:
            tensors, header = read_tensors(file)
            ids, labels, metadata, stamps, lengths = json.loads(header["items"])
            if header["model"] != self.model or not file.stem.isdecimal():
                return None
        except (OSError, ValueError, KeyError):
            return None
        content, starts = tensors["thumbnails"].numpy().tobytes(), np.cumsum([0, *lengths])
        thumbnails = [content[start : start + length] or None for start, length in zip(starts, lengths)]
        return Batch(ids, tensors["vectors"].numpy(), labels, metadata, stamps, thumbnails)

    def remove(self) -> None:
        """Remove all parts: they are in the index now."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.batches = []
