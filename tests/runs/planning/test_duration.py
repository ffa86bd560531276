"""The plan of a loss: the time of a step, from measured rates."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import chain

import pytest

from planned import H200, RECORD, ROOT, recorded
from proxymetric.runs.planning import Workload, duration_of, flops, machine, machines, memory_of, plan_of
from proxymetric.runs.planning.workload import IMPLEMENTATIONS


def test_rates_of_the_h200_are_the_recorded_ones():
    assert RECORD["device"] == H200.name
    assert H200.matrix.value == pytest.approx(RECORD["matrix_tflops"], abs=0.05)
    for name, rates in H200.implementations.items():
        for rate in rates:
            took = RECORD["proxy-anchor"][f"batch {rate.batch}"][f"{rate.classes} classes"][name]
            assert (rate.value, rate.dim, rate.method) == (took["tflops"], RECORD["dim"], "proxy-anchor")
            work = Workload(rate.classes, rate.dim, rate.batch, dtype=RECORD["type"], implementation=name)
            assert rate.dtype == work.products
            loss = duration_of(work, H200).loss
            assert loss.low == loss.high == pytest.approx(took["ms"] / 1e3, rel=5e-3)
    work = Workload(1_000_000, 512, 4096, dtype="bfloat16")
    took = RECORD["proxy-anchor"]["batch 4096"]["1000000 classes"]["triton"]
    assert str(duration_of(work, H200).loss) == f"{took['ms']:.1f} ms"
    assert duration_of(work, H200).optimizer.low == pytest.approx(7 * 1_000_000 * 512 * 2 / 4.8e12)


def test_recorded_times_that_are_no_rates_lie_within_what_the_plan_says():
    for work, took in recorded():
        loss = duration_of(work, H200).loss
        if work.several:
            assert (loss.high, loss.low < took["ms"] / 1e3) == (None, True)
        else:
            assert loss.low == loss.high == pytest.approx(took["ms"] / 1e3, rel=0.11)
    for classes, took in RECORD["curve"]["triton"].items():
        loss = duration_of(Workload(int(classes), 512, 4096, dtype="bfloat16"), H200).loss
        assert loss.low < 1.05 * took["ms"] / 1e3


@pytest.mark.parametrize(
    ("batch", "classes", "larger", "smaller"),
    [
        (512, 10**7, (512, 10**7), (512, 10**7)),
        (1024, 2_000_000, (4096, 10**7), (512, 1_000_000)),
        (4095, 999_999, (4096, 1_000_000), (512, 131_072)),
        (4096, 999_999, (4096, 1_000_000), (4096, 131_072)),
        (8192, 2 * 10**7, (4096, 10**7), (4096, 10**7)),
        (256, 200_000, (512, 1_000_000), None),
        (4096, 1000, (4096, 131_072), None),
    ],
)
def test_between_sizes_that_were_measured_time_is_a_range(batch, classes, larger, smaller):
    at = {(rate.batch, rate.classes): rate.value * 1e12 for rate in H200.implementations["triton"]}
    work = Workload(classes, dim=512, batch=batch, dtype="bfloat16")
    loss = duration_of(work, H200).loss
    assert loss.low == pytest.approx(flops(work) / at[larger])
    assert loss.high == (None if smaller is None else pytest.approx(flops(work) / at[smaller]))


def test_what_is_not_measured_is_a_range_or_a_bound():
    work = Workload(classes=1_000_000, dim=512, batch=4096)
    products = 6 * 4096 * 1_000_000 * 512
    triton = duration_of(work, H200).loss
    took = RECORD["proxy-anchor"]["batch 4096"]["1000000 classes"]
    best, least = (1e12 * took[name]["tflops"] for name in ("triton", "chunked"))
    assert (triton.low, triton.high) == pytest.approx((products / best, products / least))
    assert "at best" in triton.why
    assert duration_of(replace(work, implementation="chunked"), H200).loss.low == triton.high
    plain = duration_of(replace(work, implementation="plain"), H200).loss
    assert (plain.low, plain.high) == (products / (1e12 * H200.matrix.value), None)
    assert str(plain).startswith("at least")
    assert "plain is not measured" in plain.why


@pytest.mark.parametrize("change", [{"batch": 511}, {"dim": 256}, {"classes": 131_071}, {"method": "cosface"}])
@pytest.mark.parametrize("implementation", ["chunked", "triton"])
def test_a_rate_measured_with_more_is_a_bound_only(change, implementation):
    work = Workload(1_000_000, dim=512, batch=4096, dtype="bfloat16", implementation=implementation)
    assert duration_of(work, H200).loss.high is not None
    loss = duration_of(replace(work, **change), H200).loss
    assert loss.low is not None
    assert loss.high is None
    assert any("may not be reached" in note for note in plan_of(replace(work, **change), 10**12, H200).notes)


def test_rates_of_the_cpu_are_the_recorded_ones():
    record = json.loads((ROOT / "benchmarks" / "results" / "losses-cpu.json").read_text())
    row = machine("cpu")
    rates = [("products", row.matrix)] + [
        ("proxymetric" + ("" if name == "chunked" else f", {name}"), rate)
        for name, several in row.implementations.items()
        for rate in several
    ]
    assert len(rates) == 5
    for side, rate in rates:
        assert (rate.batch, rate.dim) == (record["batch"], record["dim"])
        work = Workload(rate.classes, rate.dim, rate.batch, on_cpu=True)
        found = record["losses"]["proxy-anchor"][f"{rate.classes} classes"]["sides"][side]["seconds"]
        assert flops(work) / found == pytest.approx(rate.value * 1e12, rel=5e-3)
    work = Workload(100_000, 512, 128, on_cpu=True)
    ours = record["losses"]["proxy-anchor"]["100000 classes"]["sides"]["proxymetric"]
    assert duration_of(work, row).loss.high == pytest.approx(ours["seconds"], rel=5e-3)
    assert duration_of(work, row).optimizer.low is duration_of(work, row).low is None
    triton = duration_of(replace(work, implementation="triton"), row).loss
    assert (str(triton), triton.why) == ("not known", "triton does not run on Intel Xeon, 1 thread")
    parts = memory_of(work)
    extra = ours["extra_mb"] * 2**20
    assert parts["gradient"] + parts["embeddings"] + parts["similarities"] == pytest.approx(extra, rel=0.05)


def test_every_rate_says_where_it_comes_from():
    for row in machines().values():
        assert row.implementations.keys() <= set(IMPLEMENTATIONS)
        for rates in filter(None, row.implementations.values()):
            most = max(rate.batch for rate in rates), max(rate.classes for rate in rates)
            assert most in [(rate.batch, rate.classes) for rate in rates], "some rate bounds every load"
        for rate in filter(None, (row.memory, row.bandwidth, row.matrix, *chain(*row.implementations.values()))):
            assert rate.value > 0
            assert rate.kind in ("measured", "data sheet")
            assert len(rate.note) > 10
            if rate.kind == "measured":
                assert rate.date
                assert rate.dtype
            assert rate.file is None or (ROOT / rate.file).is_file()
