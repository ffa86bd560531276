"""The plan of a loss: its numbers computed by hand and compared with allocated memory, and its advice followed."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import proxymetric as pm
from planned import H200, recorded
from proxymetric.core import pieces
from proxymetric.ops import chunked, reductions, using
from proxymetric.ops.problem import DEFAULT_BUDGET
from proxymetric.ops.reductions import IMPLS
from proxymetric.ops.triton import batch_classes, chunk_pass, half_width, norms, positives, totals
from proxymetric.ops.triton import reductions as triton_reductions
from proxymetric.papers import CATALOGUE
from proxymetric.runs.planning import (
    Workload,
    exchanged,
    flops,
    kind_of,
    memory,
    memory_of,
    most_classes,
    plan_of,
    planned_methods,
    traffic,
    workload,
)
from proxymetric.runs.planning.workload import BUDGET_BYTES, IMPLEMENTATIONS, OPTIMIZERS
from proxymetric.sources import proxies
from terminal import proxymetric


def asked(*words: object) -> dict[str, Any]:
    """Return the output of `proxymetric methods WORDS --json`."""
    answer = proxymetric("methods", *words, "--json")
    assert answer.code == 0, answer
    return json.loads(answer.out)


# Sums by hand


def test_one_device_by_hand():
    assert memory_of(Workload(classes=1000, dim=8, batch=4, implementation="chunked")) == {
        "proxies": 1000 * 8 * 4,
        "gradient": 1000 * 8 * 4,
        "optimizer state": 2 * 1000 * 8 * 4,
        "embeddings": 2 * 4 * 8 * 4,
        "gathered embeddings": 0,
        # One chunk holds all proxies; the rows of the batch and two gradients of the embeddings are counted separately.
        "similarities": 4 * (4 * 1000 * 4 + 9 * 1000 + 4 * 8 + 2 * 4 * 8),
        "optimizer step": 0,
    }


def test_eight_devices_by_hand():
    work = Workload(
        classes=5_000_000, dim=512, batch=4096, devices=8, method="cosface", dtype="bfloat16",
        optimizer="rowwise-adagrad", implementation="chunked",
    )  # fmt: skip
    assert memory_of(work) == {
        "proxies": 640_000_000,
        "gradient": 640_000_000,
        "optimizer state": 625_000 * 2,
        "embeddings": 2_097_152,
        "gathered embeddings": 16_777_216,
        "similarities": 4 * (4 * 16_384 * 4096 + 2 * 16_384 * 512 + 9 * 625_000),
        "optimizer step": 0,
    }
    assert flops(work) == 8 * 4096 * 625_000 * 512
    assert traffic(work) == 3 * 640_000_000 + 2 * 2 * 625_000


def test_classes_that_devices_do_not_divide_and_several_proxies():
    work = Workload(1001, 8, 16, devices=8, per_class=3, method="mpa", optimizer="sgd", implementation="chunked")
    assert (work.shard, work.rows) == (126, 378)
    parts = memory_of(work)
    assert parts["proxies"] == parts["gradient"] == parts["optimizer state"] == 378 * 8 * 4
    assert parts["similarities"] == 4 * (5 * 378 * 16 + (16 * 3 + 2 * 16) * 8 + 9 * 378)
    assert flops(work) == 6 * 16 * 378 * 8
    assert memory_of(replace(work, classes=1008)) == parts, "the largest shard counts"
    assert memory_of(replace(work, batch=17))["embeddings"] == 2 * 3 * 8 * 4


def test_triton_by_hand():
    work = Workload(classes=10**6, dim=512, batch=4096)
    of_a_chunk, of_all = (4 + 4) * 2**26, 4 * 5 * 10**6 + 2**26
    assert memory_of(work)["similarities"] == of_a_chunk + of_all + 4 * 3 * 4096 * 512
    over = replace(work, method="norm-softmax")
    assert memory_of(over)["similarities"] == of_a_chunk + of_all + (4 * 4 + 4 * 2) * 4096 * 512 + 4 * 2**20
    kept = replace(over, classes=2**16)
    assert kept.cached
    assert memory_of(kept)["similarities"] == (
        4 * 4096 * (2**16 + 4096) + 4 * 2**26  # all, the batch's own; shares
        + 4 * 5 * 2**16 + 2**26 + (4 * 4 + 4 * 2) * 4096 * 512 + 4 * 2**20
    )  # fmt: skip


def test_triton_in_half_width_by_hand():
    work = Workload(classes=10**6, dim=512, batch=4096, dtype="bfloat16")
    assert work.half_width
    of_a_chunk = 2 * 2**27 + 2 * 32_768 * 512  # similarities, which shares overwrite; normalised proxies
    of_all = 4 * 5 * 10**6 + 2**26
    assert memory_of(work)["similarities"] == of_a_chunk + of_all + (4 * 3 + 2) * 4096 * 512
    over = replace(work, method="norm-softmax")
    assert memory_of(over)["similarities"] == of_a_chunk + of_all + (4 * 4 + 2 * 3) * 4096 * 512 + 4 * 2**20
    kept = replace(over, classes=2**16)
    assert kept.cached
    assert memory_of(kept)["similarities"] == (
        2 * 4096 * 2**16 + 2 * 2**27  # all; shares
        + 4 * 5 * 2**16 + 2**26 + (4 * 4 + 2 * 3) * 4096 * 512 + 4 * 2**20
    )  # fmt: skip


def test_auto_is_triton_on_a_gpu_and_chunked_on_a_cpu():
    assert Workload(1000, 64, 32).implementation == "triton"
    assert Workload(1000, 64, 32, implementation="auto", on_cpu=True).implementation == "chunked"


@pytest.mark.parametrize("method", planned_methods())
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_products_by_reduction_and_budget(method, implementation):
    most = BUDGET_BYTES // (4 * 4096)
    for classes, fits in ((most, True), (most + 1, False)):
        work = Workload(classes, dim=64, batch=4096, method=method, implementation=implementation)
        again = kind_of(method).over == "classes" and implementation != "plain" and not fits
        assert flops(work) == (8 if again else 6) * 4096 * classes * 64
        if implementation == "triton":
            continue
        kept = implementation != "plain" and kind_of(method).over == "classes" and fits
        over = memory_of(work)["similarities"] - memory_of(replace(work, method="proxy-anchor"))["similarities"]
        apart = 0 if kind_of(method).over == "batch" else 4 * 3 * 4096 * 64
        assert over + (apart if implementation != "plain" else 0) == (4 * 4096 * classes if kept else 0)


def test_the_batchs_classes_alone():
    work = Workload(classes=1_000_000, dim=64, batch=128, touched="batch", per_class=2)
    assert work.compared == 256
    assert flops(work) == 6 * 128 * 256 * 64
    assert traffic(work) == 7 * 256 * 64 * 4
    assert memory_of(work)["gradient"] == 4 * 256 * 64 * 4
    assert replace(work, classes=100).compared == 200
    assert replace(work, touched=0.1).compared == 2 * (128 + 100_000)
    assert replace(work, touched=0.999_999).compared == work.rows
    for wrong in ("bath", "a number above 0 and below 1", 1.0):
        with pytest.raises(ValueError, match="touched: got"):
            replace(work, touched=wrong)


def test_what_devices_send_each_other():
    work = Workload(classes=1000, dim=64, batch=30, devices=3)
    assert exchanged(work) == 4 * 2 * 20 * 64
    assert exchanged(replace(work, method="norm-softmax")) == exchanged(work) + 4 * 2 * 30
    assert exchanged(replace(work, devices=1)) == 0


# Against the library


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_method_is_planned_or_refused_with_the_reason_in_its_row(name):
    """The contract test "reduction" checks that the loss sums as its row states."""
    row = CATALOGUE[name].about
    if row.sums_over is not None:
        assert Workload(1000, 8, 4, method=name).kind.over == row.sums_over
        return
    with pytest.raises(ValueError, match=r"^method: got ") as refusal:
        Workload(1000, 8, 4, method=name)
    assert f"{name!r}, which {row.no_plan}; expected one of proxy-anchor, " in str(refusal.value)


def test_a_method_whose_class_has_one_proxy():
    assert [name for name in planned_methods() if not kind_of(name).several] == ["arcface", "adaface"]


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("adamw", torch.optim.AdamW),
        ("adam", torch.optim.Adam),
        ("sgd", lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9)),
    ],
)
def test_optimisers_keep_as_many_numbers(name, make):
    rows = torch.nn.Parameter(torch.randn(10, 6))
    optimiser = make([rows])
    rows.grad = torch.ones_like(rows)
    optimiser.step()
    assert sum(value.numel() for value in optimiser.state[rows].values() if value.numel() > 1) == OPTIMIZERS[name] * 60


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_table_of_rows_keeps_as_many_bytes(optimizer):
    source = proxies(classes=10, dim=6, per_class=2, touched="batch")
    source.table.follow(optimizer, (0.9, 0.999), 0.0, 0.9)
    parts = memory_of(Workload(classes=10, dim=6, batch=4, per_class=2, touched="batch", optimizer=optimizer))
    held = sum(value.nbytes for name, value in source.table.named_buffers() if name != "values")
    assert (source.table.values.nbytes, held) == (parts["proxies"], parts["optimizer state"])


def test_chunks_and_budget_are_those_of_the_reductions():
    assert (chunked.PAIRS_PER_GPU_CHUNK, chunked.NUMBERS_PER_CPU_CHUNK, DEFAULT_BUDGET) == (
        memory.PAIRS_PER_GPU_CHUNK,
        memory.NUMBERS_PER_CPU_CHUNK,
        BUDGET_BYTES,
    )
    assert (chunk_pass.MAX_PAIRS_PER_CHUNK, 4 * chunk_pass.MAX_RUNNING_SUMS, chunk_pass.MAX_FUSED_BATCH) == (
        memory.PAIRS_PER_GPU_CHUNK,
        memory.RUNNING_SUM_NUMBERS,
        memory.MAX_FUSED_BATCH,
    )
    assert half_width.MIN_HALF_PAIRS == workload.MIN_HALF_WIDTH_PAIRS
    for batch, dim in ((1, 8), (100, 512), (512, 512), (4096, 64), (3_000_000, 512)):
        work = Workload(classes=10**10, dim=dim, batch=batch, implementation="triton")
        assert memory.chunk(work) == chunk_pass.rows_per_chunk(batch, dim, None)
    # A plan is about many classes; dense is for few, and takes no more memory than plain.
    assert set(IMPLS) - {"dense"} == set(IMPLEMENTATIONS)
    with pytest.raises(ValueError, match="touched: got 'batch' for proxies that are to be divided"):
        pm.method("proxy-anchor", classes=8, dim=4, touched="batch").shard(0, 2)


def peak(step: Callable[[], None]) -> int:
    """Return the peak of the bytes that a step has allocated."""
    # Garbage of earlier code must not be freed during the step, because that would lower the peak.
    gc.collect()
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            step()
    finally:
        gc.enable()
    assert seen.profiler is not None
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        highest = max(highest, held)
    return highest


def measured(work: Workload, budget: int = BUDGET_BYTES) -> float:
    """Return the memory of a step divided by that of the plan."""
    told = {"per_class": work.per_class, "tau": 0.0} if work.kind.grouped else {}
    criterion = pm.method(work.method, classes=work.classes, dim=work.dim, **told)
    x, y = torch.randn(work.batch, work.dim, requires_grad=True), torch.randint(work.classes, (work.batch,))

    def step() -> None:
        with using(work.implementation, budget=budget):
            criterion(x, y).backward()
        criterion.commit()

    step()
    x.grad = None
    criterion.zero_grad(set_to_none=True)
    parts = memory_of(work)
    return peak(step) / (parts["gradient"] + parts["embeddings"] + parts["similarities"])


@pytest.mark.parametrize(
    ("method", "per_class", "dim"),
    [("proxy-anchor", 1, 8), ("arcface", 1, 256), ("norm-softmax", 1, 32), ("mpa", 2, 8), ("soft-triple", 8, 32)],
)
def test_plain_allocates_what_the_plan_says(method, per_class, dim):
    work = Workload(2000 // per_class, dim, 32, per_class=per_class, method=method, implementation="plain")
    assert 0.75 < measured(work) <= 1


@pytest.mark.parametrize("budget", [0, BUDGET_BYTES])
@pytest.mark.parametrize(
    ("method", "per_class", "dim", "batch"),
    [("proxy-anchor", 1, 8, 64), ("proxy-anchor", 1, 256, 8), ("norm-softmax", 1, 32, 64), ("soft-triple", 4, 32, 64)],
)
def test_chunked_allocates_what_the_plan_says(method, per_class, dim, batch, budget, monkeypatch):
    monkeypatch.setattr(workload, "BUDGET_BYTES", budget)
    work = Workload(60_000 // per_class, dim, batch, per_class=per_class, method=method, on_cpu=True)
    assert work.cached == (kind_of(method).over == "classes" and budget > 0)
    assert 0.75 < measured(work, budget) <= 1


@pytest.mark.parametrize(("optimizer", "kind"), [("adamw", torch.optim.AdamW), ("adam", torch.optim.Adam)])
def test_a_step_of_adam_on_a_cpu_allocates_what_the_plan_says(optimizer, kind):
    work = Workload(2000, 64, 32, optimizer=optimizer, on_cpu=True)
    criterion = pm.method(work.method, classes=work.classes, dim=work.dim)
    stepper = kind(criterion.param_groups(lr=1e-2))
    x, y = torch.randn(work.batch, work.dim), torch.randint(work.classes, (work.batch,))
    for _ in range(2):
        stepper.zero_grad()
        criterion(x, y).backward()
        allocated = peak(stepper.step)
        criterion.commit(stepper)
    assert 0.9 < allocated / memory_of(work)["optimizer step"] < 1.1
    assert memory_of(replace(work, on_cpu=False))["optimizer step"] == 0, "one kernel, without copies"
    assert memory_of(replace(work, touched="batch"))["optimizer step"] == 0


def test_a_plan_says_what_your_own_loop_and_the_trainer_ask_for():
    def notes(**changes: Any) -> str:
        work = Workload(**({"classes": 1000, "dim": 8, "batch": 16} | changes))
        return "\n".join(plan_of(work, 10**9, H200).notes)

    assert "zero_grad() before the forward pass" in notes()
    assert "fused=True" in notes()
    assert "fused=True" not in notes(optimizer="sgd")
    assert "zero_grad" not in notes(touched="batch")
    assert "takes a batch that is a multiple of the 3 processes" in notes(devices=3)
    assert "multiple" not in notes(devices=4)


def no_kernel(name: str, grid: Any, warps: int, tensors: tuple[torch.Tensor, ...], *_: Any) -> None:
    """Replaces `launch`: writes rows that exist and lengths above zero, and leaves all other memory as it is."""
    for tensor in tensors:
        if name == "rows_of_batch" or (name in ("row_norms", "norms_and_columns") and tensor is tensors[1]):
            tensor.fill_(name != "rows_of_batch")


@pytest.mark.parametrize("budget", [0, BUDGET_BYTES])
@pytest.mark.parametrize(
    ("method", "per_class", "classes"),
    [("proxy-anchor", 1, 4000), ("norm-softmax", 1, 4000), ("soft-triple", 5, 800), ("mpa", 5, 800)],
)
def test_triton_allocates_what_the_plan_says(method, per_class, classes, budget, monkeypatch):
    for module in (positives, triton_reductions, norms, batch_classes, chunk_pass, totals):
        monkeypatch.setattr(module, "launch", no_kernel)
    monkeypatch.setattr(reductions, "installed", lambda: True)
    monkeypatch.setattr(triton_reductions, "interpreting", lambda: True)
    monkeypatch.setattr(chunk_pass, "MAX_PAIRS_PER_CHUNK", 2**15)
    monkeypatch.setattr(memory, "PAIRS_PER_GPU_CHUNK", 2**15)
    monkeypatch.setattr(chunk_pass, "MAX_RUNNING_SUMS", 2**6)
    monkeypatch.setattr(memory, "RUNNING_SUM_NUMBERS", 2**8)
    monkeypatch.setattr(memory, "WORKSPACE_BYTES", 0)
    monkeypatch.setattr(workload, "BUDGET_BYTES", budget)
    work = Workload(classes, 64, 32, per_class=per_class, method=method, implementation="triton")
    assert work.cached == (kind_of(method).over == "classes" and budget > 0)
    assert 0.8 < measured(work, budget) <= 1


def test_triton_took_what_the_plan_says():
    assert len(recorded()) == 6 + 4
    for work, took in recorded():
        parts = memory_of(work)
        planned = parts["gradient"] + parts["similarities"] + parts["embeddings"] // 2
        if work.kind.over == "classes" and not work.cached:  # the GPU had memory to keep them
            planned += 2 * work.batch * work.compared
        assert 1 <= planned / (took["extra_mb"] * 2**20) < 1.1, work


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_criterion_hands_embeddings_on_in_the_type_of_its_proxies(dtype, monkeypatch):
    seen = []
    criterion = pm.method("proxy-anchor", classes=4, dim=2).to(dtype)
    monkeypatch.setattr(pieces, "MAX_FLOAT32_PAIRS", 0)  # few pairs of bfloat16 vectors are compared in float32
    loss = criterion.objective.loss
    criterion.objective.loss = lambda x, *rest, **told: seen.append(x.dtype) or loss(x, *rest, **told)
    for given in (torch.float32, torch.bfloat16):
        made = criterion(torch.randn(3, 2, dtype=given), torch.arange(3))
        assert made.dtype == torch.float32
    assert seen == [dtype] * 2


# What fits, and what would help

TIGHT = [
    (Workload(classes=10**7, dim=512, batch=4096), 80),
    (Workload(classes=10**7, dim=512, batch=4096, implementation="plain"), 80),
    (Workload(classes=10**8, dim=512, batch=4096, per_class=2, method="mpa-ap", implementation="plain"), 141),
    (Workload(classes=3 * 10**6, dim=1024, batch=512, devices=3, method="cosface", optimizer="sgd"), 8),
    (Workload(classes=10**7, dim=512, batch=4096, dtype="bfloat16", optimizer="rowwise-adagrad"), 20),
]


@pytest.mark.parametrize(("work", "gb"), TIGHT)
def test_following_the_advice_makes_it_fit(work, gb):
    made = plan_of(work, gb * 10**9, H200)
    assert not made.fits
    assert any(each.fits for each in made.advice)
    words = ["--memory", gb, "--device", "H200"]
    for name in ("dim", "batch", "devices", "per_class", "dtype", "optimizer", "implementation"):
        words += [f"--{name.replace('_', '-')}", getattr(work, name)]
    words += [work.method, "--plan", work.classes]
    before = asked(*words)
    assert before["fits"] is False
    assert [each["options"] for each in before["advice"]] == [list(each.options) for each in made.advice]
    for each in made.advice:
        after = asked(*words, *each.options)
        assert (after["fits"], after["memory"]["total"]) == (each.fits, each.total)
        assert each.total < made.total


def test_advice_is_the_least_that_suffices():
    work, available = TIGHT[0][0], TIGHT[0][1] * 10**9
    advice = {each.words: each for each in plan_of(work, available, H200).advice}
    devices, fewer = advice["more devices"].work.devices, advice["fewer dimensions"].work.dim
    assert not plan_of(replace(work, devices=devices - 1), available, H200).fits
    assert not plan_of(replace(work, dim=fewer + 8), available, H200).fits
    assert fewer % 8 == 0
    assert advice["proxies in half precision"].total < 0.51 * plan_of(work, available, H200).total


def test_together_where_nothing_alone_suffices():
    work, gb = TIGHT[2]
    advice = plan_of(work, gb * 10**9, H200).advice
    assert not any(each.fits for each in advice[:4])
    joined = advice[-1]
    assert joined.words == "together, on more devices"
    assert joined.fits
    (devices,) = [each for each in advice if each.words == "more devices"]
    assert devices.work.devices > joined.work.devices


def test_what_fits_gets_no_advice_and_how_far_it_goes():
    work = Workload(classes=1_000_000, dim=512, batch=4096)
    made = plan_of(work, 80 * 10**9, H200)
    assert made.fits
    assert made.advice == ()
    assert made.most_classes is not None
    assert plan_of(replace(work, classes=made.most_classes), 80 * 10**9, H200).fits
    assert not plan_of(replace(work, classes=made.most_classes + 1), 80 * 10**9, H200).fits
    assert most_classes(work, 10**6) is None


def test_a_python_user_plans_in_one_call():
    made = pm.plan("5M", devices=8, memory=80, device="H200")
    assert made == pm.plan(5_000_000, devices="8", memory="80", device="h200")
    assert made.as_dict() == asked("--plan", "5M", "--devices", 8, "--memory", 80, "--device", "H200")
    with pytest.raises(ValueError, match="classes: got 0"):
        pm.plan(0)
