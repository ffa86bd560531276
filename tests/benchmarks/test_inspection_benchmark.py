"""The benchmark of `inspect` puts in the faults that it says, and counts them."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from proxymetric.data import open_data

FOLDER = Path(__file__).resolve().parent.parent.parent / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(FOLDER))
    # By its file: `inspection` may also be the package of the tests of inspect.
    spec = importlib.util.spec_from_file_location("inspection_benchmark", FOLDER / "inspection.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "inspection_benchmark", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "FILE", tmp_path / "inspection.json")
    monkeypatch.setattr(module, "COPIED", 0.05)
    yield module
    sys.modules.pop("common", None)


def test_the_faults_are_those_that_are_counted(benchmark, photos, tmp_path):
    images = open_data(photos)
    truth = benchmark.damaged(images, tmp_path / "copies", seed=0)
    assert len(truth.images) == 84
    changed = truth.images.labels[:80] != images.labels
    assert changed.sum() == 4
    assert truth.sources[:80].tolist() == list(range(80))
    assert (truth.right_labels[80:] == images.labels[truth.sources[80:]]).all()
    assert (truth.images.labels[80:] != truth.right_labels[80:]).sum() == 2
    again = benchmark.damaged(images, tmp_path / "copies", seed=0)
    assert np.array_equal(again.images.labels, truth.images.labels)


@pytest.mark.release
def test_the_record(benchmark, photos, tmp_path):
    options = argparse.Namespace(
        data=photos, layout="auto", backbone="small", weights=None, size=16, batch=16, seeds=1, trained_seeds=0,
        epochs=1, foreign=photos, foreign_count=3, work=tmp_path / "work",
    )  # fmt: skip
    benchmark.measure_cub(options, {})
    part = json.loads((tmp_path / "inspection.json").read_text())["cub"]
    assert part["untrained"]["0"]["wrong labels"]["put in"] == 4 + 2
    duplicates = part["untrained"]["0"]["duplicates"]
    assert duplicates["put in"] == 4
    assert 0 <= duplicates["recall"] <= 1
    assert part["foreign"]["lonely"] == 0, "a photo that is there already is not lonely"
    benchmark.measure_cars(options, {})
    record = json.loads((tmp_path / "inspection.json").read_text())
    assert record["cub"] == part
    assert record["cars"]["pairs of equal files with two labels"] == 0
