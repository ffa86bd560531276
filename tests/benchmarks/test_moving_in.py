"""The comparison of the guides' scripts: lines, differences, and a tiny run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).resolve().parent.parent.parent / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import moving_in

    yield moving_in
    for name in ("moving_in", "common"):
        sys.modules.pop(name, None)


def test_lines_are_those_of_code(benchmark):
    text = (FOLDER / "moving" / "pml_ours.py").read_text().splitlines()
    assert benchmark.lines_of("pml_ours") == sum(bool(line.strip()) for line in text) - 1, "all but the docstring"


def test_differences_of_losses_and_of_first_results(benchmark):
    labels = torch.arange(40) % 4
    vectors = torch.eye(4)[labels] + 0.01 * torch.arange(40)[:, None]
    run = {"curve": [2.0] * 12, "vectors": vectors}
    same = {"losses": 0.0, "first 10 losses": 0.0, "queries": 40, "queries that differ": 0}
    assert benchmark.differences(run, run, labels) == same
    other = {"curve": [2.0] * 10 + [2.5] * 2, "vectors": vectors[torch.randperm(40)]}
    found = benchmark.differences(run, other, labels)
    assert (found["losses"], found["first 10 losses"]) == (0.25, 0.0)
    assert found["queries that differ"] > 0


@pytest.mark.release
def test_the_record_of_a_tiny_run(benchmark, tmp_path, monkeypatch):
    pytest.importorskip("pytorch_metric_learning", reason="the other library is not installed")
    out = tmp_path / "moving.json"
    words = ["moving_in.py", "--rounds", "1", "--epochs", "1", "--classes", "12", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", words)
    benchmark.main()
    record = json.loads(out.read_text())
    pair = record["pairs"]["pytorch-metric-learning"]
    assert pair["sides"]["theirs"]["scores"] == pytest.approx(pair["sides"]["ours"]["scores"], abs=0.02)
    assert pair["in 32 bits"]["first 10 losses"] < 1e-4
    assert pair["in 64 bits"]["losses"] < 1e-10
    assert set(record["load"]) == {"before", "after"}
