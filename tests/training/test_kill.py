"""Killed by a real signal and resumed, a run ends bit for bit like an uninterrupted one."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from no_forms import no_forms
from training_runs import Process, command, kill_in_epoch, records, run, same_run, state, until

pytestmark = pytest.mark.slow

OFTEN = {"train__save_every": 1}
KINDS = {
    "rows that step themselves": {"loss__touched": "batch"},
    "in the batch, no parameters": {"method": "triplet"},
    "momentum": {"train__optimizer": "sgd", "train__lr": 0.01, "train__proxy_lr": 0.1},
    "accumulated": {"train__accumulate": 2, "train__batch": 4},
    "evaluated on the way": {"train__evaluate_steps": 3},
    "nested": {"method": "vcpa", "loss__nested": [2, 5, 8]},
}


@pytest.fixture(scope="module")
def straight(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Proxy-Anchor with AdamW, never interrupted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("proxymetric.runs.session.draw_report", lambda *args, **kwargs: None)
        patch.setattr("proxymetric.runs.session.closed_form_rows", no_forms)
        return run(photos, tmp_path_factory.mktemp("straight") / "run").folder


@pytest.fixture(scope="module")
def straight_with_rows(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with the rows of the closed forms, which `python -m proxymetric` computes and keeps in its state."""
    return run(photos, tmp_path_factory.mktemp("straight") / "run").folder


def written(file: Path) -> bool:
    return file.is_file() and file.stat().st_size > 0


class Started:
    """`python -m proxymetric`, as a person starts it."""

    def __init__(self, words: list[str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "proxymetric", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.text = ""

    def running(self) -> bool:
        return self.process.poll() is None

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def finish(self) -> int:
        self.text, _ = self.process.communicate(timeout=60)
        return self.process.returncode


class Group(Started):
    """The same with its child processes, which a batch system or a terminal signals all at once."""

    def send(self, number: signal.Signals) -> None:
        os.killpg(self.process.pid, number)

    def left(self) -> bool:
        try:
            os.killpg(self.process.pid, 0)
        except ProcessLookupError:
            return False
        return True


def test_killed_and_resumed_on_the_command_line(photos: Path, straight_with_rows: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    killed = kill_in_epoch(lambda: Started(command(photos, out, **OFTEN)), out, signal.SIGKILL)
    assert killed.finish() == -signal.SIGKILL
    assert not state(out)["done"]
    # A run is resumed from its folder alone, which stores the settings of the run.
    again = Process(["train", "--out", str(out), "--resume"], tmp_path / "text")
    assert again.finish() == 0, again.text()
    assert "continuing from epoch 1, step" in again.text()
    same_run(out, straight_with_rows)


@pytest.mark.parametrize("kind", KINDS)
def test_killed_and_resumed_for_each_kind_of_state(
    kind: str, photos: Path, tmp_path: Path, only_training: None
) -> None:
    out, text = tmp_path / "run", tmp_path / "text"
    killed = kill_in_epoch(lambda: Process(command(photos, out, **OFTEN | KINDS[kind]), text), out, signal.SIGKILL)
    assert killed.finish() == -signal.SIGKILL
    assert not state(out)["done"]
    run(photos, out, resume=True, **KINDS[kind])
    same_run(out, run(photos, tmp_path / "straight", **KINDS[kind]).folder)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_asked_to_stop_it_saves_and_says_how_to_go_on(
    number: signal.Signals, photos: Path, straight: Path, tmp_path: Path, only_training: None
) -> None:
    for attempt in range(5):
        out = tmp_path / f"run{attempt}"
        # Checkpoints only at the end of an epoch, so that a checkpoint within an epoch was saved because of the signal.
        started = Process(command(photos, out), tmp_path / "text")
        until(lambda out=out: written(out / "log.jsonl"), started.running, "first evaluation")
        started.send(number)
        code = started.finish()
        if not (out / "result.json").exists():
            break  # otherwise the run ended before the signal came
    assert code == 130, started.text()
    assert "--resume" in started.text()
    assert "Traceback" not in started.text()
    stopped = state(out)
    assert stopped["step"] > 0
    assert not stopped["done"]
    run(photos, out, resume=True)
    same_run(out, straight)


def test_workers_leave_it_to_the_main_process_to_stop(photos: Path, straight_with_rows: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = command(photos, out, **OFTEN, data__workers=2)
    stopped = kill_in_epoch(lambda: Group(words), out, signal.SIGTERM, epoch=0)
    assert stopped.finish() == 130, stopped.text
    assert "--resume" in stopped.text
    assert "Traceback" not in stopped.text
    assert not stopped.left(), "no worker outlives the run"
    assert not state(out)["done"]
    run(photos, out, resume=True)
    same_run(out, straight_with_rows)


def test_killed_again_and_again_while_it_writes(photos: Path, straight: Path, tmp_path: Path) -> None:
    out, dice, broken, reached = tmp_path / "run", random.Random(0), 0, 0
    words = [*command(photos, out, **OFTEN), "--resume"]
    for sitting in range(8):
        started, text = Process(words, tmp_path / "text"), f"sitting {sitting}"
        goal = reached + dice.randint(0, 4)
        if sitting == 5:
            time.sleep(dice.uniform(0.01, 0.3))  # at any time, also before the first step
        else:
            until(lambda goal=goal: state(out).get("step", 0) >= goal, started.running, text)
            until(lambda: any(out.glob(".*")), started.running, text)
            time.sleep(dice.uniform(0, 0.003))
        started.send(signal.SIGKILL)
        assert started.finish() == -signal.SIGKILL, started.text()
        broken += any(out.glob(".*"))
        assert state(out).get("step", 0) >= reached, "a kill destroyed an existing checkpoint"
        reached = state(out).get("step", 0)
        if reached > 16:
            break
    assert broken, "no kill happened while a checkpoint was written"
    last = Process(words, tmp_path / "text")
    assert last.finish() == 0, last.text()
    same_run(out, straight)


def test_killed_before_the_first_checkpoint_it_starts_anew(
    photos: Path, straight: Path, tmp_path: Path, only_training: None
) -> None:
    out = tmp_path / "run"
    started = Process(command(photos, out), tmp_path / "text")
    until(lambda: written(out / "log.jsonl"), started.running, "first evaluation")
    started.send(signal.SIGKILL)
    assert started.finish() == -signal.SIGKILL
    assert state(out).get("step", 0) == 0
    run(photos, out, resume=True)
    assert [r["epoch"] for r in records(out) if r["event"] == "evaluation"] == [0, 1, 2, 3]
    same_run(out, straight)
