"""A full disk: one error message, earlier checkpoints stay intact, and the run can resume when there is space."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import proxymetric as pm
from proxymetric.system.files import NotSaved, read_json
from proxymetric.system.watcher import Silent, Tick
from terminal import TINY, bytes_of, proxymetric, refused, train

pytestmark = pytest.mark.usefixtures("only_training")

FEW = 40_000
"""bytes: the log and the JSON of a run fit, its models do not"""


def test_a_disk_that_is_full_from_the_beginning(photos, tmp_path):
    """A real process under a real limit; it saved enough to resume when there is space."""
    words = ["train", "--data", str(photos), "--out", str(tmp_path / "run"), *TINY]
    answer = subprocess.run(
        [sys.executable, "-m", "proxymetric", *words],
        capture_output=True, text=True, timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (FEW, FEW)),
    )  # fmt: skip
    assert answer.returncode == 1, answer
    assert "Traceback" not in answer.stderr
    best = tmp_path / "run" / "best.safetensors"
    assert f"could not save {best}: the disk is full" in answer.stderr
    assert "continue with --resume" in answer.stderr
    assert set(bytes_of(tmp_path / "run")) == {"run.json"}, "no half-written file is left"
    refused(proxymetric("evaluate", tmp_path / "run"), "has no checkpoint")
    again = train(photos, tmp_path / "run", "--resume")
    assert again.code == 0, again
    assert read_json(tmp_path / "run" / "result.json")["epochs"] == 1


class Filling(Silent):
    """Lets no file grow beyond `FEW` bytes once the second epoch has begun."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.saved: dict[str, bytes] = {}

    def tick(self, tick: Tick) -> None:
        if tick.epoch == 2 and not self.saved:
            self.saved = bytes_of(self.folder)
            resource.setrlimit(resource.RLIMIT_FSIZE, (FEW, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.fixture
def limit_restored() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


TWO = {
    "encoder.backbone": "small", "encoder.dim": 8, "view.size": 16, "view.resize": 16, "train.batch": 16,
    "train.epochs": 2, "train.device": "cpu", "data.workers": 0,
}  # fmt: skip


@pytest.mark.usefixtures("limit_restored")
def test_a_disk_that_fills_up_while_training(photos, tmp_path):
    whole = pm.train(photos, out=tmp_path / "whole", settings=TWO)
    room, filling = resource.getrlimit(resource.RLIMIT_FSIZE), Filling(tmp_path / "run")
    with pytest.raises(NotSaved, match=r"the disk is full.*the earlier file is unchanged.*continue with --resume"):
        pm.train(photos, out=tmp_path / "run", settings=TWO, watcher=filling)
    resource.setrlimit(resource.RLIMIT_FSIZE, room)
    after = bytes_of(tmp_path / "run")
    assert after["last.safetensors"] == filling.saved["last.safetensors"]
    assert after["best.safetensors"] == filling.saved["best.safetensors"]
    assert set(after) == set(filling.saved) - {".lock"}, "no half-written file is left"
    assert pm.load(tmp_path / "run").dim == 8
    again = pm.train(photos, out=tmp_path / "run", settings=TWO, resume=True)
    assert again.result.curve == whole.result.curve
    assert again.scores == whole.scores


@pytest.mark.usefixtures("limit_restored")
def test_a_disk_that_is_full_when_vectors_are_written(photos, tmp_path):
    run, file = tmp_path / "run", tmp_path / "all.safetensors"
    assert train(photos, run).code == 0
    assert proxymetric("embed", run, photos, "--out", file).code == 0
    earlier = file.read_bytes()
    room = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, room[1]))
    answer = proxymetric("embed", run, photos, "--out", file)
    # Remove the limit at once: it also applies to the file that the output of the tests may go to.
    resource.setrlimit(resource.RLIMIT_FSIZE, room)
    refused(answer, f"could not save {file}: the disk is full", "the earlier file is unchanged")
    assert file.read_bytes() == earlier
    assert not list(tmp_path.glob(".*.part"))
