"""The pairs of one class, apart: where classes lie each at one place, a query has them with its own class alone.

They are B times K, whatever the number of classes; autograd goes back through them, from a copy of the rows they need.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from proxymetric.ops.task import NONE, Task
from proxymetric.seam import NORMALISATIONS


class Found(NamedTuple):
    """What the positives are, and the way back."""

    log: Tensor
    """a sum over columns of `log(1 + sum exp)`, or the log-sum of each query (B,)"""
    weight: Tensor
    """the sum of the columns' mean weights, or the mean weight of each query (B,)"""
    queries: Tensor
    """(B, D) the leaf"""
    vectors: Tensor
    """(B K, D) the leaf, the rows that `Own.rows` names"""


class Own:
    """The classes of a batch: at most B of them, counted 0 to B - 1. Nothing here waits for a device."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.per_class = task.refs.per_class or 1
        labels, of_classes = task.labels.long(), task.refs.labels[:: self.per_class].long().contiguous()
        count, classes = len(labels), len(of_classes)
        present, order = labels.sort(stable=True)
        number = torch.cat([present[:1] * 0, (present[1:] != present[:-1]).long()]).cumsum(0)
        self.number = torch.empty_like(number).scatter_(0, order, number)
        """(B,) that of each query's class"""
        place = torch.searchsorted(present, of_classes).clamp_(max=count - 1)
        slot = number[place].masked_fill_(present[place] != of_classes, count)
        del place
        column = labels.new_full((count + 1,), -1).scatter_(0, slot, torch.arange(classes, device=labels.device))
        column, counted = column[:-1], torch.arange(count, device=labels.device)
        self.here = column >= 0
        """(B,) whether there is a class of that number, with references here"""
        # Where there is none, any rows will do; not the same ones for all, which would then be written to in turns.
        column = column.where(self.here, counted % classes)
        within = torch.arange(self.per_class, device=labels.device)
        self.rows = (column[:, None] * self.per_class + within).flatten()
        """(B K,) the references of these classes"""

    def mean(self, queries: Tensor, vectors: Tensor, count: float, wanted: tuple[bool, bool]) -> Found:
        """The sum over columns of `log(1 + sum over the queries of its class)`, over `count`."""
        z, weight, x, p = self._pairs(queries, vectors, wanted)
        size, at = z.shape, (self.number,)
        base = z.new_zeros(size).scatter_reduce_(0, self.number[:, None].expand(size), z.detach(), "amax")
        total = torch.index_put(z.new_zeros(size), at, (z - base[self.number]).exp(), accumulate=True)
        # base >= 0; where it is 0, 1 + total may not show a small total.
        log = torch.where(base > 0, base + (total + (-base).exp()).log(), total.log1p())
        pairs = torch.index_put(z.new_zeros(size), at, (z != NONE).to(z), accumulate=True)
        if weight is not None:
            pairs = torch.index_put(z.new_zeros(size), at, weight, accumulate=True) / pairs.clamp(min=1)
        return Found(log.sum() / count, pairs.sum() if weight is not None else (pairs > 0).to(z).sum(), x, p)

    def each(self, queries: Tensor, vectors: Tensor, wanted: tuple[bool, bool]) -> Found:
        """Of each query the log-sum over the columns of its class, and their mean weight."""
        z, weight, x, p = self._pairs(queries, vectors, wanted)
        here = self.here[self.number]
        log = torch.logsumexp(z.masked_fill(~here[:, None], 0.0), 1).masked_fill(~here, NONE)
        return Found(log, here.to(z) if weight is None else weight.mean(1) * here, x, p)

    def _pairs(
        self, queries: Tensor, vectors: Tensor, wanted: tuple[bool, bool]
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """Exponents of each query at the columns of its class, (B, 1) or (B, K), their weights, and the leaves."""
        refs, of_class, rule = self.task.refs, self.task.of_class, self.task.weight
        x = queries.detach().float().requires_grad_(wanted[0])
        p = vectors.detach()[self.rows].float().requires_grad_(wanted[1])
        rows = p if refs.normalise is None else NORMALISATIONS[refs.normalise](p)
        s = (rows.unflatten(0, (-1, self.per_class))[self.number] * x[:, None]).sum(2)
        if of_class is not None:
            s = of_class(s)[:, None]
        z, weight = self.task.positive(s), None
        if rule is not None:
            labels = self.task.labels.long()[:, None].expand(s.shape).flatten()
            weight = rule.positive.of(labels)(s.flatten()[None])[0].view_as(s).to(s)
            z = z * weight
        return z.masked_fill(~self.here[self.number, None], NONE), weight, x, p
