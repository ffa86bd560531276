"""Learned proxies: K trained vectors for each class."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from proxymetric.checks import whole_number
from proxymetric.core.capabilities import ClassProxies
from proxymetric.core.class_shards import Shard
from proxymetric.core.normalisation import unit
from proxymetric.core.pieces import Commit, Context, Energy, References, Source, nothing
from proxymetric.signatures import one_of

INITIALISATIONS: dict[str, Callable[[int, int], Tensor]] = {
    # Proxy-Anchor's released code: kaiming-normal with fan_out = the number of rows.
    "kaiming": lambda rows, dim: torch.randn(rows, dim) * math.sqrt(2 / rows),
    # SoftTriple's released code: kaiming-uniform(a = sqrt 5) of the transposed matrix, so a bound of 1 / sqrt(rows).
    "kaiming-uniform": lambda rows, dim: torch.empty(rows, dim).uniform_(-1, 1) / math.sqrt(rows),
    "xavier": lambda rows, dim: torch.empty(rows, dim).uniform_(-1, 1) * math.sqrt(6 / (rows + dim)),
    # VPTSP's released code, for its free proxies and for the proxies of its baseline without semantic proxies.
    "xavier/8": lambda rows, dim: torch.empty(rows, dim).uniform_(-1, 1) * math.sqrt(6 / (rows + dim)) / 8,
    "normal": lambda rows, dim: torch.randn(rows, dim),
    "unit": lambda rows, dim: unit(torch.randn(rows, dim)),
}
"""name -> a function (rows, dim) that draws the first vectors; a cosine ignores their length, the step size does not"""


def initial(classes: int, dim: int, per_class: int, init: str) -> Tensor:
    """The first vectors, (C K, D).

    Args:
        classes: C, at least 1.
        dim: D, at least 1.
        per_class: K, at least 1.
        init: a name of `INITIALISATIONS`.

    Raises:
        ValueError: an argument is out of its range.
    """
    whole_number(1, classes=classes, dim=dim, per_class=per_class)
    one_of("init", init, INITIALISATIONS)
    return INITIALISATIONS[init](classes * per_class, dim)


class LearnedProxies(Source):
    """`C K` vectors, ordered by class, that the run's optimiser trains at the learning rate of proxies.

    Args:
        classes: C.
        dim: D.
        per_class: K.
        init: a name of `INITIALISATIONS`: "kaiming", "kaiming-uniform", "xavier", "xavier/8", "normal" or "unit".

    Example:
        >>> source = LearnedProxies(classes=3, dim=2, per_class=2)
        >>> source.vectors.shape, source.labels
        (torch.Size([6, 2]), tensor([0, 0, 1, 1, 2, 2]))
        >>> source
        LearnedProxies(classes=3, dim=2, per_class=2)
    """

    proxies = ("vectors",)
    takes_several_labels = True
    labels: Tensor
    per_class: int

    def __init__(self, classes: int, dim: int, per_class: int = 1, init: str = "kaiming") -> None:
        super().__init__()
        self.classes = classes
        self.dim = dim
        self.per_class = per_class
        self.seats = per_class
        self.vectors = nn.Parameter(initial(classes, dim, per_class, init))
        self.register_buffer("labels", torch.arange(classes).repeat_interleave(per_class), persistent=False)

    def forward(self, ctx: Context, energy: Energy) -> tuple[References, Commit]:
        refs = References(self.vectors, self.labels, self.per_class, shard=self.part, all_classes=self.part is None)
        return refs, nothing

    def shard(self, shard: Shard) -> None:
        assert self.part is None
        rows = slice(shard.start * self.per_class, shard.stop * self.per_class)
        self.vectors = nn.Parameter(self.vectors.detach()[rows].clone())
        self.labels = self.labels[rows].clone()
        self.part = shard

    def seated(self) -> Tensor:
        if self.part is not None:
            raise ValueError(
                "shard: got proxies divided among processes, which cannot be re-picked, expected all proxies in each "
                "process"
            )
        return self.vectors.detach().clone()

    @torch.no_grad()
    def reseed(self, vectors: Tensor) -> None:
        self.vectors.copy_(vectors)

    def class_proxies(self) -> ClassProxies:
        """The proxies (`HasClassProxies`)."""
        return ClassProxies(self.seated(), self.labels)
