"""Two processes get the same result as one process with the same global batch."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from groups import all_end, free_port, place
from proxymetric.system.checkpoint import Checkpoint
from proxymetric.system.files import read_json
from proxymetric.training.process_group import ProcessGroup
from training_runs import Process, command, forks, kill_in_epoch, records, run, same_run, state

pytestmark = pytest.mark.usefixtures("only_training")
STILL = {"encoder__freeze_bn": True, "train__epochs": 1, "train__warmup": 0, "train__lr": 1e-4}
"""frozen BatchNorm, because two half batches and a whole one differ; a rate at which rounding does not grow"""


class Pair:
    """Both processes of a group, as `torchrun` would start them; `other`: the words of the second, if they differ."""

    def __init__(self, words: list[str], texts: Path, other: list[str] | None = None) -> None:
        port, texts = free_port(), texts.with_name("text")
        both = (words, words if other is None else other)
        self.ranks = [Process(both[rank], texts.with_suffix(f".{rank}"), **place(rank, 2, port)) for rank in (0, 1)]

    def running(self) -> bool:
        return all(rank.running() for rank in self.ranks)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to one process only: both must react."""
        self.ranks[1].send(number)

    def finish(self, code: int = 0) -> Pair:
        codes = [rank.finish() for rank in self.ranks]
        assert codes == [code, code], self.ranks[0].text() + self.ranks[1].text()
        assert "deprecated" not in self.ranks[0].text(), "no warning that only a developer could act on"
        return self


def close(two: Path, one: Path) -> None:
    """Check that parameters, statistics and optimiser state agree, up to the order of sums."""
    found, expected = (Checkpoint.read(folder / "last.safetensors").tensors for folder in (two, one))
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=2e-3, atol=2e-5, msg=name)
    assert [r["epoch"] for r in records(two)] == [r["epoch"] for r in records(one)], "only one of them writes"
    losses = [[record["loss"] for record in state(folder)["curve"][1:]] for folder in (two, one)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ("recipe", "train.lr: got 0.5 in process 1 and 0.0001 in process 0, expected the same command"),
        ("images", "whose files differ; only one of them has the class "),
        ("folder", "which process 1 does not share with process 0; expected a folder on a disk"),
    ],
)
def test_processes_that_were_not_started_alike_are_refused(photos, tmp_path, changed, sentence) -> None:
    data, out, settings = photos, tmp_path / "run", dict(STILL)
    if changed == "recipe":
        settings["train__lr"] = 0.5
    elif changed == "images":
        data = tmp_path / "photos"
        shutil.copytree(photos, data)
        one = min(path for path in data.iterdir() if path.is_dir())
        one.rename(one.with_name("zzz"))
    else:
        out = tmp_path / "elsewhere"
        out.mkdir()
    pair = Pair(command(photos, tmp_path / "run", **STILL), tmp_path / "run", command(data, out, **settings))
    for rank, code in zip(pair.ranks, [each.finish() for each in pair.ranks], strict=True):
        text = " ".join(rank.text().split())
        assert code == 1, text
        assert sentence in text
        assert "Traceback" not in text
    assert not list((tmp_path / "run").rglob(".shared*"))


def test_images_that_only_the_second_process_could_not_read_are_reported(photos, tmp_path) -> None:
    damaged = tmp_path / "photos"
    shutil.copytree(photos, damaged)
    broken = sorted(path for path in damaged.rglob("*") if path.is_file())
    for path in broken:
        path.write_bytes(b"\0" * path.stat().st_size)
    settings = STILL | {"data__validation": 0.0}
    out = tmp_path / "run"
    Pair(command(photos, out, **settings), out, command(damaged, out, **settings)).finish()
    result = read_json(out / "result.json")
    assert result["bad_images"], "half of the images were junk for the second process"
    assert result["machine"]["processes"] == 2


def test_the_images_that_batch_norm_sees_are_said(photos, tmp_path) -> None:
    out, settings = tmp_path / "run", STILL | {"data__validation": 0.0}
    pair = Pair(command(photos, out, **settings | {"encoder__freeze_bn": False}), out).finish()
    assert "BatchNorm normalises the" in pair.ranks[0].text()
    assert "BatchNorm normalises the" not in pair.ranks[1].text(), "only one of them writes"
    still = Pair(command(photos, tmp_path / "still", **settings), out).finish()
    assert "BatchNorm normalises the" not in still.ranks[0].text()


@pytest.mark.slow
def test_torchrun_equals_one_process(photos: Path, tmp_path: Path) -> None:
    # Without held-out classes there is no evaluation, and no report to wait for.
    out, all_classes = tmp_path / "two", STILL | {"data__validation": 0.0}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}"]
    done = subprocess.run(
        [*launcher, "-m", "proxymetric", *command(photos, out, **all_classes)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    one = run(photos, tmp_path / "one", **all_classes)
    close(out, one.folder)
    untrained = run(photos, tmp_path / "untrained", **all_classes | {"train__lr": 0.0})
    first = "encoder.backbone.stages.0.0.weight"
    before, after = (Checkpoint.read(folder / "last.safetensors").tensors[first] for folder in (untrained.folder, out))
    assert (after - before).abs().max() > 1e-4, "it moved by more than the tolerance"
    assert {path.name for path in out.iterdir()} == {"run.json", "result.json", "log.jsonl", "last.safetensors"}


KINDS: dict[str, dict[str, Any]] = {
    "pairs of all ranks": {"method": "triplet"},
    "rows that step themselves": {"loss__touched": "batch"},
    "accumulated": {"train__accumulate": 2, "train__batch": 4},
    "frozen": {"train__frozen": True},
    "nested": {"loss__nested": [2, 5, 8]},
    "scale and shift": {"encoder__freeze_bn": "statistics"},
    "evaluated on the way": {"train__evaluate_steps": 3},
    "proxies from a pool": {"method": "ccp", "train__evaluate_steps": 2, "loss__patience": 1, "train__per_class": 2},
}
SLOW = ("nested", "scale and shift", "accumulated", "frozen")


@pytest.mark.parametrize("kind", [pytest.param(k, marks=[pytest.mark.slow] * (k in SLOW)) for k in KINDS])
def test_two_processes_equal_one(kind: str, photos: Path, tmp_path: Path) -> None:
    settings = STILL | KINDS[kind]
    Pair(command(photos, tmp_path / "two", **settings), tmp_path).finish()
    close(tmp_path / "two", run(photos, tmp_path / "one", **settings).folder)


def test_images_that_one_of_them_cannot_read(photos: Path, tmp_path: Path) -> None:
    """The parts have unequal sizes, or one is empty: a batch of two has one image for each process."""
    broken = shutil.copytree(photos, tmp_path / "photos")
    for c in range(10):
        (broken / f"class{c}" / "3.png").write_text("no picture")
    settings = STILL | {"train__batch": 2, "data__validation": 0.5}
    Pair(command(broken, tmp_path / "two", **settings), tmp_path).finish()
    one = run(broken, tmp_path / "one", **settings)
    assert len(one.result.bad_images) == 10
    close(tmp_path / "two", one.folder)


def test_a_process_that_is_lost_is_said(photos: Path, tmp_path: Path) -> None:
    out, settings = tmp_path / "two", {"train__epochs": 3, "train__warmup": 0, "train__save_every": 1}
    pair = kill_in_epoch(lambda: Pair(command(photos, out, **settings), tmp_path), out, signal.SIGKILL, epoch=0)
    assert pair.ranks[0].finish() == 1
    said = " ".join(pair.ranks[0].text().split())
    assert "proxymetric: processes: another process of the group has gone" in said
    assert "--resume continues a run from its last checkpoint" in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_asked_to_stop_one_of_them_stops_both(photos: Path, tmp_path: Path) -> None:
    """With BatchNorm, so that the running averages of the processes differ until an evaluation."""
    out, settings = tmp_path / "two", {"train__epochs": 1, "train__warmup": 0, "train__save_every": 1}
    kill_in_epoch(lambda: Pair(command(photos, out, **settings), tmp_path), out, signal.SIGINT, epoch=0).finish(130)
    assert not state(out)["done"]
    Pair(command(photos, out, "--resume", **settings), tmp_path).finish()
    Pair(command(photos, tmp_path / "straight", **settings), tmp_path).finish()
    same_run(out, tmp_path / "straight")


def _comes_and_goes(rank: int, ports: list[int]) -> None:
    torch.set_num_threads(1)
    for port in ports:
        os.environ |= place(rank, 2, port)
        # This thread keeps the interpreter's lock until it waits, so that the rare case occurs every time.
        sys.setswitchinterval(60)
        with contextlib.suppress(InterruptedError), ProcessGroup.joined() as world:
            _agrees_to_stop(world)
        sys.setswitchinterval(0.005)


def _agrees_to_stop(world: ProcessGroup) -> None:
    model = DistributedDataParallel(nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    world.any(True)
    raise InterruptedError(model)  # which keeps the model alive until the group is left


@pytest.mark.parametrize(
    ("size", "sentence"),
    [
        ("two", "WORLD_SIZE: got 'two' in the environment"),
        ("0", "got '0'"),
        ("4", "got 4 in the environment, without RANK"),
    ],
)
def test_half_of_the_variables_of_torchrun_is_refused(
    monkeypatch: pytest.MonkeyPatch, size: str, sentence: str
) -> None:
    """Some schedulers set WORLD_SIZE alone."""
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(ValueError, match=sentence), ProcessGroup.joined():
        pass


def test_who_leaves_does_not_wait_for_a_thread_that_waits_for_him() -> None:
    ports = [free_port() for _ in range(12)]
    all_end([forks.Process(target=_comes_and_goes, args=(rank, ports)) for rank in (0, 1)])


def test_what_one_refuses_all_refuse(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "letter.txt").write_text("mine")
    pair = Pair(command(photos, tmp_path / "taken"), tmp_path).finish(1)
    for rank in pair.ranks:
        assert "is not empty and holds no run" in rank.text()
        assert "Traceback" not in rank.text()
    pair = Pair(command(photos, tmp_path / "odd", train__batch=7), tmp_path).finish(1)
    assert "batch: got 7, expected a positive multiple of world=2" in pair.ranks[0].text()
