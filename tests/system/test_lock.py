"""Only one process writes to a run: the error of a second one names the first, and a killed one holds no lock."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from proxymetric.system.lock import locked
from proxymetric.system.watcher import Silent, Tick
from terminal import bytes_of, proxymetric, refused, train
from training_runs import TINY, command, until
from training_runs import run as tiny_run

pytestmark = pytest.mark.usefixtures("only_training")


class During(Silent):
    """Calls something once, in the middle of a run."""

    def __init__(self, call) -> None:
        self.call, self.answers = call, []

    def tick(self, tick: Tick) -> None:
        if not self.answers:
            self.answers.append(self.call())


@pytest.mark.parametrize("words", [("--resume",), ("--overwrite",), ("--overwrite", "--seed", 5)])
def test_a_second_process_is_told_who_trains_there(photos, tmp_path, words):
    out = tmp_path / "run"
    seen = {}

    def second():
        seen.update(bytes_of(out))
        answer = train(photos, out, *words)
        assert bytes_of(out) == seen
        return answer

    during = During(second)
    if "--resume" in words:  # --resume takes the recipe of the run
        during = During(lambda: proxymetric("train", "--out", out, "--resume"))
    tiny_run(photos, out, watcher=during, train__epochs=1)
    (answer,) = during.answers
    refused(answer, f"out: got {out}, in use by process {os.getpid()} on {socket.gethostname()} since 20", "--out")
    assert not (out / ".lock").exists()
    assert [line.count('"event"') for line in (out / "log.jsonl").read_text().splitlines()].count(1) == 2


def workers_of(process: int) -> list[int]:
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [int(child) for child in children]


def has_lock(process: int) -> bool:
    """Whether a process has the lock file open; False for a process that has ended."""
    try:
        return any(os.readlink(file).endswith("/.lock") for file in Path(f"/proc/{process}/fd").iterdir())
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the workers in /proc")
def test_the_lock_of_a_killed_process_is_free_at_once_though_its_workers_live(photos, tmp_path):
    out = tmp_path / "run"
    words = command(photos, out, data__workers=2, train__epochs=200, train__patience=200)
    with open(tmp_path / "text", "wb") as text:
        started = subprocess.Popen(
            [sys.executable, "-m", "proxymetric", *words], stdout=text, stderr=text, start_new_session=True
        )
    until(lambda: len(workers_of(started.pid)) == 2, lambda: started.poll() is None, "workers")
    refused(proxymetric("train", "--out", out, "--resume"), f"in use by process {started.pid}")
    os.kill(started.pid, signal.SIGSTOP)  # the run starts no more processes
    workers = workers_of(started.pid)
    until(lambda: not any(has_lock(worker) for worker in workers), lambda: True, "workers without the lock")
    for worker in workers:
        os.kill(worker, signal.SIGSTOP)  # so that the workers outlive the run
    started.kill()
    started.wait(30)
    try:
        with locked(out) as held:
            assert held
    finally:
        for worker in workers:
            os.kill(worker, signal.SIGKILL)
    with locked(out) as held:
        assert held
    assert not (out / ".lock").exists()


def test_a_mistake_leaves_neither_lock_nor_folder(photos, tmp_path):
    refused(train(tmp_path / "nowhere", tmp_path / "a" / "b" / "run"), "does not exist")
    assert not (tmp_path / "a").exists()


def test_a_lock_that_was_left_behind_is_no_content(photos, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").write_text("{")
    assert train(photos, tmp_path / "run").code == 0
    assert not (tmp_path / "run" / ".lock").exists()


def test_many_take_turns(tmp_path):
    """Of threads and processes that lock and remove the same file, never two hold the lock at the same time."""
    inside, worst, turns = [0], [0], [0]

    def turn():
        while turns[0] < 60:
            try:
                with locked(tmp_path / "run"):
                    inside[0] += 1
                    worst[0] = max(worst[0], inside[0])
                    time.sleep(0.0005)
                    turns[0] += 1
                    inside[0] -= 1
            except ValueError:
                time.sleep(0.0002)

    threads = [threading.Thread(target=turn) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert turns[0] >= 60
    assert worst == [1]


def test_a_started_program_does_not_inherit_the_lock(tmp_path):
    with locked(tmp_path):
        program = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        with locked(tmp_path) as held:
            assert held
    finally:
        program.communicate(b"\n", timeout=30)


def test_mlrc_holds_its_folder(photos, tmp_path):
    out = tmp_path / "mlrc"
    settings = [f"--set={key}={value}" for key, value in TINY.items() if key != "encoder.dim"]
    with locked(out):
        answer = proxymetric(
            "train", "--protocol", "mlrc", "--data", photos, "--out", out, "--set", "data.test=0.5", *settings
        )
    refused(answer, f"out: got {out}, in use by process {os.getpid()}")


def test_without_permission_it_is_a_sentence(photos, tmp_path):
    refused(train(photos, Path("/proc/x")), "out: got /proc/x", "expected")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    refused(train(photos, tmp_path / "link"), f"out: got {tmp_path / 'link'}, a link to", "which is missing")
