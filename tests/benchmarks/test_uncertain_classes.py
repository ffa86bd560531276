"""The benchmark of "none of these" with a run that knows its uncertainty runs at a tiny size."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent.parent / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    """The benchmark with 24 characters: 16 to train on and to hold out, 4 new ones, 4 that nobody has seen."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import uncertain_classes

    for name, value in {"CHARACTERS": 24, "TRAINING": 16, "NEW": 4, "SHOWN": 1}.items():
        monkeypatch.setattr(uncertain_classes, name, value)
    yield uncertain_classes
    for name in ("uncertain_classes", "common"):
        sys.modules.pop(name, None)


def check(record, rates):
    for way in ("with uncertainty", "without"):
        assert set(record[way]) == {f"{rate:g}" for rate in rates}
        for shares in record[way].values():
            assert len(shares) == 3
            assert all(0 <= share <= 1 for share in shares.values())
    lowest, highest = record["offsets, lowest and highest"]
    assert lowest <= highest


@pytest.mark.release
def test_a_run_is_measured_and_what_the_verbs_say_is_recorded(benchmark, tmp_path, monkeypatch):
    out = tmp_path / "uncertain.json"
    monkeypatch.setattr(sys, "argv", ["uncertain_classes.py", "--seeds", "1", "--epochs", "1", "--out", str(out)])
    benchmark.main()
    record = json.loads(out.read_text())
    assert (record["benchmark"], record["epochs"], len(record["runs"])) == ("uncertain-classes", 1, 1)
    check(record["runs"][0], benchmark.RATES)
    assert record["runs"][0]["uncertainty"], "VCPA has an uncertainty of its classes"
    said = record["runs"][0]["said"]
    assert set(said) == {"index", "add-class", "identify"}
    assert len([line for line in said["identify"] if ".png" in line]) >= 3, "an image of each kind"
    assert not [line for line in said["identify"] if str(tmp_path) in line]
