"""A queue of past embeddings as references."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from proxymetric.seam import NORMALISATIONS, Commit, Context, Energy, References, Source, nothing


class Memory(Source):
    """The last `size` embeddings of earlier batches, without gradient: cross-batch memory (Wang et al. 2020).

    It rests on slow drift: an embedding of some steps ago is still nearly what the encoder would give now, so the batch
    can be compared with many more samples than fit into it. The batch itself is not in it: it enters in `commit`.

    size: embeddings kept, > 0; oldest out first. dim: D. start: commits before it begins to fill and to be used, since
    a young encoder drifts fast (the paper: 1,000). normalise: how embeddings are kept, as the objective does it.

    >>> source = Memory(size=4, dim=2)
    >>> source.remember(torch.eye(2), torch.tensor([0, 1])); source.remember(-torch.eye(2), torch.tensor([2, 3]))
    >>> source.remember(torch.ones(1, 2), torch.tensor([4]))
    >>> source.labels, len(source)
    (tensor([4, 1, 2, 3]), 4)
    """

    vectors: Tensor
    labels: Tensor

    def __init__(self, size: int, dim: int, start: int = 0, normalise: str = "l2") -> None:
        super().__init__()
        if size < 1 or start < 0:
            raise ValueError(f"memory: got size {size} and start {start}, wanted a size above 0 and a start from 0")
        self.start, self.normalise = start, normalise
        self.dim = dim
        self.register_buffer("vectors", torch.zeros(size, dim))
        self.register_buffer("labels", torch.full((size,), -1, dtype=torch.int64))
        self._seen = 0

    def __len__(self) -> int:
        return min(self._seen, len(self.labels))

    def forward(self, ctx: Context, energy: Energy) -> tuple[References, Commit]:
        refs = References(self.vectors[: len(self)], self.labels[: len(self)])
        if ctx.progress.step < self.start:
            return refs, nothing
        new, labels = NORMALISATIONS[self.normalise](ctx.embeddings.detach()), ctx.batch.labels

        def commit() -> None:
            self.remember(new, labels)

        # A view would be written to by this very commit, before a second backward could read it.
        return refs._replace(vectors=refs.vectors.clone(), labels=refs.labels.clone()), commit

    @torch.no_grad()
    def remember(self, vectors: Tensor, labels: Tensor) -> None:
        """Put rows in the places of the oldest; of more rows than there are places, the last ones."""
        size = len(self.labels)
        vectors, labels = vectors[-size:], labels[-size:]
        places = (self._seen + torch.arange(len(labels), device=self.labels.device)) % size
        self.vectors[places] = vectors.to(self.vectors)
        self.labels[places] = labels.to(self.labels)
        self._seen += len(labels)

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self._seen)

    def set_extra_state(self, state: Any) -> None:
        self._seen = int(state)
