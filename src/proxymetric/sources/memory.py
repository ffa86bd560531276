"""A queue of past embeddings as references."""

from __future__ import annotations

from proxymetric.core.normalisation import NORMALISATIONS
from proxymetric.core.pieces import Commit, Context, Energy, References, Source, nothing
from proxymetric.sources.queue import Queue


class Memory(Queue, Source):
    """The last `size` embeddings of earlier batches, without gradient: cross-batch memory (Wang et al. 2020).

    Embeddings drift slowly: an embedding from a few steps ago is still close to what the encoder would compute now. So
    a batch can be compared with many more samples than fit into it. The batch itself enters the memory in `commit`.

    Args:
        size: number of embeddings, at least 1.
        dim: D.
        start: commits before the memory is filled and used, because embeddings drift fast at first (the paper: 1,000).
        normalise: the normalisation of stored embeddings, the same as in the objective: "l2" or "ball".

    Example:
        >>> source = Memory(size=4, dim=2, start=1000)
        >>> source, len(source)
        (Memory(size=4, dim=2, start=1000), 0)
    """

    def __init__(self, size: int, dim: int, start: int = 0, normalise: str = "l2") -> None:
        super().__init__(size, dim)
        if start < 0:
            raise ValueError(f"start: got {start}, expected a number of steps of at least 0")
        self.start = start
        self.normalise = normalise
        self.dim = dim

    def forward(self, ctx: Context, energy: Energy) -> tuple[References, Commit]:
        refs = References(self.vectors[: len(self)], self.labels[: len(self)])
        if ctx.progress.step < self.start:
            return refs, nothing
        embeddings, labels = NORMALISATIONS[self.normalise](ctx.embeddings.detach()), ctx.batch.labels

        def commit() -> None:
            self.remember(embeddings, labels)

        # Copies: the commit overwrites the queue, and a second backward pass may still read the references.
        return refs._replace(rows=refs.rows.clone(), labels=refs.labels.clone()), commit
