"""The reductions on an accelerator: the library's matrix products, and Triton's kernels between them.

Products are of the type that queries and references have in common, narrow ones included, with sums in float32; so are
the shares that the gradient is made of. All else is float32. Values and gradients are those of the plain definition
but for the rounding of the shares; there is no second derivative.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from proxymetric.ops import chunked
from proxymetric.ops.problem import LEAST_WEIGHT, NONE, Count, Problem, Reduced, Settings, Totals
from proxymetric.ops.triton.batch_classes import Own, arranged, find, measured, own_rows
from proxymetric.ops.triton.chunk_pass import Run, rows_of
from proxymetric.ops.triton.launch import interpreting, launch, pair
from proxymetric.ops.triton.positives import few
from proxymetric.ops.triton.totals import totals

LIFT = 2.0**12
"""by what float16 shares of a sum over very many classes are multiplied, or the small ones would be lost"""
BLOCK = 1024
"""numbers of a gradient that a program adds"""


def takes(queries: Tensor, task: Problem) -> bool:
    """Whether these can be reduced here: classes side by side, numbers that kernels know. Others go to chunked."""
    types = {queries.dtype, task.refs.vectors.dtype}
    return (
        task.refs.per_class is not None and task.refs.same is None
        and types <= {torch.float32, torch.bfloat16, torch.float16}
    )  # fmt: skip


def mean_over_batch(
    queries: Tensor, task: Problem, positive_count: Count, negative_count: Count, setting: Settings
) -> Totals:
    """As in chunks, a chunk's gradient is made in the forward pass; the pairs of one class are taken apart from it."""
    _check(queries, task)
    if not takes(queries, task):
        return chunked.mean_over_batch(queries, task, positive_count, negative_count, setting)
    job = _job(0, queries, task, setting)._replace(
        counts=(positive_count or 1, negative_count or 1),
        over_weights=(positive_count is None, negative_count is None),
    )
    with torch.cuda.device_of(queries):
        return Totals(*chunked.MeanOverBatch.apply(queries, task.refs.vectors, job, _means))


def over_batch(queries: Tensor, task: Problem, setting: Settings) -> Reduced:
    _check(queries, task)
    return chunked.over_batch(queries, task, setting)


def over_classes(queries: Tensor, task: Problem, setting: Settings) -> Reduced:
    _check(queries, task)
    if not takes(queries, task):
        return chunked.over_classes(queries, task, setting)
    with torch.cuda.device_of(queries):
        return Reduced(*_OverClasses.apply(queries, task.refs.vectors, _job(1, queries, task, setting)))


def _check(queries: Tensor, task: Problem) -> None:
    """Kernels are given addresses: what lies elsewhere would end the process, or worse."""
    if not queries.is_cuda and not interpreting():
        raise ValueError(
            f"impl: 'triton' wants tensors on cuda, got some on {queries.device}; expected 'chunked' there"
        )
    rules = () if task.weight is None else (*task.weight.positive, *task.weight.negative)
    for each in (task.labels, task.refs.labels, task.refs.vectors, *rules):
        if each.device != queries.device:
            raise ValueError(
                f"device: queries are on {queries.device}, their labels, references or weights on {each.device}; "
                "expected all on one"
            )


def _job(dim: int, queries: Tensor, task: Problem, setting: Settings) -> chunked.ChunkPlan:
    batch, width = queries.shape
    return chunked.job_of(dim, queries, task, rows_of(batch, width, setting.rows), setting.budget)


class Made(NamedTuple):
    """The gradients that the forward pass of the means leaves."""

    in_queries: tuple[Tensor, Tensor] | None
    """those of the positives' and of the negatives' total, (B, D) each"""
    in_vectors: Tensor | None
    """(R, D) that of the negatives' total"""
    columns: Tensor
    """(B,) the classes in whose rows the positives' total has one; -1: none"""
    in_own: Tensor
    """(B K, D) which it is"""
    weights: Tensor
    """(2,) the summed weights"""
    over_weights: tuple[bool, bool]
    """by which of them the total was divided, but not these gradients"""
    type: torch.dtype
    """of the queries"""

    def added(self, up: Tensor, down: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """As `chunked.Made.added`, in few launches."""
        (queries_up, queries_down), vectors = self.in_queries or (self.in_own, self.in_own), self.in_vectors
        in_queries = None if self.in_queries is None else torch.empty_like(queries_up, dtype=self.type)
        size, blocks, (count, dim) = 0, 0, self.in_own.shape
        up, down = up.contiguous(), down.contiguous()
        if in_queries is not None:
            size = in_queries.numel()
            blocks = -(-size // BLOCK)
        if vectors is not None:
            many = vectors.numel()
            launch(
                "rescale", (min(-(-many // 4096), 2048),), 4, (vectors, down, self.weights), (many, LEAST_WEIGHT),
                {"DIVIDED": self.over_weights[1], "BLOCK": 4096},
            )  # fmt: skip
        launch(
            "add", (blocks + (0 if vectors is None else count),), 4,
            (queries_up, queries_down, self.in_own if in_queries is None else in_queries,
             self.in_own if vectors is None else vectors, self.columns, self.in_own, up, down, self.weights),
            (blocks, size, dim, LEAST_WEIGHT),
            {"UP": self.over_weights[0], "DOWN": self.over_weights[1], "K": count // len(self.columns), "BLOCK": BLOCK},
        )  # fmt: skip
        return in_queries, vectors


def _means(
    queries: Tensor, vectors: Tensor, job: chunked.ChunkPlan
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Made]:
    """Totals of the positives and the negatives, their summed weights, and the gradients of the totals."""
    at, known = arranged(job.task.labels), None
    if job.task.refs.normalise is None:
        find(job.task, at)
    else:
        known = measured(vectors, job.task, at)
    run = Run(queries, vectors, job, at.narrow, measured=known)
    # The many rows first: while a device is busy with them, the few of the batch's classes are prepared.
    down, down_queries, in_vectors = _many(run, job.counts[1])
    up, up_queries, in_own = few(run, job.task, at, job.counts[0])
    in_queries = None if down_queries is None else (up_queries, down_queries)
    *found, weights = totals(up, down, job.over_weights)
    made = Made(in_queries, in_vectors, at.columns, in_own, weights, job.over_weights, queries.dtype)
    return tuple(found), weights.unbind(), made


def _many(run: Run, count: float) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Of the pairs of two classes the logarithms and weights of the columns, and the gradients of their sum."""
    found, by = pair(run.queries, run.columns), run.line.slope / count
    in_queries = run.numbers(*run.queries.shape) if run.wants[0] else None
    # Half precision would lose small gradients before a loss scale, which comes later, can save them.
    wide = run.vectors.dtype == torch.float16
    in_vectors = run.like(run.vectors, torch.float32 if wide else run.vectors.dtype) if run.wants[1] else None
    left = None if run.fold else run.numbers(1).fill_(by)
    for part in run:
        run.look(part)
        run.log_means(part, found, by, 1.0 / count)
        run.back(part, run.queries, in_queries, in_vectors, left)
    if in_queries is not None and left is not None:
        in_queries.mul_(left)
    return found, in_queries, in_vectors


class _OverClasses(torch.autograd.Function):
    """queries, vectors -> the four parts of `Reduced`."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, vectors: Tensor, job: chunked.ChunkPlan) -> tuple[Tensor, ...]:
        at = arranged(job.task.labels)
        run = Run(queries, vectors, job, at.narrow)
        ctx.kept = run.numbers(len(vectors), len(queries)) if job.keep else None
        # The many rows first, as in `_means`.
        down, down_weight = _sums(run, ctx.kept)
        own = own_rows(job.task, at)
        up, up_weight = _sums(Run(queries, vectors.detach()[own.rows], job, at.narrow, own), None)
        ctx.job = job
        ctx.save_for_backward(queries, vectors, up, down, at.narrow, run.lengths, *own)
        ctx.mark_non_differentiable(up_weight, down_weight)
        return up, down, up_weight, down_weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        chunked.once()
        queries, vectors, up, down, labels, lengths, *rows = ctx.saved_tensors
        job, own = ctx.job, Own(*rows)
        in_queries, in_vectors = _back(Run(queries, vectors, job, labels, measured=lengths), down, grads[1], ctx.kept)
        up_queries, up_rows = _back(Run(queries, vectors[own.rows], job, labels, own), up, grads[0], None)
        if in_queries is not None:
            assert up_queries is not None
            in_queries = in_queries.add_(up_queries).to(queries.dtype)
        if in_vectors is not None:
            assert up_rows is not None
            in_vectors.index_add_(0, own.rows, up_rows.to(in_vectors))
        return in_queries, in_vectors, None


def _sums(run: Run, kept: Tensor | None) -> tuple[Tensor, Tensor]:
    """Of each query the log-sum over the columns, and their mean weight."""
    sums = run.sums()
    for part in run:
        run.look(part, kept)
        run.log_sums(part, sums)
    highest = sums[0].amax(0)
    highest.masked_fill_(highest == NONE, 0.0)
    logs = highest + ((sums[0] - highest).exp() * sums[1]).sum(0).log()
    return logs, (logs != NONE).to(logs) if run.how["EDGES"] < 0 else sums[2].sum(0) / sums[3].sum(0).clamp(min=1)


def _back(run: Run, logs: Tensor, grads: Tensor, kept: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """From the gradient in the log-sums: that in the queries and in the rows."""
    empty = logs == NONE
    shares, by, lift = grads.masked_fill(empty, 0.0).mul_(run.line.slope), None, 1.0
    if run.type == torch.float16:
        # A mean over a batch makes all of them small, which half precision feels; their shares of the largest are not.
        lift, most = LIFT, shares.abs().amax()
        most = most.where(most > 0, 1.0)
        shares, by = shares / most, (most / LIFT).view(1)
    scaled = (run.queries * shares[:, None]).to(run.type)
    in_queries = run.numbers(*run.queries.shape) if run.wants[0] else None
    in_vectors = run.like(run.vectors, torch.float32 if run.how["OWN"] else run.vectors.dtype) if run.wants[1] else None
    logs = logs.masked_fill(empty, 0.0)
    for part in run:
        run.look(part, kept, known=kept is not None)
        run.shares(part, logs, shares, lift)
        run.back(part, scaled, in_queries, in_vectors, by)
    if in_queries is not None:
        in_queries.mul_(shares[:, None] if by is None else shares[:, None] * by)
    return in_queries, in_vectors
