"""Vectors with the files they came from: save, load, search exactly."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from proxymetric.files import replacing
from proxymetric.seam import unit


class Index:
    """(N, D) vectors and N names, searched by cosine.

    >>> index = Index(torch.eye(3), ["x", "y", "z"])
    >>> index.search(torch.tensor([[0.0, 2.0, 1.0]]), k=2)[0]
    [('y', 0.894...), ('z', 0.447...)]
    """

    def __init__(self, vectors: Tensor, names: Sequence[str]) -> None:
        if len(vectors) != len(names):
            raise ValueError(f"names: got {len(names)} for {len(vectors)} vectors, wanted one for each")
        self.vectors, self.names = vectors, list(names)

    def search(self, queries: Tensor, k: int = 8, without: Sequence[str] = ()) -> list[list[tuple[str, float]]]:
        """The k nearest names of each query with their cosine; a query's own name in `without` is not among them."""
        if k < 1:
            raise ValueError(f"k: got {k}, wanted at least 1")
        scores = unit(queries) @ unit(self.vectors).T
        own = {str(Path(name).resolve()) for name in without}
        for column, name in enumerate(self.names):
            if own and str(Path(name).resolve()) in own:
                scores[:, column] = -torch.inf
        found = scores.topk(min(k, len(self.names)), dim=1)
        return [
            [(self.names[i], s) for i, s in zip(places, values, strict=True) if s > -torch.inf]
            for places, values in zip(found.indices.tolist(), found.values.tolist(), strict=True)
        ]

    def save(self, file: str | Path) -> None:
        """One safetensors file: `vectors`, and the names in its header."""
        with replacing(file) as temporary:
            save_file({"vectors": self.vectors.contiguous()}, str(temporary), {"names": json.dumps(self.names)})

    @classmethod
    def load(cls, file: str | Path) -> Index:
        try:
            with safe_open(str(file), "pt") as opened:
                return cls(opened.get_tensor("vectors"), json.loads((opened.metadata() or {})["names"]))
        except (OSError, SafetensorError, KeyError) as error:
            raise ValueError(f"{file} is no file that `proxymetric embed` wrote: {error}") from None
