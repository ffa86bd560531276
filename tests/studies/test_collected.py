"""The file of collected results: what is written is read, and a damaged line is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from proxymetric.studies import parse
from proxymetric.studies.collected import RUNS_FILE, as_line, read_runs, write_runs
from proxymetric.studies.results import stored_results

ROOT = Path(__file__).resolve().parent.parent.parent
GOOD = as_line("b-seed0", {"seconds": 1.5})


def test_what_is_written_is_read_and_sorted(tmp_path):
    runs = {"b-seed1": {"x": 0.1 + 0.2}, "a/é-seed0": {"x": [1e-7, None, "Zürich\u2028"]}, "b-seed0": {"x": {}}}
    write_runs(tmp_path, runs)
    assert read_runs(tmp_path) == runs
    lines = (tmp_path / RUNS_FILE).read_bytes().split(b"\n")
    assert [json.loads(line)["run"] for line in lines[:-1]] == sorted(runs)
    assert lines[-1] == b""
    assert [file.name for file in tmp_path.iterdir()] == [RUNS_FILE], "no temporary file is left"


def test_one_more_run_is_one_more_line(tmp_path):
    write_runs(tmp_path, {"a-seed0": {"x": 1}, "c-seed0": {"x": 3}})
    before = (tmp_path / RUNS_FILE).read_text().splitlines()
    write_runs(tmp_path, read_runs(tmp_path) | {"b-seed0": {"x": 2}})
    after = (tmp_path / RUNS_FILE).read_text().splitlines()
    assert [before[0], as_line("b-seed0", {"x": 2}), before[1]] == after


@pytest.mark.parametrize(
    "line",
    [b"", b"[1]", b'"run"', b'{"seconds": 1}', b'{"run": 3}', b'{"run": "a"', b'{"run": "\xff"}', b"<<<<<<< HEAD"],
)
def test_a_damaged_line_is_named(line, tmp_path):
    content = GOOD.encode() + b"\n" + line + b"\n" + GOOD.encode().replace(b"b-", b"c-") + b"\n"
    (tmp_path / RUNS_FILE).write_bytes(content)
    with pytest.raises(ValueError, match=rf"results: got .*{RUNS_FILE} with a damaged line 2, expected the name and"):
        read_runs(tmp_path)


def test_two_lines_of_a_run_are_named(tmp_path):
    lines = [GOOD, as_line("c-seed0", {}), GOOD.replace("1.5", "2.5")]
    (tmp_path / RUNS_FILE).write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match=r"with the run b-seed0 in lines 1 and 3, expected one line for each run"):
        read_runs(tmp_path)


def test_a_run_that_is_no_result_is_named(tmp_path):
    study = parse({"name": "s", "data": {"g": {"path": "glyphs"}}, "rows": [{"name": "a"}]})
    (task,) = study.tasks()
    run = read_runs(ROOT / "results" / "cub-160")["vcpa-seed0"]
    write_runs(tmp_path, {task.name: run, "of a row that was renamed": {}})
    assert stored_results(study, tmp_path)[task.name].rows == run["rows"]
    for changes, said in (
        ({"rows": {}}, "got a result without scores"),
        ({"rows": [1]}, "rows: got"),
        ({"schema": 99}, "got schema 99"),
    ):
        write_runs(tmp_path, {task.name: run | changes})
        with pytest.raises(ValueError, match=rf"{RUNS_FILE}, run {task.name}: {said}"):
            stored_results(study, tmp_path)


def test_the_stored_results_are_few_sorted_files():
    assert len([file for file in (ROOT / "results").rglob("*") if file.is_file()]) <= 200
    files = sorted((ROOT / "results").rglob(RUNS_FILE))
    assert files
    for file in files:
        runs = read_runs(file.parent)
        assert list(runs) == sorted(runs), file
        assert file.read_text(encoding="utf-8") == "".join(as_line(name, run) + "\n" for name, run in runs.items())
