"""The collected results of a study in one file: a line for each run, sorted by name, so that git merges by line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from proxymetric.system.files import replacing

RUNS_FILE = "runs.jsonl"
"""the collected results of a study, a line for each run"""
NAME = "run"
"""key of a line that holds the name of the run; the others are those of the result"""


def as_line(name: str, result: Mapping[str, Any]) -> str:
    """The line of a run, without its end.

    >>> as_line("vcpa-seed0", {"seconds": 1.5})
    '{"run": "vcpa-seed0", "seconds": 1.5}'
    """
    return json.dumps({NAME: name, **result}, ensure_ascii=False)


def read_runs(folder: Path) -> dict[str, dict[str, Any]]:
    """The collected results of a folder, by the name of the run; none if it has no such file.

    Raises:
        ValueError: a line is damaged, or two lines have the same run.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> write_runs(folder, {"vcpa-seed1": {"seconds": 2.0}, "vcpa-seed0": {"seconds": 1.5}})
        >>> read_runs(folder)
        {'vcpa-seed0': {'seconds': 1.5}, 'vcpa-seed1': {'seconds': 2.0}}
    """
    file = folder / RUNS_FILE
    runs: dict[str, dict[str, Any]] = {}
    if not file.is_file():
        return runs
    lines: dict[str, int] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        try:
            result = json.loads(line)
            name = result.pop(NAME)
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
            name = None
        if not isinstance(name, str):
            raise ValueError(
                f"results: got {file} with a damaged line {number}, expected the name and the result of a run: collect "
                "it again"
            )
        if name in runs:
            raise ValueError(
                f"results: got {file} with the run {name} in lines {lines[name]} and {number}, expected one line for "
                "each run: delete one of them"
            )
        runs[name], lines[name] = result, number
    return runs


def write_runs(folder: Path, runs: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the collected results of a folder, sorted by the name of the run; the file is replaced as a whole.

    Raises:
        NotSaved: the file could not be written.
    """
    with replacing(folder / RUNS_FILE) as temporary:
        text = "".join(as_line(name, runs[name]) + "\n" for name in sorted(runs))
        temporary.write_text(text, encoding="utf-8", newline="\n")
