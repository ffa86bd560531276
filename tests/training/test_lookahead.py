"""The next batch is made while a step runs, and the results do not depend on it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from proxymetric.core.pieces import Batch
from proxymetric.data.feeds import TrainFeed
from training_runs import Notes, run, state
from vptsp_steps import batch, build

PROMPTED = {"encoder__backbone": "test_vit", "encoder__pretrained": False, "encoder__tuning": "vpt+bitfit"}
SMALL = PROMPTED | {"method": "vptsp-m", "view__size": 32, "view__resize": 32, "train__warmup": 0}


@pytest.fixture
def many_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Class prompts lie in host memory, as those of many classes do."""
    monkeypatch.setattr("proxymetric.sources.semantic_proxies.MAX_BYTES_ON_DEVICE", 0)


@pytest.mark.usefixtures("many_classes")
def test_a_batch_that_cannot_be_made_fails_in_its_own_step(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step before the failed batch is taken and saved."""
    whole = TrainFeed.epoch

    def broken(self: TrainFeed, number: int, start: int = 0) -> Iterator[Batch]:
        for i, made in enumerate(whole(self, number, start), start):
            if i == 4:
                raise OSError("the disk is gone")
            yield made

    monkeypatch.setattr(TrainFeed, "epoch", broken)
    with pytest.raises(OSError, match="the disk is gone"):
        run(photos, tmp_path / "run", **SMALL, train__save_every=4)
    assert state(tmp_path / "run")["step"] == 4


@pytest.mark.usefixtures("many_classes")
def test_prompts_of_the_next_batch_are_prefetched() -> None:
    """The prefetched rows are the rows that are taken: the same classes in the same order."""
    criterion, source, _ = build("ema")
    x, y, images = batch(0)
    criterion.prefetch_batch(y)
    assert source.prompts._prefetched is not None
    sent = source.prompts._prefetched[1]
    criterion(x, y, images=images)
    assert source.prompts._prefetched is None
    assert next(rows for _, rows in source.prompts._taken) is sent


@pytest.mark.usefixtures("many_classes")
def test_a_run_makes_use_of_it(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from proxymetric.sources import RowTable

    prefetched, taken = [], []
    prefetch, take = RowTable.prefetch, RowTable.take

    def noted(self: RowTable, index: torch.Tensor, device: torch.device) -> None:
        prefetched.append(index)
        prefetch(self, index, device)

    def used(self: RowTable, index: torch.Tensor, *args: object, **told: object) -> torch.Tensor:
        taken.append(self._prefetched is not None and torch.equal(self._prefetched[0], index))
        return take(self, index, *args, **told)  # type: ignore[arg-type]

    monkeypatch.setattr(RowTable, "prefetch", noted)
    monkeypatch.setattr(RowTable, "take", used)
    run(photos, tmp_path / "run", **SMALL, train__epochs=2)
    assert taken[0] is False
    assert sum(taken) == len(prefetched) == len(taken) - 2, "all but the first of an epoch"


@pytest.mark.parametrize(("cache", "advised"), [("none", True), ("device", False)])
def test_a_run_that_waits_for_images_says_so(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: str, advised: bool
) -> None:
    epoch = TrainFeed.epoch

    def slow(self: TrainFeed, number: int, start: int = 0) -> Iterator[Batch]:
        for made in epoch(self, number, start):
            time.sleep(0.05)
            yield made

    monkeypatch.setattr(TrainFeed, "epoch", slow)
    monkeypatch.setattr("proxymetric.training.advice.MIN_SECONDS_BEFORE_ADVICE", 0.2)
    watcher = Notes()
    result = run(photos, tmp_path / "run", watcher=watcher, data__cache=cache).result
    sentences = [text for text in watcher.said if "wait for images" in text]
    assert len(sentences) == advised
    assert not advised or "% of the time: try --cache memory" in sentences[0]
    assert 0.3 < result.waiting_seconds <= result.training_seconds + 0.1
