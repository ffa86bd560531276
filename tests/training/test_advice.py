"""What a run says about its own speed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from proxymetric.system.watcher import Silent
from proxymetric.training import advice
from proxymetric.training.advice import late_memory
from proxymetric.training.options import TrainOptions
from training_runs import Notes, run

pytestmark = pytest.mark.usefixtures("only_training")
CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def test_when_compiled_steps_would_be_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "find_spec", lambda name: object())
    plain = TrainOptions()
    assert advice.could_compile(plain, frozen=False, epoch=1, device=CUDA)
    assert not advice.could_compile(plain, frozen=False, epoch=1, device=CPU)
    assert not advice.could_compile(plain, frozen=True, epoch=1, device=CUDA)
    assert not advice.could_compile(plain, frozen=False, epoch=0, device=CUDA), "the head warms up"
    assert not advice.could_compile(TrainOptions(compile=True), frozen=False, epoch=1, device=CUDA)
    assert not advice.could_compile(TrainOptions(parallel="fsdp"), frozen=False, epoch=1, device=CUDA)
    monkeypatch.setattr(advice, "find_spec", lambda name: None)
    assert not advice.could_compile(plain, frozen=False, epoch=1, device=CUDA), "no triton"


def test_a_memory_that_starts_after_the_end_is_named(photos: Path, tmp_path: Path) -> None:
    said = Notes()
    run(photos, tmp_path / "run", method="xbm", watcher=said)
    assert sum(text.startswith("loss.start: the memory starts after 1000 steps, but the") for text in said.said) == 1
    assert late_memory({"memory": 10, "memory_epoch": 1}, steps=9, epochs=1).startswith("loss.memory_epoch: the memory")
    assert late_memory({"memory": 10, "memory_epoch": 1}, steps=9, epochs=2) == ""
    assert late_memory({"memory": 10, "memory_epoch": 7.0}, steps=9, epochs=2).startswith("loss.memory_epoch: the")
    assert late_memory({"start": 1000}, steps=9, epochs=2) == "", "a method without a memory"


@pytest.mark.usefixtures("traced_only")
def test_a_run_says_it_once_and_can_be_resumed_compiled(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU plays a GPU, and every run is a long one."""

    class Notes(Silent):
        def __init__(self) -> None:
            self.said: list[str] = []

        def say(self, text: str) -> None:
            self.said.append(text)

    monkeypatch.setattr("proxymetric.training.trainer.could_compile", lambda *given: True)
    for name in ("MIN_SECONDS_TO_COMPILE", "MIN_SECONDS_BEFORE_ADVICE"):
        monkeypatch.setattr(advice, name, 0.0)
    monkeypatch.setattr(advice, "MIN_WAITING_SHARE", 2.0)
    notes = Notes()
    run(photos, tmp_path / "run", watcher=notes, train__epochs=2)
    (said,) = [text for text in notes.said if "compiled" in text]
    assert said.endswith("--resume --set train.compile=true")
    resumed = run(photos, tmp_path / "run", resume=True, train__epochs=3, train__compile=True)
    assert resumed.result.epochs == 3
