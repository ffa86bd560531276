"""A training without a GPU says beforehand how long it takes, and how long with --frozen."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import proxymetric.runs.recipe as recipes
from proxymetric.encoders import build
from proxymetric.runs import time_on_cpu
from proxymetric.runs.time_on_cpu import pass_seconds, slow_training
from training_runs import Notes, run, same_run


@pytest.fixture
def a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward pass of an image takes a second."""
    monkeypatch.setattr(time_on_cpu, "pass_seconds", lambda encoder: 1.0)


def said(settings: dict, trained: int = 100, choosing: int = 0, unseen: int = 0) -> str:
    recipe = recipes.check({"data": {"path": "glyphs"}, "encoder": {"backbone": "small"}} | settings)
    return slow_training(recipe, build("small", dim=8, size=32), trained, choosing, unseen)


@pytest.mark.usefixtures("a_second")
def test_the_time_is_that_of_all_passes() -> None:
    train = {"epochs": 10, "warmup": 1, "evaluate_every": 2}
    # One epoch of forward passes, nine with backward passes, five evaluations, unseen images before and after.
    seconds = 100 + 9 * 300 + 5 * 40 + 2 * 60
    text = said({"train": train}, choosing=40, unseen=60)
    assert text.startswith(
        f"on the CPU, 10 epochs take about {seconds // 60}m{seconds % 60:02d}s (1.0 images/s through"
    )
    assert text.endswith("on features that are computed once, in about 3m20s")
    linear = said({"train": train | {"epochs": 20}, "encoder": {"backbone": "small", "tuning": "linear"}})
    assert "take about 33m20s (" in linear
    assert said({"train": train | {"epochs": 5}}) == "", "a short training needs no message"
    assert said({"train": train | {"frozen": True}}, trained=10_000) == ""


@pytest.mark.usefixtures("a_second")
def test_frozen_is_proposed_only_where_it_is_possible() -> None:
    vit = {"backbone": "vit_tiny_patch16_224", "tuning": "vpt"}
    assert "--frozen" not in (text := said({"encoder": vit}))
    assert text.endswith("a smaller --backbone, or fewer pixels (--size), take less time")


def test_timing_a_pass_changes_nothing() -> None:
    encoder = build("small", dim=8, size=32)
    before = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    modes = [module.training for module in encoder.modules()]
    random_state = torch.get_rng_state()
    assert 0 < pass_seconds(encoder) < 60
    assert torch.equal(torch.get_rng_state(), random_state)
    assert [module.training for module in encoder.modules()] == modes
    assert all(torch.equal(tensor, before[name]) for name, tensor in encoder.state_dict().items())


@pytest.mark.usefixtures("only_training")
def test_a_run_says_it_before_it_trains(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet, slow = Notes(), Notes()
    first = run(photos, tmp_path / "first", watcher=quiet)
    monkeypatch.setattr(time_on_cpu, "MIN_SECONDS", 0.0)
    second = run(photos, tmp_path / "second", watcher=slow)
    same_run(second.folder, first.folder)
    assert not any(text.startswith("on the CPU") for text in quiet.said)
    assert sum(text.startswith("on the CPU, ") and "--frozen trains head" in text for text in slow.said) == 1
