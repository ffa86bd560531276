"""One chunk of columns against all queries: its similarities, its exponents, and the gradients of its rows and queries.

Matrices here have the shape (columns, B), so that the rows of a chunk are the left factor of every product.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from proxymetric.core.normalisation import MIN_DIVISORS
from proxymetric.core.pair_weights import StepFunction
from proxymetric.ops.problem import NONE, Line, Problem

POSITIVE, NEGATIVE = 0, 1


class Chunk(NamedTuple):
    """The n columns from `start` to `stop`."""

    start: int
    stop: int
    rows: slice
    """the reference rows of these columns"""
    batch_columns: Tensor
    """(u,) the columns, counted from `start`, whose class occurs in the batch: only these have positives"""


class RowScales(NamedTuple):
    """How the rows of a chunk are normalised: the factors enter the products, and no normalised copy is written."""

    scale: Tensor
    """(n K,) `1 / max(length, min_length)`"""
    slope: Tensor
    """(n K,) the same, but 0 for rows shorter than `min_length`: their normalisation is a constant factor"""


class ChunkSimilarities(NamedTuple):
    """The rows of a chunk and their similarities."""

    rows: Tensor
    """(n K, D) the references, not normalised"""
    scales: RowScales | None
    """None: the rows are compared without normalisation"""
    of_rows: Tensor
    """(n K, B)"""
    of_columns: Tensor
    """(n, B)"""


class PairExponents(NamedTuple):
    """The exponents of a chunk's positive pairs, or of its negative pairs."""

    columns: Tensor
    """(m,) the columns with such pairs, counted among all columns"""
    exponents: Tensor
    """(m, B), -inf for pairs of the other kind"""
    weights: Tensor | None
    """(m, B) the factors that the exponents contain; None: all are 1"""
    line: Line

    def slopes(self, shares: Tensor, factor: Tensor) -> Tensor:
        """The gradient in the similarities, given `factor * shares` in the exponents; overwrites `shares`."""
        shares.mul_(self.line.slope * factor)
        return shares if self.weights is None else shares.mul_(self.weights)

    def summed_weights(self, dim: int) -> tuple[Tensor, Tensor]:
        """The sum of the weights of the pairs, and the number of pairs."""
        assert self.weights is not None
        is_pair = self.exponents != NONE
        return (self.weights * is_pair).sum(dim), is_pair.sum(dim)


class Chunks:
    """A problem cut into chunks of at most `rows` rows, but of at least one column. Iteration yields the chunks."""

    def __init__(self, queries: Tensor, vectors: Tensor, problem: Problem, rows: int) -> None:
        self.queries, self.vectors, self.problem = queries, vectors, problem
        self.per_column = problem.per_column
        self.min_length = None if problem.refs.normalise is None else MIN_DIVISORS[problem.refs.normalise]
        self.labels = problem.refs.labels[:: self.per_column].contiguous()
        self.columns = torch.arange(len(self.labels), device=self.labels.device)
        self.columns_per_chunk = max(1, rows // self.per_column)
        batch_labels = problem.labels.to(self.labels.dtype).sort().values
        position = torch.searchsorted(batch_labels, self.labels).clamp(max=len(batch_labels) - 1)
        # This line and `__iter__` synchronise with the GPU: the host decides which chunks have positives.
        self.batch_columns = self.columns[batch_labels[position] == self.labels]

    def __iter__(self) -> Iterator[Chunk]:
        starts = range(0, len(self.labels), self.columns_per_chunk)
        first_columns = self.columns[:: self.columns_per_chunk].contiguous()
        bounds = [*torch.searchsorted(self.batch_columns, first_columns).tolist(), len(self.batch_columns)]
        for number, start in enumerate(starts):
            stop = min(start + self.columns_per_chunk, len(self.labels))
            rows = slice(start * self.per_column, stop * self.per_column)
            yield Chunk(start, stop, rows, self.batch_columns[bounds[number] : bounds[number + 1]] - start)

    def similarities(self, chunk: Chunk, cache: Tensor | None = None, cached: bool = False) -> ChunkSimilarities:
        """Compute the similarities of a chunk.

        Args:
            chunk: the chunk.
            cache: (R, B) holds the similarities of all rows; those of the chunk are written to it.
            cached: whether `cache` already contains them; then they are read, not computed.
        """
        rows, scales = self.vectors[chunk.rows].to(self.queries.dtype), None
        if self.min_length is not None:
            lengths = torch.linalg.vector_norm(rows, dim=1)
            scale = lengths.clamp(min=self.min_length).reciprocal_()
            scales = RowScales(scale, scale * (lengths >= self.min_length))
        out = None if cache is None else cache[chunk.rows]
        of_rows = out if cached and out is not None else torch.mm(rows, self.queries.T, out=out)
        if scales is not None and not cached:
            of_rows.mul_(scales.scale[:, None])
        if self.per_column == 1:
            return ChunkSimilarities(rows, scales, of_rows, of_rows)
        assert self.problem.of_class is not None
        return ChunkSimilarities(rows, scales, of_rows, self.problem.of_class(self._grouped(of_rows), dim=1))

    def exponents(self, chunk: Chunk, similarities: ChunkSimilarities) -> Iterator[tuple[int, PairExponents]]:
        """Yield `POSITIVE` and the positives of `chunk.batch_columns`, if any; then `NEGATIVE` and all negatives."""
        weight, batch_columns, same = self.problem.weight, chunk.batch_columns, self.problem.refs.same
        is_positive = self.labels[chunk.start : chunk.stop][batch_columns, None] == self.problem.labels
        if self.problem.of_class is not None:
            same = None  # a column is a class, never the query itself
        if len(batch_columns):
            rule = weight and weight.positive
            columns = batch_columns + chunk.start
            pairs = self._exponents(columns, similarities.of_columns[batch_columns], self.problem.positive, rule)
            pairs.exponents.masked_fill_(~is_positive, NONE)
            if same is not None:
                pairs.exponents.masked_fill_(same.T[columns], NONE)
            yield POSITIVE, pairs
        rule = weight and weight.negative
        columns = self.columns[chunk.start : chunk.stop]
        pairs = self._exponents(columns, similarities.of_columns, self.problem.negative, rule)
        if len(batch_columns):
            pairs.exponents[batch_columns] = pairs.exponents[batch_columns].masked_fill_(is_positive, NONE)
        if same is not None:
            pairs.exponents.masked_fill_(same.T[chunk.start : chunk.stop], NONE)
        yield NEGATIVE, pairs

    def _exponents(self, columns: Tensor, similarity: Tensor, line: Line, rule: StepFunction | None) -> PairExponents:
        exponents = line(similarity)
        if rule is None:
            return PairExponents(columns, exponents, None, line)
        weights = rule.of(self.labels[columns])(similarity.T).T.to(similarity.dtype)
        return PairExponents(columns, exponents * weights, weights, line)

    def backward(
        self, similarities: ChunkSimilarities, slopes: Tensor, in_queries: Tensor | None, in_rows: Tensor | None
    ) -> None:
        """Turn the gradient in the columns' similarities into the gradients in the queries and in the rows.

        With `p^ = scale p` and the gradient u in p^, the gradient in p is `scale (u - p^ (p^ . u))`. The product
        `p^ . u` is the sum over the batch of slope times similarity, so it needs no product of rows.

        Args:
            similarities: of the chunk.
            slopes: (n, B) the gradient in `similarities.of_columns`; may be overwritten.
            in_queries: (B, D) the gradient is added to it; None: not needed.
            in_rows: (n K, D) the gradient is written to it; None: not needed.
        """
        if self.per_column > 1:
            assert self.problem.of_class is not None
            grouped = self._grouped(similarities.of_rows)
            of_rows = self.problem.of_class.slopes(grouped, similarities.of_columns, dim=1)
            slopes = of_rows.mul_(slopes[:, None]).flatten(0, 1)
        radial = None
        if similarities.scales is not None:
            scale, scale_slope = similarities.scales
            radial = (slopes * similarities.of_rows).sum(1).mul_(scale).mul_(scale_slope)
            slopes = slopes.mul_(scale[:, None])
        if in_queries is not None:
            in_queries.addmm_(slopes.T, similarities.rows)
        if in_rows is None:
            return
        same_type = in_rows.dtype == slopes.dtype
        gradient = torch.mm(slopes, self.queries, out=in_rows) if same_type else slopes @ self.queries
        if radial is not None:
            gradient.addcmul_(similarities.rows, radial[:, None], value=-1)
        if not same_type:
            in_rows.copy_(gradient)

    def of_batch_columns(self, chunk: Chunk, similarities: ChunkSimilarities) -> tuple[Tensor, ChunkSimilarities]:
        """The rows of `chunk.batch_columns`, counted among all rows, and the similarities of these columns only."""
        offsets = torch.arange(self.per_column, device=chunk.batch_columns.device)
        rows = (chunk.batch_columns[:, None] * self.per_column + offsets).flatten()
        scales = similarities.scales and RowScales(*(factors[rows] for factors in similarities.scales))
        batch_similarities = ChunkSimilarities(
            similarities.rows[rows], scales, similarities.of_rows[rows], similarities.of_columns[chunk.batch_columns]
        )
        return rows + chunk.rows.start, batch_similarities

    def _grouped(self, of_rows: Tensor) -> Tensor:
        return of_rows.unflatten(0, (-1, self.per_column))
