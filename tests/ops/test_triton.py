"""The reductions with Triton's kernels against the plain ones: on a GPU where there is one, else in the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
pytest.importorskip("triton")

from ops.test_chunked import (
    BUDGET,
    RandomProblem,
    notices_changed_rows,
    refuses_a_second_derivative,
    uses_twice_and_goes_back_again,
)
from proxymetric.core.class_shards import Shard
from proxymetric.core.normalisation import NORMALISATIONS
from proxymetric.core.pair_weights import PairWeights, StepFunction
from proxymetric.core.pieces import References
from proxymetric.ops import IMPLS, NONE, Line, Similarity, chosen, mean_over_batch, reductions, using
from proxymetric.ops import problem as problem_module
from proxymetric.ops.triton import batch_classes, chunk_pass, half_width, kernels, launch, memory, totals
from proxymetric.ops.triton import reductions as triton_reductions

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NARROW = {torch.float16: 4.0, torch.bfloat16: 4.0 if DEVICE == "cuda" else 8.0}
"""root mean square error that gradients of narrow types may have, as a multiple of that of plain gradients: shares and
rows are rounded, not only the result, and the interpreter truncates bfloat16"""
REDUCTIONS = ("mean_over_batch", "over_classes")
DRAWS = 16 if DEVICE == "cuda" else 4
"""random draws of a problem: the errors of a few small problems depend on chance"""
MANY = 4 * DRAWS
"""random draws for a scale so large that all errors come from the few pairs that are close"""
AWKWARD = [(1, 1, 1, 2), (7, 1, 1, 3), (1, 40, 1, 17), (33, 41, 1, 65), (7, 5, 3, 31), (3, 2, 10, 128)]
"""batch, classes, per class, dim"""


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs programs one after the other, and three parallel sums test the same as hundreds."""
    monkeypatch.setattr(chunk_pass, "MAX_RUNNING_SUMS", 3 * 32)


class ProblemOnDevice(RandomProblem):
    """A problem whose tensors lie on the device."""

    def __init__(self, *args: Any, **choice: Any) -> None:
        super().__init__(*args, **choice)
        self.x, self.p, self.labels, self.mix = (each.to(DEVICE) for each in (self.x, self.p, self.labels, self.mix))
        same = None if self.refs.same is None else self.refs.same.to(DEVICE)
        self.refs = self.refs._replace(rows=self.p, labels=self.refs.labels.to(DEVICE), same=same)
        if self.weight is not None:
            # In float32: weights in float64 would make the exponents of plain float64, too.
            self.weight = PairWeights(
                *(StepFunction(*(each.to(DEVICE).float() for each in rule)) for rule in self.weight[:2])
            )


class Errors:
    """Squared errors of several results against float64, summed by name."""

    def __init__(self) -> None:
        self.of: dict[str, dict[str, float]] = {}
        self.sizes: dict[str, float] = {}

    def take(self, impl: str, got: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
        mine = self.of.setdefault(impl, {})
        for name, each in exact.items():
            finite = each != NONE
            assert torch.equal(got[name] != NONE, finite), (impl, name)
            mine[name] = mine.get(name, 0.0) + float((got[name] - each)[finite].square().sum())
            if impl == "triton":
                self.sizes[name] = self.sizes.get(name, 0.0) + float(each[finite].square().sum())

    def check(self, eps: float = 2**-23, gradients: float = BUDGET) -> None:
        """Check the errors; one rounding of the result itself is allowed."""
        for name, size in self.sizes.items():
            times, free = (gradients, eps) if name.startswith("in ") else (BUDGET, 2**-23)
            plain, ours = (self.of[impl][name] ** 0.5 for impl in ("plain", "triton"))
            assert ours <= times * plain + free * size**0.5, (name, f"plain {plain:.3g}, of {size**0.5:.3g}")


def compare(
    reduction: str, *shape: int, draws: int = DRAWS, rows: int = 24, budget: int = 2**30, **choice: Any
) -> None:
    """Check that errors against float64 are within the budget, over several draws of one shape in float32."""
    errors = Errors()
    for seed in range(draws):
        problem = ProblemOnDevice(seed, *shape, **choice)
        exact = problem.results(reduction, "plain", given=torch.float32)
        errors.take("plain", problem.results(reduction, "plain", torch.float32), exact)
        errors.take("triton", problem.results(reduction, "triton", torch.float32, rows=rows, budget=budget), exact)
    errors.check()


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("scale", [1.0, 1e3])
@pytest.mark.parametrize("shape", AWKWARD)
def test_single_precision_is_as_exact_as_plain(shape, scale, reduction):
    compare(reduction, *shape, kind="soft", scale=scale, draws=MANY if scale > 1 else DRAWS)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(
    ("normalise", "kind", "weighted"),
    [("l2", kind, weighted) for kind in ("soft", "max", "mean", None) for weighted in (False, True)]
    + [(normalise, kind, False) for normalise in (None, "ball") for kind in ("soft", None)],
)
def test_all_that_a_loss_may_ask_for(normalise, kind, weighted, reduction):
    """K rows that are one column or K columns, with rules of weights, and classes without a query."""
    choice = {"present": 4, "counts": (3.0, 7.0) if weighted else (None, None)}
    compare(reduction, 5, 6, 3, 7, kind=kind, normalise=normalise, weighted=weighted, rows=12, **choice)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(("per_class", "kind"), [(1, None), (3, "soft"), (3, "mean"), (10, "soft")])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_last_bit_of_a_large_exponent(weighted, per_class, kind, reduction):
    """Both passes round alike: otherwise a share of 1 would be off by a last bit times the scale."""
    compare(reduction, 7, 5, per_class, 31, kind=kind, scale=3e3, weighted=weighted, draws=MANY)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("per_class", [1, 3])
@pytest.mark.parametrize("present", [1, 6])
def test_a_batch_in_several_blocks(present, per_class, reduction, monkeypatch):
    """Programs that hold less than a batch read it in blocks; the batch has one class or all classes."""
    monkeypatch.setattr(chunk_pass, "MAX_NUMBERS_WHOLE_BATCH", 8)
    monkeypatch.setattr(chunk_pass, "NUMBERS_PER_TILE", 16 * per_class)
    kind = "soft" if per_class > 1 else None
    compare(reduction, 19, 6, per_class, 5, kind=kind, present=present, weighted=present > 1, draws=2, rows=24)


@pytest.mark.parametrize(("per_class", "kind"), [(1, None), (10, "soft"), (3, None)])
def test_many_queries_of_a_class_in_many_dimensions(per_class, kind):
    """More queries and dimensions than a program of one class holds at once; several columns add up in the queries."""
    compare("mean_over_batch", 40 if per_class < 10 else 9, 5, per_class, 300, kind=kind, draws=2, rows=1000)


@pytest.mark.parametrize("counts", [(None, None), (3.0, None)])
def test_sums_over_more_columns_than_a_program_goes_over(counts, monkeypatch):
    monkeypatch.setattr(totals, "MAX_COLUMNS_PER_PROGRAM", 16)
    monkeypatch.setattr(totals, "COLUMNS_PER_PART", 16)
    compare("mean_over_batch", 9, 50, 1, 5, weighted=True, counts=counts, draws=2, rows=16)


def test_means_may_be_changed_in_place():
    """A loss may add one mean to the other in place, however they were computed."""
    problem, grads = ProblemOnDevice(0, 5, 7, 1, 3), []
    for impl in ("plain", "triton"):
        x = problem.x.float().requires_grad_()
        refs = problem.refs._replace(rows=problem.p.float())
        with using(impl):
            positive, negative = mean_over_batch(x, problem.labels, refs, Line(-2.0), Line(2.0))
        positive += negative.mul_(2)
        positive.backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_batch_is_sorted_by_class(dtype):
    """More labels than one program sorts, most of them several times; every second element of a larger tensor."""
    labels = torch.randint(40, (300,), dtype=dtype, device=DEVICE)[::2]
    found = batch_classes.sort_batch(labels)
    wanted, order = labels.long().sort(stable=True)
    assert torch.equal(found.labels, wanted)
    assert torch.equal(found.order, order)
    assert torch.equal(found.labels32, labels.int())
    assert (found.columns == -1).all()


@pytest.mark.parametrize("budget", [0, 2**30])
def test_over_classes_kept_or_computed_again(budget):
    compare("over_classes", 11, 40, 1, 9, draws=3, rows=16, budget=budget, scale=32.0)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(33, 41, 1, 65), (7, 5, 3, 31), (70, 150, 1, 130)])
def test_narrow_types_are_multiplied_as_they_are_and_summed_in_single(shape, dtype, reduction):
    """Values are as exact as in float32: products of narrow numbers are exact. Gradients are within `NARROW`."""
    errors = Errors()
    for seed in range(3):
        problem = ProblemOnDevice(seed, *shape, kind="soft", scale=32.0)
        exact = problem.results(reduction, "plain", given=dtype)
        errors.take("plain", problem.results(reduction, "plain", dtype), exact)
        got = problem.results(reduction, "triton", dtype, rows=24 if len(problem.p) < 100 else 140)
        errors.take("triton", got, exact)
    errors.check(torch.finfo(dtype).eps / 4, NARROW[dtype])
    x, p = (each.to(dtype).requires_grad_() for each in (problem.x, problem.p))
    found = problem.compute(reduction, x, p, "triton")
    assert {each.dtype for each in found} == {torch.float32}


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("fused_batch", [0, 1024])
@pytest.mark.parametrize(("shape", "kind"), [((33, 41, 1, 65), None), ((7, 5, 3, 31), "soft")])
def test_half_width_similarities(shape, kind, fused_batch, reduction, monkeypatch):
    """Gradients are as exact as with similarities in float32; values are off by no more than their rounding allows."""
    monkeypatch.setattr(chunk_pass, "MAX_FUSED_BATCH", fused_batch)
    errors, scale = Errors(), 32.0
    for seed in range(3):
        problem = ProblemOnDevice(seed, *shape, kind=kind, scale=scale)
        exact = problem.results(reduction, "plain", given=torch.bfloat16)
        monkeypatch.setattr(half_width, "MIN_HALF_PAIRS", 2**60)
        errors.take("plain", problem.results(reduction, "triton", torch.bfloat16, rows=24), exact)
        monkeypatch.setattr(half_width, "MIN_HALF_PAIRS", 0)
        kept, computed_again = (
            problem.results(reduction, "triton", torch.bfloat16, rows=24, budget=budget) for budget in (2**30, 0)
        )
        errors.take("triton", kept, exact)
        assert all(torch.equal(each, computed_again[name]) for name, each in kept.items())
    for name, size in errors.sizes.items():
        full, half = (errors.of[side][name] ** 0.5 for side in ("plain", "triton"))
        # A similarity is off by 2^-12 of itself, once more for its row, and an exponent by the scale times that.
        allowed = 1.25 * full + 2**-10 * size if name.startswith("in ") else scale * 2**-11 * size**0.5
        assert half <= allowed, (name, f"with float32 {full:.3g}, half {half:.3g}, of {size**0.5:.3g}")
    assert reduction != "over_classes" or errors.of["triton"]["negative"] > errors.of["plain"]["negative"]


def test_half_width_is_for_many_pairs_of_normalised_rows_and_moderate_scales(monkeypatch):
    def fits(dtype: torch.dtype = torch.bfloat16, scale: float = 32.0, kind: str | None = None, **choice: Any) -> bool:
        given = ProblemOnDevice(0, 5, 7, 2, 3, **choice)
        of_class, lines = None if kind is None else Similarity(kind), (Line(-scale), Line(scale))
        reduced = problem_module.Problem(given.labels, given.refs, *lines, of_class, given.weight)
        return half_width.fits_half(given.x.to(dtype), given.p.to(dtype), reduced)

    assert not fits()
    monkeypatch.setattr(half_width, "MIN_HALF_PAIRS", 5 * 7 * 2)
    assert fits()
    assert fits(kind="soft")
    for choice in ({"dtype": torch.float16}, {"dtype": torch.float32}, {"normalise": None}, {"kind": "max"}):
        assert not fits(**choice)
    assert not fits(weighted=True)
    assert not fits(scale=65.0)


def test_the_budget_is_a_share_of_the_free_memory():
    """Without a GPU it is a constant; a little is kept without asking."""
    assert memory.default_budget(torch.device("cpu"), 1) == memory.ALWAYS_KEPT
    assert memory.default_budget(torch.device("cpu"), memory.ALWAYS_KEPT + 1) == problem_module.DEFAULT_BUDGET


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
def test_the_budget_follows_what_is_allocated(monkeypatch):
    monkeypatch.setattr(memory, "SECONDS", -1.0)  # no answer is old enough to be used again
    device, size = torch.device("cuda", torch.cuda.current_device()), memory.ALWAYS_KEPT + 1
    before = memory.default_budget(device, size)
    assert before <= memory.SHARE * torch.cuda.mem_get_info(device)[1]
    held = torch.empty(2**28, dtype=torch.uint8, device=device)
    assert before - memory.default_budget(device, size) == pytest.approx(memory.SHARE * len(held), rel=0.5)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("types", [(torch.bfloat16, torch.float32), (torch.float32, torch.float16)])
def test_mixed_types_are_multiplied_in_the_wider(types, reduction):
    problem = ProblemOnDevice(0, 9, 30, 1, 17)
    all_results = []
    for wide in (False, True):
        x, p = (each.to(kind) for each, kind in zip((problem.x, problem.p), types, strict=True))
        x, p = ((each.float() if wide else each).detach().requires_grad_() for each in (x, p))
        found = problem.compute(reduction, x, p, "triton", rows=8)
        torch.stack([each.where(each != NONE, 0.0).sum() for each in found[:2]]).sum().backward()
        all_results.append((found, x.grad, p.grad))
    (narrow, *grads), (wide_ones, *wide_grads) = all_results
    for one, other in zip(narrow, wide_ones, strict=True):
        torch.testing.assert_close(one, other)
    for kind, one, other in zip(types, grads, wide_grads, strict=True):
        assert one.dtype == kind
        # Rounded twice to its type: with the pairs of other classes, and after the pairs of its own class are added.
        near = 2 * torch.finfo(kind).eps * float(other.abs().max())
        torch.testing.assert_close(one, other.to(kind), rtol=0, atol=near)


def test_small_gradients_of_half_precision_wait_for_the_loss_scale():
    problem = ProblemOnDevice(0, 4, 3, 1, 8, scale=1.0, counts=(1e6, 1e6))
    x, p = problem.x.half().requires_grad_(), problem.p.half().requires_grad_()
    parts = problem.compute("mean_over_batch", x, p, "triton")
    (2.0**20 * torch.stack(parts).sum()).backward()
    exact = [each.half().double().requires_grad_() for each in (problem.x, problem.p)]
    (2.0**20 * torch.stack(problem.compute("mean_over_batch", *exact, "plain")).sum()).backward()
    for got, wanted in zip((x, p), exact, strict=True):
        torch.testing.assert_close(
            got.grad.double(), wanted.grad, rtol=2e-3, atol=2e-3 * float(wanted.grad.abs().max())
        )


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("length", [0.0, 1.0])
@pytest.mark.parametrize("normalise", NORMALISATIONS)
def test_rows_at_the_edge_of_their_normalisation(normalise, length, reduction):
    problem = ProblemOnDevice(0, 5, 4, 1, 2, normalise=normalise)
    problem.p[1], problem.p[2] = torch.tensor([length, 0.0]), torch.tensor([0.0, -length])
    wanted, got = (problem.results(reduction, impl, torch.float32, rows=3) for impl in ("plain", "triton"))
    for name, each in wanted.items():
        torch.testing.assert_close(got[name], each, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_of_several_largest_rows_each_has_an_equal_share(reduction):
    problem = ProblemOnDevice(0, 5, 4, 3, 6, kind="max")
    problem.p[1::3] = problem.p[::3]
    wanted, got = (problem.results(reduction, impl, torch.float32) for impl in ("plain", "triton"))
    torch.testing.assert_close(got["in rows"], wanted["in rows"], rtol=1e-4, atol=1e-5)


def test_a_sum_that_one_does_not_show_counts():
    """`log(1 + 1e-9)` is 1e-9, although 1 + 1e-9 is 1 in float32."""
    problem = ProblemOnDevice(0, 5, 4, 1, 6)
    given = (problem.x.float(), problem.labels, problem.refs._replace(rows=problem.p.float()))
    lines, counts = (Line(1.0, -20.0), Line(1.0, -21.0)), {"positive_count": 1.0, "negative_count": 1.0}
    with using("triton"):
        got = mean_over_batch(*given, *lines, **counts)
    with using("plain"):
        wanted = mean_over_batch(*given, *lines, **counts)
    assert 0 < float(wanted.negative) < 1e-7
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=0.0)


@pytest.mark.filterwarnings("ignore:overflow")  # float16 cannot represent the gradient in such a row, in plain either
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_zero_rows_of_half_precision_leave_finite_gradients_in_the_queries(reduction):
    problem = ProblemOnDevice(0, 5, 4, 1, 2)
    problem.p[1] = 0
    for dtype in (torch.float16, torch.bfloat16):
        got, exact = problem.results(reduction, "triton", dtype), problem.results(reduction, "plain", given=dtype)
        torch.testing.assert_close(got["in queries"], exact["in queries"], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("which", ["queries", "rows", "neither"])
def test_only_what_wants_a_gradient_gets_one(which, reduction):
    problem = ProblemOnDevice(0, 5, 7, 2, 3, kind="soft")
    wanted = problem.results(reduction, "plain", torch.float32)
    x = problem.x.float().requires_grad_(which == "queries")
    p = problem.p.float().requires_grad_(which == "rows")
    found = problem.compute(reduction, x, p, "triton", rows=4)
    parts = [part.where(part != NONE, 0.0) for part in found[:2]]
    total = sum((part * mix[: part.numel()].view_as(part)).sum() for part, mix in zip(parts, problem.mix.float()))
    assert total.requires_grad == (which != "neither")
    if which != "neither":
        total.backward()
        leaf, other, name = (x, p, "in queries") if which == "queries" else (p, x, "in rows")
        assert other.grad is None
        torch.testing.assert_close(leaf.grad.double(), wanted[name], rtol=1e-4, atol=1e-5)
    for part, name in zip(parts, ("positive", "negative")):
        torch.testing.assert_close(part.double(), wanted[name].where(wanted[name] != NONE, 0.0), rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        assert not any(each.requires_grad for each in problem.compute(reduction, x, p, "triton", rows=4))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("budget", [0, 2**30])
def test_a_result_may_be_used_twice_and_gone_back_through_again(reduction, budget):
    uses_twice_and_goes_back_again(
        ProblemOnDevice(0, 5, 7, 2, 3, kind="soft"), "triton", reduction, budget, torch.float32
    )


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_second_derivative_is_refused(reduction):
    refuses_a_second_derivative(ProblemOnDevice(0, 5, 7, 2, 3, kind="soft"), "triton", reduction, torch.float32)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_rows_changed_before_the_backward_pass_are_noticed(reduction):
    notices_changed_rows(ProblemOnDevice(0, 5, 7, 1, 3), "triton", reduction, torch.float32)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_labels_in_any_order_and_of_any_whole_type(reduction):
    """Classes may be in any order, and some may be missing: a process may hold a part of them."""
    problem = ProblemOnDevice(0, 8, 9, 2, 5, kind="soft")
    order = torch.randperm(9)[:6].to(DEVICE)
    problem.refs = problem.refs._replace(labels=order.repeat_interleave(2))
    problem.p = problem.p[:12]
    wanted = problem.results(reduction, "plain", torch.float32)
    for kind in (torch.int64, torch.int16):
        problem.labels = problem.labels.to(kind)
        for name, each in problem.results(reduction, "triton", torch.float32, rows=4).items():
            torch.testing.assert_close(each, wanted[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_divided_references_are_put_together_as_before(reduction, tmp_path):
    """A single process that holds all classes of a shard gets the same results as without a shard."""
    problem = ProblemOnDevice(0, 8, 9, 1, 5)
    wanted = problem.results(reduction, "triton", torch.float32, rows=4)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        problem.refs = problem.refs._replace(shard=Shard.of(9, 0, 1))
        got = problem.results(reduction, "triton", torch.float32, rows=4)
    finally:
        torch.distributed.destroy_process_group()
    for name, each in wanted.items():
        torch.testing.assert_close(got[name], each)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("choice", [{"loose": True}, {"loose": True, "same": True}, {"dtype": torch.float64}])
def test_unsupported_problems_are_computed_in_chunks(choice, reduction):
    """Single rows, a query among its references, and float64: bit for bit equal to the chunked implementation."""
    choice = dict(choice)
    dtype = choice.pop("dtype", torch.float32)
    problem = ProblemOnDevice(0, 5, 7, 1, 3, **choice)
    wanted = problem.results(reduction, "chunked", dtype, rows=4)
    assert all(
        torch.equal(each, wanted[name]) for name, each in problem.results(reduction, "triton", dtype, rows=4).items()
    )


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_kernels_are_what_runs(reduction, monkeypatch):
    """Otherwise every other test here could pass without the kernels."""
    launch.interpreting()  # cached now, while the kernels are the real ones
    seen = []
    for name in kernels.__all__:
        kernel = getattr(kernels, name)

        class Seen:
            def __getitem__(self, grid, kernel=kernel, name=name):
                seen.append(name)
                return kernel[grid]

        monkeypatch.setattr(kernels, name, Seen())
    monkeypatch.setattr(launch, "interpreting", lambda: True)
    for dtype, end in ((torch.float32, "row_gradients"), (torch.bfloat16, "fused_row_gradients")):
        seen.clear()
        ProblemOnDevice(0, 5, 7, 1, 3).results(reduction, "triton", dtype, rows=4)
        # Seven classes are two chunks.
        means, sums, shares = (each * 2 for each in (["log_means", end], ["log_sums"], ["shares", end]))
        there = [*sums, "finish_sums", "positive_sums"]
        back = ["scale_queries", *shares, "positive_gradients"]
        wanted = {
            "mean_over_batch": [
                "sort_labels",
                "norms_and_columns",
                *means,
                "positive_means",
                "totals",
                "rescale",
                "add_gradients",
            ],
            "over_classes": ["sort_labels", "norms_and_columns", *there, *back],
        }
        assert seen == wanted[reduction]


@pytest.mark.skipif(DEVICE == "cuda", reason="they were compiled for every other test")
def test_kernels_compile():
    """The interpreter accepts Python code that the compiler does not accept."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).parent.parent / "support" / "triton_compiles.py"
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_it_is_named_and_chosen(monkeypatch):
    assert list(IMPLS) == ["plain", "dense", "chunked", "triton"]
    refs = References(torch.zeros(10_000, 2, device=DEVICE), torch.arange(10_000, device=DEVICE), 1)
    large = torch.zeros(2**14, 2, device=DEVICE)
    assert chosen(large, refs) == ("triton" if DEVICE == "cuda" else "chunked")
    assert chosen(large[:1], refs) == "plain"
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert chosen(large, refs) == "chunked"
    with using("triton"):
        assert chosen(large, refs) == "chunked"


@pytest.mark.parametrize("which", ["labels", "references", "weights"])
def test_tensors_of_several_devices_are_refused(which):
    """Kernels get addresses. If the tests run on a GPU, the other device is the CPU."""
    problem, other = ProblemOnDevice(0, 5, 7, 1, 3, weighted=True), "cpu" if DEVICE == "cuda" else "meta"
    if which == "labels":
        problem.labels = problem.labels.to(other)
    elif which == "references":
        problem.refs = problem.refs._replace(labels=problem.refs.labels.to(other))
    else:
        assert problem.weight is not None
        rule = StepFunction(*(each.to(other) for each in problem.weight.negative))
        problem.weight = PairWeights(problem.weight.positive, rule)
    for reduction in REDUCTIONS:
        with pytest.raises(
            ValueError, match=f"device: got queries on {DEVICE}(:0)? and .* on {other}, expected all on one"
        ):
            problem.compute(reduction, problem.x.float(), problem.p.float(), "triton")


def test_tensors_that_kernels_cannot_reach_are_refused(monkeypatch):
    monkeypatch.setattr(triton_reductions, "interpreting", lambda: False)
    problem = RandomProblem(0, 5, 7, 1, 3)
    with pytest.raises(ValueError, match="impl: got 'triton' for tensors on cpu, expected 'chunked'"):
        problem.compute("mean_over_batch", problem.x.float(), problem.p.float(), "triton")


def test_without_the_package_it_cannot_be_asked_for(monkeypatch):
    monkeypatch.setattr(reductions, "installed", lambda: False)
    with (
        pytest.raises(ValueError, match=r"impl: got 'triton', expected .*pip install 'proxymetric\[triton\]'"),
        using("triton"),
    ):
        pass
    assert chosen(torch.zeros(2**14, 2), References(torch.zeros(10_000, 2), torch.arange(10_000), 1)) == "chunked"
