"""Counts between two evaluations, for the figures of a method; they have no effect on a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from proxymetric.core.class_shards import Shard, all_reduce_sum


class Tally(nn.Module):
    """Counts that restart after each evaluation.

    Counts change only in a commit. An evaluation calls `close`: the counts stay readable, and the next commit restarts
    them. Without any `close`, they cover all of training. Counts are buffers, so that checkpoints hold them, and
    counting does not synchronise with the GPU.
    """

    closed: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("closed", torch.zeros((), dtype=torch.int64))
        self.may_be_closed = True
        """whether `closed` may be 1: a commit asks this first, which takes less time than an operator"""

    def close(self) -> None:
        """Restart the counts at the next commit, because an evaluation reads them now."""
        self.closed.fill_(1)
        self.may_be_closed = True

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.may_be_closed = True


def close_tallies(module: nn.Module) -> None:
    """Close every tally inside a module.

    Args:
        module: any module; its submodules are searched.

    Example:
        >>> module = nn.ModuleList([Counts("samples")])
        >>> close_tallies(module); int(module[0].closed)
        1
    """
    for submodule in module.modules():
        if isinstance(submodule, Tally):
            submodule.close()


class Counts(Tally):
    """Named whole numbers, each summed over the steps since the last evaluation.

    Args:
        *names: the names of the numbers.

    Example:
        >>> counts = Counts("samples", "hits")
        >>> counts.add(samples=4, hits=torch.tensor(3)); counts.add(samples=4, hits=2)
        >>> counts.share("hits", "samples")
        0.625
        >>> counts.close(); counts.add(samples=1, hits=0)
        >>> counts.total("samples"), counts.share("hits", "samples")
        (1, 0.0)
    """

    changed_by_commit = ("closed", "may_be_closed", "sums")
    sums: Tensor

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.places = {name: place for place, name in enumerate(names)}
        self.register_buffer("sums", torch.zeros(len(names), dtype=torch.int64))

    @torch.no_grad()
    def add(self, **counts: Tensor | int) -> None:
        """Add the numbers of one step.

        Args:
            **counts: name -> a whole number, or a 0-dimensional tensor on the device of the sums.
        """
        if self.may_be_closed:
            self.sums.mul_(1 - self.closed)
            self.closed.zero_()
            self.may_be_closed = False
        for name, count in counts.items():
            self.sums[self.places[name]].add_(count)

    def total(self, name: str) -> int:
        """The sum with this name; this synchronises with the GPU."""
        return int(self.sums[self.places[name]])

    def share(self, part: str, whole: str) -> float | None:
        """The ratio of two sums; None if the second one is 0."""
        return self.total(part) / self.total(whole) if self.total(whole) else None


class ProxyUse(Tally):
    """Counts the proxies in use: a proxy is in use if it is the nearest proxy of its class for some sample.

    The intervals between evaluations are numbered. Each proxy stores the number of the last interval in which it was
    in use, so that the cost of a step depends on its batch and not on the number of classes.

    Args:
        classes: C.
        per_class: K.

    Example:
        >>> use = ProxyUse(classes=3, per_class=2)
        >>> use.mark(torch.tensor([0, 0, 2, 3])); use.figures()  # one of class 0, both of class 1
        {'proxies in use': 1.5}
        >>> use.close(); use.mark(torch.tensor([5])); use.figures()
        {'proxies in use': 1.0}
    """

    changed_by_commit = ("closed", "may_be_closed", "last", "interval")
    last: Tensor
    interval: Tensor

    def __init__(self, classes: int, per_class: int) -> None:
        super().__init__()
        self.per_class = per_class
        self.register_buffer("last", torch.zeros(classes * per_class, dtype=torch.int32))
        self.register_buffer("interval", torch.ones((), dtype=torch.int32))

    @torch.no_grad()
    def nearest(
        self,
        queries: Tensor,
        labels: Tensor,
        rows: Tensor,
        row_labels: Tensor,
        normalise: Callable[[Tensor], Tensor],
        shard: Shard | None = None,
    ) -> Tensor:
        """The nearest proxy of each query's own class.

        Args:
            queries: (B, D), normalised.
            labels: (B,) labels of the queries.
            rows: (R, D) proxies, K for each class, not normalised.
            row_labels: (R,) classes of the rows, ascending.
            normalise: the normalisation of the rows.
            shard: the classes of these rows, if other processes hold the rows of other classes.

        Returns:
            (B,) row numbers among the `C K` proxies of all classes, the same in every process.
        """
        grouped = rows.detach().unflatten(0, (-1, self.per_class))
        if shard is None and len(grouped) * self.per_class == len(self.last):  # rows of all classes, in order
            return self._nearest(queries, grouped[labels], labels, normalise)
        local_classes = row_labels[:: self.per_class].contiguous()
        place = torch.searchsorted(local_classes, labels).clamp(max=len(local_classes) - 1)
        nearest = self._nearest(queries, grouped[place], labels, normalise)
        return nearest if shard is None else all_reduce_sum(nearest * (local_classes[place] == labels), shard)

    def _nearest(self, queries: Tensor, rows: Tensor, labels: Tensor, normalise: Callable[[Tensor], Tensor]) -> Tensor:
        """Row numbers (B,) of the nearest among the proxies (B, K, D) of each query's class."""
        similarity = torch.bmm(normalise(rows.to(queries.dtype)), queries.unsqueeze(2)).squeeze(2)
        return torch.add(similarity.argmax(1), labels, alpha=self.per_class)

    def mark(self, rows: Tensor) -> None:
        """Record, in a commit, that proxies were in use.

        Args:
            rows: their row numbers, from `nearest`.
        """
        if self.may_be_closed:
            self.interval.add_(self.closed)
            self.closed.zero_()
            self.may_be_closed = False
        self.last.scatter_(0, rows, self.interval.expand_as(rows))

    def figures(self) -> dict[str, float]:
        """The mean number of proxies in use per class.

        Returns:
            "proxies in use": the mean over the classes with samples since the last evaluation; empty without samples.
        """
        used_per_class = (self.last == self.interval).view(-1, self.per_class).sum(1)
        classes = int((used_per_class > 0).sum())
        return {"proxies in use": int(used_per_class.sum()) / classes} if classes else {}
