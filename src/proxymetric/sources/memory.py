"""A queue of past embeddings as references."""

from __future__ import annotations

from proxymetric.core.pieces import NORMALISATIONS, Commit, Context, Energy, References, Source, nothing
from proxymetric.sources.queue import Queue


class Memory(Queue, Source):
    """The last `size` embeddings of earlier batches, without gradient: cross-batch memory (Wang et al. 2020).

    It rests on slow drift: an embedding of some steps ago is still nearly what the encoder would give now, so the batch
    can be compared with many more samples than fit into it. The batch itself is not in it: it enters in `commit`.

    size: embeddings kept, > 0; oldest out first. dim: D. start: commits before it begins to fill and to be used, since
    a young encoder drifts fast (the paper: 1,000). normalise: how embeddings are kept, as the objective does it.

    >>> source = Memory(size=4, dim=2, start=1000)
    >>> len(source)
    0
    """

    def __init__(self, size: int, dim: int, start: int = 0, normalise: str = "l2") -> None:
        super().__init__(size, dim)
        if start < 0:
            raise ValueError(f"start: got {start}, expected a number of steps from 0")
        self.start, self.normalise, self.dim = start, normalise, dim

    def forward(self, ctx: Context, energy: Energy) -> tuple[References, Commit]:
        refs = References(self.vectors[: len(self)], self.labels[: len(self)])
        if ctx.progress.step < self.start:
            return refs, nothing
        new, labels = NORMALISATIONS[self.normalise](ctx.embeddings.detach()), ctx.batch.labels

        def commit() -> None:
            self.remember(new, labels)

        # A view would be written to by this very commit, before a second backward could read it.
        return refs._replace(vectors=refs.vectors.clone(), labels=refs.labels.clone()), commit
