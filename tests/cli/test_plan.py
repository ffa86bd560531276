"""`proxymetric methods --plan` from the command line: what users type and what they see."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch

from planned import RECORD
from proxymetric.runs.planning import count, gigabytes
from proxymetric.system import device
from terminal import Answer, proxymetric, refused

FIVE_MILLION = ("methods", "--plan", "5_000_000", "--dim", "512", "--batch", "4096", "--devices", "8")


def asked(*words: object) -> dict[str, Any]:
    """The output of `proxymetric methods WORDS --json`."""
    answer = proxymetric("methods", *words, "--json")
    assert answer.code == 0, answer
    return json.loads(answer.out)


def test_where_nothing_helps_it_says_so():
    answer = proxymetric("methods", "--plan", "1M", "--memory", "0.001", "--device", "H200")
    assert answer.code == 0
    assert "it does not fit" in answer.out
    assert "no change that was tried makes it fit" in answer.out


@pytest.mark.parametrize("text", ["5_000_000", "5e6", "5M", "5m", "5000k", " 5000000 ", "5.0E6"])
def test_numbers_as_people_type_them(text):
    assert count("classes", text) == 5_000_000


@pytest.mark.parametrize("text", ["", "M", "0", "-3", "2.5", "1e99999999", "nan", "inf", "5 million", "5MM", "0x10"])
def test_what_is_no_whole_number_is_refused(text):
    with pytest.raises(ValueError, match=r"classes: got .* expected a whole number from 1 to 10\^12"):
        count("classes", text)


@pytest.mark.parametrize("text", ["", "0", "-1", "1e-10", "nan", "80GB", "1e999999999"])
def test_what_is_no_memory_is_refused(text):
    with pytest.raises(ValueError, match=r"memory: got .* expected a number of GB above 0"):
        gigabytes("memory", text)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--plan", "many"), ("classes: got 'many'", "5_000_000, 5e6 or 5M")),
        (("--dim", "0"), ("dim: got '0'", "whole number")),
        (("--per-class", "1.5"), ("per_class: got '1.5'",)),
        (("--memory", "lots"), ("memory: got 'lots'", "GB above 0")),
        (("--dtype", "bfloat"), ("dtype: got 'bfloat'", "float32, bfloat16", "did you mean 'bfloat16'?")),
        (("--optimizer", "adagrad"), ("optimizer: got 'adagrad'", "did you mean 'rowwise-adagrad'?")),
        (("--implementation", "Triton"), ("implementation: got 'Triton'", "did you mean 'triton'?")),
        (("--touched", "some"), ("touched: got 'some'", "expected 'all', 'batch' or a number above 0 and below 1")),
        (("--touched", "1.5"), ("touched: got '1.5'", "above 0 and below 1")),
        (("--touched", "batch", "--devices", "2"), ("devices: got 2 with touched=batch", "expected 1, or touched=all")),
        (("proxy-anker",), ("method: got 'proxy-anker'", "did you mean 'proxy-anchor'?")),
        (("triplet",), ("method: got 'triplet'", "has no proxies", "expected one of proxy-anchor")),
        (("proxy-isa",), ("method: got 'proxy-isa'", "plan its base")),
        (("arcface", "--per-class", "2"), ("per_class: got 2", "arcface has one proxy", "expected 1")),
        (
            ("--device", "NVIDIA H20"),
            ("device: got 'NVIDIA H20'", "expected one of H200, cpu", "did you mean 'NVIDIA H200'?"),
        ),
        (("--devices", "2000"), ("devices: got 2000", "1000 classes")),
        (("--devices", "8", "--batch", "4"), ("batch: got 4", "each of the 8 devices")),
    ],
)
def test_a_mistake_is_one_sentence(words, said):
    refused(proxymetric("methods", "--plan", "1000", *words), *said)


def test_an_unknown_flag_names_the_nearest():
    answer = proxymetric("methods", "--plan", "1000", "--device-s", "3")
    assert answer.code == 2
    assert "--devices" in answer.err


def column(answer: Answer, part: str) -> str:
    """The last cell of a row of a table."""
    (line,) = [line for line in answer.out.splitlines() if re.match(rf"{part}  ", line)]
    return line.split()[-1]


def test_the_plan_as_people_read_it():
    answer = proxymetric(*FIVE_MILLION, "--memory", "80", "--device", "H200")
    assert answer.code == 0, answer
    assert not answer.err
    assert "5,000,000 classes of 1 proxy, 512-D, batches of 4,096, on 8 devices" in answer.out
    found = {part: column(answer, part) for part in ("proxies", "gradient", "optimizer state", "total")}
    assert found == {"proxies": "1.28", "gradient": "1.28", "optimizer state": "2.56", "total": "5.78"}
    assert "it fits: 5.78 of 80.00 GB; 74.22 GB are left for the encoder" in answer.out
    assert "triton, of 4,096 x 16,384 at a time" in answer.out
    took = RECORD["proxy-anchor"]["batch 4096"]
    # A device has 625,000 of the proxies: between the numbers of the slower and of the faster measurement.
    best, least = took["1000000 classes"]["triton"]["tflops"], took["131072 classes"]["chunked"]["tflops"]
    products = 6 * 4096 * 625_000 * 512 / 1e12
    low = f"{1e3 * products / best:.1f}".removesuffix(".0")
    assert f"{low} ms to {1e3 * products / least:.0f} ms" in answer.out
    assert f"7.86 TFLOP at {best} TFLOP/s (measured) at" in answer.out
    assert "8.96 GB at 4.8 TB/s (data sheet)" in answer.out
    assert "what would help" not in answer.out
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\x9b]", answer.out)


def test_what_does_not_fit_as_people_read_it(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    answer = proxymetric("methods", "--plan", "10M", "--memory", "80", "--device", "H200")
    assert "it does not fit: 82.77 of 80.00 GB; 2.77 GB too much" in answer.out
    assert re.search(r"--optimizer rowwise-adagrad\W+41\.85\W+yes", answer.out)
    assert re.search(r"--devices 2\W+41\.71\W+yes", answer.out)


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
    assert found["rates"]["implementations"]["plain"] == []
    assert {rate["file"] for rate in found["rates"]["implementations"]["triton"]} == {
        "benchmarks/results/losses-cuda.json"
    }
    assert found["rates"]["bandwidth"]["kind"] == "data sheet"


def test_auto_goes_by_the_device():
    assert asked("--plan", "1M", "--device", "H200")["asked"]["implementation"] == "triton"
    assert asked("--plan", "1M", "--device", "cpu", "--implementation", "auto")["asked"]["implementation"] == "chunked"


def test_the_accelerator_here_decides_where_nothing_is_said(monkeypatch):
    monkeypatch.setattr(device, "accelerator", lambda: ("NVIDIA A100-SXM4-40GB", 42 * 10**9))
    found = asked("--plan", "1M")
    assert found["memory"]["available"] == 42 * 10**9
    assert found["taken"][0] == "rates: measured on NVIDIA H200, because none were measured on NVIDIA A100-SXM4-40GB"
    assert asked("--plan", "1M", "--memory", "10")["memory"]["available"] == 10 * 10**9
    assert asked("--plan", "1M", "--device", "h200")["memory"]["available"] == 141 * 10**9
    monkeypatch.setattr(device, "accelerator", lambda: ("NVIDIA H200", 150 * 10**9))
    assert asked("--plan", "1M")["taken"][0] == "rates: measured on NVIDIA H200"
    monkeypatch.setattr(device, "accelerator", lambda: None)
    found = asked("--plan", "1M")
    assert found["memory"]["available"] == 80 * 10**9
    assert found["taken"][0] == "rates: measured on NVIDIA H200, because this machine has no GPU"


def test_the_accelerator_is_found_where_there_is_one():
    found = device.accelerator()
    assert (found is not None) == torch.cuda.is_available()
    assert found is None or found[1] == torch.cuda.mem_get_info()[1]


def test_help_has_an_example_that_runs():
    examples = re.findall(r"proxymetric (methods .*--plan .+)", proxymetric("methods", "--help").out)
    assert len(examples) == 2
    for words in examples:
        assert proxymetric(*words.split()).code == 0
