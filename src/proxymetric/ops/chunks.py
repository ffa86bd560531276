"""A chunk of columns against all queries: its similarities, its exponents, and the way back to rows and queries.

Matrices lie column after column here, (columns, B), so that a chunk's rows are the left side of every product.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from proxymetric.core.pair_weights import StepFunction
from proxymetric.core.pieces import LEAST
from proxymetric.ops.problem import NONE, Line, Problem


class Chunk(NamedTuple):
    """n columns, from `start` to `stop`."""

    start: int
    stop: int
    rows: slice
    own: Tensor
    """(u,) those of its columns, counted from `start`, that some query is of the class of"""


class Lengths(NamedTuple):
    """How the rows of a chunk are normalised, folded into what is made of them: no normalised copy is written."""

    shrink: Tensor
    """(n K,) `1 / max(length, least)`"""
    bend: Tensor
    """(n K,) the same, but 0 where the length does not count: normalising is a constant factor there"""


class Block(NamedTuple):
    """The similarities of a chunk."""

    rows: Tensor
    """(n K, D) the references, not normalised"""
    lengths: Lengths | None
    """None: the rows are compared as they are"""
    of_rows: Tensor
    """(n K, B)"""
    of_columns: Tensor
    """(n, B)"""


class Side(NamedTuple):
    """The exponents of a chunk's positives, or of its negatives."""

    columns: Tensor
    """(m,) which columns have some, among all"""
    exponents: Tensor
    """(m, B), -inf where a pair is of the other kind"""
    weights: Tensor | None
    """(m, B) what they were multiplied with"""
    line: Line

    def slopes(self, shares: Tensor, factor: Tensor) -> Tensor:
        """Gradient in the similarities, from that in the exponents, `factor * shares`; shares are written over."""
        shares.mul_(self.line.slope * factor)
        return shares if self.weights is None else shares.mul_(self.weights)

    def summed_weights(self, dim: int) -> tuple[Tensor, Tensor]:
        """Of the pairs that there are: the sum of their weights, and how many they are."""
        assert self.weights is not None
        there = self.exponents != NONE
        return (self.weights * there).sum(dim), there.sum(dim)


class Blocks:
    """A task cut into chunks of at most `rows` rows, but of one column at least."""

    def __init__(self, queries: Tensor, vectors: Tensor, task: Problem, rows: int) -> None:
        self.queries, self.vectors, self.task = queries, vectors, task
        self.per_column = task.per_column
        self.least = None if task.refs.normalise is None else LEAST[task.refs.normalise]
        self.labels = task.refs.labels[:: self.per_column].contiguous()
        self.places = torch.arange(len(self.labels), device=self.labels.device)
        self.size = max(1, rows // self.per_column)
        present = task.labels.to(self.labels.dtype).sort().values
        place = torch.searchsorted(present, self.labels).clamp(max=len(present) - 1)
        # Here and in `__iter__` a device is waited for: which chunks have positives is decided on the host.
        self.own = self.places[present[place] == self.labels]

    def __iter__(self) -> Iterator[Chunk]:
        starts = range(0, len(self.labels), self.size)
        bounds = [*torch.searchsorted(self.own, self.places[:: self.size].contiguous()).tolist(), len(self.own)]
        for number, start in enumerate(starts):
            stop = min(start + self.size, len(self.labels))
            rows = slice(start * self.per_column, stop * self.per_column)
            yield Chunk(start, stop, rows, self.own[bounds[number] : bounds[number + 1]] - start)

    def look(self, chunk: Chunk, kept: Tensor | None = None, known: bool = False) -> Block:
        """Compute a block. The similarities of all rows are written to `kept` (R, B), or are there already."""
        rows, lengths = self.vectors[chunk.rows].to(self.queries.dtype), None
        if self.least is not None:
            long = torch.linalg.vector_norm(rows, dim=1)
            shrink = long.clamp(min=self.least).reciprocal_()
            lengths = Lengths(shrink, shrink * (long >= self.least))
        room = None if kept is None else kept[chunk.rows]
        of_rows = room if known and room is not None else torch.mm(rows, self.queries.T, out=room)
        if lengths is not None and not known:
            of_rows.mul_(lengths.shrink[:, None])
        if self.per_column == 1:
            return Block(rows, lengths, of_rows, of_rows)
        assert self.task.of_class is not None
        return Block(rows, lengths, of_rows, self.task.of_class(self._grouped(of_rows), dim=1))

    def sides(self, chunk: Chunk, block: Block) -> Iterator[tuple[int, Side]]:
        """0 and the positives, of the columns in `chunk.own`, if there are any; 1 and the negatives, of all columns."""
        weight, own, same = self.task.weight, chunk.own, self.task.refs.same
        match = self.labels[chunk.start : chunk.stop][own, None] == self.task.labels
        if self.task.of_class is not None:
            same = None  # a class is no query
        if len(own):
            rule = weight and weight.positive
            side = self._side(own + chunk.start, block.of_columns[own], self.task.positive, rule)
            side.exponents.masked_fill_(~match, NONE)
            if same is not None:
                side.exponents.masked_fill_(same.T[own + chunk.start], NONE)
            yield 0, side
        rule = weight and weight.negative
        side = self._side(self.places[chunk.start : chunk.stop], block.of_columns, self.task.negative, rule)
        if len(own):
            side.exponents[own] = side.exponents[own].masked_fill_(match, NONE)
        if same is not None:
            side.exponents.masked_fill_(same.T[chunk.start : chunk.stop], NONE)
        yield 1, side

    def _side(self, columns: Tensor, similarity: Tensor, line: Line, rule: StepFunction | None) -> Side:
        exponents = line(similarity)
        if rule is None:
            return Side(columns, exponents, None, line)
        weights = rule.of(self.labels[columns])(similarity.T).T.to(similarity.dtype)
        return Side(columns, exponents * weights, weights, line)

    def back(self, block: Block, slopes: Tensor, in_queries: Tensor | None, in_rows: Tensor | None) -> None:
        """From the gradient in the columns' similarities: add that in the queries, write that in the rows.

        With `p^ = shrink p` and u the gradient in p^, that in p is `shrink (u - p^ (p^ . u))`, and `p^ . u` is the sum
        over the batch of slope times similarity: no product of rows is needed for it.
        """
        if self.per_column > 1:
            assert self.task.of_class is not None
            each = self.task.of_class.slopes(self._grouped(block.of_rows), block.of_columns, dim=1)
            slopes = each.mul_(slopes[:, None]).flatten(0, 1)
        inward = None
        if block.lengths is not None:
            shrink, bend = block.lengths
            inward = (slopes * block.of_rows).sum(1).mul_(shrink).mul_(bend)
            slopes = slopes.mul_(shrink[:, None])
        if in_queries is not None:
            in_queries.addmm_(slopes.T, block.rows)
        if in_rows is None:
            return
        direct = in_rows.dtype == slopes.dtype
        grad = torch.mm(slopes, self.queries, out=in_rows) if direct else slopes @ self.queries
        if inward is not None:
            grad.addcmul_(block.rows, inward[:, None], value=-1)
        if not direct:
            in_rows.copy_(grad)

    def part(self, chunk: Chunk, block: Block) -> tuple[Tensor, Block]:
        """The rows of the columns in `chunk.own`, counted among all, and the block of these columns alone."""
        within = torch.arange(self.per_column, device=chunk.own.device)
        rows = (chunk.own[:, None] * self.per_column + within).flatten()
        lengths = block.lengths and Lengths(*(each[rows] for each in block.lengths))
        part = Block(block.rows[rows], lengths, block.of_rows[rows], block.of_columns[chunk.own])
        return rows + chunk.rows.start, part

    def _grouped(self, of_rows: Tensor) -> Tensor:
        return of_rows.unflatten(0, (-1, self.per_column))
