"""The chunked reductions against the plain ones: values and gradients in any type and shape; products and memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import proxymetric as pm
from proxymetric.core.normalisation import NORMALISATIONS, unit
from proxymetric.core.pair_weights import PairWeights, StepFunction
from proxymetric.core.pieces import References
from proxymetric.ops import IMPLS, NONE, Line, Similarity, chosen, mean_over_batch, over_classes, using
from proxymetric.papers import options
from sampled import examples

BUDGET = 2.0
"""root mean square error against float64 that chunked sums in float32 may have, as a multiple of that of plain sums"""
REDUCTIONS = ("mean_over_batch", "over_classes")


class RandomProblem:
    """Random queries and references, and a reduction of them to one number that depends on all results."""

    def __init__(self, seed: int, batch: int, classes: int, per_class: int, dim: int, **choice: Any) -> None:
        self.choice = choice
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        rows = classes * per_class
        self.x, self.p = unit(draw(batch, dim)), draw(rows, dim) * 10 ** (draw(rows, 1) / 2)
        self.labels = torch.randint(choice.get("present", classes), (batch,), generator=generator)
        of = torch.arange(classes).repeat_interleave(per_class)
        if choice.get("loose"):
            of = torch.randint(max(1, classes // 2), (rows,), generator=generator)
        same = torch.rand(batch, rows, generator=generator) < 0.2 if choice.get("same") else None
        per = None if choice.get("loose") else per_class
        self.refs = References(self.p, of, per, same, choice.get("normalise", "l2"))
        self.weight = None
        if choice.get("weighted"):
            edges = draw(classes, 2).div(5).sort(1).values
            rules = [StepFunction(edges + shift, draw(classes, 3).abs()) for shift in (0.0, 0.1)]
            self.weight = PairWeights(*rules)
        self.mix = draw(4, max(batch, rows))

    def compute(
        self, reduction: str, x: Tensor, p: Tensor, impl: str, rows: int | None = None, budget: int = 2**30
    ) -> list[Tensor]:
        choice = self.choice
        scale = choice.get("scale", 8.0)
        lines = Line(-scale, scale * 0.1), Line(scale, scale * 0.2)
        of_class = None if choice.get("kind") is None else Similarity(choice["kind"], 0.2)
        given = (x, self.labels, self.refs._replace(rows=p), *lines, of_class, self.weight)
        with using(impl, rows=rows, budget=budget):
            if reduction == "mean_over_batch":
                count = choice.get("counts", (None, None))
                return [*mean_over_batch(*given, positive_count=count[0], negative_count=count[1])]
            return [*over_classes(*given)]

    def results(
        self,
        reduction: str,
        impl: str,
        dtype: torch.dtype = torch.float64,
        given: torch.dtype | None = None,
        **how: Any,
    ) -> dict[str, Tensor]:
        """Results, and gradients of a sum of the finite ones, in float64; the inputs are first rounded to `given`."""
        x, p = (each.to(given or dtype).to(dtype, copy=True).requires_grad_() for each in (self.x, self.p))
        found = self.compute(reduction, x, p, impl, **how)
        parts = [part.where(part != NONE, 0.0) for part in found[:2]]
        mixed = [(part * mix[: part.numel()].view_as(part).to(part)).sum() for part, mix in zip(parts, self.mix)]
        torch.stack(mixed).sum().backward()
        names = ("positive", "negative", "positive weight", "negative weight")
        results = dict(zip(names, (each.detach() for each in found)))
        return {name: each.double() for name, each in (results | {"in queries": x.grad, "in rows": p.grad}).items()}


def close(got: dict[str, Tensor], wanted: dict[str, Tensor], problem: RandomProblem) -> None:
    """Check that results are equal except for rounding in float64 of exponents, and of slopes divided by lengths.

    An absolute error of an exponent is a relative error of its exponential.
    """
    assert got.keys() == wanted.keys()
    scale = 1 + problem.choice.get("scale", 8.0)
    share = 1e-12 + 4 * scale * torch.finfo(torch.float64).eps
    for name, each in wanted.items():
        way = scale / problem.p.norm(dim=1, keepdim=True).clamp(min=1e-12) if name == "in rows" else scale
        near = (got[name] - each).abs() <= share * (way + each.abs())
        assert bool((near | (got[name] == each)).all()), (name, got[name], each)


shapes = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**16),
        "batch": st.integers(1, 9),
        "classes": st.integers(1, 12),
        "per_class": st.integers(1, 4),
        "dim": st.integers(1, 5),
        "normalise": st.sampled_from([None, *NORMALISATIONS]),
        "scale": st.sampled_from([0.1, 8.0, 1e4]),
        "weighted": st.booleans(),
        "counts": st.sampled_from([(None, None), (3.0, 7.0), (None, 5.0)]),
    }
)


@settings(max_examples=examples(150), deadline=None)
@given(
    shapes, st.sampled_from(["soft", "max", "mean", None]), st.sampled_from(REDUCTIONS), st.integers(1, 20),
    st.booleans(),
)  # fmt: skip
def test_classes_are_the_plain_definition(shape, kind, reduction, rows, keep):
    problem = RandomProblem(**shape, kind=kind, present=max(1, shape["classes"] - 2))
    wanted = problem.results(reduction, "plain")
    close(problem.results(reduction, "chunked", rows=rows, budget=2**30 if keep else 0), wanted, problem)


@settings(max_examples=examples(100), deadline=None)
@given(shapes, st.booleans(), st.sampled_from(REDUCTIONS), st.integers(1, 20), st.booleans())
def test_loose_rows_are_the_plain_definition(shape, same, reduction, rows, keep):
    """Rows in any order of classes, with several rows or none of a class; and rows that are the query itself."""
    problem = RandomProblem(**shape, loose=True, same=same)
    wanted = problem.results(reduction, "plain")
    close(problem.results(reduction, "chunked", rows=rows, budget=2**30 if keep else 0), wanted, problem)


AWKWARD = [(1, 1, 1, 2), (7, 1, 1, 3), (1, 300, 1, 17), (33, 257, 1, 65), (130, 97, 3, 31), (5, 2, 10, 128)]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("scale", [1.0, 32.0, 1e4])
@pytest.mark.parametrize(("batch", "classes", "per_class", "dim"), AWKWARD)
def test_single_precision_is_as_exact_as_plain(batch, classes, per_class, dim, scale, reduction):
    """The error against float64 is at most `BUDGET` times that of plain, over several draws of one shape."""
    squares: dict[str, dict[str, float]] = {"plain": {}, "chunked": {}}
    sizes: dict[str, float] = {}
    for seed in range(5):
        problem = RandomProblem(seed, batch, classes, per_class, dim, kind="soft", scale=scale)
        exact = problem.results(reduction, "plain", given=torch.float32)
        for impl, of in squares.items():
            got = problem.results(reduction, impl, torch.float32, rows=50)
            for name, each in exact.items():
                finite = each != NONE
                assert torch.equal(got[name] != NONE, finite)
                of[name] = of.get(name, 0.0) + float((got[name] - each)[finite].square().sum())
                sizes[name] = sizes.get(name, 0.0) + float(each[finite].square().sum())
    for name, size in sizes.items():
        # Two roundings of the result itself are free: plain has few of them at these sizes.
        allowed = BUDGET * squares["plain"][name] ** 0.5 + 2**-22 * size**0.5
        assert squares["chunked"][name] ** 0.5 <= allowed, (name, squares, size)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("impl", ["plain", "chunked"])
def test_half_precision_is_summed_in_single(impl, reduction, dtype):
    """Sums are as exact as in float32, gradients as exact as their type allows."""
    problem = RandomProblem(0, 33, 257, 2, 65, kind="soft", scale=32.0)
    wanted = problem.results(reduction, "plain", given=dtype)
    x, p = (each.to(dtype).requires_grad_() for each in (problem.x, problem.p))
    found = problem.compute(reduction, x, p, impl, rows=50)
    assert {each.dtype for each in found} == {torch.float32}
    got = problem.results(reduction, impl, dtype, rows=50)
    for name, each in wanted.items():
        if each.ndim == 2:
            limits = torch.finfo(dtype)
            allowed = limits.eps * (each.abs().amax(1, keepdim=True) + limits.smallest_normal)
        else:
            allowed = 1e-6 * (32 + each.abs())
        near = (got[name] - each).abs() <= allowed
        assert bool((near | (each == NONE)).all()), name


def test_small_gradients_of_half_precision_wait_for_the_loss_scale():
    """They stay in float32 between the forward and the backward pass: float16 rounds numbers below 6e-8 to 0."""
    problem = RandomProblem(0, 4, 3, 1, 8, scale=1.0, counts=(1e6, 1e6))
    x, p = problem.x.half(), problem.p.half().requires_grad_()
    parts = problem.compute("mean_over_batch", x, p, "chunked")
    (2.0**20 * torch.stack(parts).sum()).backward()
    exact = problem.p.half().double().requires_grad_()
    (2.0**20 * torch.stack(problem.compute("mean_over_batch", x.double(), exact, "plain")).sum()).backward()
    torch.testing.assert_close(p.grad.double(), exact.grad, rtol=2e-3, atol=0)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("length", [0.0, 1.0])
@pytest.mark.parametrize("normalise", NORMALISATIONS)
def test_rows_at_the_edge_of_their_normalisation(normalise, length, reduction):
    problem = RandomProblem(0, 5, 4, 1, 2, normalise=normalise)
    problem.p[1], problem.p[2] = torch.tensor([length, 0.0]), torch.tensor([0.0, -length])
    close(problem.results(reduction, "chunked", rows=3), problem.results(reduction, "plain"), problem)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("which", ["queries", "rows", "neither"])
def test_only_what_wants_a_gradient_gets_one(which, reduction):
    problem = RandomProblem(0, 5, 7, 2, 3, kind="soft")
    wanted = problem.results(reduction, "plain")
    x, p = problem.x.clone().requires_grad_(which == "queries"), problem.p.clone().requires_grad_(which == "rows")
    found = problem.compute(reduction, x, p, "chunked", rows=4)
    parts = [part.where(part != NONE, 0.0) for part in found[:2]]
    total = sum((part * mix[: part.numel()].view_as(part)).sum() for part, mix in zip(parts, problem.mix))
    assert total.requires_grad == (which != "neither")
    if which == "neither":
        return
    with Products() as seen:
        total.backward()
    assert seen.largest <= 2 * max(problem.x.numel(), problem.p.numel())
    leaf, other, name = (x, p, "in queries") if which == "queries" else (p, x, "in rows")
    assert other.grad is None
    torch.testing.assert_close(leaf.grad, wanted[name])
    with torch.no_grad():
        assert not any(each.requires_grad for each in problem.compute(reduction, x, p, "chunked", rows=4))


def uses_twice_and_goes_back_again(
    problem: RandomProblem, impl: str, reduction: str, budget: int, kind: torch.dtype
) -> None:
    """Gradients of a result that is used twice, and of repeated backward passes, equal those of plain."""
    grads = []
    for each in ("plain", impl):
        x, p = (given.to(kind, copy=True).requires_grad_() for given in (problem.x, problem.p))
        up, down, *_ = problem.compute(reduction, x, p, each, rows=4, budget=budget)
        up, down = up.where(up != NONE, 0.0).sum(), down.where(down != NONE, 0.0).sum()
        total = up * up + 0.5 * down + torch.sin(down)
        total.backward(retain_graph=True)
        first = p.grad.clone()
        (3 * down).backward(retain_graph=True)  # another incoming gradient
        total.backward()
        grads += [(first, x.grad, p.grad)]
        with pytest.raises(RuntimeError, match="second time"):
            total.backward()
    near = {} if kind == torch.float64 else {"rtol": 1e-4, "atol": 1e-4}
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, **near)


def refuses_a_second_derivative(problem: RandomProblem, impl: str, reduction: str, kind: torch.dtype) -> None:
    x = problem.x.to(kind, copy=True).requires_grad_()
    total = problem.compute(reduction, x, problem.p.to(kind), impl)[1].sum()
    with pytest.raises(RuntimeError, match=r"create_graph: got True, expected False.*using\('plain'\)"):
        torch.autograd.grad(total, x, create_graph=True)


def notices_changed_rows(problem: RandomProblem, impl: str, reduction: str, kind: torch.dtype) -> None:
    x, p = (given.to(kind, copy=True).requires_grad_() for given in (problem.x, problem.p))
    total = problem.compute(reduction, x, p, impl)[1].sum()
    with torch.no_grad():
        p.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("budget", [0, 2**30])
def test_a_result_may_be_used_twice_and_gone_back_through_again(reduction, budget):
    uses_twice_and_goes_back_again(
        RandomProblem(0, 5, 7, 2, 3, kind="soft"), "chunked", reduction, budget, torch.float64
    )


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_second_derivative_is_refused(reduction):
    refuses_a_second_derivative(RandomProblem(0, 5, 7, 2, 3, kind="soft"), "chunked", reduction, torch.float64)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_rows_changed_before_the_backward_pass_are_noticed(reduction):
    notices_changed_rows(RandomProblem(0, 5, 7, 1, 3), "chunked", reduction, torch.float64)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("impl", ["plain", "chunked"])
def test_autocast_does_not_lower_the_sums(impl, reduction):
    problem = RandomProblem(0, 9, 30, 1, 33, scale=32.0)
    x, p = problem.x.float(), problem.p.float()
    wanted = problem.compute(reduction, x, p, impl)
    with torch.autocast("cpu", torch.bfloat16):
        got = problem.compute(reduction, x, p, impl)
    for one, other in zip(got, wanted):
        assert torch.equal(one, other)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_an_empty_batch_and_no_references_are_plain(reduction):
    for batch, classes in ((0, 3), (3, 0)):
        problem = RandomProblem(0, max(batch, 1), max(classes, 1), 1, 2)
        problem.labels = problem.labels[:batch]
        problem.refs = problem.refs._replace(labels=problem.refs.labels[:classes])
        found = problem.compute(reduction, problem.x[:batch], problem.p[:classes], "chunked")
        for one, other in zip(found, problem.compute(reduction, problem.x[:batch], problem.p[:classes], "plain")):
            assert torch.equal(one, other)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_labels_of_any_whole_type_mean_the_same(reduction):
    problem = RandomProblem(0, 5, 7, 1, 3)
    wanted = problem.results(reduction, "chunked", rows=2)
    problem.labels = problem.labels.to(torch.int16)
    assert all(torch.equal(each, wanted[name]) for name, each in problem.results(reduction, "chunked", rows=2).items())


# What it costs


class Products(TorchDispatchMode):
    """Counts matrix products, and records the sizes of new tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.sizes = 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.count += func.overloadpacket.__name__ in ("mm", "addmm", "addmm_", "bmm", "matmul")
        outputs = [each for each in (out if isinstance(out, tuple | list) else [out]) if isinstance(each, Tensor)]
        # Views and tensors written into existing memory are not new.
        held = {each.untyped_storage().data_ptr() for each in args if isinstance(each, Tensor)}
        self.sizes += [each.numel() for each in outputs if each.untyped_storage().data_ptr() not in held]
        return out

    @property
    def largest(self) -> int:
        return max(self.sizes, default=0)


LARGE = {"batch": 16, "classes": 640, "per_class": 1, "dim": 4}
"""ten chunks of 64 rows"""


def costs(reduction: str, budget: int, **choice: Any) -> tuple[Products, Products]:
    problem = RandomProblem(0, **LARGE, present=1, **choice)  # one chunk has positives
    x, p = problem.x.clone().requires_grad_(), problem.p.clone().requires_grad_()
    with Products() as forward:
        parts = problem.compute(reduction, x, p, "chunked", rows=64, budget=budget)
    total = parts[0].where(parts[0] != NONE, 0.0).sum() + parts[1].sum()
    with Products() as backward:
        total.backward()
    return forward, backward


def test_over_the_batch_the_gradient_is_made_in_the_forward_pass():
    forward, backward = costs("mean_over_batch", 0)
    assert (forward.count, backward.count) == (10 * 3 + 2, 0)


def test_a_budget_decides_what_is_computed_again():
    need = LARGE["batch"] * LARGE["classes"] * 8
    for budget, products in ((need, (10, 20)), (need - 1, (10, 30)), (0, (10, 30))):
        forward, backward = costs("over_classes", budget)
        assert (forward.count, backward.count) == products


@pytest.mark.parametrize("normalise", [None, *NORMALISATIONS])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_nothing_is_made_of_the_size_of_all_pairs_but_the_gradient(reduction, normalise):
    """LARGE has more pairs than numbers in its rows; only the gradient is as large as the rows."""
    rows, pairs = LARGE["classes"] * LARGE["dim"], LARGE["classes"] * LARGE["batch"]
    forward, backward = costs(reduction, 0, normalise=normalise)
    sizes = forward.sizes + backward.sizes
    assert max(sizes) == rows < pairs
    assert sizes.count(rows) == 1
    plain = RandomProblem(0, **LARGE, normalise="l2")
    with Products() as seen:
        plain.compute(reduction, plain.x, plain.p, "plain")
    assert seen.largest == pairs, "such a tensor would be seen"


def test_a_loss_that_nobody_goes_back_through_leaves_nothing():
    """The gradient that was computed early is freed with the result, without the garbage collector."""
    problem = RandomProblem(0, **LARGE, counts=(1.0, 1.0))
    gc.disable()
    try:
        positive, negative = problem.compute(
            "mean_over_batch", problem.x, problem.p.clone().requires_grad_(), "chunked"
        )
        ahead = weakref.ref(negative.grad_fn.gradients.in_vectors)
        assert ahead() is not None
        del positive, negative
        assert ahead() is None
    finally:
        gc.enable()


PROXIES = [
    name
    for name in pm.methods()
    if {"scale", "temperature"} & options(name).keys()
    and pm.method(name, classes=4, dim=2).objective.classes is not None
]


def criterion(name: str, tau: float = 0.2) -> pm.Criterion:
    torch.manual_seed(0)
    more: dict[str, Any] = {"source": "encoder"} if "class_prompts" in options(name) else {}
    more |= {"newton_steps": 0, "sample": False} if "newton_steps" in options(name) else {}
    more |= {"tau": tau} if "per_class" in options(name) and "similarity" in options(name) else {}
    method = pm.method(name, classes=LARGE["classes"] // 2, dim=LARGE["dim"], **more).bind(torch.nn.Identity())
    method.epoch(5)  # weightings are on
    return method.double()


@pytest.mark.parametrize("budget", [0, 2**30])
@pytest.mark.parametrize("name", PROXIES)
def test_every_proxy_method_gives_the_same_in_chunks(name, budget):
    all_results = []
    for impl in ("plain", "chunked"):
        method = criterion(name)
        x = torch.randn(LARGE["batch"], LARGE["dim"], dtype=torch.float64).requires_grad_()
        y = torch.randint(LARGE["classes"] // 2, (LARGE["batch"],))
        with using(impl, rows=37, budget=budget):
            loss = method(x, y, images=x)
            loss.backward()
        grads = [p.grad for p in method.parameters() if p.grad is not None]
        assert grads
        all_results.append([loss.detach(), x.grad, *grads])
    for one, other in zip(*all_results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", PROXIES)
def test_every_proxy_method_goes_through_the_reductions(name):
    """No method makes a matrix of all pairs. The regulariser is left out: it compares all proxies at once."""
    method = criterion(name, tau=0.0)
    x = torch.randn(LARGE["batch"] * 4, LARGE["dim"], dtype=torch.float64).requires_grad_()
    y = torch.randint(LARGE["classes"] // 2, (LARGE["batch"] * 4,))
    rows = sum(p.shape[0] for p in method.parameters() if p.ndim == 2 and p.shape[1] == LARGE["dim"])
    with using("chunked", rows=64, budget=0), Products() as seen:
        method(x, y, images=x).backward()
    assert seen.largest < len(x) * min(rows, LARGE["classes"] // 2)


# The setting


def test_names_come_from_one_table():
    assert list(IMPLS) == ["plain", "dense", "chunked", "triton"]
    said = "impl: got 'chunky', expected one of plain, dense, chunked, triton, auto"
    with pytest.raises(ValueError, match=said), using("chunky"):
        pass


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"budget": -1}, "budget: got -1, expected a whole number of at least 0"),
        ({"budget": 1.5}, "budget: got 1.5"),
        ({"rows": 0}, "rows: got 0, expected a whole number of at least 1"),
    ],
)
def test_numbers_that_cannot_be_meant_are_refused(wrong, said):
    with pytest.raises(ValueError, match=said), using(**wrong):
        pass


def test_settings_nest_and_end_where_they_began():
    few, many = (References(torch.zeros(n, 2), torch.arange(n)) for n in (10, 10_000))
    x = torch.zeros(16, 2)
    assert (chosen(x, few), chosen(x, many)) == ("plain", "chunked")
    with using("chunked", budget=7) as outer:
        with using(rows=3) as inner:
            assert (inner.impl, inner.budget, inner.rows) == ("chunked", 7, 3)
        with pytest.raises(ZeroDivisionError), using("plain", rows=3):
            1 / 0  # noqa: B018
        assert chosen(x, few) == "chunked"
        assert outer.rows is None
        with using("auto") as back:
            assert back.budget == 7
            assert chosen(x, few) == "plain"
    assert chosen(x, few) == "plain"


def test_auto_computes_large_ones_in_chunks():
    """The implementation that the setting names is the one that runs: its products of the forward pass are counted."""

    @contextmanager
    def default() -> Iterator[None]:
        yield

    problem = RandomProblem(0, 64, 1100, 1, 4)
    x, p = problem.x.clone().requires_grad_(), problem.p.clone().requires_grad_()
    for how, products in ((default(), 5), (using("plain"), 1)):
        line = Line(1.0)
        with how, Products() as seen:
            mean_over_batch(x, problem.labels, problem.refs._replace(rows=p), line, line)
        assert seen.count == products
