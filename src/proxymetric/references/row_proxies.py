"""Proxies of the batch's classes only: for class counts where touching every proxy at every step is too much."""

from __future__ import annotations

import torch

from proxymetric.references.learned import initial
from proxymetric.references.rows import RowTable
from proxymetric.seam import Commit, Context, Energy, References, Source, nothing


class RowProxies(Source):
    """Compares a batch with the proxies of the classes present in it, and moves only those.

    The push from all other classes is left out, so this is another loss than with `LearnedProxies`, a cheaper one: its
    cost does not grow with C. The rows step themselves in `commit` (see `RowTable`).

    >>> source = RowProxies(classes=1000, dim=2)
    >>> list(source.parameters())
    []
    """

    def __init__(self, classes: int, dim: int, per_class: int = 1, init: str = "kaiming") -> None:
        super().__init__()
        self.classes, self.dim, self.per_class = classes, dim, per_class
        self.table = RowTable(initial(classes, dim, per_class, init))

    def forward(self, ctx: Context, energy: Energy) -> tuple[References, Commit]:
        present = ctx.batch.labels.unique()
        within = torch.arange(self.per_class, device=present.device)
        rows = (present[:, None] * self.per_class + within).flatten()
        vectors = self.table.take(rows, ctx.embeddings.device)
        return References(vectors, present.repeat_interleave(self.per_class), self.per_class), nothing
