"""The reductions on a matrix of all queries by all columns, with gradients in closed form.

At the sizes that most people train at, the time of a loss is the number of its operators: each costs microseconds on
the host, and the arithmetic next to nothing. Here each reduction is one function of autograd, with a third of the
operators of the plain definition. It applies if the references are those of all classes in order (`fits`). Then column
c is class c, and a query has exactly one positive column: its label.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from proxymetric.core.normalisation import Normalised, divisors_of
from proxymetric.core.products import scaled_product
from proxymetric.core.similarity import Similarity
from proxymetric.ops import plain
from proxymetric.ops.problem import NONE, Count, Exponent, Line, Problem, Reduced, Settings, Totals, with_vectors
from proxymetric.ops.triton import cross_entropy as fused

MAX_EXPONENT = 75.0
"""largest exponent whose exponentials, summed over any batch, stay finite in float32"""


def fits(queries: Tensor, problem: Problem) -> bool:
    """Whether the closed forms apply to these queries and references.

    Args:
        queries: (B, D).
        problem: labels, references, exponents.
    """
    refs = problem.refs
    return (
        refs.all_classes
        and problem.weight is None
        and refs.normalise is not None
        and refs.same is None
        and (refs.per_class == 1 or problem.of_class is not None)
        and queries.dtype == refs.rows.dtype
        and queries.dtype in (torch.float32, torch.float64)
    )


def bounded(problem: Problem) -> bool:
    """Whether no exponential of a cosine overflows, so that sums need no maximum to be subtracted."""
    return all(abs(line.slope) + abs(line.offset) <= MAX_EXPONENT for line in (problem.positive, problem.negative))


def mean_over_batch(
    queries: Tensor, problem: Problem, positive_count: Count, negative_count: Count, settings: Settings
) -> Totals:
    """See `reductions.mean_over_batch`."""
    if not (fits(queries, problem) and bounded(problem)):
        return plain.mean_over_batch(queries, problem, positive_count, negative_count, settings)
    counts = positive_count, negative_count
    means = _MeanOverBatch.apply(queries, problem.refs.rows, problem.labels, problem, counts)
    return Totals(means[0], means[1], None, None)


def over_classes(queries: Tensor, problem: Problem, settings: Settings) -> Reduced:
    """See `reductions.over_classes`."""
    if not fits(queries, problem) or len(problem.refs.labels) == problem.per_column:  # one class has no negatives
        return plain.over_classes(queries, problem, settings)
    logs = _OverClasses.apply(queries, problem.refs.rows, problem.labels, problem)
    one = queries.new_ones(()).expand(len(queries))
    return Reduced(logs[0], logs[1], one, one)


def cross_entropy(queries: Tensor, problem: Problem, own_class: Exponent, count: int) -> Tensor:
    """See `reductions.cross_entropy`: the sum over the queries, divided by a count."""
    if fused.fits(queries, problem.refs.rows, own_class):
        return fused.cross_entropy(queries, problem, own_class, count, natural_unit(problem))
    value: Tensor = _CrossEntropy.apply(queries, problem.refs.rows, problem.labels, problem, own_class, count)
    return value


class _Similarities(NamedTuple):
    """The similarities `t = s / unit` of all queries and all columns, and what their gradient needs.

    A well chosen unit (`natural_unit`) spares a product of the whole matrix. With "soft" and the unit gamma, the
    similarity to a class is `T = sum_k softmax_k(t) t_k`, and its derivatives are `softmax_k(t) (1 + t_k - T)`. Such
    classes have K times as many references as columns: their products are divided by the lengths of the references,
    which takes fewer passes over the references than normalising them.
    """

    rows: Tensor
    """(R, D) the references, normalised; with shares, as they are"""
    divisors: Tensor
    """(R, 1), see `Normalised`; with shares (R,)"""
    by_length: Tensor | None
    """(R, 1), see `Normalised`; with shares (R,)"""
    of_rows: Tensor
    """(B, R)"""
    of_columns: Tensor
    """(B, C)"""
    shares: Tensor | None
    """(B, C, K) softmax_k(t), with "soft" and K > 1"""

    @staticmethod
    def of(queries: Tensor, vectors: Tensor, problem: Problem, unit: float) -> _Similarities:
        labels, name = problem.labels, problem.refs.normalise
        assert name is not None
        of_class = _combination(problem)
        if of_class is not None and of_class.kind == "soft":
            normalised = Normalised(vectors, *divisors_of(vectors, name))
            of_rows = scaled_product(queries, vectors, 1.0).div_(normalised.divisors * unit)
        else:
            normalised = Normalised.of(vectors, name)
            of_rows = scaled_product(queries, normalised.rows, 1 / unit)
        if of_class is None:
            return _Similarities(*normalised, of_rows, of_rows, None)
        grouped = of_rows.view(len(queries), -1, problem.per_column)
        if problem.refs.nearest is not None:
            own_similarities = grouped.gather(1, labels[:, None, None].expand(-1, 1, problem.per_column)).squeeze(1)
            problem.refs.nearest.rows = torch.add(own_similarities.argmax(1), labels, alpha=problem.per_column)
        if of_class.kind != "soft":
            return _Similarities(*normalised, of_rows, of_class(grouped), None)
        shares = _softmax_of_few(grouped, 1 / unit)
        return _Similarities(*normalised, of_rows, (shares * grouped).sum(2), shares)

    def gradients(
        self, slopes: Tensor, queries: Tensor, problem: Problem, unit: float, needs_grad: tuple[bool, ...]
    ) -> tuple[Tensor | None, Tensor | None]:
        """The gradients in the queries and in the vectors.

        Args:
            slopes: (B, C) the gradient in the similarities s to the columns.
            queries: (B, D).
            problem: how the references of a class are combined.
            unit: the unit of the similarities.
            needs_grad: whether the queries and the vectors need a gradient.
        """
        of_class = _combination(problem)
        if of_class is not None:
            grouped = self.of_rows.view(len(queries), -1, problem.per_column)
            if self.shares is not None:
                of_references = (grouped - (self.of_columns - 1).unsqueeze(2)).mul_(self.shares)
                slopes = of_references.mul_(slopes.unsqueeze(2)).flatten(1)
                return self._gradients_of_soft(slopes.div_(self.divisors), queries, unit, needs_grad)
            slopes = of_class.slopes(grouped, self.of_columns).mul_(slopes.unsqueeze(2)).flatten(1)
        in_queries = slopes @ self.rows if needs_grad[0] else None
        if not needs_grad[1]:
            return in_queries, None
        return in_queries, Normalised(self.rows, self.divisors, self.by_length).gradient(slopes.T @ queries)

    def _gradients_of_soft(
        self, slopes: Tensor, queries: Tensor, unit: float, needs_grad: tuple[bool, ...]
    ) -> tuple[Tensor | None, Tensor | None]:
        """See `gradients`: `s = q . v / ||v||` has the gradient `q / ||v|| - s v / ||v||^2` in v.

        Args:
            slopes: (B, R) the gradient in the similarities to the references, divided by their lengths.
            queries: (B, D).
            unit: the unit of the similarities.
            needs_grad: whether the queries and the vectors need a gradient.
        """
        in_queries = slopes @ self.rows if needs_grad[0] else None
        if not needs_grad[1]:
            return in_queries, None
        radial = (slopes * self.of_rows).sum(0).div_(self.divisors)
        if self.by_length is not None:
            radial.mul_(self.by_length)
        return in_queries, (slopes.T @ queries).addcmul_(self.rows, radial.unsqueeze(1), value=-unit)


def _softmax_of_few(exponents: Tensor, largest: float) -> Tensor:
    """The softmax over the last dimension.

    On the CPU, torch's own takes three times as long if that dimension has about ten numbers.

    Args:
        exponents: (B, C, K).
        largest: no exponent is larger or, with a minus, smaller.
    """
    if exponents.is_cuda or largest > MAX_EXPONENT:
        return exponents.softmax(2)
    exponentials = exponents.exp()
    return exponentials.div_(exponentials.sum(2, keepdim=True))


def natural_unit(problem: Problem) -> float:
    """The unit that spares a product: gamma, or the one in which the exponents of negatives have the slope 1."""
    of_class = _combination(problem)
    if of_class is not None and of_class.kind == "soft":
        return of_class.gamma
    return 1 / problem.negative.slope if problem.negative.slope else 1.0


def _combination(problem: Problem) -> Similarity | None:
    """How the references of a class are combined; None: a class has one."""
    return None if problem.per_column == 1 else problem.of_class


class _MeanOverBatch(torch.autograd.Function):
    """queries, vectors, labels, problem, counts -> the positive and the negative mean.

    All exponentials are finite (`bounded`), so that the sums of each column need no care:
    `log(1 + e^offset sum_i exp(slope s_ic))`.
    """

    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, vectors: Tensor, labels: Tensor, problem: Problem, counts: tuple[Count, Count]
    ) -> tuple[Tensor, Tensor]:
        unit = natural_unit(problem)
        similarities = _Similarities.of(queries, vectors, problem, unit)
        of_columns, own_columns = similarities.of_columns, labels[:, None]
        positive = of_columns.gather(1, own_columns).mul_(problem.positive.slope * unit).exp_()
        negative = _times(of_columns, problem.negative.slope * unit).exp().scatter_(1, own_columns, 0.0)
        positive_sums = negative.new_zeros(negative.shape[1]).index_add_(0, labels, positive.squeeze(1))
        positive_sums.mul_(math.exp(problem.positive.offset))
        negative_sums = negative.sum(0).mul_(math.exp(problem.negative.offset))
        divisors = [
            sums.count_nonzero().clamp_(min=1) if count is None else count
            for sums, count in zip((positive_sums, negative_sums), counts, strict=True)
        ]
        ctx.problem, ctx.counts, ctx.divisors = problem, counts, divisors
        ctx.save_for_backward(queries, vectors, labels, *similarities, positive, negative, positive_sums, negative_sums)
        ctx.set_materialize_grads(False)
        return positive_sums.log1p().sum().div_(divisors[0]), negative_sums.log1p().sum().div_(divisors[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        queries, vectors, labels, *similarities, positive, negative, positive_sums, negative_sums = ctx.saved_tensors
        problem: Problem = ctx.problem
        if torch.is_grad_enabled():

            def by_autograd(x: Tensor, p: Tensor) -> tuple[Tensor, ...]:
                positive_count, negative_count = ctx.counts
                given = with_vectors(problem, p), positive_count, negative_count, Settings()
                return plain.mean_over_batch(x, *given)[:2]

            return *plain.gradients_with_graph(by_autograd, queries, vectors, grads), None, None, None

        def factors(sign: int, line: Line, sums: Tensor) -> Tensor:
            """(C,) the gradient in `sum_i exp(slope s_ic)`, times the slope."""
            grad = grads[sign]
            if grad is None:
                return torch.zeros_like(sums)
            return (grad * (line.slope * math.exp(line.offset))).div_(ctx.divisors[sign]) / (sums + 1)

        slopes = negative * factors(1, problem.negative, negative_sums)
        of_positives = factors(0, problem.positive, positive_sums)[labels, None].mul_(positive)
        slopes.scatter_(1, labels[:, None], of_positives)
        gradients = _Similarities(*similarities).gradients(
            slopes, queries, problem, natural_unit(problem), ctx.needs_input_grad
        )
        return *gradients, None, None, None


class _OverClasses(torch.autograd.Function):
    """queries, vectors, labels, problem -> the log-sums over the positives and over the negatives."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, vectors: Tensor, labels: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
        unit = natural_unit(problem)
        similarities = _Similarities.of(queries, vectors, problem, unit)
        of_columns, own_columns = similarities.of_columns, labels[:, None]
        positive = of_columns.gather(1, own_columns).squeeze(1).mul_(problem.positive.slope * unit)
        logits = (of_columns * (problem.negative.slope * unit)).scatter_(1, own_columns, NONE)
        log_sums = logits.logsumexp(1)
        ctx.problem = problem
        ctx.save_for_backward(queries, vectors, labels, *similarities, logits, log_sums)
        ctx.set_materialize_grads(False)
        return positive.add_(problem.positive.offset), log_sums + problem.negative.offset

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        queries, vectors, labels, *similarities, logits, log_sums = ctx.saved_tensors
        problem: Problem = ctx.problem
        if torch.is_grad_enabled():

            def by_autograd(x: Tensor, p: Tensor) -> tuple[Tensor, ...]:
                return plain.over_classes(x, with_vectors(problem, p), Settings())[:2]

            return *plain.gradients_with_graph(by_autograd, queries, vectors, grads), None, None
        in_positive, in_negative = (torch.zeros_like(log_sums) if grad is None else grad for grad in grads)
        slopes = (logits - log_sums[:, None]).exp_().mul_((in_negative * problem.negative.slope)[:, None])
        slopes.scatter_(1, labels[:, None], (in_positive * problem.positive.slope)[:, None])
        gradients = _Similarities(*similarities).gradients(
            slopes, queries, problem, natural_unit(problem), ctx.needs_input_grad
        )
        return *gradients, None, None


class _CrossEntropy(torch.autograd.Function):
    """queries, vectors, labels, problem, exponent of the query's class, count -> the cross entropy, a scalar."""

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        vectors: Tensor,
        labels: Tensor,
        problem: Problem,
        own_class: Exponent,
        count: int,
    ) -> Tensor:
        unit = natural_unit(problem)
        similarities = _Similarities.of(queries, vectors, problem, unit)
        of_columns, own_columns = similarities.of_columns, labels[:, None]
        others = problem.negative
        logits = _times(of_columns, others.slope * unit)
        own_similarity = None
        if isinstance(own_class, Line) and own_class.slope == others.slope:
            if own_class.offset != others.offset:  # a margin, which the other classes do not have
                logits = logits.scatter(1, own_columns, own_class.offset - others.offset, reduce="add")
        else:
            own_similarity = of_columns.gather(1, own_columns).mul_(unit)
            logits = logits.scatter(1, own_columns, own_class(own_similarity) - others.offset)
        log_shares = logits.log_softmax(1)
        log_own = log_shares.gather(1, own_columns)
        ctx.problem, ctx.own_class, ctx.count = problem, own_class, count
        ctx.save_for_backward(queries, vectors, labels, *similarities, own_similarity, log_shares, log_own)
        return log_own.sum().mul_(-1 / count)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        queries, vectors, labels, *similarities, own_similarity, log_shares, log_own = ctx.saved_tensors
        problem: Problem = ctx.problem
        own_class: Exponent = ctx.own_class
        if torch.is_grad_enabled():
            gradients = plain.cross_entropy_gradients(queries, vectors, problem, own_class, ctx.count, grad)
            return *gradients, None, None, None, None
        factor = grad * (problem.negative.slope / ctx.count)
        slopes = log_shares.exp().mul_(factor)
        # The share of the query's class, less 1: exact also where the share is nearly 1.
        in_exponent = log_own.expm1()
        if own_similarity is not None:
            in_exponent.mul_(own_class.slope_at(own_similarity))
            factor = grad / ctx.count
        slopes.scatter_(1, labels[:, None], in_exponent.mul_(factor))
        gradients = _Similarities(*similarities).gradients(
            slopes, queries, problem, natural_unit(problem), ctx.needs_input_grad
        )
        return *gradients, None, None, None, None


def _times(values: Tensor, factor: float) -> Tensor:
    """`values * factor`; the values themselves if the factor is 1."""
    return values if factor == 1 else values * factor
