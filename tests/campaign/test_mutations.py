"""Mutants of command lines, recipes, CSV files and stored files: each runs, or is refused in a sentence; nothing of the
user's changes.

`PROXYMETRIC_TEST_SHARE=1 pytest tests/campaign/test_mutations.py -rP` runs all of them, and prints how many ended how.
"""

from __future__ import annotations

import collections
import os
import random
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from campaign_cases import SEED, SHARE, contents
from mutations import Words, file_of, line_of, recipe_of, table_of, write_inputs
from terminal import proxymetric

pytestmark = pytest.mark.slow
MUTANTS = round(500 * SHARE)
"""of each kind"""
CPU_SECONDS = 60
KINDS: dict[str, Callable[[random.Random, Path], Words]] = {
    "command lines": line_of,
    "recipes": recipe_of,
    "CSV files": table_of,
    "stored files": file_of,
}
USERS = ("photos/", "table.csv", "cameras.csv", "recipe.toml", "study.toml", "new.png")
"""what no verb may change, whatever it does"""
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class Hang(BaseException):
    """A mutant took too long."""


class Watch:
    """Which files a mutant opens: whether it gets to its inputs, and what it writes elsewhere."""

    def __init__(self) -> None:
        self.root: str | None = None
        self.opened, self.elsewhere = set[str](), list[str]()
        sys.addaudithook(self._see)

    def _see(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.root is None or event not in ("open", "sqlite3.connect"):
            return
        file = arguments[0]
        if not isinstance(file, str | bytes | os.PathLike):
            return
        path = os.path.abspath(os.fsdecode(file))
        if path.startswith(self.root):
            self.opened.add(path.removeprefix(self.root))
        elif event == "open" and (arguments[2] or 0) & WRITING and not path.startswith(os.environ["PROXYMETRIC_CACHE"]):
            self.elsewhere.append(path)


@pytest.fixture(scope="module")
def watch() -> Iterator[Watch]:
    watch = Watch()
    yield watch
    watch.root = None  # a hook cannot be removed


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def _stop(*_: object) -> None:
    raise Hang


def end_of(words: Words, watch: Watch, root: Path) -> tuple[str, str]:
    """Run a mutant: how it ends, and what is said."""
    watch.root, watch.opened, watch.elsewhere = f"{root}{os.sep}", set(), []
    signal.signal(signal.SIGPROF, _stop)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        answer = proxymetric(*words)
    except Hang:
        return "hang", traceback.format_exc()
    except Exception:
        return "traceback", traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        watch.root = None
    said = answer.err
    if watch.elsewhere:
        return "wrote elsewhere", f"{watch.elsewhere}"
    if answer.code == 0:
        return "ran", said
    if answer.code == 2:
        return "usage", said
    if "Traceback" in said or not any(sign in said for sign in ("proxymetric: ", "left out, cannot be read: ")):
        return "no sentence", f"{answer}"
    return ("refused behind" if watch.opened else "refused before"), said


@pytest.mark.parametrize("kind", KINDS)
def test_a_mutant_runs_or_is_refused_in_a_sentence(inputs, watch, tmp_path, monkeypatch, kind):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    ends, failures = collections.Counter[str](), list[str]()
    for number in range(MUTANTS):
        root = tmp_path / str(number)
        shutil.copytree(inputs, root)
        (root / "out").mkdir()
        monkeypatch.chdir(root)
        words = KINDS[kind](random.Random(f"{SEED} {kind} {number}"), root)
        before = contents(root)
        end, said = end_of(words, watch, root)
        after = contents(root)
        ends[end] += 1
        changed = [name for name in before if after.get(name) != before[name]]
        if "--resume" in words and end == "refused behind":  # a run that went on, and could not be scored at the end
            changed = [name for name in changed if not name.startswith("run/")]
        if end in ("traceback", "hang", "no sentence", "wrote elsewhere"):
            failures.append(f"{kind} {number}: {end}: {words}\n{said}")
        elif lost := [name for name in changed if end != "ran" or name.startswith(USERS)]:
            failures.append(f"{kind} {number}: {end}, but changed {lost}: {words}\n{said}")
        shutil.rmtree(root)
    print(kind, dict(ends))
    assert not failures, f"{len(failures)} of {MUTANTS}:\n" + "\n\n".join(failures)
