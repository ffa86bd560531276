"""`result.json`: a written result can be read back, and an unreadable one is refused with one sentence."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from proxymetric.runs.result import OPTIONAL, SINCE_SCHEMA_2, Result, peak_memory
from proxymetric.studies.collected import read_runs

STORED = read_runs(Path(__file__).resolve().parents[2] / "results" / "cub-160")


def test_what_is_written_is_read(tmp_path):
    result = Result(recipe={"method": "mpa"}, rows={"trained encoder": {"R@1": 0.5}}, refit={"epochs": 2}, steps=3)
    result.write(tmp_path / "result.json")
    assert Result.read(tmp_path / "result.json") == result
    content = json.loads((tmp_path / "result.json").read_text())
    assert content["refit"] == {"epochs": 2}
    assert "uncertainty" not in content, "left out where there is none"


@pytest.mark.parametrize("key", ["rows", "recipe", "commit", "chosen_step"])
def test_a_missing_key_is_named(key, tmp_path):
    content = Result().as_dict()
    del content[key]
    (tmp_path / "result.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"result\.json: got no {key}, expected the result of a finished run"):
        Result.read(tmp_path / "result.json")


@pytest.mark.parametrize(("text", "sentence"), [
    ('{"schema": 3}', r"result\.json: got schema 3, expected at most 2; a newer proxymetric wrote it"),
    ("[1]", r"result\.json: got list, expected the result of a run"),
    ('{"schema": ', r"not valid JSON"),
])  # fmt: skip
def test_another_file_is_refused(text, sentence, tmp_path):
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(ValueError, match=sentence):
        Result.read(tmp_path / "result.json")


def test_results_of_schema_1_are_read():
    assert STORED
    for content in STORED.values():
        result = Result.from_dict(content)
        assert (result.schema, result.protocol) == (1, "held-out")
        assert result.scores == content["rows"]["trained encoder"]
    older = {key: value for key, value in Result().as_dict().items() if key not in OPTIONAL | SINCE_SCHEMA_2}
    assert Result.from_dict(older).chosen_step is None


def test_peak_memory_is_left_out_where_the_platform_does_not_tell(monkeypatch):
    assert peak_memory(torch.device("cpu"))["process_mb"] > 50
    monkeypatch.setitem(sys.modules, "resource", None)  # as on Windows
    assert peak_memory(torch.device("cpu")) == {}
