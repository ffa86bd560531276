"""Steps that are launched before the figures of the last one are read give the results of steps that wait."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from proxymetric.core.pieces import Compare, Context, Objective, Outcome
from proxymetric.losses import ProxyAnchor
from proxymetric.papers import CATALOGUE
from proxymetric.papers.about import about
from proxymetric.sources import LearnedProxies
from proxymetric.testing import builder, make, optimizer_of, same, sample, snapshot, train_step
from proxymetric.testing import run as loss_of
from proxymetric.training.stepper import Stepper, keeps_no_memory
from training_runs import Notes, records, run, same_tensors, state

pytestmark = pytest.mark.usefixtures("no_page")


class Poisoned(Compare):
    """Proxy-Anchor with noise, without a memory; the batches `poisoned`, counted from 0, have a bad loss or gradient.

    A batch that comes again, because its step is repeated, keeps its number.
    """

    def __init__(self, classes: int, dim: int, poison: str, poisoned: set[int]) -> None:
        super().__init__(ProxyAnchor(), LearnedProxies(classes, dim))
        self.poison, self.poisoned = poison, poisoned
        self.batches: list[int] = []

    def forward(self, ctx: Context) -> Outcome:
        outcome = super().forward(ctx)
        assert ctx.batch.images is not None
        checksum = hash(ctx.batch.images.numpy().tobytes())
        if checksum not in self.batches:
            self.batches.append(checksum)
        nothing = 0 * ctx.embeddings.sum()
        outcome.terms["noise"] = ctx.embeddings.mean() * torch.randn(())
        if self.batches.index(checksum) in self.poisoned:
            # The square root at 0 is 0, its slope is infinite: the loss is finite, its gradient is not.
            outcome.terms["poison"] = nothing * math.nan if self.poison == "loss" else nothing.square().sqrt()
        return outcome


@pytest.mark.parametrize(
    ("poison", "poisoned", "settings"),
    [
        ("loss", set(), {}),
        ("loss", {2}, {}),
        ("gradient", {2, 3, 5}, {}),
        ("loss", {0, 7, 8}, {}),  # the first step, the last one of an epoch, the first one of the next
        ("gradient", {1}, {"train__accumulate": 3}),
        ("loss", {1, 2}, {"train__save_every": 3, "train__evaluate_steps": 2}),
    ],
)
def test_running_ahead_changes_nothing(
    poison: str, poisoned: set[int], settings: dict[str, Any], photos: Path, tmp_path: Path, monkeypatch
) -> None:
    """Parameters, BatchNorm, optimiser, random state, log and messages are those of a run whose steps wait."""
    monkeypatch.setattr("proxymetric.training.optim._fused", lambda *given: True)
    monkeypatch.setattr("proxymetric.training.stepper.AHEAD_DEVICES", ("cpu", "cuda"))

    @about(paper="none", choose="never")
    def row(classes: int, dim: int) -> Objective:
        return Poisoned(classes, dim, poison, poisoned)

    monkeypatch.setitem(CATALOGUE, "poisoned", row)
    in_flight: list[int] = []
    finish = Stepper._finish_first

    def noted(self: Stepper) -> Any:
        in_flight.append(self.in_flight)
        return finish(self)

    monkeypatch.setattr(Stepper, "_finish_first", noted)
    chosen = {"method": "poisoned", "train__epochs": 2, "train__warmup": 0} | settings
    notes = Notes(), Notes()
    ahead = run(photos, tmp_path / "ahead", watcher=notes[0], **chosen)
    assert max(in_flight) == 2
    in_flight.clear()
    monkeypatch.setattr("proxymetric.training.stepper.keeps_no_memory", lambda *given: False)
    waiting = run(photos, tmp_path / "waiting", watcher=notes[1], **chosen)
    assert max(in_flight) == 1
    assert ahead.result.skipped_steps == waiting.result.skipped_steps
    assert bool(poisoned) == bool(waiting.result.skipped_steps)
    same_tensors(ahead.folder / "last.safetensors", waiting.folder / "last.safetensors")
    assert records(ahead.folder) == records(waiting.folder)
    assert [text for text in notes[0].said if "finite" in text] == [t for t in notes[1].said if "finite" in t]
    keys = ("step", "position", "epoch", "losses", "skipped", "images")
    assert [state(ahead.folder)[key] for key in keys] == [state(waiting.folder)[key] for key in keys]


@pytest.mark.parametrize("name", CATALOGUE)
def test_a_method_without_memory_commits_nothing(name: str) -> None:
    """The stepper commits before it knows whether the step is finite, so `commit` must change no tensor."""
    criterion = make(builder(name))
    optimizer = optimizer_of(criterion)
    trained = [] if optimizer is None else [p for group in optimizer.param_groups for p in group["params"]]
    if not keeps_no_memory(criterion, trained):
        assert set(criterion.state_dict()) - {"_extra_state"}
        return
    assert not criterion.row_tables()
    assert "epochs" not in criterion.needs
    for seed in range(3):
        train_step(criterion, optimizer, seed)
        embeddings, labels = sample(seed)
        loss_of(criterion, embeddings, labels)
        before = snapshot(criterion)
        buffers = [value.clone() for value in criterion.buffers()]
        criterion.commit()
        after = snapshot(criterion)
        assert float(after.pop("_extra_state")[0]) == float(before.pop("_extra_state")[0]) + 1
        assert same(before, after)
        assert all(torch.equal(value, old) for value, old in zip(criterion.buffers(), buffers, strict=True))


def test_methods_that_run_ahead() -> None:
    """The catalogue has both kinds, so that the test above can fail."""
    criteria = {name: make(builder(name)) for name in ("proxy-anchor", "triplet", "proxy-isa", "vcpa", "ccp", "moco")}
    ahead = {name for name, each in criteria.items() if keeps_no_memory(each, list(each.parameters()))}
    assert ahead == {"proxy-anchor", "triplet"}
