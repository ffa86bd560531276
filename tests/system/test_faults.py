"""Faults of the machine in real processes: one sentence with the cause and the way out, and the run can be resumed."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from proxymetric.system.faults import sentence
from proxymetric.system.files import read_json
from proxymetric.training.log import Log
from terminal import proxymetric
from training_runs import command, until

pytestmark = pytest.mark.slow


def started(words: list[str], before: Callable[[], None] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "proxymetric", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=before,
    )  # fmt: skip


def children(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def one_sentence(error: str, *said: str) -> None:
    lines = [line for line in error.splitlines() if line.startswith("proxymetric: ")]
    assert len([line for line in lines if not line.startswith("proxymetric: warning: ")]) == 1, error
    # A signal may arrive while torch imports an optional module: torch then logs the error, and goes on without it.
    own = "\n".join(line for line in error.splitlines() if not re.match(r"W\d{4} .*torch", line))
    assert "Traceback" not in own
    assert "Exception ignored" not in own
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


@pytest.mark.release
def test_few_file_descriptors(photos, tmp_path):
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))

    process = started(command(photos, tmp_path / "run", data__workers=4), limit)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 1, error
    one_sentence(error, "file descriptors", "ulimit -n", "--resume")


def in_small_shared_memory(words: list[str], kilobytes: int) -> list[str]:
    """The command in a separate mount namespace, where /dev/shm has this size."""
    mount = f'mount -t tmpfs -o size={kilobytes}k tmpfs /dev/shm && exec "$@"'
    return ["unshare", "--mount", "sh", "-c", mount, "sh", *words]


def can_mount() -> bool:
    try:
        return subprocess.run(in_small_shared_memory(["true"], 64), capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.release
@pytest.mark.skipif(not can_mount(), reason="a separate /dev/shm needs the rights of root and `unshare`")
def test_little_shared_memory(photos, tmp_path):
    words = command(photos, tmp_path / "run", data__workers=2, view__size=128, view__resize=128, train__batch=16)
    process = subprocess.Popen(
        in_small_shared_memory([sys.executable, "-m", "proxymetric", *words], 300),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    _, error = process.communicate(timeout=120)
    assert process.returncode == 1, error
    one_sentence(error, "shared memory (/dev/shm)", "data.workers=0", "--resume")


@pytest.mark.release
@pytest.mark.skipif(not can_mount(), reason="a separate /dev/shm needs the rights of root and `unshare`")
def test_no_shared_memory_for_a_semaphore(photos, tmp_path):
    """This error has the number of a full disk, and names no file either."""
    words = command(photos, tmp_path / "run", data__workers=2)
    process = subprocess.Popen(
        in_small_shared_memory([sys.executable, "-m", "proxymetric", *words], 4),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    _, error = process.communicate(timeout=120)
    assert process.returncode == 1, error
    one_sentence(error, "shared memory (/dev/shm)", "data.workers=0", "--resume")


needs_a_full_device = pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="needs /dev/full")


@needs_a_full_device
def test_a_full_disk_is_named_with_the_file(tmp_path):
    """The error of a write does not name the file."""
    (tmp_path / "log.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as caught:
        Log(tmp_path / "log.jsonl").add(step=1)
    assert caught.value.filename is None
    said = sentence(caught.value, "train")
    assert said == (
        f"could not save {tmp_path / 'log.jsonl'}: the disk is full, or a limit on file size is reached; expected free "
        "space for it; --resume continues a run from its last checkpoint"
    )


@needs_a_full_device
def test_an_output_that_is_full(tmp_path):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "proxymetric", "methods"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert done.returncode == 1, done
    one_sentence(done.stderr, "could not save the output: the disk is full")


def test_only_verbs_with_settings_are_told_of_them():
    fault = RuntimeError("unable to write to file </torch_1>: No space left on device (28)")
    assert "--set data.workers=0; --resume" in str(sentence(fault, "train"))
    said = sentence(fault, "demo")
    assert said == ("shared memory (/dev/shm): got too little for the processes that read images, expected more")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_little_memory_of_the_gpu():
    with pytest.raises(torch.cuda.OutOfMemoryError) as caught:
        torch.empty(2**50, device="cuda")
    assert "--batch" in str(sentence(caught.value, "train"))


@pytest.mark.release
def test_little_memory(photos, tmp_path):
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (3 * 2**30, 3 * 2**30))

    words = command(photos, tmp_path / "run", view__size=2048, view__resize=2048, train__batch=64)
    process = started(words, limit)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 1, error
    one_sentence(error, "memory: got too little", "--batch", "--resume")
