"""The benchmarks of the training step and of files run at tiny sizes on a CPU, and write what they measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


def recorded(script: str, file: Path, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, ROOT / "benchmarks" / script, "--tiny", "--out", file, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(file.read_text())


@pytest.mark.release
def test_the_training_loop_against_a_bare_one(tmp_path: Path) -> None:
    record = recorded("train_step.py", tmp_path / "a.json")
    loop = record["loop"]
    assert loop["steps"] == 8  # two rounds of four steps
    assert min(loop[side]["images/s"]["median"] for side in ("trainer", "bare")) > 0
    assert loop["images/s, trainer to bare"]["median"] > 0
    assert not record["criterion"]["proxy-anchor"]["keeps a memory"]
    assert record["criterion"]["soft-triple"]["keeps a memory"]
    methods = record["criterion"].values()
    assert all(each["ms alone"]["median"] > 0 for each in methods)
    assert all(("share alone" in each) != each["keeps a memory"] for each in methods)


def test_files_against_a_data_loader(tmp_path: Path) -> None:
    record = recorded("files.py", tmp_path / "a.json", "--workers", "0")
    for cache in ("none", "memory"):
        found = record[cache]["0 workers"]
        assert found["images/s, feed to DataLoader"]["median"] > 0
        assert len(found["feed"]["images/s"]["lowest and highest"]) == 2
    assert "reduced" in record["none"]["0 workers"]
    for use in ("frozen features", "embed", "evaluation"):
        assert record["networks"][use]["images/s, ours to bare"]["median"] > 0


@pytest.mark.release
def test_the_kernels_of_tunings(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    command = [sys.executable, ROOT / "benchmarks" / "tuning_kernels.py", "--out", file, "--steps", "1"]
    done = subprocess.run([*command, "--sides", "vptsp-g"], capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stdout + done.stderr
    done = subprocess.run([*command, "--sides", "full"], capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stdout + done.stderr
    sides = json.loads(file.read_text())["by batch"]["16"]
    assert sides.keys() == {"full", "vptsp-g"}, "a second run adds to the file"
    for side in sides.values():
        assert side["kernels_ms"] == pytest.approx(sum(kind["ms"] for kind in side["kinds"].values()), abs=0.05)
    runs = [sides[side]["kinds"]["attention"]["launches"] for side in ("full", "vptsp-g")]
    assert runs[1] == 2 * runs[0], "VPTSP runs its network twice"


@pytest.mark.release
def test_the_memory_of_divided_proxies(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "benchmarks" / "divided_proxies.py", "--classes", "200000", "--dim", "64"]
    done = subprocess.run([*command, "--out", tmp_path / "a.json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "a.json").read_text())
    first, other = record["processes, in tables"]
    assert first.keys() - other.keys() == {"size of the checkpoint"}
    assert {"all proxies, then a part", "a part alone", "a checkpoint"} == other.keys()
    assert 3.0 <= first["size of the checkpoint"] < 3.2
