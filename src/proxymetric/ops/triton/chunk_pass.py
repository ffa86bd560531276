"""One pass over the references in chunks: the buffers that all chunks share, the matrix products and the launches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from proxymetric.core.normalisation import MIN_DIVISORS
from proxymetric.core.similarity import KINDS
from proxymetric.ops.chunked import ChunkPlan
from proxymetric.ops.triton.launch import aligned_pair, interpreting, launch
from proxymetric.ops.triton.norms import next_power_of_two, row_norms, tile_shape
from proxymetric.ops.triton.products import add_product, write_product

MAX_PAIRS_PER_CHUNK = 2**26
"""similarities of one chunk: so many that the matrix products, not the launches, take most of the time"""
ROW_MULTIPLE = 64
"""the rows of a chunk are a multiple of this"""
MAX_INDEX = 2**31 - 1
"""the largest index: kernels use 32-bit indices"""
MAX_RUNNING_SUMS = 2**18
"""the largest number of running sums over the classes, over all queries and programs"""
MAX_PARTS = 512
"""the largest number of running sums of one query, one in each program"""
NUMBERS_PER_TILE = 2**13
"""numbers that a program holds at most, if a column has several rows or a program reads the batch in blocks"""
NUMBERS_PER_GROUPS_TILE, MAX_GROUPS_BLOCK = 2**12, 256
"""numbers and queries that a program of sums over the classes holds at most, if a column has several rows; the program
is one warp: each of its threads has all rows of its queries, so that no thread waits for another one"""
CLASSES_TILE, LARGE_BATCH_CLASSES_TILE = (16, 128), (8, 128)
"""rows and queries that a program of sums over the classes holds: 16 or 8 running sums for each thread of 4 warps; the
second is for batches from `LARGE_BATCH` queries, where there are more programs"""
LARGE_BATCH = 2048
NUMBERS_PER_WARP = 2**10
"""numbers of one warp, 32 for each thread: its sums need no other threads"""
QUERIES_PER_PROGRAM = 32
"""queries whose running sums a program adds"""
MAX_NUMBERS_WHOLE_BATCH = 2**14
"""numbers up to which a program holds the whole batch and reads it once"""
MAX_FUSED_BATCH = 1024
"""queries up to which writing and reading the result of a product takes longer than the product itself"""
FUSED_TILE = (128, 128, 64)
"""rows, dimensions and queries that a program of a fused product holds"""


def rows_per_chunk(batch: int, dim: int, rows: int | None, half: bool = False) -> int:
    """The rows of a chunk: the given number, or a number that suits the GPU."""
    pairs = MAX_PAIRS_PER_CHUNK * (2 if half else 1)
    rows = rows or max(1, pairs // batch // ROW_MULTIPLE) * ROW_MULTIPLE
    return min(rows, MAX_INDEX // max(batch, dim))


class ColumnChunk(NamedTuple):
    """A chunk of n columns."""

    columns: slice
    rows: slice
    n: int


class ChunkPass:
    """The queries and references of a problem in the type of their products, with buffers for one chunk.

    A pass handles the negative pairs of all references. Iteration yields the chunks. For each chunk call
    `compute_similarities`, one of `log_means`, `log_sums` and `shares`, and, for gradients, `backward`.

    Args:
        queries: (B, D).
        vectors: (R, D).
        plan: the problem and the size of its chunks.
        labels: (B,) the classes of the queries, in 32 bits.
        norms: (R,) the lengths of the vectors, if they are needed and known.
        half: whether similarities are computed and stored in float16 (see `half_width.fits_half`).
    """

    def __init__(
        self,
        queries: Tensor,
        vectors: Tensor,
        plan: ChunkPlan,
        labels: Tensor,
        norms: Tensor | None = None,
        half: bool = False,
    ) -> None:
        problem = plan.problem
        self.type = torch.promote_types(queries.dtype, vectors.dtype)
        self.queries, self.vectors = queries.detach().to(self.type).contiguous(), vectors.detach()
        self.batch, self.dim = queries.shape
        self.K, self.line = problem.per_column, problem.negative
        self.padded_K = next_power_of_two(self.K)
        self.columns = len(vectors) // self.K
        self.columns_per_chunk = min(max(1, plan.rows // self.K), self.columns)
        self.labels = problem.refs.labels
        self.min_length = None if problem.refs.normalise is None else MIN_DIVISORS[problem.refs.normalise]
        self.needs_grad, self.any_needs_grad = plan.needs_grad, any(plan.needs_grad)
        self.empty = self.new_float32(0)
        self.norms = self.empty
        self.half = half
        if half:
            self.half_queries = self.queries.to(torch.float16)
        if norms is not None:
            self.norms = norms
        elif half:  # `compute_similarities` fills them in
            self.norms = self.new_float32(len(vectors))
        elif self.min_length is not None:
            self.norms = row_norms(self.vectors)
        rule = None if problem.weight is None else problem.weight.negative
        rules = [self.empty] * 2 if rule is None else [numbers.float().contiguous() for numbers in rule]
        self.labels_and_rules = (labels, *rules)
        # Shares include the factors of their rows, except in float16: it can represent neither the factors of very
        # short rows nor very small shares.
        self.fold = self.type != torch.float16
        of_class = problem.of_class
        self.inverse_gamma = 1.0 if of_class is None else 1.0 / of_class.gamma
        self.constants = {
            "K": self.K,
            "KIND": 0 if of_class is None else KINDS.index(of_class.kind),
            "NORMALISE": self.min_length is not None,
            "EDGES": -1 if rule is None else rule.edges.shape[1],
            "LABEL_STRIDE": self.K * self.labels.stride(0),
            "SCALED": half,
        }
        rows = self.columns_per_chunk * self.K
        self.rows = self.similarities = self.empty
        self.similarities_buffer: Tensor | None = None
        self.unit_rows_buffer: Tensor | None = None
        self.shares_buffer: Tensor | None = None
        self.radials = self.new_float32(rows) if self.any_needs_grad else self.empty
        self.factors, self.scaled_rows = self.empty, self.empty
        if self.any_needs_grad and not self.fold:
            self.factors, self.scaled_rows = self.new_float32(rows), self.new_like_queries(rows, self.dim)
        self.product_buffer: Tensor | None = None
        # Only bfloat16: tensor cores would round float32 factors.
        self.fuses_product = self.batch <= MAX_FUSED_BATCH and self.type == torch.bfloat16
        self.has_query_gradient = False

    def new_float32(self, *shape: int) -> Tensor:
        """An uninitialised float32 tensor."""
        return self.queries.new_empty(shape, dtype=torch.float32)

    def new_like_queries(self, *shape: int) -> Tensor:
        """An uninitialised tensor in the type of the products."""
        return self.queries.new_empty(shape)

    def __iter__(self) -> Iterator[ColumnChunk]:
        for start in range(0, self.columns, self.columns_per_chunk):
            stop = min(start + self.columns_per_chunk, self.columns)
            yield ColumnChunk(slice(start, stop), slice(start * self.K, stop * self.K), stop - start)

    def compute_similarities(self, chunk: ColumnChunk, cache: Tensor | None = None, cached: bool = False) -> None:
        """Compute the products of a chunk's rows and the queries; kernels divide them by the row lengths.

        In half width these are the similarities themselves, because the rows are divided by their lengths first.

        Args:
            chunk: the chunk.
            cache: (R, B) from `new_cache` holds the products of all rows; those of the chunk are written to it.
            cached: whether `cache` already contains them; then they are read, not computed.
        """
        self.rows = take_rows(self.vectors, chunk.rows).to(self.type).contiguous()
        if cache is None:
            if self.similarities_buffer is None:
                self.similarities_buffer = self.new_cache(self.columns_per_chunk * self.K)
            self.similarities = take_rows(self.similarities_buffer, slice(0, len(self.rows)))
        else:
            self.similarities = take_rows(cache, chunk.rows)
        if cached:
            return
        if self.half:
            torch.mm(self._unit_rows(chunk), self.half_queries.T, out=self.similarities)
        else:
            write_product(self.similarities, self.rows, self.queries.T)

    def new_cache(self, rows: int) -> Tensor:
        """An uninitialised tensor for the similarities of so many rows and all queries."""
        return self.queries.new_empty((rows, self.batch), dtype=torch.float16 if self.half else torch.float32)

    def _unit_rows(self, chunk: ColumnChunk) -> Tensor:
        """The chunk's rows, divided by their lengths, in float16; also fills in their lengths."""
        if self.unit_rows_buffer is None:
            self.unit_rows_buffer = self.queries.new_empty(
                (self.columns_per_chunk * self.K, self.dim), dtype=torch.float16
            )
        units = take_rows(self.unit_rows_buffer, slice(0, len(self.rows)))
        tile, block = tile_shape(self.dim)
        assert self.min_length is not None, "half width needs normalised rows"
        launch(
            "unit_rows",
            (-(-len(self.rows) // tile),),
            4,
            (self.rows, units, take_rows(self.norms, chunk.rows)),
            (len(self.rows), self.dim, self.min_length),
            {"TILE": tile, "BLOCK": block},
        )
        return units

    def log_means(self, chunk: ColumnChunk, means: Tensor, gradient_factor: float, value_factor: float) -> None:
        """Write `value_factor log(1 + sum exp)` and the mean weight of each column to `means`; prepare gradients."""
        block = next_power_of_two(self.batch)
        max_numbers = MAX_NUMBERS_WHOLE_BATCH if self.K == 1 else NUMBERS_PER_TILE
        whole_batch = block * self.padded_K <= max_numbers
        numbers = NUMBERS_PER_WARP // 2 if self.half else NUMBERS_PER_WARP
        tile = min(max(1, numbers // block), 16) if self.K == 1 else self.padded_K
        if not whole_batch:
            tile, block = (2, NUMBERS_PER_TILE // 2)
            if self.K > 1:
                tile, block = self.padded_K, max(16, NUMBERS_PER_TILE // self.padded_K)
        outputs = (self._shares(), self.factors, self.radials, *means[:, chunk.columns])
        flags = {"FOLD": self.fold, "NEEDS_GRAD": self.any_needs_grad, "WHOLE_BATCH": whole_batch}
        launch(
            "log_means",
            (-(-chunk.n // tile) if self.K == 1 else chunk.n,),
            _warps(tile * block),
            (self.similarities, *outputs, *self._chunk_tensors(chunk)),
            (*self._chunk_numbers(chunk), gradient_factor, value_factor),
            self.constants | flags | self._tile_constants(tile, block),
        )

    def _shares(self) -> Tensor:
        """The buffer of the chunk's shares; empty if no gradient is needed."""
        if not self.any_needs_grad:
            return self.empty
        if self.shares_buffer is None:
            # Shares overwrite similarities of their width, unless these are kept.
            if self.half and self.similarities_buffer is not None:
                self.shares_buffer = self.similarities_buffer.view(self.type)
            else:
                self.shares_buffer = self.new_like_queries(self.columns_per_chunk * self.K, self.batch)
        return self.shares_buffer

    def _chunk_tensors(self, chunk: ColumnChunk) -> tuple[Tensor, ...]:
        """The tensors that describe the columns of a chunk and the queries."""
        norms = self.empty if self.min_length is None else take_rows(self.norms, chunk.rows)
        return norms, take_rows(self.labels, chunk.rows), *self.labels_and_rules

    def _chunk_numbers(self, chunk: ColumnChunk) -> tuple[float, ...]:
        exponent = (self.line.slope, self.line.offset, self.inverse_gamma)
        return chunk.n, self.batch, *exponent, self.min_length or 1.0

    def _tile_constants(self, tile: int, block: int) -> dict[str, Any]:
        return {"NO_TAIL": self.batch % block == 0, "TILE": tile, "BLOCK": block}

    def new_running_sums(self) -> Tensor:
        """(4, parts, B) for running sums: highest exponents, sums of `exp(z - highest)`, weights and pair counts.

        They are uninitialised until `log_sums` of the first chunk. Without a weighting the last two stay so.
        """
        parts = min(max(MAX_RUNNING_SUMS // next_power_of_two(self.batch), 1), MAX_PARTS, self.columns)
        return self.new_float32(4, parts, self.batch)

    def _classes_tile(self) -> tuple[int, int, int]:
        """The rows and queries that a program over the classes holds, and its warps.

        If a column has several rows, the forward and the backward pass use the same tile: it determines the order in
        which threads sum these rows, and a large scale turns a difference in the last bit into a large error of a
        share.
        """
        if self.K == 1:
            (tile, block), warps = CLASSES_TILE if self.batch < LARGE_BATCH else LARGE_BATCH_CLASSES_TILE, 4
        else:
            tile, warps = self.padded_K, 1
            most = MAX_GROUPS_BLOCK if self.half else MAX_GROUPS_BLOCK // 2  # a thread loads 16 bytes at once
            block = min(max(16, NUMBERS_PER_GROUPS_TILE // tile), most)
        return tile, min(block, next_power_of_two(self.batch)), warps

    def log_sums(self, chunk: ColumnChunk, sums: Tensor) -> None:
        """Add the columns of a chunk to the running sums of each query."""
        tile, block, warps = self._classes_tile()
        launch(
            "log_sums",
            (sums.shape[1], -(-self.batch // block)),
            warps,
            (self.similarities, *sums, *self._chunk_tensors(chunk)),
            self._chunk_numbers(chunk),
            self.constants | {"FIRST": chunk.columns.start == 0} | self._tile_constants(tile, block),
        )

    def finish_sums(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        """The log-sum and the mean weight of each query, from its running sums."""
        logs, means = aligned_pair(self.queries, self.batch)
        launch(
            "finish_sums",
            (-(-self.batch // QUERIES_PER_PROGRAM),),
            4,
            (*sums, logs, means),
            (sums.shape[1], self.batch),
            {"EDGES": self.constants["EDGES"], "PART_BLOCK": 64, "BLOCK": QUERIES_PER_PROGRAM},
        )
        return logs, means

    def shares(self, chunk: ColumnChunk, logs: Tensor, grads: Tensor, lift: float) -> None:
        """Compute the shares of a chunk from the log-sums of each query, and prepare the gradients."""
        if self.K > 1:
            tile, block, warps = self._classes_tile()
        else:
            # As measured: smaller tiles for similarities in 16 bits.
            tile, block, warps = (2, 512, 2) if self.half else (8, NUMBERS_PER_TILE // 8, 8)
            block = min(block, next_power_of_two(self.batch))
        buffers = (self._shares(), self.factors, self.radials)
        launch(
            "shares",
            (-(-chunk.n // tile) if self.K == 1 else chunk.n,),
            warps,
            (self.similarities, *buffers, logs, grads, *self._chunk_tensors(chunk)),
            (*self._chunk_numbers(chunk), lift),
            self.constants | {"FOLD": self.fold} | self._tile_constants(tile, block),
        )

    def backward(
        self,
        chunk: ColumnChunk,
        queries: Tensor,
        in_queries: Tensor | None,
        in_vectors: Tensor | None,
        multiplier: Tensor | None,
    ) -> None:
        """Compute the gradients from a chunk's shares.

        Args:
            chunk: the chunk.
            queries: (B, D) the right factor of the product that gives the gradient in the rows.
            in_queries: (B, D) the gradient, without the multiplier, is added to it; None: not needed.
            in_vectors: (R, D) the gradient of the chunk's rows, times the multiplier, is written to it; None: not
                needed.
            multiplier: (1,) on the device; None: 1.
        """
        if not self.any_needs_grad:
            return
        size = len(self.rows)
        shares = take_rows(self._shares(), slice(0, size))
        scale_rows = not self.fold and in_queries is not None
        if in_vectors is not None and self.fuses_product and in_vectors.dtype == self.type:
            self._fused_row_gradients(shares, queries, take_rows(in_vectors, chunk.rows), multiplier)
        elif in_vectors is not None and self.half and in_vectors.dtype == self.type:
            self._added_row_gradients(shares, queries, take_rows(in_vectors, chunk.rows))
        elif in_vectors is not None or scale_rows:
            in_rows = None if in_vectors is None else take_rows(in_vectors, chunk.rows)
            self._row_gradients(shares, queries, in_rows, multiplier, scale_rows)
        if in_queries is not None:
            store_product = add_product if self.has_query_gradient else write_product
            store_product(in_queries, shares.T, self.scaled_rows[:size] if scale_rows else self.rows)
            self.has_query_gradient = True

    def _fused_row_gradients(self, shares: Tensor, queries: Tensor, out: Tensor, multiplier: Tensor | None) -> None:
        """Write the gradient of a chunk's rows in one launch that includes the product."""
        tile, block, query_block = FUSED_TILE
        launch(
            "fused_row_gradients",
            (-(-self.dim // block) * -(-len(out) // tile),),
            4,
            (shares, queries, self.rows, self.radials, out, self.empty if multiplier is None else multiplier),
            (len(out), self.batch, self.dim),
            {
                "MULTIPLY": multiplier is not None,
                "NORMALISE": self.min_length is not None,
                "IN_FLOAT32": interpreting(),
                "TILE": tile,
                "BLOCK": block,
                "QUERY_BLOCK": query_block,
            },
        )

    def _added_row_gradients(self, shares: Tensor, queries: Tensor, out: Tensor) -> None:
        """Write the gradient of a chunk's rows with a library product that adds to the rest of the gradient."""
        tile, block = tile_shape(self.dim)
        launch(
            "radial_gradients",
            (-(-len(out) // tile),),
            4,
            (self.rows, self.radials, out),
            (len(out), self.dim),
            {"TILE": tile, "BLOCK": block},
        )
        torch.addmm(out, shares, queries, out=out)

    def _row_gradients(
        self, shares: Tensor, queries: Tensor, out: Tensor | None, multiplier: Tensor | None, scale_rows: bool
    ) -> None:
        """Write the gradient of a chunk's rows with a library product; `scale_rows` also fills `scaled_rows`."""
        size, product = len(shares), self.similarities
        if out is not None:
            product = out
            if out.dtype != torch.float32:
                if self.product_buffer is None:
                    self.product_buffer = self.new_float32(self.columns_per_chunk * self.K, self.dim)
                product = take_rows(self.product_buffer, slice(0, size))
            write_product(product, shares, queries)
        block = min(next_power_of_two(self.dim), 1024)
        tile = min(max(1, 2048 // block), 64)
        outputs = (self.scaled_rows, self.scaled_rows if out is None else out)
        launch(
            "row_gradients",
            (-(-size // tile), -(-self.dim // block)),
            4,
            (
                self.rows,
                product,
                self.factors,
                self.radials,
                *outputs,
                self.empty if multiplier is None else multiplier,
            ),
            (size, self.dim),
            {
                "MULTIPLY": multiplier is not None,
                "FOLD": self.fold,
                "SCALE_ROWS": scale_rows,
                "NEEDS_GRAD": out is not None,
                "NORMALISE": self.min_length is not None,
                "TILE": tile,
                "BLOCK": block,
            },
        )


def take_rows(tensor: Tensor, rows: slice) -> Tensor:
    """`tensor[rows]`; the tensor itself, which is cheaper, if these are all rows."""
    return tensor if rows.start == 0 and rows.stop == tensor.shape[0] else tensor[rows]


def _warps(numbers: int) -> int:
    """The number of warps for a program that holds this many numbers."""
    return min(max(numbers // NUMBERS_PER_WARP, 1), 16)
