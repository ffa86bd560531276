"""The reductions on an accelerator: the library's matrix products, and Triton's kernels between them.

Products are of the type that queries and references have in common, narrow ones included, with sums in float32; so are
the shares that the gradient is made of. All else is float32. Values and gradients are those of the plain definition
but for the rounding of the shares; there is no second derivative.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from proxymetric.ops import chunked
from proxymetric.ops.own import Own, own_rows
from proxymetric.ops.runs import Run, kernels, rows_of
from proxymetric.ops.task import NONE, Count, Reduced, Setting, Task, Totals

LIFT = 2.0**12
"""by what float16 shares of a sum over very many classes are multiplied, or the small ones would be lost"""


def installed() -> bool:
    """Whether there is a triton to import."""
    return find_spec("triton") is not None


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter: TRITON_INTERPRET=1 when they were imported."""
    import triton

    return not isinstance(kernels().finish, triton.JITFunction)


def takes(queries: Tensor, task: Task) -> bool:
    """Whether these can be reduced here: classes side by side, numbers that kernels know. Others go to chunked."""
    types = {queries.dtype, task.refs.vectors.dtype}
    return (
        task.refs.per_class is not None and task.refs.same is None
        and types <= {torch.float32, torch.bfloat16, torch.float16}
    )  # fmt: skip


def mean_over_batch(
    queries: Tensor, task: Task, positive_count: Count, negative_count: Count, setting: Setting
) -> Totals:
    """As in chunks, a chunk's gradient is made in the forward pass; the pairs of one class are taken apart from it."""
    _check(queries)
    if not takes(queries, task):
        return chunked.mean_over_batch(queries, task, positive_count, negative_count, setting)
    job = _job(0, queries, task, setting)._replace(counts=(positive_count or 1, negative_count or 1))
    with torch.cuda.device_of(queries):
        return Totals(*chunked.MeanOverBatch.apply(queries, task.refs.vectors, job, _means, _rescale))


def over_batch(queries: Tensor, task: Task, setting: Setting) -> Reduced:
    _check(queries)
    return chunked.over_batch(queries, task, setting)


def over_classes(queries: Tensor, task: Task, setting: Setting) -> Reduced:
    _check(queries)
    if not takes(queries, task):
        return chunked.over_classes(queries, task, setting)
    with torch.cuda.device_of(queries):
        return Reduced(*_OverClasses.apply(queries, task.refs.vectors, _job(1, queries, task, setting)))


def _check(queries: Tensor) -> None:
    if not queries.is_cuda and not interpreting():
        raise ValueError(f"impl: 'triton' wants tensors on cuda, got some on {queries.device}; wanted 'chunked' there")


def _job(dim: int, queries: Tensor, task: Task, setting: Setting) -> chunked.Job:
    batch, width = queries.shape
    return chunked.job_of(dim, queries, task, rows_of(batch, width, setting.rows), setting.budget)


def _rescale(values: Tensor, by: Tensor) -> None:
    size, block = values.numel(), 4096
    kernels().rescale[(min(-(-size // block), 2048),)](values, by.contiguous(), size, BLOCK=block)


def _means(
    queries: Tensor, vectors: Tensor, job: chunked.Job
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], chunked.Made]:
    """Totals of the positives and the negatives, their summed weights, and the gradients of the totals."""
    own = own_rows(job.task, kernels().find)
    up, up_weight, up_queries, up_rows = _mean(queries, vectors.detach()[own.rows], job, own)
    down, down_weight, down_queries, in_vectors = _mean(queries, vectors, job)
    in_queries = None if up_queries is None or down_queries is None else (up_queries, down_queries)
    in_own = queries[:0] if up_rows is None else up_rows
    return (up, down), (up_weight, down_weight), chunked.Made(in_queries, in_vectors, own.rows, in_own)


def _mean(
    queries: Tensor, vectors: Tensor, job: chunked.Job, own: Own | None = None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """A total, its summed weights, and the total's gradients."""
    run = Run(queries, vectors, job, own)
    count = job.counts[1 if own is None else 0]
    logs, weights, by = run.numbers(run.columns), run.numbers(run.columns), run.numbers(1).fill_(run.line.slope / count)
    in_queries = run.numbers(*queries.shape).zero_() if job.wanted[0] else None
    # Half precision would lose small gradients before a loss scale, which comes later, can save them.
    wide = own is not None or vectors.dtype == torch.float16
    in_vectors = run.like(vectors, torch.float32 if wide else vectors.dtype) if job.wanted[1] else None
    for part in run:
        run.look(part)
        run.log_means(part, logs, weights)
        run.back(part, run.queries, in_queries, in_vectors, by)
    return logs.sum() / count, weights.sum(), None if in_queries is None else in_queries.mul_(by), in_vectors


class _OverClasses(torch.autograd.Function):
    """queries, vectors -> the four parts of `Reduced`."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, vectors: Tensor, job: chunked.Job) -> tuple[Tensor, ...]:
        own = own_rows(job.task, kernels().find)
        up, up_weight = _sums(Run(queries, vectors.detach()[own.rows], job, own), None)
        run = Run(queries, vectors, job)
        ctx.kept = run.numbers(len(vectors), len(queries)) if job.keep else None
        down, down_weight = _sums(run, ctx.kept)
        ctx.job = job
        ctx.save_for_backward(queries, vectors, up, down, *own)
        ctx.mark_non_differentiable(up_weight, down_weight)
        return up, down, up_weight, down_weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        chunked.once()
        queries, vectors, up, down, *rows = ctx.saved_tensors
        job, own = ctx.job, Own(*rows)
        up_queries, up_rows = _back(Run(queries, vectors[own.rows], job, own), up, grads[0], None)
        in_queries, in_vectors = _back(Run(queries, vectors, job), down, grads[1], ctx.kept)
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
    lift = LIFT if run.type == torch.float16 else 1.0
    empty = logs == NONE
    grads = grads.masked_fill(empty, 0.0)
    # A mean over a batch makes all of them small, which a narrow type would feel; their shares of the largest are not.
    most = grads.abs().amax()
    most = most.where(most > 0, 1.0)
    shares, by = (grads / most).contiguous(), (most * (run.line.slope / lift)).view(1)
    scaled = (run.queries * shares[:, None]).to(run.type)
    in_queries = run.numbers(*run.queries.shape).zero_() if run.wants[0] else None
    in_vectors = run.like(run.vectors, torch.float32 if run.how["OWN"] else run.vectors.dtype) if run.wants[1] else None
    logs = logs.masked_fill(empty, 0.0)
    for part in run:
        run.look(part, kept, known=kept is not None)
        run.shares(part, logs, shares, lift)
        run.back(part, scaled, in_queries, in_vectors, by)
    return None if in_queries is None else in_queries.mul_(shares[:, None] * by), in_vectors
