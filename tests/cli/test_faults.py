"""Faults of the machine in real processes: one sentence with the cause and the way out, and the run can be resumed."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from proxymetric.files import read_json
from terminal import proxymetric
from training_runs import command, until

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def started(words: list[str], before: Callable[[], None] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "proxymetric", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=before,
    )  # fmt: skip


def children(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def one_sentence(error: str, *said: str) -> None:
    assert sum(line.startswith("proxymetric: ") for line in error.splitlines()) == 1, error
    assert "Traceback" not in error
    assert "Exception ignored" not in error
    for part in said:
        assert part in error, error


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the workers in /proc")
def test_a_killed_worker(photos, tmp_path):
    out = tmp_path / "run"
    process = started(command(photos, out, data__workers=2, train__epochs=100, train__patience=100))
    until(
        lambda: (out / "last.safetensors").is_file() and len(children(process.pid)) == 2,
        lambda: process.poll() is None,
        "workers",
    )
    while process.poll() is None:  # a worker may end before it is killed: kill those that follow
        for child in children(process.pid) if process.poll() is None else []:
            try:
                os.kill(child, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            process.wait(0.05)
        except subprocess.TimeoutExpired:
            continue
    _, error = process.communicate(timeout=60)
    assert process.returncode == 1, error
    one_sentence(error, "which reads images, was killed", "memory", "data.workers=0", "--resume")
    words = ["--set", "data.workers=0", "--epochs", "2"]
    assert proxymetric("train", "--out", out, "--resume", "--no-report", *words).code == 0
    assert read_json(out / "result.json")["rows"]


def test_few_file_descriptors(photos, tmp_path):
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))

    process = started(command(photos, tmp_path / "run", data__workers=4), limit)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 1, error
    one_sentence(error, "file descriptors", "ulimit -n", "--resume")


def test_little_memory(photos, tmp_path):
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (3 * 2**30, 3 * 2**30))

    words = command(photos, tmp_path / "run", view__size=2048, view__resize=2048, train__batch=64)
    process = started(words, limit)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 1, error
    one_sentence(error, "memory: got too little", "--batch", "--resume")
