"""Learned proxies: K free vectors for each class."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from proxymetric.checks import whole_number
from proxymetric.core.class_shards import Shard
from proxymetric.core.pieces import Commit, Context, Energy, References, Source, nothing, unit

INITIALISATIONS: dict[str, Callable[[int, int], Tensor]] = {
    # Proxy-Anchor's released code: kaiming-normal with fan_out = the number of rows.
    "kaiming": lambda rows, dim: torch.randn(rows, dim) * math.sqrt(2 / rows),
    # SoftTriple's released code: kaiming-uniform(a = sqrt 5) of the transposed matrix, so a bound of 1 / sqrt(rows).
    "kaiming-uniform": lambda rows, dim: torch.empty(rows, dim).uniform_(-1, 1) / math.sqrt(rows),
    "xavier": lambda rows, dim: torch.empty(rows, dim).uniform_(-1, 1) * math.sqrt(6 / (rows + dim)),
    # VPTSP's released code, for its free proxies and for those of its baseline without semantic proxies.
    "xavier/8": lambda rows, dim: torch.empty(rows, dim).uniform_(-1, 1) * math.sqrt(6 / (rows + dim)) / 8,
    "normal": lambda rows, dim: torch.randn(rows, dim),
    "unit": lambda rows, dim: unit(torch.randn(rows, dim)),
}
"""name -> how (rows, dim) first vectors are drawn. Length means nothing to a cosine but much to the size of a step."""


def initial(classes: int, dim: int, per_class: int, init: str) -> Tensor:
    """The first (C K, D) vectors, with every argument checked."""
    whole_number(1, classes=classes, dim=dim, per_class=per_class)
    if init not in INITIALISATIONS:
        near = difflib.get_close_matches(init, INITIALISATIONS, 1) or [next(iter(INITIALISATIONS))]
        raise ValueError(f"init: got {init!r}, expected one of {', '.join(INITIALISATIONS)}; nearest is {near[0]!r}")
    return INITIALISATIONS[init](classes * per_class, dim)


class LearnedProxies(Source):
    """`C K` vectors trained by the run's optimiser at the proxies' own rate, class after class.

    init: a name of `INITIALISATIONS`: "kaiming", "kaiming-uniform", "xavier", "xavier/8", "normal" or "unit".

    >>> source = LearnedProxies(classes=3, dim=2, per_class=2)
    >>> source.vectors.shape, source.labels
    (torch.Size([6, 2]), tensor([0, 0, 1, 1, 2, 2]))
    """

    proxies = ("vectors",)
    labels: Tensor
    per_class: int

    def __init__(self, classes: int, dim: int, per_class: int = 1, init: str = "kaiming") -> None:
        super().__init__()
        self.classes, self.dim, self.per_class, self.seats = classes, dim, per_class, per_class
        self.vectors = nn.Parameter(initial(classes, dim, per_class, init))
        self.register_buffer("labels", torch.arange(classes).repeat_interleave(per_class), persistent=False)
        self.part: Shard | None = None
        """the classes whose vectors are here; None: all"""

    def forward(self, ctx: Context, energy: Energy) -> tuple[References, Commit]:
        return References(self.vectors, self.labels, self.per_class, shard=self.part), nothing

    def shard(self, shard: Shard) -> None:
        assert self.part is None
        rows = slice(shard.start * self.per_class, shard.stop * self.per_class)
        self.vectors = nn.Parameter(self.vectors.detach()[rows].clone())
        self.labels, self.part = self.labels[rows].clone(), shard

    def seated(self) -> Tensor:
        if self.part is not None:
            raise ValueError("shard: proxies that are divided among processes cannot be re-picked")
        return self.vectors.detach().clone()

    @torch.no_grad()
    def reseed(self, vectors: Tensor) -> None:
        self.vectors.copy_(vectors)
