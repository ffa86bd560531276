"""The reductions over chunks of columns: no matrix of all queries by all references, unless a budget allows one.

Values and gradients are those of the plain definition; there is no second derivative.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from proxymetric.ops.chunks import Blocks, Side
from proxymetric.ops.problem import NONE, Count, Problem, Reduced, Settings, Totals, lifted, log1p_exp

CACHE = 2**20
"""numbers of one chunk that suit a processor's own cache: its rows, and three matrices beside the batch"""
LARGE = 2**26
"""numbers of one matrix of a chunk on an accelerator, which wants large products"""


class ChunkPlan(NamedTuple):
    """A task without its vectors, and how it is done."""

    dim: int
    """over what sums go: 0 the batch, 1 the columns"""
    task: Problem
    rows: int
    """of one chunk"""
    wanted: tuple[bool, bool]
    """whether the queries and the vectors want a gradient"""
    keep: bool
    """whether all similarities are kept for the backward pass"""
    counts: tuple[float, float] = (1.0, 1.0)
    """what the summed positives and negatives are divided by"""
    over_weights: tuple[bool, bool] = (False, False)
    """whether they are divided by their summed weights, too, before anybody sees them"""


def mean_over_batch(
    queries: Tensor, task: Problem, positive_count: Count, negative_count: Count, setting: Settings
) -> Totals:
    """A chunk holds all that its columns' part of the means depends on: its gradient is made in the forward pass.

    Where a count is given, it is in that gradient; else the whole of it is multiplied once more in the backward pass.
    """
    queries = lifted(queries)
    job = _job(0, queries, task, setting)._replace(counts=(positive_count or 1, negative_count or 1))
    found = Totals(*MeanOverBatch.apply(queries, task.refs.vectors, job, _means))
    return found.over_weights(positive_count is None, negative_count is None)


def over_batch(queries: Tensor, task: Problem, setting: Settings) -> Reduced:
    queries = lifted(queries)
    return Reduced(*_Reduce.apply(queries, task.refs.vectors, _job(0, queries, task, setting)))


def over_classes(queries: Tensor, task: Problem, setting: Settings) -> Reduced:
    queries = lifted(queries)
    return Reduced(*_Reduce.apply(queries, task.refs.vectors, _job(1, queries, task, setting)))


def _job(dim: int, queries: Tensor, task: Problem, setting: Settings) -> ChunkPlan:
    (batch, width), on_cpu = queries.shape, queries.device.type == "cpu"
    rows = setting.rows or max(256, CACHE // (width + 3 * batch) if on_cpu else LARGE // batch)
    return job_of(dim, queries, task, rows, setting.budget)


def job_of(dim: int, queries: Tensor, task: Problem, rows: int, budget: int) -> ChunkPlan:
    """The job of a task in chunks of so many rows; its similarities are kept if they fit into the budget, in bytes."""
    vectors = task.refs.vectors
    wanted = (queries.requires_grad, vectors.requires_grad) if torch.is_grad_enabled() else (False, False)
    # Similarities are float32 or wider, whatever the queries are.
    keep = any(wanted) and len(queries) * len(vectors) * max(4, queries.element_size()) <= budget
    # The vectors themselves are kept where autograd sees whether they were changed since.
    task = task._replace(refs=task.refs._replace(vectors=vectors[:0].detach()))
    return ChunkPlan(dim, task, rows, wanted, keep)


class MeanOverBatch(torch.autograd.Function):
    """queries, vectors -> sums over the columns of `log(1 + sum exp)` over `counts`, and the summed mean weights.

    means: makes them, and their gradients.
    """

    @staticmethod
    def forward(ctx: Any, queries: Tensor, vectors: Tensor, job: ChunkPlan, means: Means) -> tuple[Tensor, ...]:
        totals, weights, ctx.made = means(queries, vectors, job)
        ctx.job, ctx.means = job, means
        ctx.save_for_backward(queries, vectors)
        ctx.mark_non_differentiable(*weights)
        ctx.set_materialize_grads(False)
        return *totals, *weights

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None]:
        once()
        queries, vectors = ctx.saved_tensors
        # The large gradient is handed out, not copied. Who asks a second time has it made again.
        made, ctx.made = ctx.made or ctx.means(queries, vectors, ctx.job)[-1], None
        up, down = (vectors.new_zeros(()) if each is None else each for each in grads[:2])
        in_queries, in_vectors = made.added(up, down)
        return (
            None if in_queries is None else in_queries.to(queries.dtype),
            None if in_vectors is None else in_vectors.to(vectors.dtype),
            None,
            None,
        )


class Made(NamedTuple):
    """The gradients that the forward pass of the means leaves."""

    in_queries: tuple[Tensor, Tensor] | None
    """those of the positives' and of the negatives' total, (B, D) each"""
    in_vectors: Tensor | None
    """(R, D) that of the negatives' total"""
    own_rows: Tensor
    """the rows in which the positives' total has one"""
    in_own: Tensor
    """(len(own_rows), D) which it is"""

    def added(self, up: Tensor, down: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Those of `up` times the one and `down` times the other, in queries and in vectors, where expected."""
        in_queries, in_vectors = None, self.in_vectors
        if self.in_queries is not None:
            in_queries = up * self.in_queries[0] + down * self.in_queries[1]
        if in_vectors is not None:
            if down.device.type != "cpu" or float(down) != 1:
                in_vectors.mul_(down)
            in_vectors.index_add_(0, self.own_rows, (up * self.in_own).to(in_vectors))
        return in_queries, in_vectors


class Gradients(Protocol):
    """What `Made` is, or another that adds."""

    def added(self, up: Tensor, down: Tensor) -> tuple[Tensor | None, Tensor | None]: ...


Means = Callable[[Tensor, Tensor, ChunkPlan], tuple[tuple[Tensor, ...], tuple[Tensor, ...], Gradients]]
"""queries, vectors, job -> totals of the positives and the negatives, their summed weights, gradients of the totals"""


def _means(queries: Tensor, vectors: Tensor, job: ChunkPlan) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Made]:
    """Totals of the positives and the negatives, their summed weights, and the gradients of the totals."""
    blocks = Blocks(queries, vectors, job.task, job.rows)
    in_queries = (torch.zeros_like(queries), torch.zeros_like(queries)) if job.wanted[0] else None
    # Half precision would lose small gradients before a loss scale, which comes later, can save them.
    kind = torch.float32 if vectors.dtype == torch.float16 else vectors.dtype
    in_vectors = torch.empty_like(vectors, dtype=kind) if job.wanted[1] else None
    # Small results that outlive a chunk would lie between its large ones, whose memory could not be used again.
    logs, weights = queries.new_zeros(2, len(blocks.labels)), queries.new_zeros(2, len(blocks.labels))
    own_rows, in_own = [blocks.own[:0]], [queries[:0]]
    for chunk in blocks:
        block = blocks.look(chunk)
        for sign, side in blocks.sides(chunk, block):
            logs[sign, side.columns], weights[sign, side.columns], slopes = _log1p(side, job.counts[sign])
            if not any(job.wanted):
                continue
            if sign == 0:
                rows, part = blocks.part(chunk, block)
                in_rows = torch.empty_like(part.rows) if job.wanted[1] else None
                own_rows.append(rows)
                in_own.append(part.rows if in_rows is None else in_rows)
            else:
                part, in_rows = block, None if in_vectors is None else in_vectors[chunk.rows]
            blocks.back(part, slopes, in_queries and in_queries[sign], in_rows)
    totals = logs[0].sum() / job.counts[0], logs[1].sum() / job.counts[1]
    summed = weights[0].sum(), weights[1].sum()
    return totals, summed, Made(in_queries, in_vectors, torch.cat(own_rows), torch.cat(in_own))


def _log1p(side: Side, count: float) -> tuple[Tensor, Tensor, Tensor]:
    """For each column `log(1 + sum over the batch of exp)`, its mean weight, and the slopes of the first over `count`.

    The slope in an exponent z is `exp(z - log(1 + sum))`. The exponents are written over.
    """
    weight = None if side.weights is None else _divided(*side.summed_weights(1))
    log, shares, highest = _log_sum(side.exponents, 1)
    if weight is None:
        weight = (log != NONE).to(log)
    log = log1p_exp(log)
    return log, weight, side.slopes(shares, (highest - log[:, None]).exp_() / count)


def _log_sum(z: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """`log sum exp z`, and of what it was made: `exp(z - highest)`, where z was, and the highest, or 0 if infinite."""
    highest = z.amax(dim, keepdim=True)
    highest.masked_fill_(highest.isinf(), 0.0)
    shares = z.sub_(highest).exp_()
    return shares.sum(dim).log_().add_(highest.squeeze(dim)), shares, highest


class _Reduce(torch.autograd.Function):
    """queries, vectors -> the four parts of `Reduced`."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, vectors: Tensor, job: ChunkPlan) -> tuple[Tensor, ...]:
        blocks = Blocks(queries, vectors, job.task, job.rows)
        ctx.kept = queries.new_empty(len(vectors), len(queries)) if job.keep else None
        size = len(blocks.labels) if job.dim == 0 else len(queries)
        parts = _Parts(job.dim, queries.new_full((size,), NONE)), _Parts(job.dim, queries.new_full((size,), NONE))
        for chunk in blocks:
            block = blocks.look(chunk, ctx.kept)
            for sign, side in blocks.sides(chunk, block):
                parts[sign].take(side)
        (up, up_weight), (down, down_weight) = (each.joined() for each in parts)
        ctx.job = job
        ctx.save_for_backward(queries, vectors, up, down)
        ctx.mark_non_differentiable(up_weight, down_weight)
        return up, down, up_weight, down_weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        once()
        queries, vectors, *sums = ctx.saved_tensors
        job: ChunkPlan = ctx.job
        sums = [each.where(each != NONE, 0.0) for each in sums]
        blocks = Blocks(queries, vectors, job.task, job.rows)
        in_queries = torch.zeros_like(queries) if job.wanted[0] else None
        in_vectors = torch.empty_like(vectors) if job.wanted[1] else None
        for chunk in blocks:
            block = blocks.look(chunk, ctx.kept, known=job.keep)
            slopes = []
            for sign, side in blocks.sides(chunk, block):
                log, grad = ((each[side.columns, None] if job.dim == 0 else each) for each in (sums[sign], grads[sign]))
                slopes.append(side.slopes(side.exponents.sub_(log).exp_(), grad))
            if len(slopes) == 2:
                slopes[1][chunk.own] += slopes[0]
            blocks.back(block, slopes[-1], in_queries, None if in_vectors is None else in_vectors[chunk.rows])
        return in_queries, in_vectors, None


class _Parts:
    """The log-sums of one sign, chunk by chunk: side by side for each column, or summed up for each query."""

    def __init__(self, dim: int, none: Tensor) -> None:
        self.dim, self.logs = dim, [none]
        self.total, self.count = torch.zeros_like(none), torch.zeros_like(none)
        self.weighted = False

    def take(self, side: Side) -> None:
        if side.weights is not None:
            self.weighted = True
            at = side.columns if self.dim == 0 else slice(None)
            total, count = side.summed_weights(1 - self.dim)
            self.total[at] += total
            self.count[at] += count
        logs = _log_sum(side.exponents, 1 - self.dim)[0]
        if self.dim == 0:
            self.logs[0][side.columns] = logs
        else:
            self.logs.append(logs)

    def joined(self) -> tuple[Tensor, Tensor]:
        """The log-sums and the mean weights."""
        logs = torch.logsumexp(torch.stack(self.logs), 0)
        return logs, _divided(self.total, self.count) if self.weighted else (logs != NONE).to(logs)


def _divided(total: Tensor, count: Tensor) -> Tensor:
    return total / count.clamp(min=1)


def once() -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "create_graph=True: the chunked reductions have no second derivative; "
            "expected `with proxymetric.ops.using('plain'):` around the loss"
        )
