"""An index with an engine of its own is whole after a kill at any moment: in its state before or after the change."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from proxymetric.search import Index
from proxymetric.search.batches import new_items
from proxymetric.search.engines.exact import Exact
from proxymetric.search.folder_sync import open_to_rebuild
from training_runs import forks

COUNT, DIM = 120, 8
IDS = [f"{number:03d}" for number in range(COUNT)]
EVENTS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "sqlite3.connect", "shutil.rmtree")
"""audit events of operations on files"""


def vectors(seed: int, dim: int = DIM) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(COUNT, dim)).astype(np.float32))


def make(place: Path, engine: str) -> None:
    """Index 100 vectors, in a new index or in one that a killed process has left empty."""
    target = place / "a.index"
    is_there = (target / "manifest.json").exists()
    index = Index.open(target) if is_there else Index.create(target, DIM, engine=engine, map="none")
    if not len(index):
        index.add(IDS[:100], vectors(0)[:100])


def update(place: Path, engine: str) -> None:
    """Add 20, replace 10 and delete 10 in one step."""
    batch = new_items(DIM, IDS[90:], vectors(1)[90:], None, None, None)
    Index.open(place / "a.index").change([batch], deleted=IDS[:10], renew=True)


def rebuild(place: Path, engine: str) -> None:
    """Replace all vectors by those of another model, which has other dimensions."""
    batch = new_items(DIM + 2, IDS, vectors(2, DIM + 2), None, None, None)
    open_to_rebuild(Index, place / "a.index").replace_all([batch], dim=DIM + 2, model="another")


CHANGES = {"index": make, "update": update, "rebuild": rebuild}


def contents(place: Path) -> list:
    """What an index holds; its files are whole, and its engine gives the answers of the exact one."""
    if not (place / "a.index" / "manifest.json").exists():
        return []
    index = Index.open(place / "a.index")
    index.verify()
    if len(index):
        mask = index.store.state.is_living
        found = index.engine.search(index.vectors, 10, mask)[1]
        assert torch.equal(
            found, Exact(torch.from_numpy(index.store.state.arrays["float32"])).search(index.vectors, 10, mask)[1]
        )
    return [(item, index.vector(item).tolist()) for item in index.ids]


def _work(steps: list[str], place: Path, engine: str, fatal: int, answer: Path) -> None:
    """Make changes, write what the index holds at the steps `look`, and how many operations on files a change needed.

    This process is killed at its `fatal`-th operation on a file of the index.
    """
    torch.set_num_threads(1)
    operations, needed, seen = 0, 0, []

    def watch(event: str, arguments: tuple) -> None:
        nonlocal operations
        if event in EVENTS and isinstance(arguments[0], str | Path) and str(arguments[0]).startswith(str(place)):
            operations += 1
            if operations == fatal:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    for step in steps:
        if step == "look":
            seen.append(contents(place))
        else:
            operations = 0
            CHANGES[step](place, engine)
            needed = operations
    answer.write_bytes(pickle.dumps((seen, needed)))


def work(steps: list[str], place: Path, engine: str, fatal: int = -1) -> tuple[int, list, int]:
    """Exit code, states and operations of a process."""
    answer = place.with_name("answer")
    process = forks.Process(target=_work, args=(steps, place, engine, fatal, answer), daemon=True)
    process.start()
    process.join(120)
    assert process.exitcode is not None
    if process.exitcode:
        return process.exitcode, [], 0
    return 0, *pickle.loads(answer.read_bytes())


@pytest.mark.parametrize(
    ("engine", "change", "shares"),
    [
        ("exact", "update", [0.5]),
        ("faiss", "update", [0.5]),
        *(
            pytest.param(engine, change, np.linspace(0, 1, 7), marks=pytest.mark.slow)
            for engine in ("exact", "faiss")
            for change in CHANGES
        ),
    ],
)
def test_killed_at_any_moment(engine, change, shares, tmp_path):
    pytest.importorskip("faiss", reason="the extra is not installed")
    place, start = tmp_path / "place", tmp_path / "start"
    place.mkdir()
    if change != "index":
        assert work(["index"], place, engine)[0] == 0
    shutil.copytree(place, start)

    def restore() -> None:
        shutil.rmtree(place)
        shutil.copytree(start, place)

    code, states, operations = work(["look", change, "look"], place, engine)
    assert code == 0
    before, after = states
    assert before != after
    are_after = []
    for share in shares:
        restore()
        fatal = 1 + round(share * (operations - 1))
        code, *_ = work([change], place, engine, fatal)
        assert code == -signal.SIGKILL, f"at {fatal} of {operations}"
        code, states, _ = work(["look", change, "look"], place, engine)
        assert code == 0, f"killed at operation {fatal} of {operations}"
        assert states[0] in (before, after), f"killed at operation {fatal} of {operations}"
        assert states[1] == after
        are_after.append(states[0] == after)
    assert are_after == sorted(are_after), "before, and from some moment on after"
