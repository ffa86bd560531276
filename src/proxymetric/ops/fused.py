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
from proxymetric.ops.own import Found, Own
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
    return Totals(*_MeanOverBatch.apply(queries, task.refs.vectors, job))


def over_batch(queries: Tensor, task: Task, setting: Setting) -> Reduced:
    _check(queries)
    return chunked.over_batch(queries, task, setting)


def over_classes(queries: Tensor, task: Task, setting: Setting) -> Reduced:
    _check(queries)
    if not takes(queries, task):
        return chunked.over_classes(queries, task, setting)
    return Reduced(*_OverClasses.apply(queries, task.refs.vectors, _job(1, queries, task, setting)))


def _check(queries: Tensor) -> None:
    if not queries.is_cuda and not interpreting():
        raise ValueError(f"impl: 'triton' wants tensors on cuda, got some on {queries.device}; wanted 'chunked' there")


def _job(dim: int, queries: Tensor, task: Task, setting: Setting) -> chunked.Job:
    vectors, (batch, width) = task.refs.vectors, queries.shape
    wanted = (queries.requires_grad, vectors.requires_grad) if torch.is_grad_enabled() else (False, False)
    keep = dim == 1 and any(wanted) and batch * len(vectors) * 4 <= setting.budget
    # The vectors themselves are kept where autograd sees whether they were changed since.
    task = task._replace(refs=task.refs._replace(vectors=vectors[:0].detach()))
    return chunked.Job(dim, task, rows_of(batch, width, setting.rows), wanted, keep)


class _MeanOverBatch(torch.autograd.Function):
    """queries, vectors -> sums over the columns of `log(1 + sum exp)` over `counts`, and the summed mean weights."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, vectors: Tensor, job: chunked.Job) -> tuple[Tensor, ...]:
        totals, weights, ctx.made = _means(queries, vectors, job)
        ctx.job = job
        ctx.save_for_backward(queries, vectors)
        ctx.mark_non_differentiable(*weights)
        return *totals, *weights

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        chunked.once()
        queries, vectors = ctx.saved_tensors
        made, ctx.made = ctx.made or _means(queries, vectors, ctx.job)[-1], None
        up, down = grads[:2]
        in_queries = None
        if made.in_queries is not None:
            in_queries = (up * made.in_queries[0] + down * made.in_queries[1]).to(queries.dtype)
        if made.in_vectors is None:
            return in_queries, None, None
        size, block = made.in_vectors.numel(), 4096
        kernels().rescale[(min(-(-size // block), 2048),)](made.in_vectors, down.contiguous(), size, BLOCK=block)
        made.in_vectors.index_add_(0, made.own_rows, (up * made.in_own).to(made.in_vectors))
        return in_queries, made.in_vectors.to(vectors.dtype), None


def _means(
    queries: Tensor, vectors: Tensor, job: chunked.Job
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], chunked.Made]:
    """Totals of the positives and the negatives, their summed weights, and the gradients of the totals."""
    own = Own(job.task)
    with torch.enable_grad():
        up = own.mean(queries, vectors, job.counts[0], job.wanted)
    up_queries, up_vectors = _gradients(up, None, job.wanted)
    run = Run(queries, vectors, job)
    logs, weights = run.numbers(run.columns), run.numbers(run.columns)
    in_queries = run.numbers(*queries.shape).zero_() if job.wanted[0] else None
    kind = torch.float32 if vectors.dtype == torch.float16 else vectors.dtype
    in_vectors = vectors.new_empty(vectors.shape, dtype=kind) if job.wanted[1] else None
    by = run.numbers(1).fill_(job.task.negative.slope / job.counts[1])
    for part in run:
        run.look(part)
        run.log_means(part, logs, weights)
        run.back(part, run.queries, in_queries, in_vectors, by)
    if in_queries is not None:
        in_queries.mul_(by)
        assert up_queries is not None
    totals = up.log.detach(), logs.sum() / job.counts[1]
    made = chunked.Made(
        None if in_queries is None or up_queries is None else (up_queries, in_queries),
        in_vectors, own.rows, up.vectors if up_vectors is None else up_vectors,
    )  # fmt: skip
    return totals, (up.weight.detach(), weights.sum()), made


def _gradients(found: Found, grad: Tensor | None, wanted: tuple[bool, bool]) -> tuple[Tensor | None, Tensor | None]:
    """Of `found.log`, in the queries and in the rows of their classes."""
    leaves = [leaf for leaf, want in zip((found.queries, found.vectors), wanted, strict=True) if want]
    got = list(torch.autograd.grad(found.log, leaves, grad)) if leaves else []
    return (got.pop(0) if wanted[0] else None), (got.pop(0) if wanted[1] else None)


class _OverClasses(torch.autograd.Function):
    """queries, vectors -> the four parts of `Reduced`."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, vectors: Tensor, job: chunked.Job) -> tuple[Tensor, ...]:
        up = Own(job.task).each(queries, vectors, (False, False))
        run = Run(queries, vectors, job)
        ctx.kept = run.numbers(len(vectors), len(queries)) if job.keep else None
        sums = run.sums()
        for part in run:
            run.look(part, ctx.kept)
            run.log_sums(part, sums)
        highest = sums[0].amax(0)
        base = highest.masked_fill(highest == NONE, 0.0)
        down = base + ((sums[0] - base).exp() * sums[1]).sum(0).log()
        if job.task.weight is None:
            down_weight = (down != NONE).to(down)
        else:
            down_weight = sums[2].sum(0) / sums[3].sum(0).clamp(min=1)
        ctx.job = job
        ctx.save_for_backward(queries, vectors, down)
        ctx.mark_non_differentiable(up.weight, down_weight)
        return up.log, down, up.weight, down_weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        chunked.once()
        queries, vectors, down = ctx.saved_tensors
        job: chunked.Job = ctx.job
        own = Own(job.task)
        with torch.enable_grad():
            up = own.each(queries, vectors, job.wanted)
        up_queries, up_vectors = _gradients(up, grads[0], job.wanted)
        run = Run(queries, vectors, job)
        lift = LIFT if run.type == torch.float16 else 1.0
        grad = grads[1].masked_fill(down == NONE, 0.0).contiguous()
        sums = down.masked_fill(down == NONE, 0.0)
        # The gradient may be too small for float16, as a mean over a batch makes it, but not for all queries at once.
        most = grad.abs().amax()
        most = most.where(most > 0, 1.0)
        shares, by = grad / most, (most * (job.task.negative.slope / lift)).view(1)
        scaled = (run.queries * shares[:, None]).to(run.type)
        in_queries = run.numbers(*queries.shape).zero_() if job.wanted[0] else None
        in_vectors = vectors.new_empty(vectors.shape) if job.wanted[1] else None
        for part in run:
            run.look(part, ctx.kept, known=job.keep)
            run.shares(part, sums, shares, lift)
            run.back(part, scaled, in_queries, in_vectors, by)
        if in_vectors is not None:
            assert up_vectors is not None
            in_vectors.index_add_(0, own.rows, up_vectors.to(in_vectors))
        if in_queries is not None:
            assert up_queries is not None
            in_queries.mul_(shares[:, None] * by).add_(up_queries)
            return in_queries.to(queries.dtype), in_vectors, None
        return None, in_vectors, None
