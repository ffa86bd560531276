"""One pass over the references in chunks: buffers that every chunk uses again, its products and its launches."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from proxymetric.core.pieces import LEAST
from proxymetric.ops.chunked import ChunkPlan
from proxymetric.ops.triton.batch_classes import Own
from proxymetric.ops.triton.launch import interpreting, launch
from proxymetric.ops.triton.norms import lengths, power

PAIRS = 2**26
"""numbers of one chunk's similarities: large products, and not so many of them that launching takes the time"""
SUMS = 2**18
"""running sums over the classes that are made side by side, of all queries together"""
TILE = 2**13
"""numbers that a program holds at most, where a column is several rows or a batch goes over it in blocks"""
SOME = 2**12
"""the same over the classes"""
WARP = 2**10
"""numbers that 32 threads hold: whose sums need no other threads"""
ONE = 2**14
"""numbers of a batch up to which a program holds all of them, and reads them once"""
SHALLOW = 1024
"""queries up to which, by the bytes they move, a product with them takes less time than its result to write and read"""
ROWS_TILE = (128, 128, 64)
"""rows, dimensions, and queries at once of such a product here"""
KINDS = ("soft", "max", "mean")


def rows_of(batch: int, dim: int, wished: int | None) -> int:
    """How many rows a chunk has."""
    rows = wished or max(1, PAIRS // batch // 64) * 64
    return min(rows, (2**31 - 1) // max(batch, dim))  # kernels count in 32 bits


class Part(NamedTuple):
    """A chunk of n columns."""

    columns: slice
    rows: slice
    n: int


class Run:
    """Queries and references of a task, in the type of their products.

    For the pairs of two classes; or, of the rows in `own`, for those of one.
    """

    def __init__(
        self, queries: Tensor, vectors: Tensor, job: ChunkPlan, labels: Tensor, own: Own | None = None,
        measured: Tensor | None = None,
    ) -> None:  # fmt: skip
        """labels: the queries', in 32 bits. measured: the lengths of the vectors, where these count and are known."""
        self.type = torch.promote_types(queries.dtype, vectors.dtype)
        self.queries, self.vectors = queries.detach().to(self.type).contiguous(), vectors.detach()
        self.batch, self.dim = queries.shape
        self.K, self.line = job.task.per_column, job.task.negative if own is None else job.task.positive
        weight = job.task.weight
        rule = None if weight is None else weight.negative if own is None else weight.positive
        self.columns = len(vectors) // self.K
        self.chunk = min(max(1, job.rows // self.K), self.columns)
        self.labels = job.task.refs.labels if own is None else own.labels
        of_class = job.task.of_class
        self.least = None if job.task.refs.normalise is None else LEAST[job.task.refs.normalise]
        self.wants, self.wanted = job.wanted, any(job.wanted)
        self.none, rows = self.numbers(0), self.chunk * self.K
        self.lengths = self.none
        if self.least is not None:
            self.lengths = lengths(self.vectors) if measured is None else measured
        rules = [self.none] * 2 if rule is None else [each.float().contiguous() for each in rule]
        self.given = (labels, *rules)
        # Half precision has no room for the factors of very short rows, nor for very small shares.
        self.fold = self.type != torch.float16
        self.how = {
            "K": self.K,
            "KIND": 0 if of_class is None else KINDS.index(of_class.kind),
            "NORMAL": self.least is not None,
            "EDGES": -1 if rule is None else rule.edges.shape[1],
            "OWN": own is not None,
            "STRIDE": self.K * self.labels.stride(0),
        }
        self.exponent = (self.line.slope, self.line.offset, 1.0 if of_class is None else 1.0 / of_class.gamma)
        self.padded = power(self.K)
        self.rows = self.similarities = self.none
        self.own_similarities: Tensor | None = None
        self.shared = self.empty(rows, self.batch) if self.wanted else self.none
        self.inwards = self.numbers(rows) if self.wanted else self.none
        self.factors, self.scaled = self.none, self.none
        if self.wanted and not self.fold:
            self.factors, self.scaled = self.numbers(rows), self.empty(rows, self.dim)
        self.product: Tensor | None = None
        # Float32 would be rounded on the way into tensor cores.
        self.shallow = self.batch <= SHALLOW and self.type == torch.bfloat16
        self.begun = False

    def numbers(self, *shape: int) -> Tensor:
        return self.queries.new_empty(shape, dtype=torch.float32)

    def empty(self, *shape: int) -> Tensor:
        return self.queries.new_empty(shape)

    def like(self, vectors: Tensor, kind: torch.dtype) -> Tensor:
        return vectors.new_empty(vectors.shape, dtype=kind)

    def __iter__(self) -> Iterator[Part]:
        for start in range(0, self.columns, self.chunk):
            stop = min(start + self.chunk, self.columns)
            yield Part(slice(start, stop), slice(start * self.K, stop * self.K), stop - start)

    def look(self, part: Part, kept: Tensor | None = None, known: bool = False) -> None:
        """Similarities of a chunk, not yet over lengths. Those of all rows are written to `kept`, or are there."""
        self.rows = some(self.vectors, part.rows).to(self.type).contiguous()
        if kept is None:
            if self.own_similarities is None:
                self.own_similarities = self.numbers(self.chunk * self.K, self.batch)
            self.similarities = some(self.own_similarities, slice(0, len(self.rows)))
        else:
            self.similarities = kept[part.rows]
        if not known:
            write_product(self.similarities, self.rows, self.queries.T)

    def log_means(self, part: Part, found: Tensor, by: float, over: float) -> None:
        """Of each column `over log(1 + sum exp)`, and its mean weight; shares, and what else gradients are made of."""
        block = power(self.batch)
        one = block * self.padded <= (ONE if self.K == 1 else TILE)
        tile = min(max(1, WARP // block), 16) if self.K == 1 else self.padded
        if not one:
            tile, block = (2, TILE // 2) if self.K == 1 else (self.padded, max(16, TILE // self.padded))
        launch(
            "log_means", (-(-part.n // tile) if self.K == 1 else part.n,), _warps(tile * block),
            (self.similarities, self.shared, self.factors, self.inwards, *found[:, part.columns],
             *self.about(part)), (*self.figures(part), by, over),
            self.how | {"FOLD": self.fold, "WANTED": self.wanted, "ONE": one} | self.cut(tile, block),
        )  # fmt: skip

    def about(self, part: Part) -> tuple[Tensor, ...]:
        """The tensors that say what a chunk's columns and the queries are."""
        sizes = self.none if self.least is None else some(self.lengths, part.rows)
        return sizes, some(self.labels, part.rows), *self.given

    def figures(self, part: Part) -> tuple[float, ...]:
        return part.n, self.batch, *self.exponent, self.least or 1.0

    def cut(self, tile: int, block: int) -> dict[str, Any]:
        """What a program holds."""
        return {"FULL": self.batch % block == 0, "TILE": tile, "BLOCK": block}

    def sums(self) -> Tensor:
        """(4, parts, B) empty running sums: highest exponents, sums over these, weights, and how many."""
        parts = min(max(SUMS // power(self.batch), 1), 512, self.columns)
        sums = self.numbers(4, parts, self.batch).zero_()
        sums[0].fill_(float("-inf"))
        return sums

    def tiles(self) -> tuple[int, int]:
        """Rows and queries that a program over the classes holds.

        The same on the way there and back where a column is several rows: the order in which these are summed up is
        that of the threads, and with a large scale a last bit of the exponent is much of a share.
        """
        tile, block = (32, 128) if self.K == 1 else (self.padded, max(16, SOME // self.padded))
        return tile, min(block, power(self.batch))

    def log_sums(self, part: Part, sums: Tensor) -> None:
        """Add the columns of a chunk to running sums of each query."""
        tile, block = self.tiles()
        launch(
            "log_sums", (sums.shape[1], -(-self.batch // block)), _warps(SOME),
            (self.similarities, *sums, *self.about(part)), self.figures(part), self.how | self.cut(tile, block),
        )  # fmt: skip

    def shares(self, part: Part, sums: Tensor, grads: Tensor, lift: float) -> None:
        """From the log-sums of each query: shares of a chunk, and what else gradients are made of."""
        tile, block = (8, min(TILE // 8, power(self.batch))) if self.K == 1 else self.tiles()
        launch(
            "shares", (-(-part.n // tile) if self.K == 1 else part.n,), _warps(TILE if self.K == 1 else SOME),
            (self.similarities, self.shared, self.factors, self.inwards, sums, grads, *self.about(part)),
            (*self.figures(part), lift), self.how | {"FOLD": self.fold} | self.cut(tile, block),
        )  # fmt: skip

    def back(
        self, part: Part, queries: Tensor, in_queries: Tensor | None, in_vectors: Tensor | None, by: Tensor | None
    ) -> None:
        """From a chunk's shares: write `by` times the gradient in its rows, add that in the queries without `by`."""
        if not self.wanted:
            return
        size = len(self.rows)
        shared = some(self.shared, slice(0, size))
        scales = not self.fold and in_queries is not None
        if in_vectors is not None and self.shallow and in_vectors.dtype == self.type:
            self.back_rows(shared, queries, some(in_vectors, part.rows), by)
        elif in_vectors is not None or scales:
            self.finish(shared, queries, None if in_vectors is None else some(in_vectors, part.rows), by, scales)
        if in_queries is not None:
            put = add_product if self.begun else write_product
            put(in_queries, shared.T, self.scaled[:size] if scales else self.rows)
            self.begun = True

    def back_rows(self, shared: Tensor, queries: Tensor, out: Tensor, by: Tensor | None) -> None:
        """Write the gradient in a chunk's rows, in one launch."""
        tile, block, depth = ROWS_TILE
        launch(
            "back_rows", (-(-self.dim // block) * -(-len(out) // tile),), 4,
            (shared, queries, self.rows, self.inwards, out, self.none if by is None else by),
            (len(out), self.batch, self.dim),
            {"BY": by is not None, "NORMAL": self.least is not None, "WIDE": interpreting(),
             "TILE": tile, "BLOCK": block, "DEPTH": depth},
        )  # fmt: skip

    def finish(self, shared: Tensor, queries: Tensor, out: Tensor | None, by: Tensor | None, scales: bool) -> None:
        """The same by a product of the library and what is left to do with it; scales: what the queries' needs, too."""
        size, made = len(shared), self.similarities
        if out is not None:
            made = out
            if out.dtype != torch.float32:
                self.product = self.numbers(self.chunk * self.K, self.dim) if self.product is None else self.product
                made = some(self.product, slice(0, size))
            write_product(made, shared, queries)
        block = min(power(self.dim), 1024)
        tile = min(max(1, 2048 // block), 64)
        launch(
            "finish", (-(-size // tile), -(-self.dim // block)), 4,
            (self.rows, made, self.factors, self.inwards, self.scaled, self.scaled if out is None else out,
             self.none if by is None else by),
            (size, self.dim),
            {"BY": by is not None, "FOLD": self.fold, "SCALED": scales, "WANTED": out is not None,
             "NORMAL": self.least is not None, "TILE": tile, "BLOCK": block},
        )  # fmt: skip


def some(tensor: Tensor, rows: slice) -> Tensor:
    """These rows of it; itself, which costs less, if they are all."""
    return tensor if rows.start == 0 and rows.stop == tensor.shape[0] else tensor[rows]


def _warps(numbers: int) -> int:
    """Threads by the 32 that hold some thirty numbers each."""
    return min(max(numbers // WARP, 1), 16)


def write_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """`out = a b`, summed and written in float32."""
    if a.dtype == torch.float32:
        torch.mm(a, b, out=out)
    elif _widens(a.device, a.dtype):
        torch.mm(a, b, out_dtype=torch.float32, out=out)
    else:
        torch.mm(a.float(), b.float(), out=out)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """`total += a b`, in float32."""
    if a.dtype == torch.float32:
        total.addmm_(a, b)
    elif _widens(a.device, a.dtype):
        # torch.addmm of narrow matrices wants a narrow total, too.
        total.add_(torch.mm(a, b, out_dtype=torch.float32))
    else:
        total.addmm_(a.float(), b.float())


@cache
def _widens(device: torch.device, kind: torch.dtype) -> bool:
    """Whether this torch multiplies matrices of a narrow type into float32 there: from 2.8, on CUDA."""
    some = torch.zeros(16, 16, dtype=kind, device=device)
    try:
        torch.mm(some, some, out_dtype=torch.float32, out=torch.empty(16, 16, device=device))
    except (TypeError, RuntimeError):
        return False
    return True
