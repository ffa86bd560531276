"""`proxymetric plan`: its sums by hand and against what is allocated, its advice followed, its words."""

from __future__ import annotations

import gc
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import proxymetric as pm
from proxymetric import device
from proxymetric.papers import CATALOGUE, options
from proxymetric.planning import (
    METHODS,
    Workload,
    count,
    duration_of,
    exchanged,
    flops,
    gigabytes,
    machine,
    machines,
    memory_of,
    most_classes,
    plan,
    traffic,
)
from proxymetric.planning.workload import APART, BUDGET, IMPLEMENTATIONS, OPTIMIZERS
from proxymetric.references import proxies
from terminal import Answer, proxymetric, refused

ROOT = Path(__file__).resolve().parent.parent
FIVE_MILLION = ("plan", "--classes", "5_000_000", "--dim", "512", "--batch", "4096", "--devices", "8")
H200 = machines()["NVIDIA H200"]
MATRIX, CHUNKED = 790e12, 109e12


def asked(*words: object) -> dict[str, Any]:
    """What `proxymetric plan WORDS --json` says."""
    answer = proxymetric("plan", *words, "--json")
    assert answer.code == 0, answer
    return json.loads(answer.out)


# Sums by hand


def test_one_device_by_hand():
    assert memory_of(Workload(classes=1000, dim=8, batch=4)) == {
        "proxies": 1000 * 8 * 4,
        "gradient": 1000 * 8 * 4,
        "optimizer state": 2 * 1000 * 8 * 4,
        "embeddings": 2 * 4 * 8 * 4,
        "gathered embeddings": 0,
        "similarities": 4 * (4 * 1000 * 4 + 4 * 8 + 9 * 1000),  # one chunk holds all; the batch's own rows apart
    }


def test_eight_devices_by_hand():
    work = Workload(
        classes=5_000_000, dim=512, batch=4096, devices=8, method="cosface", dtype="bfloat16",
        optimizer="rowwise-adagrad",
    )  # fmt: skip
    assert memory_of(work) == {
        "proxies": 640_000_000,
        "gradient": 640_000_000,
        "optimizer state": 2_500_000,
        "embeddings": 2_097_152,
        "gathered embeddings": 16_777_216,
        "similarities": 4 * (4 * 16_384 * 4096 + 2 * 16_384 * 512 + 9 * 625_000),
    }
    assert flops(work) == 8 * 4096 * 625_000 * 512
    assert traffic(work) == 3 * 640_000_000 + 2 * 2 * 625_000


def test_classes_that_devices_do_not_divide_and_several_proxies():
    work = Workload(classes=1001, dim=8, batch=16, devices=8, per_class=3, method="mpa", optimizer="sgd")
    assert (work.shard, work.rows) == (126, 378)
    parts = memory_of(work)
    assert parts["proxies"] == parts["gradient"] == parts["optimizer state"] == 378 * 8 * 4
    assert parts["similarities"] == 4 * (5 * 378 * 16 + 16 * 3 * 8 + 9 * 378)
    assert flops(work) == 6 * 16 * 378 * 8
    assert memory_of(replace(work, classes=1008)) == parts, "the largest shard counts"
    assert memory_of(replace(work, batch=17))["embeddings"] == 2 * 3 * 8 * 4


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_products_by_reduction_and_budget(method, implementation):
    most = BUDGET // (4 * 4096)
    for classes, fits in ((most, True), (most + 1, False)):
        work = Workload(classes, dim=64, batch=4096, method=method, implementation=implementation)
        again = METHODS[method].over == "classes" and implementation != "plain" and not fits
        assert flops(work) == (8 if again else 6) * 4096 * classes * 64
        kept = implementation != "plain" and METHODS[method].over == "classes" and fits
        over = memory_of(work)["similarities"] - memory_of(replace(work, method="proxy-anchor"))["similarities"]
        apart = 0 if METHODS[method].over == "batch" else 4 * 4096 * 64
        assert over + (apart if implementation != "plain" else 0) == (4 * 4096 * classes if kept else 0)


def test_the_batchs_classes_alone():
    work = Workload(classes=1_000_000, dim=64, batch=128, touched="batch", per_class=2)
    assert work.compared == 256
    assert flops(work) == 6 * 128 * 256 * 64
    assert traffic(work) == 7 * 256 * 64 * 4
    assert memory_of(work)["gradient"] == 4 * 256 * 64 * 4
    assert replace(work, classes=100).compared == 200


def test_what_devices_send_each_other():
    work = Workload(classes=1000, dim=64, batch=30, devices=3)
    assert exchanged(work) == 4 * 2 * 20 * 64
    assert exchanged(replace(work, method="norm-softmax")) == exchanged(work) + 4 * 2 * 30
    assert exchanged(replace(work, devices=1)) == 0


# Against the library


def test_every_method_is_planned_or_refused_with_a_reason():
    assert METHODS.keys() | APART.keys() == CATALOGUE.keys()
    assert not METHODS.keys() & APART.keys()


@pytest.mark.parametrize("name", METHODS)
def test_methods_sum_as_the_plan_says(name):
    kind = METHODS[name]
    loss = pm.method(name, classes=4, dim=2).objective.loss
    assert set(re.findall(r"over_(batch|classes)\(", inspect.getsource(type(loss).__call__))) == {kind.over}
    assert hasattr(loss, "of_class") == kind.grouped
    assert ("per_class" in options(name)) == kind.several


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


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_table_of_rows_keeps_as_many_bytes(optimizer):
    source = proxies(classes=10, dim=6, per_class=2, touched="batch")
    parts = memory_of(Workload(classes=10, dim=6, batch=4, per_class=2, touched="batch", optimizer=optimizer))
    held = sum(value.nbytes for name, value in source.table.named_buffers() if name != "values")
    assert (source.table.values.nbytes, held) == (parts["proxies"], parts["optimizer state"])


def peak(step: Callable[[], None]) -> int:
    """The most bytes that a step has allocated at one time."""
    # What others left behind must not be freed meanwhile: that would count against the step.
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


@pytest.mark.parametrize(
    ("method", "per_class", "dim"),
    [("proxy-anchor", 1, 8), ("arcface", 1, 256), ("norm-softmax", 1, 32), ("mpa", 2, 8), ("soft-triple", 8, 32)],
)
def test_plain_allocates_what_the_plan_says(method, per_class, dim):
    classes, batch = 2000 // per_class, 32  # few enough pairs for every default to be plain
    told = {"per_class": per_class, "tau": 0.0} if METHODS[method].grouped else {}
    criterion = pm.method(method, classes=classes, dim=dim, **told)
    x, y = torch.randn(batch, dim, requires_grad=True), torch.randint(classes, (batch,))

    def step() -> None:
        criterion(x, y).backward()
        criterion.commit()

    step()
    x.grad = None
    criterion.zero_grad(set_to_none=True)
    work = Workload(classes, dim, batch, per_class=per_class, method=method, implementation="plain")
    parts = memory_of(work)
    said = parts["gradient"] + parts["embeddings"] + parts["similarities"]
    assert 0.75 * said <= peak(step) <= said


# Time


def test_the_recorded_time_of_chunked_comes_out():
    work = Workload(classes=10 * 2**20, dim=512, batch=4096, dtype="bfloat16")
    loss = duration_of(work, H200).loss
    assert loss.low == loss.high == pytest.approx(1.211, abs=1e-3)
    assert str(loss) == "1.21 s"
    assert duration_of(work, H200).optimizer.low == pytest.approx(7 * 10 * 2**20 * 512 * 2 / 4.8e12)


def test_what_is_not_measured_is_a_range_or_a_bound():
    work = Workload(classes=1_000_000, dim=512, batch=4096, dtype="bfloat16")
    products = 6 * 4096 * 1_000_000 * 512
    triton = duration_of(replace(work, implementation="triton"), H200).loss
    assert (triton.low, triton.high) == (products / MATRIX, products / CHUNKED)
    assert "not measured" in triton.why
    plain = duration_of(replace(work, implementation="plain"), H200).loss
    assert (plain.low, plain.high) == (products / MATRIX, None)
    assert str(plain).startswith("at least")


@pytest.mark.parametrize("change", [{"dtype": "float32"}, {"batch": 4095}, {"dim": 256}])
@pytest.mark.parametrize("implementation", ["chunked", "triton"])
def test_a_rate_measured_with_more_is_a_bound_only(change, implementation):
    work = Workload(1_000_000, dim=512, batch=4096, dtype="bfloat16", implementation=implementation)
    assert duration_of(work, H200).loss.high is not None
    loss = duration_of(replace(work, **change), H200).loss
    assert loss.low is not None
    assert loss.high is None
    assert any("may not be reached" in note for note in plan(replace(work, **change), 10**12, H200).notes)


def test_nothing_is_known_of_cpus():
    assert machine("cpu") is None
    found = asked("--classes", "1M", "--device", "cpu")
    assert found["time"]["loss"]["low"] is found["time"]["optimizer"]["low"] is found["time"]["at_least"] is None
    assert found["rates"] is None
    assert "not known" in proxymetric("plan", "--classes", "1M", "--device", "cpu").out


def test_every_rate_says_where_it_comes_from():
    for row in machines().values():
        assert row.implementations.keys() == set(IMPLEMENTATIONS)
        for rate in (row.memory, row.bandwidth, row.matrix, *filter(None, row.implementations.values())):
            assert rate.value > 0
            assert rate.kind in ("measured", "data sheet")
            assert len(rate.note) > 10
            if rate.kind == "measured":
                assert rate.date
                assert rate.dtype
            assert rate.file is None or (ROOT / rate.file).is_file()


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
    made = plan(work, gb * 10**9, H200)
    assert not made.fits
    assert any(each.fits for each in made.advice)
    words = ["--memory", gb, "--device", "H200"]
    for name in ("classes", "dim", "batch", "devices", "per_class", "method", "dtype", "optimizer", "implementation"):
        words += [f"--{name.replace('_', '-')}", getattr(work, name)]
    before = asked(*words)
    assert before["fits"] is False
    assert [each["options"] for each in before["advice"]] == [list(each.options) for each in made.advice]
    for each in made.advice:
        after = asked(*words, *each.options)
        assert (after["fits"], after["memory"]["total"]) == (each.fits, each.total)
        assert each.total < made.total


def test_advice_is_the_least_that_suffices():
    work, available = TIGHT[0][0], TIGHT[0][1] * 10**9
    advice = {each.words: each for each in plan(work, available).advice}
    devices, fewer = advice["more devices"].work.devices, advice["fewer dimensions"].work.dim
    assert not plan(replace(work, devices=devices - 1), available).fits
    assert not plan(replace(work, dim=fewer + 8), available).fits
    assert fewer % 8 == 0
    assert advice["proxies in half precision"].total < 0.51 * plan(work, available).total


def test_together_where_nothing_alone_suffices():
    work, gb = TIGHT[2]
    advice = plan(work, gb * 10**9).advice
    assert not any(each.fits for each in advice[:4])
    joined = advice[-1]
    assert joined.words == "together, on more devices"
    assert joined.fits
    (devices,) = [each for each in advice if each.words == "more devices"]
    assert devices.work.devices > joined.work.devices


def test_what_fits_gets_no_advice_and_how_far_it_goes():
    work = Workload(classes=1_000_000, dim=512, batch=4096)
    made = plan(work, 80 * 10**9)
    assert made.fits
    assert made.advice == ()
    assert made.most_classes is not None
    assert plan(replace(work, classes=made.most_classes), 80 * 10**9).fits
    assert not plan(replace(work, classes=made.most_classes + 1), 80 * 10**9).fits
    assert most_classes(work, 10**6) is None


def test_where_nothing_helps_it_says_so():
    answer = proxymetric("plan", "--classes", "1M", "--memory", "0.001", "--device", "cpu")
    assert answer.code == 0
    assert "it does not fit" in answer.out
    assert "nothing of what is tried here makes it fit" in answer.out


# What people type and see


@pytest.mark.parametrize("text", ["5_000_000", "5e6", "5M", "5m", "5000k", " 5000000 ", "5.0E6"])
def test_numbers_as_people_type_them(text):
    assert count("classes", text) == 5_000_000


@pytest.mark.parametrize("text", ["", "M", "0", "-3", "2.5", "1e99999999", "nan", "inf", "5 million", "5MM", "0x10"])
def test_what_is_no_whole_number_is_refused(text):
    with pytest.raises(ValueError, match=r"classes: got .* wanted a whole number from 1 to 10\^12"):
        count("classes", text)


@pytest.mark.parametrize("text", ["", "0", "-1", "1e-10", "nan", "80GB", "1e999999999"])
def test_what_is_no_memory_is_refused(text):
    with pytest.raises(ValueError, match=r"memory: got .* wanted a number of GB above 0"):
        gigabytes("memory", text)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--classes", "many"), ("classes: got 'many'", "5_000_000, 5e6 or 5M")),
        (("--dim", "0"), ("dim: got '0'", "whole number")),
        (("--per-class", "1.5"), ("per_class: got '1.5'",)),
        (("--memory", "lots"), ("memory: got 'lots'", "GB above 0")),
        (("--dtype", "bfloat"), ("dtype: got 'bfloat'", "float32, bfloat16", "nearest is 'bfloat16'")),
        (("--optimizer", "adagrad"), ("optimizer: got 'adagrad'", "nearest is 'rowwise-adagrad'")),
        (("--implementation", "Triton"), ("implementation: got 'Triton'", "nearest is 'triton'")),
        (("--touched", "some"), ("touched: got 'some'", "all, batch")),
        (("--method", "proxy-anker"), ("method: got 'proxy-anker'", "nearest is 'proxy-anchor'")),
        (("--method", "triplet"), ("method: triplet", "has no proxies", "wanted one of proxy-anchor")),
        (("--method", "proxy-isa"), ("method: proxy-isa", "plan its base")),
        (("--method", "arcface", "--per-class", "2"), ("per_class: got 2", "arcface has one proxy", "wanted 1")),
        (("--device", "NVIDIA H20"), ("device: got 'NVIDIA H20'", "nearest is 'NVIDIA H200'")),
        (("--devices", "2000"), ("devices: got 2000", "1000 classes")),
        (("--devices", "8", "--batch", "4"), ("batch: got 4", "each of the 8 devices")),
    ],
)
def test_a_mistake_is_one_sentence(words, said):
    refused(proxymetric("plan", "--classes", "1000", *words), *said)


def test_an_unknown_flag_names_the_nearest():
    answer = proxymetric("plan", "--classes", "1000", "--device-s", "3")
    assert answer.code == 2
    assert "--devices" in answer.err


def column(answer: Answer, part: str) -> str:
    """The last cell of a row of a table."""
    (line,) = [line for line in answer.out.splitlines() if re.match(rf"\W+{part} ", line)]
    return line.strip("│ ").split()[-1]


def test_the_plan_as_people_read_it():
    answer = proxymetric(*FIVE_MILLION, "--memory", "80", "--device", "H200")
    assert answer.code == 0, answer
    assert not answer.err
    assert "5,000,000 classes of 1 proxy, 512-D, batches of 4,096, on 8 devices" in answer.out
    found = {part: column(answer, part) for part in ("proxies", "gradient", "optimizer state", "total")}
    assert found == {"proxies": "1.28", "gradient": "1.28", "optimizer state": "2.56", "total": "6.24"}
    assert "it fits: 6.24 of 80.00 GB; 73.76 GB are left for the encoder" in answer.out
    assert "at least 72.1 ms" in answer.out
    assert "7.86 TFLOP at 109 TFLOP/s (measured)" in answer.out
    assert "8.96 GB at 4.8 TB/s (data sheet)" in answer.out
    assert "what would help" not in answer.out
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\x9b]", answer.out)


def test_what_does_not_fit_as_people_read_it(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    answer = proxymetric("plan", "--classes", "10M", "--memory", "80", "--device", "H200")
    assert "it does not fit: 83.38 of 80.00 GB; 3.38 GB too many" in answer.out
    assert re.search(r"--optimizer rowwise-adagrad\W+42\.46\W+yes", answer.out)
    assert re.search(r"--devices 2\W+42\.25\W+yes", answer.out)


def test_the_plan_as_json():
    found = asked(*FIVE_MILLION[1:], "--memory", "80", "--device", "H200", "--implementation", "triton")
    assert found["asked"]["classes"] == 5_000_000
    assert found["rows"] == 625_000
    assert found["memory"]["parts"]["proxies"] == 1_280_000_000
    assert found["memory"]["total"] == sum(found["memory"]["parts"].values())
    assert found["memory"]["left"] == 80 * 10**9 - found["memory"]["total"]
    assert found["fits"] is True
    assert found["time"]["flops"] == 6 * 4096 * 625_000 * 512
    assert found["device"] == "NVIDIA H200"
    assert found["rates"]["implementations"]["triton"] is None
    assert found["rates"]["bandwidth"]["kind"] == "data sheet"


def test_the_accelerator_here_decides_where_nothing_is_said(monkeypatch):
    monkeypatch.setattr(device, "accelerator", lambda: ("NVIDIA A100-SXM4-40GB", 42 * 10**9))
    found = asked("--classes", "1M")
    assert found["memory"]["available"] == 42 * 10**9
    assert found["taken"][0] == "rates: those of NVIDIA H200, as none are measured on NVIDIA A100-SXM4-40GB"
    assert asked("--classes", "1M", "--memory", "10")["memory"]["available"] == 10 * 10**9
    assert asked("--classes", "1M", "--device", "h200")["memory"]["available"] == 141 * 10**9
    monkeypatch.setattr(device, "accelerator", lambda: ("NVIDIA H200", 150 * 10**9))
    assert asked("--classes", "1M")["taken"][0] == "rates: those of NVIDIA H200"
    monkeypatch.setattr(device, "accelerator", lambda: None)
    found = asked("--classes", "1M")
    assert found["memory"]["available"] == 80 * 10**9
    assert found["taken"][0] == "rates: those of NVIDIA H200, as no accelerator was found here"


def test_the_accelerator_is_found_where_there_is_one():
    found = device.accelerator()
    assert (found is not None) == torch.cuda.is_available()
    assert found is None or found[1] == torch.cuda.mem_get_info()[1]


def test_a_plan_for_a_named_machine_needs_no_torch():
    script = (
        "import sys; from proxymetric.cli import main\n"
        "sys.argv = ['proxymetric', 'plan', '--classes', '1M', '--device', 'H200']\n"
        "try: main()\n"
        "finally: print('HEAVY', sorted({'torch', 'numpy'} & set(sys.modules)))"
    )
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert answer.stdout.splitlines()[-1] == "HEAVY []", answer
    assert "it fits" in answer.stdout


def test_help_has_an_example_that_runs():
    examples = re.findall(r"proxymetric (plan -.+)", proxymetric("plan", "--help").out)
    assert len(examples) == 2
    for words in examples:
        assert proxymetric(*words.split()).code == 0
