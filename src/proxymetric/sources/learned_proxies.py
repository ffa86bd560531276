"""Learned proxies: K trained vectors for each class."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from proxymetric.arguments.checks import whole_number
from proxymetric.arguments.signatures import one_of
from proxymetric.core.capabilities import ClassProxies
from proxymetric.core.class_shards import Shard, made_part
from proxymetric.core.normalisation import unit
from proxymetric.core.pieces import Commit, Context, Energy, References, Source, nothing

INITIALISATIONS: dict[str, Callable[[Tensor, int], Tensor]] = {
    # Proxy-Anchor's released code: kaiming-normal with fan_out = the number of rows.
    "kaiming": lambda chunk, rows: chunk.normal_().mul_(math.sqrt(2 / rows)),
    # SoftTriple's released code: kaiming-uniform(a = sqrt 5) of the transposed matrix, so a bound of 1 / sqrt(rows).
    "kaiming-uniform": lambda chunk, rows: chunk.uniform_(-1, 1).div_(math.sqrt(rows)),
    "xavier": lambda chunk, rows: chunk.uniform_(-1, 1).mul_(math.sqrt(6 / (rows + chunk.shape[1]))),
    # VPTSP's released code, for its free proxies and for the proxies of its baseline without semantic proxies.
    "xavier/8": lambda chunk, rows: chunk.uniform_(-1, 1).mul_(math.sqrt(6 / (rows + chunk.shape[1]))).div_(8),
    "normal": lambda chunk, rows: chunk.normal_(),
    "unit": lambda chunk, rows: chunk.copy_(unit(chunk.normal_())),
}
"""name -> a function that draws the first vectors of some of all rows in place and returns them; a cosine ignores their
length, the step size does not"""
MAX_NUMBERS_PER_CHUNK = 2**22
"""numbers that are drawn at once, where most rows belong to other processes"""
ROWS_PER_DRAW = 16
"""torch draws normal numbers on a CPU in blocks of 16: other chunks than whole blocks would give other numbers"""


def initial(classes: int, dim: int, per_class: int, init: str, part: Shard | None = None) -> Tensor:
    """The first vectors, (C K, D).

    Args:
        classes: C, at least 1.
        dim: D, at least 1.
        per_class: K, at least 1.
        init: a name of `INITIALISATIONS`.
        part: the classes whose vectors are kept; None: all. The vectors and the random state at the end are those of
            all classes, but the vectors of all classes are not in memory at once.

    Raises:
        ValueError: an argument is out of its range.

    Example:
        >>> _ = torch.manual_seed(0); vectors = initial(100, 8, 1, "kaiming")
        >>> _ = torch.manual_seed(0); part = initial(100, 8, 1, "kaiming", Shard.of(100, rank=1, size=4))
        >>> torch.equal(part, vectors[25:50])
        True
    """
    whole_number(1, classes=classes, dim=dim, per_class=per_class)
    one_of("init", init, INITIALISATIONS)
    draw, rows = INITIALISATIONS[init], classes * per_class
    if part is None:
        return draw(torch.empty(rows, dim), rows)
    first, last = part.start * per_class, part.stop * per_class
    kept = torch.empty(last - first, dim)
    for start, stop in _chunks(rows, dim, kept.device):
        chunk = draw(torch.empty(stop - start, dim), rows)
        low, high = max(start, first), min(stop, last)
        if low < high:
            kept[low - first : high - first] = chunk[low - start : high - start]
    return kept


def _chunks(rows: int, dim: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """The rows from which, and up to which, vectors are drawn at once, such that the numbers are those of one draw.

    The last chunk has the rest of the rows, too: a draw of fewer than 16 numbers would give other numbers. On other
    devices than a CPU, the numbers depend on the size of a draw, so that there is one chunk.
    """
    step = max(ROWS_PER_DRAW, MAX_NUMBERS_PER_CHUNK // dim // ROWS_PER_DRAW * ROWS_PER_DRAW)
    if device.type != "cpu":
        step = rows
    starts = range(0, max(1, rows - step + 1), step)
    yield from zip(starts, [*starts[1:], rows], strict=True)


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
        whole_number(1, classes=classes)
        self.made = made_part(classes)
        """the classes whose vectors were made, if this process is to keep only these; None: all classes"""
        self.vectors = nn.Parameter(initial(classes, dim, per_class, init, self.made))
        made_classes = torch.arange(classes) if self.made is None else torch.arange(self.made.start, self.made.stop)
        self.register_buffer("labels", made_classes.repeat_interleave(per_class), persistent=False)

    def forward(self, ctx: Context, energy: Energy) -> tuple[References, Commit]:
        refs = References(self.vectors, self.labels, self.per_class, shard=self.part, all_classes=self.part is None)
        return refs, nothing

    def shard(self, shard: Shard) -> None:
        assert self.part is None
        assert self.made in (None, shard)
        if self.made is None:
            rows = slice(shard.start * self.per_class, shard.stop * self.per_class)
            self.vectors = nn.Parameter(self.vectors.detach()[rows].clone())
            self.labels = self.labels[rows].clone()
        self.part = shard

    def seated(self) -> Tensor:
        if self.part is not None or self.made is not None:
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
