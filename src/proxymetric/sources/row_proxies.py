"""Proxies of a few classes at a time: for class counts where touching every proxy at every step is too much."""

from __future__ import annotations

import torch
from torch import Tensor

from proxymetric.core.pieces import Commit, Context, Energy, References, Source, nothing
from proxymetric.sources.learned_proxies import initial
from proxymetric.sources.row_table import RowTable
from proxymetric.sources.shared_random import shared_random


class RowProxies(Source):
    """Compares a batch with the proxies of the classes present in it and of random others, and moves only those.

    The push from all other classes is left out, so this is another loss than with `LearnedProxies`, a cheaper one: its
    cost does not grow with C, or by a fraction of it only. The rows step themselves in `commit` (see `RowTable`): those
    of a class that is not drawn are neither read nor moved, nor is their optimiser state.

    others: in [0, 1), the share of the classes that are drawn beside those of the batch, anew at each step and with
    replacement, so that a few less are seen (PartialFC, An et al. 2022, which draws without).

    >>> source = RowProxies(classes=1000, dim=2)
    >>> list(source.parameters())
    []
    """

    per_class: int

    def __init__(self, classes: int, dim: int, per_class: int = 1, init: str = "kaiming", others: float = 0.0) -> None:
        super().__init__()
        self.classes, self.dim, self.per_class, self.others = classes, dim, per_class, others
        self.table, self.called = RowTable(initial(classes, dim, per_class, init)), {"table": "proxies"}

    def forward(self, ctx: Context, energy: Energy) -> tuple[References, Commit]:
        present = self._seen(ctx.batch.labels)
        within = torch.arange(self.per_class, device=present.device)
        rows = (present[:, None] * self.per_class + within).flatten()
        vectors = self.table.take(rows, ctx.embeddings.device)
        return References(vectors, present.repeat_interleave(self.per_class), self.per_class), nothing

    def _seen(self, labels: Tensor) -> Tensor:
        """The classes of this step, distinct and in order; without gradients those of the batch alone."""
        if not self.others or not self.training or not torch.is_grad_enabled():
            return labels.unique()
        assert self.classes is not None
        more = (shared_random(round(self.others * self.classes), device=labels.device).double() * self.classes).long()
        return torch.cat([labels, more.to(labels)]).unique()
