"""Proxies of a few classes per step, for class counts at which a step cannot touch every proxy."""

from __future__ import annotations

import torch
from torch import Tensor

from proxymetric.arguments.checks import at_least_zero
from proxymetric.core.capabilities import ClassProxies
from proxymetric.core.class_shards import Shard
from proxymetric.core.pieces import Commit, Context, Energy, References, Source, nothing
from proxymetric.core.row_table import RowTable
from proxymetric.sources.learned_proxies import initial
from proxymetric.sources.shared_random import shared_random


class RowProxies(Source):
    """Compares a batch with the proxies of its own classes and of random other classes, and moves only these proxies.

    The loss differs from the loss with `LearnedProxies`: negative pairs with the other classes are missing. In return,
    its cost does not grow with C, or only with a fraction of C. The rows step in `commit` (see `RowTable`): the proxies
    of other classes, and their optimiser state, are neither read nor moved.

    Args:
        classes: C.
        dim: D.
        per_class: K.
        init: a name of `INITIALISATIONS`.
        others: the share of classes, in [0, 1), that are drawn at each step in addition to the classes of the batch.
            They are drawn with replacement, so that slightly fewer distinct classes result (PartialFC, An et al. 2022,
            draws without replacement).

    Example:
        >>> source = RowProxies(classes=1000, dim=2)
        >>> list(source.parameters())
        []
    """

    per_class: int

    def __init__(self, classes: int, dim: int, per_class: int = 1, init: str = "kaiming", others: float = 0.0) -> None:
        super().__init__()
        at_least_zero(others=others)
        if others >= 1:
            raise ValueError(f"others: got {others}, expected a share of the classes below 1")
        self.classes = classes
        self.dim = dim
        self.per_class = per_class
        self.others = others
        self.table = RowTable(initial(classes, dim, per_class, init), copy=False)
        self.part_names = {"table": "proxies"}

    def forward(self, ctx: Context, energy: Energy) -> tuple[References, Commit]:
        step_classes = self._step_classes(ctx.batch.labels)
        within_class = torch.arange(self.per_class, device=step_classes.device)
        rows = (step_classes[:, None] * self.per_class + within_class).flatten()
        vectors = self.table.take(rows, ctx.embeddings.device)
        return References(vectors, step_classes.repeat_interleave(self.per_class), self.per_class), nothing

    def _step_classes(self, labels: Tensor) -> Tensor:
        """The classes of this step, distinct and ascending; without gradients, only those of the batch."""
        if not self.others or not self.training or not torch.is_grad_enabled():
            return labels.unique()
        assert self.classes is not None
        draws = (shared_random(round(self.others * self.classes), device=labels.device).double() * self.classes).long()
        return torch.cat([labels, draws.to(labels)]).unique()

    def shard(self, shard: Shard) -> None:
        """Refuse: a step draws its classes from all of them.

        Raises:
            ValueError: always.
        """
        touched = self.others or "batch"
        raise ValueError(
            f"touched: got {touched!r} for proxies that are to be divided among processes (shard), expected "
            "touched='all', or all proxies in every process (train.shard=false)"
        )

    def class_proxies(self) -> ClassProxies:
        """The rows of the table (`HasClassProxies`)."""
        labels = torch.arange(len(self.table.values)) // self.per_class
        return ClassProxies(self.table.values.detach().clone(), labels)
