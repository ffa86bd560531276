"""What a method counts between two evaluations: for its figures alone, without a part in any loss."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from proxymetric.core.class_shards import Shard, all_reduce_sum


class Tally(nn.Module):
    """Numbers that begin anew after each evaluation.

    They change in a commit alone. `close` says that an evaluation reads them: they stay as they are until the next
    commit, which begins anew, so that reading changes nothing. Where nobody closes them they go on from the start of
    training. All of it is in buffers, which a checkpoint holds, and counting does not synchronise with the GPU.
    """

    closed: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("closed", torch.zeros((), dtype=torch.int64))

    def close(self) -> None:
        """An evaluation reads the numbers now."""
        self.closed.fill_(1)


def close_tallies(module: nn.Module) -> None:
    """Close every tally inside a module.

    Args:
        module: any module; the tallies are found among its submodules.

    Example:
        >>> inside = nn.ModuleList([Counts("samples")])
        >>> close_tallies(inside); int(inside[0].closed)
        1
    """
    for part in module.modules():
        if isinstance(part, Tally):
            part.close()


class Counts(Tally):
    """Named whole numbers, each a sum over the steps since the last evaluation.

    Args:
        names: of the numbers.

    Example:
        >>> counts = Counts("samples", "hits")
        >>> counts.add(samples=4, hits=torch.tensor(3)); counts.add(samples=4, hits=2)
        >>> counts.share("hits", "samples")
        0.625
        >>> counts.close(); counts.add(samples=1, hits=0)
        >>> counts.total("samples"), counts.share("hits", "samples")
        (1, 0.0)
    """

    sums: Tensor

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.places = {name: place for place, name in enumerate(names)}
        self.register_buffer("sums", torch.zeros(len(names), dtype=torch.int64))

    @torch.no_grad()
    def add(self, **counts: Tensor | int) -> None:
        """Add a step's numbers: whole ones, in host memory or as 0-dimensional tensors where the sums are."""
        self.sums.mul_(1 - self.closed)
        self.closed.zero_()
        for name, count in counts.items():
            self.sums[self.places[name]].add_(count)

    def total(self, name: str) -> int:
        """The sum of that name; this synchronises with the GPU."""
        return int(self.sums[self.places[name]])

    def share(self, part: str, whole: str) -> float | None:
        """The ratio of two sums; None where nothing was counted."""
        return self.total(part) / self.total(whole) if self.total(whole) else None


class ProxyUse(Tally):
    """Which of a class's K proxies are the nearest one of their class for some sample of it.

    For each proxy the number of the last interval between evaluations in which it was in use is kept, so that a step
    costs what its batch costs, however many classes there are.

    Args:
        classes: C.
        per_class: K.

    Example:
        >>> use = ProxyUse(classes=3, per_class=2)
        >>> use.mark(torch.tensor([0, 0, 2, 3])); use.figures()  # one of class 0, both of class 1, class 2 is not seen
        {'proxies in use': 1.5}
        >>> use.close(); use.mark(torch.tensor([5])); use.figures()
        {'proxies in use': 1.0}
    """

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
        of: Tensor,
        normal: Callable[[Tensor], Tensor],
        shard: Shard | None = None,
    ) -> Tensor:
        """The nearest proxy of each query's own class.

        Args:
            queries: (B, D) as they are compared.
            labels: (B,) of the queries.
            rows: (R, D) proxies, K for each class, not normalised.
            of: (R,) classes of the rows, ascending.
            normal: how rows are normalised.
            shard: which classes the rows are of, where other processes hold those of the others.

        Returns:
            (B,) places among the `C K` proxies of all classes, the same in every process.
        """
        here = of[:: self.per_class].contiguous()
        place = torch.searchsorted(here, labels).clamp(max=len(here) - 1)
        own = normal(rows.detach().unflatten(0, (-1, self.per_class))[place].to(queries.dtype))
        found = labels * self.per_class + torch.einsum("bd,bkd->bk", queries, own).argmax(1)
        return found if shard is None else all_reduce_sum(found * (here[place] == labels), shard)

    @torch.no_grad()
    def mark(self, places: Tensor) -> None:
        """Say in a commit which proxies were in use."""
        self.interval.add_(self.closed)
        self.closed.zero_()
        self.last[places] = self.interval

    def figures(self) -> dict[str, float]:
        """The mean number of proxies in use, over the classes seen since the last evaluation; none without any."""
        used = (self.last == self.interval).view(-1, self.per_class).sum(1)
        seen = int((used > 0).sum())
        return {"proxies in use": int(used.sum()) / seen} if seen else {}
