"""Run the command line in this process, and capture what it prints and how it ends."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from no_forms import no_forms
from proxymetric.cli import main

TINY = (
    "--backbone", "small", "--size", "16", "--dim", "8", "--batch", "16", "--epochs", "1", "--device", "cpu",
    "--set", "view.resize=16", "--set", "data.workers=0", "--set", "train.metrics=['R@1', 'MAP@R']",
)  # fmt: skip
"""a run of the `photos` in a fraction of a second"""


class Answer(NamedTuple):
    code: int
    out: str
    err: str


def proxymetric(*words: object) -> Answer:
    """Run `proxymetric WORDS`; a traceback is an exception here."""
    out, err = io.StringIO(), io.StringIO()
    argv = ["proxymetric", *(str(word) for word in words)]
    with mock.patch.object(sys, "argv", argv), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
            code: object = 0
        except SystemExit as end:
            code = end.code or 0
    assert isinstance(code, int)
    return Answer(code, out.getvalue(), err.getvalue())


def train(data: Path | str, out: Path, *words: object) -> Answer:
    """Run `proxymetric train` for a tiny run; `words` override its options."""
    return proxymetric("train", "--data", data, "--out", out, *TINY, *words)


def finished_run(data: Path, folder: Path, *words: object) -> Path:
    """A tiny finished run without a report and the rows of the closed forms."""
    session = "proxymetric.runs.session"
    with (
        mock.patch(f"{session}.draw_report", return_value=None),
        mock.patch(f"{session}.closed_form_rows", no_forms),
    ):
        answer = train(data, folder, *words)
    assert answer.code == 0, answer
    return folder


def refused(answer: Answer, *said: str) -> None:
    """One sentence at the end of the error stream that says all of `said`, and exit code 1."""
    assert answer.code == 1, answer
    assert "Traceback" not in answer.err
    assert "Errno" not in answer.err
    _, begin, sentence = f"\n{answer.err}".rpartition("\nproxymetric: ")
    assert begin, answer.err
    for part in said:
        assert part in sentence, answer.err


def bytes_of(folder: Path) -> dict[str, bytes]:
    """Every file of a folder: what must not change."""
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
