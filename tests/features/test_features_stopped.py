"""Ctrl-C and SIGTERM while features are computed: what was computed is kept, and the same command continues."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator

import pytest
import torch
from rich.console import Console

from conftest import write_photos
from proxymetric.data import EvalView, open_data
from proxymetric.encoders import build
from proxymetric.features.cache import FeaturesStopped, cached_features
from proxymetric.system.terminal import Terminal
from training_runs import Process, command, until


@pytest.fixture
def default_handlers() -> Iterator[None]:
    """Restore the handlers of a terminal: a shell that starts tests in the background makes them ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("bad", [False, True])
def test_a_part_of_a_shard_is_kept(tmp_path, number, bad, default_handlers):
    photos = write_photos(tmp_path / "photos", classes=4, images=8)
    if bad:
        (photos / "class0" / "1.png").write_text("no image")
    images, view, encoder = open_data(photos), EvalView(16, resize=16), build("small", dim=8, size=16)
    handler = signal.getsignal(number)

    def stop(done: int, total: int) -> None:
        if done >= 12:
            os.kill(os.getpid(), number)

    with pytest.raises(FeaturesStopped, match=r"the features of 1\d of 3\d images are kept.*same command continues"):
        cached_features(encoder, images, view, folder=tmp_path / "cache", batch=4, progress=stop)
    assert signal.getsignal(number) == handler
    calls: list[int] = []
    again = cached_features(
        encoder, images, view, folder=tmp_path / "cache", batch=4, progress=lambda done, total: calls.append(done)
    )
    assert 10 <= calls[0] < 20, "begins with those that were kept"
    whole = cached_features(encoder, images, view, folder=tmp_path / "other", batch=4)
    assert again.kept.tolist() == whole.kept.tolist()
    assert torch.allclose(again.vectors, whole.vectors, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_on_the_command_line(tmp_path, number, default_handlers):
    photos = write_photos(tmp_path / "photos", classes=30, images=50, size=64)
    words = command(photos, tmp_path / "run", "--frozen", train__epochs=1, view__size=64, view__resize=64)
    cache = tmp_path / "cache"
    process = Process(words, tmp_path / "text", PROXYMETRIC_CACHE=str(cache))
    until(lambda: bool(list(cache.rglob("*.safetensors"))), process.running, "features")
    process.send(number)
    code, error = process.finish(), process.text()
    assert code == 130, error
    assert re.search(r"the features of \d+ of \d+ images are kept", error)
    assert "Traceback" not in error
    assert not (tmp_path / "run").exists(), "the same command starts the run"


def test_rate_and_time_left_are_shown(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("proxymetric.system.terminal.time.monotonic", lambda: now[0])
    console = Console(record=True, width=100, force_terminal=False, file=open(os.devnull, "w"))  # noqa: SIM115
    terminal = Terminal(console)
    for step in range(5):
        terminal.work("features: training images", 100 * (step + 1), 10_000)
        now[0] += 10
    assert "500 of 10000, 10 images/s, 15m50s left" in console.export_text()
