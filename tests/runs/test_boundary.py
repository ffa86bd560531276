"""Evaluations in the middle of epochs: the pool of embeddings that a method gets, and the figures that it returns."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import proxymetric as pm
from proxymetric.core.pieces import Boundary, Compare, Context, Objective, Outcome
from proxymetric.data import open_data, split
from proxymetric.losses import ProxyAnchor
from proxymetric.papers import CATALOGUE
from proxymetric.papers.about import about
from proxymetric.sources import LearnedProxies
from proxymetric.system.checkpoint import Checkpoint
from proxymetric.system.watcher import Silent, Tick
from proxymetric.training.trainer import Interrupted
from training_runs import Stop, records, run, same_run, same_tensors, state

pytestmark = pytest.mark.usefixtures("only_training")
STILL = {"train__lr": 0.0, "encoder__freeze_bn": True}
"""nothing moves, so that the first evaluation after a step is the best for good"""


class Tasting(Compare):
    """Proxy-Anchor that records the pool of each evaluation, moves the encoder, or gives an infinite gradient."""

    taste: Tensor

    def __init__(self, classes: int, dim: int, pools: bool = True, moves: bool = False, poisoned: bool = False) -> None:
        super().__init__(ProxyAnchor(), LearnedProxies(classes, dim))
        self.register_buffer("taste", torch.zeros(2))
        self.pools, self.moves, self.poisoned, self.passes = pools, moves, poisoned, 0
        self.told: list[Boundary] = []
        self.encoder: list[nn.Module] = []

    def bind(self, encoder: nn.Module) -> None:
        self.encoder[:] = [encoder]

    def forward(self, ctx: Context) -> Outcome:
        terms, commit = super().forward(ctx)
        self.passes += 1
        if self.poisoned and self.passes == 5:
            terms["poison"] = (0 * ctx.embeddings.sum()).square().sqrt()  # a finite loss with an infinite gradient
        return Outcome(terms, commit)

    @torch.no_grad()
    def boundary(self, given: Boundary) -> None:
        self.told.append(given)
        if self.pools:
            assert given.pool is not None
            vectors, labels = given.pool(3)
            self.taste += torch.stack([(vectors.sum(1) * (labels + 1)).sum(), torch.ones(())])
        if self.moves:
            self.encoder[0].head.weight.mul_(-0.5).add_(0.1)

    def figures(self) -> dict[str, float]:
        return {"taste": float(self.taste[0]), "boundaries": float(self.taste[1])} if self.pools else {}


@pytest.fixture
def tasting(monkeypatch: pytest.MonkeyPatch) -> list[Tasting]:
    """The methods `tasting`, `moving` and `plain` for a test, and the objectives that they built."""
    made: list[Tasting] = []

    def offer(name: str, needs: tuple[str, ...], **options: bool) -> None:
        @about(paper="none", choose="never", needs=needs)
        def build(classes: int, dim: int) -> Objective:
            made.append(Tasting(classes, dim, **options))
            return made[-1]

        monkeypatch.setitem(CATALOGUE, name, build)

    offer("tasting", ("pool",))
    offer("moving", ("encoder",), pools=False, moves=True)
    offer("plain", (), pools=False, poisoned=True)
    return made


def steps(curve: list[dict[str, Any]]) -> list[tuple[int, float]]:
    return [(record["step"], record["epoch"]) for record in curve]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"train__evaluate_steps": 3}, [(0, 0), (3, 0.375), (6, 0.75), (9, 1.125), (12, 1.5), (15, 1.875), (16, 2)]),
        ({"train__evaluate_steps": 4}, [(0, 0), (4, 0.5), (8, 1), (12, 1.5), (16, 2)]),
        ({"train__evaluate_steps": 99}, [(0, 0), (16, 2)]),
        ({"train__evaluate_steps": 2, "train__accumulate": 3}, [(0, 0), (2, 2 / 3), (4, 4 / 3), (6, 2)]),
    ],
    ids=["with a rest", "also where epochs end", "once", "accumulated"],
)
def test_evaluated_after_so_many_steps_and_at_the_end(
    settings: dict, expected: list, photos: Path, tmp_path: Path
) -> None:
    done = run(photos, tmp_path / "run", train__epochs=2, **settings)
    assert steps(done.result.curve) == expected
    assert steps([record for record in records(done.folder) if record["event"] == "evaluation"]) == expected
    whole = [epoch for _, epoch in steps(done.result.curve) if epoch == int(epoch)]
    assert all(isinstance(epoch, int) for epoch in whole)


MODES: dict[str, dict[str, Any]] = {
    "warm-up and BatchNorm": {"train__warmup": 1},
    "frozen BatchNorm": {"encoder__freeze_bn": True, "train__warmup": 0},
    "frozen": {"train__frozen": True},
}


@pytest.mark.parametrize("mode", MODES)
def test_looking_changes_nothing(mode: str, photos: Path, tmp_path: Path, tasting: list) -> None:
    """An evaluation changes no bit of weights, statistics, optimiser or random numbers, also around a skipped step."""
    settings = {"method": "plain", "train__epochs": 2, **MODES[mode]}
    looked = run(photos, tmp_path / "looked", train__evaluate_steps=1, **settings)
    blind = run(photos, tmp_path / "blind", train__evaluate_every=2, **settings)
    assert [len(r.result.curve) for r in (looked, blind)] == [17, 2]
    assert looked.result.skipped_steps == blind.result.skipped_steps == 1
    same_tensors(looked.folder / "last.safetensors", blind.folder / "last.safetensors")
    losses = [record["loss"] for record in looked.result.curve[1:] if "loss" in record]
    assert len(losses) == 15, "none of the skipped step"
    assert blind.result.curve[-1]["loss"] == pytest.approx(sum(losses) / 15)


@pytest.mark.parametrize("method", ["plain", "moving"])
def test_the_best_step_is_kept_as_it_was_measured(method: str, photos: Path, tmp_path: Path, tasting: list) -> None:
    """Also if the method moves the encoder after it receives the score."""
    settings = {"train__epochs": 2, "train__lr": 3e-3, "data__validation": 0.4, "train__evaluate_steps": 4}
    done = run(photos, tmp_path / "run", method=method, **settings)
    best = max(done.result.curve[1:], key=lambda record: record["MAP@R"])
    assert best["step"] % 6, "a choice in the middle of an epoch"
    assert done.result.chosen_step == best["step"]
    assert done.result.chosen_epoch == best["epoch"] == best["step"] / 6
    assert done.result.validation == best
    assert Checkpoint.read(done.folder / "best.safetensors").state == {"epoch": best["epoch"], "step": best["step"]}
    images = split(open_data(photos), 0.4, "auto", 0).validation
    assert images is not None
    scores = pm.evaluate(done.load().embed(images), images.labels, ("R@1", "MAP@R"))
    assert scores == {name: best[name] for name in scores} == done.scores


def test_patience_may_end_training_in_the_middle_of_an_epoch(photos: Path, tmp_path: Path) -> None:
    settings = STILL | {"train__epochs": 9, "train__patience": 2, "train__evaluate_steps": 3}
    done = run(photos, tmp_path / "run", **settings)
    assert steps(done.result.curve) == [(0, 0), (3, 0.375), (6, 0.75)]
    assert (done.result.epochs, done.result.steps) == (0.75, 6)
    assert (done.result.chosen_epoch, done.result.chosen_step) == (0, 0)
    assert state(done.folder)["done"]
    assert run(photos, tmp_path / "run", resume=True, **settings).result.steps == 6
    more = run(photos, tmp_path / "run", resume=True, **settings | {"train__patience": 3})
    assert more.result.steps == 9
    same_run(more.folder, run(photos, tmp_path / "straight", **settings | {"train__patience": 3}).folder)


def test_a_refit_trains_for_the_same_fraction_of_an_epoch(photos: Path, tmp_path: Path) -> None:
    settings = {"train__epochs": 2, "train__evaluate_steps": 3, "train__refit": True}

    class Ends(Silent):
        def tick(self, tick: Tick) -> None:
            if tick.steps != 16 and tick.step == 3:  # of the refit: there is no evaluation after 1.6 epochs
                raise Stop

    with pytest.raises(Stop):
        run(photos, tmp_path / "run", watcher=Ends(), train__save_every=1, **settings)
    done = run(photos, tmp_path / "run", resume=True, **settings)
    refit = state(tmp_path / "run" / "refit")
    chosen = done.result.chosen_epoch
    end = round(chosen * 10)
    assert (refit["step"], refit["epoch"], refit["position"], refit["done"]) == (end, end // 10, end % 10, True)
    due = sorted({*range(0, end + 1, 3), end})
    assert steps(refit["curve"]) == [(step, step / 10) for step in due]
    assert (done.result.refit["epochs"], done.result.refit["steps"]) == (chosen, end)
    straight = run(photos, tmp_path / "straight", **settings)
    same_run(done.folder, straight.folder)
    same_tensors(done.folder / "refit" / "last.safetensors", straight.folder / "refit" / "last.safetensors")
    assert records(done.folder / "refit") == records(straight.folder / "refit")
    written = (done.folder / "refit" / "last.safetensors").stat().st_mtime_ns
    run(photos, tmp_path / "run", resume=True, **settings)
    assert (done.folder / "refit" / "last.safetensors").stat().st_mtime_ns == written, "done is done"
    # Fewer steps are chosen now, as if the scores of the held-out classes had been different.
    chosen = Checkpoint.read(done.folder / "last.safetensors")
    chosen.state["curve"][1] |= {"epoch": 0.25, "step": 2}
    chosen.state["best"] = [1.0, 0.25]
    chosen.write(done.folder / "last.safetensors")
    fewer = run(photos, tmp_path / "run", resume=True, **settings)
    assert (fewer.result.refit["steps"], state(fewer.folder / "refit")["step"]) == (2, 2)


class Copies(Silent):
    """Copies the folder of a run as a kill would leave it: at every step, and in the middle of every evaluation."""

    def __init__(self, folder: Path, copies: Path) -> None:
        self.folder, self.copies, self.step = folder, copies, 0

    def tick(self, tick: Tick) -> None:
        self.step = tick.step
        shutil.copytree(self.folder, self.copies / f"{tick.step:02d}")

    def evaluated(
        self, epoch: float, scores: dict[str, float], best: bool, scored_on: str = "held-out classes"
    ) -> None:
        if self.step:
            shutil.copytree(self.folder, self.copies / f"{self.step:02d} evaluated")


def test_killed_anywhere_it_goes_on_and_evaluates_once(photos: Path, tmp_path: Path, tasting: list) -> None:
    """The pool is part of the state here: a different pool after a kill would change the tensors of the method."""
    settings = {"method": "tasting", "train__epochs": 2, "train__evaluate_steps": 3, "train__save_every": 5}
    straight = tmp_path / "straight"
    run(photos, straight, watcher=Copies(straight, tmp_path / "copies"), **settings)
    at = [f"{state(copy).get('step')} {copy.name}" for copy in sorted((tmp_path / "copies").iterdir())]
    wanted = ["0 01", "3 04", "5 06", "5 06 evaluated", "6 07", "10 12", "10 13", "15 16", "15 16 evaluated"]
    assert set(wanted) <= set(at), "kills between checkpoint and evaluation, and an evaluation that no checkpoint holds"
    for name in wanted:
        copy = tmp_path / "copies" / name.split(" ", 1)[1]
        torch.manual_seed(99)
        run(photos, copy, resume=True, **settings)
        same_run(copy, straight)


def test_asked_to_stop_where_an_evaluation_is_due(photos: Path, tmp_path: Path) -> None:
    settings = {"train__epochs": 1, "train__evaluate_steps": 3}

    class Asks(Silent):
        def tick(self, tick: Tick) -> None:
            if tick.step == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        run(photos, tmp_path / "run", watcher=Asks(), **settings)
    stopped = state(tmp_path / "run")
    assert (stopped["step"], steps(stopped["curve"])) == (3, [(0, 0), (3, 0.375)]), "evaluated, then saved"
    run(photos, tmp_path / "run", resume=True, **settings)
    same_run(tmp_path / "run", run(photos, tmp_path / "straight", **settings).folder)


def test_a_pool_is_given_to_those_who_need_it(photos: Path, tmp_path: Path, tasting: list[Tasting]) -> None:
    run(photos, tmp_path / "tasting", method="tasting", train__epochs=1, train__evaluate_steps=5)
    run(photos, tmp_path / "plain", method="plain", train__epochs=1)
    asked, plain = tasting[1::2]  # each method is built once before, to check that it can be built
    assert [len(objective.told) for objective in (asked, plain)] == [3, 2], "at the start and after each evaluation"
    assert all(told.pool is None for told in plain.told)
    assert all(told.score is not None for told in asked.told)
    assert asked.told[0].pool is not None
    vectors, labels = asked.told[0].pool(2)
    assert labels.tolist() == [c for c in range(8) for _ in range(2)]
    assert (vectors.shape, vectors.dtype, vectors.requires_grad) == ((16, 8), torch.float32, False)


def test_figures_are_those_after_the_boundary(photos: Path, tmp_path: Path, tasting: list[Tasting]) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    settings = {"train__epochs": 1, "train__evaluate_steps": 5, "train__track": "tensorboard"}
    done = run(photos, tmp_path / "run", method="tasting", **settings)
    told = json.loads((done.folder / "result.json").read_text())["curve"]
    assert [record["figures"]["boundaries"] for record in told] == [1, 2, 3]
    assert len({record["figures"]["taste"] for record in told}) == 3
    logged = [record for record in records(done.folder) if record["event"] == "evaluation"]
    assert [record["figures"] for record in logged] == [record["figures"] for record in told]
    found = events.EventAccumulator(str(done.folder / "tensorboard"))
    found.Reload()
    drawn = {event.step: event.value for event in found.Scalars("validation/figures/taste")}
    assert drawn == pytest.approx({record["step"]: record["figures"]["taste"] for record in told})
    plain = run(photos, tmp_path / "plain", method="plain", train__epochs=1)
    assert all("figures" not in record for record in (*plain.result.curve, *records(plain.folder)))


@pytest.fixture
def trained_names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A method `copying` that keeps a copy of every trainable parameter, and the names of the copies."""
    names: list[str] = []

    class Copying(Tasting):
        def bind(self, encoder: nn.Module) -> None:
            super().bind(encoder)
            for name, value in encoder.named_parameters():
                if value.requires_grad:
                    names.append(name)
                    self.register_buffer(name.replace(".", "/"), value.detach().clone())

    @about(paper="none", choose="never", needs=("encoder", "pool"))
    def copying(classes: int, dim: int) -> Objective:
        return Copying(classes, dim)

    monkeypatch.setitem(CATALOGUE, "copying", copying)
    return names


def test_a_method_that_copies_the_encoder_copies_the_head_of_a_frozen_one(
    photos: Path, tmp_path: Path, trained_names: list[str]
) -> None:
    settings = {"method": "copying", "train__frozen": True, "train__epochs": 2, "train__evaluate_steps": 3}
    straight, out = tmp_path / "straight", tmp_path / "copies" / "06 evaluated"
    run(photos, straight, watcher=Copies(straight, tmp_path / "copies"), **settings)
    assert trained_names == ["head.weight", "head.bias"]
    run(photos, out, resume=True, **settings)
    same_run(out, straight)
    copy = Checkpoint.read(straight / "last.safetensors").tensors["criterion.objective.head/weight"]
    assert torch.equal(copy, Checkpoint.read(out / "last.safetensors").tensors["criterion.objective.head/weight"])


def test_frozen_features_refuse_a_method_that_wants_images(photos: Path, tmp_path: Path, monkeypatch) -> None:
    @about(paper="none", choose="never", needs=("images",))
    def looking(classes: int, dim: int) -> Objective:
        raise AssertionError

    monkeypatch.setitem(CATALOGUE, "looking", looking)
    with pytest.raises(ValueError, match=r"^train.frozen: got true, but looking runs the encoder on images"):
        run(photos, tmp_path / "run", method="looking", train__frozen=True)
