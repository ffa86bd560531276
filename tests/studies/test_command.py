"""`pm.study`: what a Python user gets, and `--json`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import proxymetric as pm
from terminal import proxymetric

STUDY = Path(__file__).resolve().parent.parent.parent / "studies" / "glyphs.toml"


def test_a_dry_run_lists_the_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = pm.study(STUDY, dry_run=True)
    assert [run.status for run in result.runs] == ["to do"] * len(result.runs)
    assert result.code == 0
    answer = proxymetric("study", STUDY, "--dry-run", "--json")
    assert answer.code == 0, answer
    assert json.loads(answer.out) == result.as_dict()
    listed = proxymetric("study", STUDY, "--dry-run").out
    assert all(run.name in listed for run in result.runs)
    with pytest.raises(ValueError, match="--jobs: got 0"):
        pm.study(STUDY, jobs=0)
