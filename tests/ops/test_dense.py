"""The dense reductions against the plain ones: values, gradients and second derivatives, in any type and shape."""

from __future__ import annotations

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
from proxymetric.core.pieces import NearestRows, References
from proxymetric.core.similarity import KINDS
from proxymetric.ops import Arc, Line, Similarity, chosen, cross_entropy, dense, mean_over_batch, over_classes, using
from proxymetric.ops.problem import Problem
from proxymetric.ops.reductions import MAX_DENSE_PAIRS

REDUCTIONS = ("mean_over_batch", "over_classes", "cross_entropy", "arc")
shapes = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 99),
        "batch": st.integers(1, 9),
        "classes": st.integers(1, 7),
        "per_class": st.integers(1, 3),
        "dim": st.integers(1, 6),
    }
)


def problem(
    seed: int, batch: int, classes: int, per_class: int, dim: int, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, References]:
    generator = torch.Generator().manual_seed(seed)
    x = unit(torch.randn(batch, dim, generator=generator, dtype=torch.float64)).to(dtype)
    p = torch.randn(classes * per_class, dim, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(classes, (batch,), generator=generator)
    of = torch.arange(classes).repeat_interleave(per_class)
    return x, labels, References(p, of, per_class, normalise="l2", all_classes=True)


def computed(
    reduction: str, impl: str, x: Tensor, labels: Tensor, refs: References, kind: str = "soft", **choice: Any
) -> list[Tensor]:
    scale = choice.get("scale", 8.0)
    of_class = Similarity(kind, 0.2)
    given = x, labels, refs
    with using(impl):
        if reduction == "mean_over_batch":
            count = choice.get("counts", (None, None))
            lines = Line(-scale, 0.1 * scale), Line(scale, 0.2 * scale)
            return [*mean_over_batch(*given, *lines, of_class, positive_count=count[0], negative_count=count[1])]
        if reduction == "over_classes":
            return [*over_classes(*given, Line(-scale, 0.5), Line(scale, 0.2), of_class)][:2]
        own = Arc(scale, 0.5) if reduction == "arc" else Line(scale, choice.get("offset", -0.3))
        of_sum = choice.get("over_queries", "mean")
        return [cross_entropy(*given, own, Line(scale, choice.get("others", 0.0)), of_class, reduction=of_sum)]


def gradients(reduction: str, impl: str, x: Tensor, labels: Tensor, refs: References, **choice: Any) -> list[Tensor]:
    """The results, and the gradients of a sum of the finite ones."""
    x, p = x.clone().requires_grad_(), refs.rows.clone().requires_grad_()
    found = computed(reduction, impl, x, labels, refs._replace(rows=p), **choice)
    mix = torch.randn(len(found), generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(x)
    total = sum((part.where(part.isfinite(), 0.0) * m).sum() for part, m in zip(found, mix, strict=True))
    assert isinstance(total, Tensor)
    total.backward()
    assert x.grad is not None
    assert p.grad is not None
    return [*(part.detach() for part in found), x.grad, p.grad]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("normalise", NORMALISATIONS)
@settings(max_examples=40, deadline=None)
@given(shape=shapes, kind=st.sampled_from(KINDS), data=st.data())
def test_it_is_the_plain_definition(
    reduction: str, normalise: str, shape: dict[str, int], kind: str, data: Any
) -> None:
    if reduction == "arc":
        shape |= {"per_class": 1}
    x, labels, refs = problem(**shape)
    refs = refs._replace(normalise=normalise)
    choice = {
        "counts": data.draw(st.sampled_from([(None, None), (4.0, 3.0), (None, 5.0)])),
        "scale": data.draw(st.sampled_from([1.0, 8.0, 32.0])),
        "offset": data.draw(st.sampled_from([0.0, -0.3])),
        "others": data.draw(st.sampled_from([0.0, 0.4])),
        "over_queries": data.draw(st.sampled_from(["mean", "sum"])),
    }
    got = gradients(reduction, "dense", x, labels, refs, kind=kind, **choice)
    wanted = gradients(reduction, "plain", x, labels, refs, kind=kind, **choice)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("scale", [1.0, 32.0, 64.0])
@pytest.mark.parametrize("shape", [(1, 2, 1, 2), (33, 257, 1, 65), (130, 97, 3, 31), (128, 100, 1, 512)])
def test_single_precision_is_as_exact_as_plain(reduction: str, scale: float, shape: tuple[int, ...]) -> None:
    if reduction == "arc" and shape[2] > 1:
        shape = (*shape[:2], 1, shape[3])
    x, labels, refs = problem(0, *shape, dtype=torch.float32)
    exact = gradients(reduction, "plain", x.double(), labels, refs._replace(rows=refs.rows.double()), scale=scale)
    errors = {}
    for impl in ("plain", "dense"):
        got = gradients(reduction, impl, x, labels, refs, scale=scale)
        errors[impl] = [float((g.double() - e).square().mean().sqrt()) for g, e in zip(got, exact, strict=True)]
    sizes = [float(e.square().mean().sqrt()) for e in exact]
    for plainly, densely, size in zip(errors["plain"], errors["dense"], sizes, strict=True):
        assert densely <= 2 * plainly + 2**-22 * size, (errors, sizes)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_it_has_a_second_derivative(reduction: str) -> None:
    x, labels, refs = problem(1, 5, 4, 1 if reduction == "arc" else 2, 3)

    def second(impl: str) -> list[Tensor]:
        given = x.clone().requires_grad_(), refs.rows.clone().requires_grad_()
        found = computed(reduction, impl, given[0], labels, refs._replace(rows=given[1]))
        first = torch.autograd.grad(sum(part.square().sum() for part in found), given, create_graph=True)  # type: ignore
        return list(torch.autograd.grad(sum(part.square().sum() for part in first), given))  # type: ignore

    for one, other in zip(second("dense"), second("plain"), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("wanted", ["queries", "rows"])
def test_only_what_wants_a_gradient_gets_one(reduction: str, wanted: str) -> None:
    x, labels, refs = problem(2, 6, 5, 1, 4)
    leaf = (x if wanted == "queries" else refs.rows).clone().requires_grad_()
    parts = {}
    for impl in ("dense", "plain"):
        leaf.grad = None
        given = (leaf, labels, refs) if wanted == "queries" else (x, labels, refs._replace(rows=leaf))
        sum(part.sum() for part in computed(reduction, impl, *given)).backward()  # type: ignore[union-attr]
        parts[impl] = leaf.grad
    torch.testing.assert_close(parts["dense"], parts["plain"])


def test_one_result_without_a_gradient() -> None:
    """Only one of two results enters the loss."""
    x, labels, refs = problem(3, 6, 5, 2, 4)
    for which in range(2):
        for reduction in ("mean_over_batch", "over_classes"):
            grads = []
            for impl in ("dense", "plain"):
                p = refs.rows.clone().requires_grad_()
                computed(reduction, impl, x, labels, refs._replace(rows=p))[which].sum().backward()
                grads.append(p.grad)
            torch.testing.assert_close(*grads)


def test_where_it_does_not_apply_it_is_plain() -> None:
    x, labels, refs = problem(4, 6, 5, 2, 4)
    rule = StepFunction(torch.zeros(5, 2, dtype=torch.float64), torch.rand(5, 3, dtype=torch.float64))
    lines = Line(-40.0, 40.0), Line(40.0, 40.0)  # exponentials that overflow in float32
    cases: list[tuple[References, tuple[Any, ...], PairWeights | None]] = [
        (refs, (Line(-4.0), Line(4.0), Similarity()), PairWeights(rule, rule)),
        (refs, (Line(-4.0), Line(4.0)), None),  # each of the K rows is a column
        (refs._replace(all_classes=False, labels=refs.labels.flip(0)), (Line(-4.0), Line(4.0), Similarity()), None),
        (refs, (*lines, Similarity()), None),
    ]
    for case, parts, weight in cases:
        results = []
        for impl in ("dense", "plain"):
            with using(impl):
                results.append(mean_over_batch(x, labels, case, *parts, weight=weight))
                results.append(over_classes(x, labels, case, *parts, weight=weight)[:2])
        for one, other in zip(results[:2], results[2:], strict=True):
            for got, wanted in zip(one, other, strict=True):
                torch.testing.assert_close(got, wanted, equal_nan=True)


def test_it_is_chosen_where_it_applies() -> None:
    x, labels, refs = problem(0, 16, 10, 1, 4, torch.float32)

    def fits(given: References, queries: Tensor = x, **parts: Any) -> bool:
        return dense.fits(queries, Problem(labels, given, Line(1.0), Line(1.0), **parts))

    assert fits(refs)
    assert chosen(x, refs, dense_fits=True) == "dense"
    assert chosen(x, refs) == "plain"
    assert not fits(refs._replace(all_classes=False))
    assert not fits(refs._replace(normalise=None))
    assert not fits(refs._replace(rows=refs.rows.bfloat16()))
    assert not fits(refs, x.bfloat16())
    assert fits(refs._replace(per_class=2), of_class=Similarity())
    assert not fits(refs._replace(per_class=2))
    with using("chunked"):
        assert chosen(x, refs, dense_fits=True) == "chunked"
    many = refs._replace(labels=torch.arange(MAX_DENSE_PAIRS["cpu"] // len(x) + 1))
    assert chosen(x, many, dense_fits=True) == "chunked"


METHODS = ["proxy-anchor", "proxy-nca++", "cosface", "arcface", "subcentre-arcface", "soft-triple", "mpa", "mpa-ap"]


@pytest.mark.parametrize("name", METHODS)
def test_methods_use_it_and_give_the_same(name: str) -> None:
    """A criterion with learned proxies takes this path, and its loss and gradients are those of the plain one."""
    torch.manual_seed(0)
    criterion = pm.method(name, classes=12, dim=8).double()
    x, labels = torch.randn(20, 8, dtype=torch.float64), torch.randint(12, (20,))
    found = []
    for impl in ("auto", "plain"):
        criterion.zero_grad()
        given = x.clone().requires_grad_()
        with using(impl):
            loss = criterion(given, labels)
        names = function_names(loss)
        assert any(each.startswith(("_MeanOverBatch", "_OverClasses", "_CrossEntropy")) for each in names) == (
            impl == "auto"
        )
        loss.backward()
        found.append([loss.detach(), given.grad, *(p.grad for p in criterion.parameters())])
        criterion.discard()
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


def function_names(tensor: Tensor) -> set[str]:
    """The names of the functions that a tensor was computed by."""
    names, todo = set(), [tensor.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None:
            names.add(node.name())
            todo += [function for function, _ in node.next_functions]
    return names


@pytest.mark.parametrize("kind", KINDS)
def test_the_nearest_row_of_the_class_is_a_by_product(kind: str) -> None:
    x, labels, refs = problem(5, 40, 6, 3, 4)
    by_product = NearestRows()
    computed("cross_entropy", "dense", x, labels, refs._replace(nearest=by_product), kind=kind)
    similarity = (x @ unit(refs.rows).T).masked_fill(labels[:, None] != refs.labels, -2)
    assert by_product.rows is not None
    assert torch.equal(by_product.rows, similarity.argmax(1))


class Operators(TorchDispatchMode):
    """Counts the operators that compute something."""

    VIEWS = ("view", "detach", "expand", "aten.t.", "transpose", "unsqueeze", "select", "slice", "squeeze", "permute")

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not any(view in str(function) for view in self.VIEWS)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", METHODS)
def test_it_needs_fewer_operators(name: str) -> None:
    """The time of a small loss is the number of its operators."""
    criterion = pm.method(name, classes=12, dim=8)
    x, labels = torch.randn(20, 8, requires_grad=True), torch.randint(12, (20,))
    counts = {}
    for impl in ("dense", "plain"):
        with using(impl), Operators() as seen:
            criterion(x, labels).backward()
        criterion.discard()
        counts[impl] = seen.count
    assert counts["dense"] <= counts["plain"] - 15, counts


def test_the_slope_of_the_arc_is_that_of_autograd() -> None:
    exponent = Arc(64.0, 0.5)
    s = torch.linspace(-1, 1, 401, dtype=torch.float64).requires_grad_()
    (wanted,) = torch.autograd.grad(exponent(s).sum(), s)
    torch.testing.assert_close(exponent.slope_at(s.detach()), wanted)
