"""Tiny runs for the tests of training: in this process, or by the command line in a process that can be killed."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch

from no_forms import no_forms
from proxymetric.runs.train import Run, train
from proxymetric.system.checkpoint import Checkpoint
from proxymetric.system.watcher import Silent, Tick

TINY: dict[str, Any] = {
    "encoder.backbone": "small",
    "encoder.dim": 8,
    "view.size": 16,
    "view.resize": 16,
    "view.scale": [0.6, 1.0],
    "train.batch": 8,
    "train.epochs": 3,
    "train.lr": 1e-3,
    "train.metrics": ["R@1", "MAP@R"],
    "train.device": "cpu",
    "train.save_every": 1000,
    "train.keep": "trained",
    "data.workers": 0,
}
"""eight steps an epoch on the `photos`, some ten milliseconds each"""
LEARNING: dict[str, Any] = {
    "train__frozen": True,
    "train__epochs": 10,
    "train__batch": 64,
    "train__lr": 1e-2,
    "encoder__dim": 32,
    "encoder__layer_norm": True,
    "data__validation": 0.3,
}
"""what learns something of the `letters` in a second"""
WAIT = 120.0
"""seconds after which a test gives up"""


def run(photos: Path, out: Path, *, resume: bool = False, watcher: Any = None, **settings: Any) -> Run:
    """Train in this process; settings as `train__batch=4`."""
    return train(photos, out=out, settings=TINY | _dotted(settings), resume=resume, watcher=watcher)


def command(photos: Path, out: Path, *more: str, **settings: Any) -> list[str]:
    """The words after `proxymetric` for the same run."""
    words = ["train", "--data", str(photos), "--out", str(out), *more]
    for key, value in (TINY | _dotted(settings)).items():
        words += ["--set", f"{key}={json.dumps(value) if not isinstance(value, str) else value}"]
    return words


def _dotted(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key.replace("__", "."): value for key, value in settings.items()}


class Stop(Exception):
    """Raised in the middle of training by `StopAfter`."""


class StopAfter(Silent):
    """A watcher that stops the run at its `steps`-th step, after the update and before it is saved."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def tick(self, tick: Tick) -> None:
        self.left -= 1
        if self.left == 0:
            raise Stop


class Snapshot(Silent):
    """A watcher that copies the folder of a run as a kill at its `steps`-th step would leave it."""

    def __init__(self, steps: int, folder: Path, copy: Path) -> None:
        self.steps, self.folder, self.copy = steps, folder, copy

    def tick(self, tick: Tick) -> None:
        if tick.step == self.steps:
            shutil.copytree(self.folder, self.copy)


class Notes(Silent):
    """A watcher that stores the messages."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


# A server that has imported everything forks a process in a hundredth of the time that a new Python needs.
forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload(["pytest", "torch._inductor", "proxymetric.system.terminal", "proxymetric.training"])
warm_up = forkserver.ensure_running


class Process:
    """The command line in a separate process, forked from a server, without a report.

    One `with_workers` may have child processes, such as those that read images.
    """

    def __init__(self, words: list[str], output: Path, *, with_workers: bool = False, **environment: str) -> None:
        self.output = output
        self.process = forks.Process(target=_main, args=(words, str(output), environment), daemon=not with_workers)
        self.process.start()
        assert self.process.pid is not None
        self.pid: int = self.process.pid

    def send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # the process has just ended
            os.kill(self.pid, number)

    def running(self) -> bool:
        return self.process.is_alive()

    def finish(self) -> int:
        """Wait for the end; the exit code, negative for a signal."""
        self.process.join(WAIT)
        code = self.process.exitcode
        if code is None:
            self.send(signal.SIGUSR1)  # the process prints its stack
            time.sleep(1)
            self.process.kill()
            raise AssertionError(f"still running after {WAIT:.0f} s:\n{self.output.read_text()}")
        return code

    def text(self) -> str:
        return self.output.read_text() if self.output.exists() else ""  # killed before its first output


def _main(words: list[str], output: str, environment: dict[str, str]) -> None:
    os.environ |= environment
    torch.set_num_threads(1)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    faulthandler.register(signal.SIGUSR1)
    sys.argv = ["proxymetric", *words]
    from proxymetric.cli import main

    runs = importlib.import_module("proxymetric.runs.session")
    runs.draw_report = lambda *args, **kwargs: None  # type: ignore[attr-defined]
    runs.closed_form_rows = no_forms  # type: ignore[attr-defined]
    try:
        main()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt after the end would change the exit code


def until(condition: Callable[[], bool], running: Callable[[], bool], what: str) -> None:
    """Wait for a condition on a process that is running."""
    end = time.monotonic() + WAIT
    while not condition():
        assert running(), f"ended before {what}"
        assert time.monotonic() < end, f"no {what} in {WAIT:.0f} s"
        time.sleep(0.001)


def state(folder: Path) -> dict[str, Any]:
    """The state in the last checkpoint, without tensors; {} if there is no checkpoint."""
    # The file is opened once, unlike in safetensors' own reader, because the run may replace it at any moment.
    try:
        with open(folder / "last.safetensors", "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            return json.loads(json.loads(file.read(length))["__metadata__"]["state"])
    except FileNotFoundError:
        return {}


def kill_in_epoch(start: Callable[[], Any], folder: Path, kill: signal.Signals, epoch: int = 1) -> Any:
    """Start a run, and signal it as soon as some steps of `epoch` are saved."""
    started = start()

    def there() -> bool:
        now = state(folder)
        return bool(now) and (now["epoch"], now["position"]) >= (epoch, 2)

    until(there, started.running, f"steps of epoch {epoch}")
    started.send(kill)
    return started


def records(folder: Path) -> list[dict[str, Any]]:
    """All records of `log.jsonl`, which must be complete."""
    text = (folder / "log.jsonl").read_text()
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def same_tensors(file: Path, other: Path) -> None:
    """Two checkpoints hold the same names and the same bits."""
    ours, theirs = Checkpoint.read(file).tensors, Checkpoint.read(other).tensors
    assert ours.keys() == theirs.keys()
    different = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert not different, different


def same_run(folder: Path, other: Path) -> None:
    """Two runs ended bit for bit alike: every tensor, the log record by record, and the curve of the result."""
    for name in ("last.safetensors", "best.safetensors"):
        assert (folder / name).is_file() == (other / name).is_file()
        if (folder / name).is_file():
            same_tensors(folder / name, other / name)
    ours, theirs = state(folder), state(other)
    for kept in (ours, theirs):
        del kept["seconds"], kept["waited"], kept["facts"]["seconds"]
    assert ours == theirs
    assert records(folder) == records(other)
    result, expected = (json.loads((path / "result.json").read_text()) for path in (folder, other))
    for facts in (result, expected):
        del facts["recipe"]["train"]["save_every"], facts["finished"], facts["seconds"]
        for cost in (facts, facts.get("refit")):
            if cost:
                del cost["training_seconds"], cost["waiting_seconds"], cost["memory"], cost["images_per_second"]
    assert result == expected
    left = [path.name for path in folder.glob(".*")]
    assert not left, left
