"""What one step does: accumulation, skipped steps, head warm-up, frozen BatchNorm, rates, clipping."""

from __future__ import annotations

import math
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import proxymetric as pm
from proxymetric.core.pieces import Compare, Context, Objective, Outcome
from proxymetric.encoders import build
from proxymetric.losses import ProxyAnchor
from proxymetric.papers import CATALOGUE
from proxymetric.papers.about import about
from proxymetric.runs.train import Run
from proxymetric.sources import LearnedProxies
from proxymetric.system.checkpoint import Checkpoint
from proxymetric.training.learner import Learner
from proxymetric.training.optim import clip_gradients, decay_factor, make_optimizer, set_rates, step_if
from proxymetric.training.options import TrainOptions
from training_runs import Notes, Process, command, records, run, same_tensors, state

pytestmark = pytest.mark.usefixtures("only_training")
STILL = {"view__crop": "none", "view__flip": False}
"""views without random augmentation, so that an image has the same pixels in batches of any size"""


def tensors(run: Run) -> dict[str, Tensor]:
    return Checkpoint.read(run.folder / "last.safetensors").tensors


@pytest.mark.parametrize("mode", [{"train__frozen": True}, {"encoder__freeze_bn": True}], ids=["frozen", "whole"])
def test_four_batches_of_eight_are_one_of_thirty_two(mode: dict, photos: Path, tmp_path: Path) -> None:
    """The mean over samples is the mean of the means over equal parts; BatchNorm, which would differ, is frozen."""
    # With 64 training images, both runs make two steps per epoch.
    common = {"method": "norm-softmax", "train__optimizer": "sgd", "train__lr": 0.02, "train__proxy_lr": 0.2}
    common |= {"train__epochs": 2, "train__warmup": 0, "train__clip_value": None, **STILL, **mode}
    one = run(photos, tmp_path / "one", train__batch=32, **common)
    four = run(photos, tmp_path / "four", train__batch=8, train__accumulate=4, **common)
    assert one.result.steps == four.result.steps == 4
    losses = [[record["loss"] for record in r.result.curve[1:]] for r in (one, four)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    expected, found = tensors(one), tensors(four)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-3, atol=1e-5, msg=name)
    # Without accumulation the result differs.
    eight = tensors(run(photos, tmp_path / "eight", train__batch=8, **common))
    assert (eight["encoder.head.weight"] - expected["encoder.head.weight"]).abs().max() > 1e-2


def test_the_last_step_of_an_epoch_takes_what_is_left(photos: Path, tmp_path: Path) -> None:
    done = run(photos, tmp_path / "run", train__accumulate=3, train__epochs=2)
    assert done.result.steps == 6, "8 batches: three, three and two"
    assert tensors(done)["criterion._extra_state"].tolist() == [6.0, 1.0]


class Heavy(torch.autograd.Function):
    """The identity, with a tensor that lives as long as its node in the graph, as the caches of the losses do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tensors: list[weakref.ref]) -> Tensor:
        ctx.kept = torch.zeros(1)
        tensors.append(weakref.ref(ctx.kept))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        return slope, None


def test_the_memory_of_accumulation_does_not_grow_with_the_batches(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a batch is computed, the graph of the previous batch may still exist, but no earlier graph."""
    tensors: list[weakref.ref] = []
    alive: list[int] = []

    class Watched(Compare):
        def forward(self, ctx: Context) -> Outcome:
            alive.append(sum(tensor() is not None for tensor in tensors))
            return super().forward(ctx._replace(embeddings=Heavy.apply(ctx.embeddings, tensors)))

    @about(paper="none", choose="never")
    def watched(classes: int, dim: int) -> Objective:
        return Watched(ProxyAnchor(), LearnedProxies(classes, dim))

    monkeypatch.setitem(CATALOGUE, "watched", watched)
    run(photos, tmp_path / "run", method="watched", train__accumulate=4, train__epochs=1, train__warmup=0)
    assert len(alive) == 8
    assert max(alive) <= 1


class Poisoned(Compare):
    """Proxy-Anchor whose third batch is poisoned; it counts commits in its state, and forward passes outside of it."""

    def __init__(self, classes: int, dim: int, poison: str) -> None:
        super().__init__(ProxyAnchor(), LearnedProxies(classes, dim))
        self.register_buffer("commits", torch.zeros((), dtype=torch.int64))
        self.poison, self.passes = poison, 0

    def forward(self, ctx: Context) -> Outcome:
        terms, _ = super().forward(ctx)
        self.passes += 1
        if self.passes == 3:
            nothing = 0 * ctx.embeddings.sum()
            # The square root at 0 is 0, its slope is infinite: the loss is finite, its gradient is not.
            terms["poison"] = nothing * math.nan if self.poison == "loss" else nothing.square().sqrt()

        def commit() -> None:
            self.commits += 1

        return Outcome(terms, commit)


class Watching(Notes):
    """Copies the checkpoints before and after the step that was skipped."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def say(self, text: str) -> None:
        super().say(text)
        if "not finite" in text:
            shutil.copy(self.folder / "last.safetensors", self.folder / "before")

    def tick(self, tick) -> None:
        if tick.step == 4:
            shutil.copy(self.folder / "last.safetensors", self.folder / "after")


@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("poison", ["loss", "gradient"])
def test_a_step_that_is_not_finite_leaves_no_trace(
    poison: str, fused: bool | None, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the optimiser itself checks for finite gradients (fused, as on a GPU)."""
    monkeypatch.setattr("proxymetric.training.optim._fused", lambda *given: fused)

    @about(paper="none", choose="never")
    def poisoned(classes: int, dim: int) -> Objective:
        return Poisoned(classes, dim, poison)

    monkeypatch.setitem(CATALOGUE, "poisoned", poisoned)
    watcher = Watching(tmp_path / "run")
    often = {"train__save_every": 1, "train__epochs": 1, "train__warmup": 0}
    done = run(photos, tmp_path / "run", method="poisoned", watcher=watcher, **often)
    assert done.result.skipped_steps == 1
    assert done.result.steps == 8
    before, after = (Checkpoint.read(tmp_path / "run" / name) for name in ("before", "after"))
    assert (before.state["step"], after.state["step"]) == (2, 3)
    assert after.state["skipped"] == 1
    # Encoder with its BatchNorm statistics, criterion and optimiser: bit for bit.
    same_tensors(tmp_path / "run" / "before", tmp_path / "run" / "after")
    final = tensors(done)
    assert int(final["criterion.objective.commits"]) == 7
    assert all(value.isfinite().all() for name, value in final.items() if value.is_floating_point())
    assert [r["step"] for r in records(done.folder) if r["event"] == "skipped"] == [3]
    assert "step 3: loss or gradient not finite, skipped (1 so far)" in watcher.said


def test_a_batch_of_unreadable_images_is_no_step(photos: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(photos, tmp_path / "photos")
    for c in (0, 1, 2, 3, 4, 5):
        for k in range(4):
            (broken / f"class{c}" / f"{k}.png").write_text("no picture")
    done = run(broken, tmp_path / "run", train__batch=1, train__epochs=1, encoder__freeze_bn=True)
    trained = sum("class" in title for title in done.result.bad_images)
    skipped = [record for record in records(done.folder) if record["event"] == "unread"]
    assert 0 < len(skipped) <= trained
    assert done.result.skipped_steps == 0, "only steps that are not finite count as skipped"
    assert int(tensors(done)["criterion._extra_state"][0]) == done.result.steps - len(skipped)


def moved(before: dict[str, Tensor], after: dict[str, Tensor], part: str, kinds: tuple[str, ...]) -> list[bool]:
    names = [name for name in before if name.startswith(part) and name.endswith(kinds)]
    assert names
    return [not torch.equal(before[name], after[name]) for name in names]


def test_in_the_warm_up_only_head_and_proxies_move(photos: Path, tmp_path: Path) -> None:
    initial = tensors(run(photos, tmp_path / "initial", train__lr=0.0, train__epochs=1))
    all_of_it, one_of_two, told = (
        Notes(),
        Notes(),
        "epoch 1 warms up: only head and proxies are trained (train.warmup=1)",
    )
    warm = tensors(run(photos, tmp_path / "warm", watcher=all_of_it, train__epochs=1, train__warmup=1))
    after = tensors(run(photos, tmp_path / "after", watcher=one_of_two, train__epochs=2, train__warmup=1))
    assert told in one_of_two.said
    assert f"{told}, and the backbone is never trained; expected more epochs, or train.warmup=0" in all_of_it.said
    alone, rows = Notes(), Notes()
    few = {"train__epochs": 1, "train__warmup": 1, "train__lr": 1e-3}
    head = run(photos, tmp_path / "alone", watcher=alone, encoder__tuning="linear", **few)
    assert head.result.rates == {"head": 1e-3, "proxies": 0.1}
    assert not [said for said in alone.said if "warms up" in said], "nothing else will ever move"
    headless = {"encoder__head": "none", "encoder__dim": None, "loss__touched": "batch"}
    none = run(photos, tmp_path / "rows", watcher=rows, **few | {"train__epochs": 2} | headless)
    assert told in rows.said
    assert none.result.rates == {"backbone": 1e-3, "proxies": 0.1}
    weights = ("weight", "bias")
    assert not any(moved(initial, warm, "encoder.backbone.", weights))
    assert all(moved(initial, warm, "encoder.head.", weights))
    assert all(moved(initial, warm, "criterion.objective.source.vectors", ("vectors",)))
    assert all(moved(warm, after, "encoder.backbone.", weights))
    assert all(moved(warm, after, "encoder.backbone.", ("running_mean", "running_var")))
    none = tensors(run(photos, tmp_path / "none", train__epochs=1, train__warmup=0))
    assert all(moved(initial, none, "encoder.backbone.", weights))


def test_frozen_statistics_train_scale_and_shift_after_the_warm_up(photos: Path, tmp_path: Path) -> None:
    settings = {"encoder__freeze_bn": "statistics", "train__lr": 1e-3}
    initial = tensors(run(photos, tmp_path / "initial", **settings, train__epochs=1, train__warmup=1))
    after = tensors(run(photos, tmp_path / "run", **settings, train__epochs=2, train__warmup=1))
    norms = [name.removesuffix("running_mean") for name in initial if name.endswith("running_mean")]
    assert len(norms) == 4
    for norm in norms:
        assert all(moved(initial, after, norm, ("weight", "bias")))
        assert not any(moved(initial, after, norm, ("running_mean", "running_var", "tracked")))
        assert not after[f"{norm}running_mean"].any(), "still as it was built"


def test_frozen_batch_norm_keeps_statistics_scale_and_shift(photos: Path, tmp_path: Path) -> None:
    still = {"encoder__freeze_bn": True, "train__warmup": 0, "train__epochs": 1}
    initial = tensors(run(photos, tmp_path / "initial", **still | {"train__lr": 0.0}))
    done = run(photos, tmp_path / "run", **still)
    after = tensors(done)
    norms = [name.removesuffix("running_mean") for name in initial if name.endswith("running_mean")]
    assert len(norms) == 4
    for norm in norms:
        assert not any(moved(initial, after, norm, ("weight", "bias", "running_mean", "running_var", "tracked")))
    convolutions = [name for name in initial if name.endswith(".0.weight")]
    assert all(not torch.equal(initial[name], after[name]) for name in convolutions)
    frozen = 2 * (32 + 64 + 128 + 256)
    assert done.result.parameters["total"] - done.result.parameters["trained"] == frozen


@pytest.mark.parametrize(
    ("decay", "factors"),
    [
        ({"decay": "none"}, [1, 1, 1, 1]),
        ({"decay": "step", "decay_every": 2, "decay_by": 0.1}, [1, 1, 0.1, 0.1]),
        ({"decay": "cosine", "decay_every": None}, [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2]),
    ],
    ids=["none", "step", "cosine"],
)
def test_rates_as_logged(decay: dict, factors: list[float], photos: Path, tmp_path: Path) -> None:
    schedule = {f"train__{key}": value for key, value in decay.items()}
    done = run(photos, tmp_path / "run", train__epochs=4, train__batch=4, train__frozen=True, **schedule)
    steps = [record for record in records(done.folder) if record["event"] == "step"]
    assert [record["step"] for record in steps] == [10, 20, 30, 40, 50, 60]
    for record in steps:
        factor = factors[record["epoch"]]
        assert record["epoch"] == (record["step"] - 1) // 16
        assert record["lr"] == pytest.approx({"head": 1e-3 * factor, "proxies": 1e-1 * factor})


def test_a_plateau_lowers_the_rates(photos: Path, tmp_path: Path) -> None:
    """The rates follow from the scores of the curve: as logged, also within an epoch and after a kill."""
    schedule = {"train__decay": "plateau", "train__decay_every": 2, "train__decay_by": 0.1, "train__patience": None}
    settings = schedule | {"train__batch": 4, "train__frozen": True, "train__epochs": 3, "train__evaluate_steps": 5}
    done = run(photos, tmp_path / "run", **settings)
    best, stale, factor, factors = -1.0, 0, 1.0, {}
    for evaluation in done.result.curve:
        score = evaluation["MAP@R"]
        best, stale = (score, 0) if score > best else (best, stale + 1)
        if stale == 2:
            factor, stale = factor * 0.1, 0
        factors[evaluation["step"]] = factor
    assert len(set(factors.values())) > 1, "the scores never rested: this test shows nothing"
    steps = [record for record in records(done.folder) if record["event"] == "step"]
    assert [record["step"] for record in steps] == [10, 20, 30, 40]
    for record in steps:
        factor = factors[max(step for step in factors if step < record["step"])]
        assert record["lr"] == pytest.approx({"head": 1e-3 * factor, "proxies": 1e-1 * factor})


def test_a_plateau_needs_scores(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"train.decay: got 'plateau' without classes that are scored"):
        run(photos, tmp_path / "run", train__decay="plateau", data__validation=0, train__epochs=1)
    with pytest.raises(ValueError, match=r"train.decay_every: got none with train.decay='plateau'"):
        TrainOptions(decay="plateau", decay_every=None)
    with pytest.raises(ValueError, match=r"train.decay: got 'plateau' with train.refit"):
        TrainOptions(decay="plateau", refit=True)


def learner(method: str = "proxy-anchor", frozen: bool = False, **encoder: object) -> Learner:
    return Learner(build("small", **{"dim": 8, "size": 16, **encoder}), pm.method(method, classes=3, dim=8), frozen)


def test_proxies_have_a_hundred_times_the_rate() -> None:
    assert TrainOptions().base_rates == (1e-4, 1e-2)
    assert TrainOptions(frozen=True).base_rates == (1e-3, 1e-1)
    assert TrainOptions(lr=0.5).base_rates == (0.5, 50.0)
    assert TrainOptions(lr=0.5, proxy_lr=0.25).base_rates == (0.5, 0.25)
    optimizer = make_optimizer(learner(), TrainOptions())
    assert {group["name"]: group["lr"] for group in optimizer.param_groups} == {
        "head": 1e-4, "backbone": 1e-4, "proxies": 1e-2,
    }  # fmt: skip
    set_rates(optimizer, 0.5)
    set_rates(optimizer, 0.25)
    assert optimizer.param_groups[2]["lr"] == 0.25e-2, "a factor of the initial rate, not of the previous one"


@pytest.mark.parametrize(
    ("name", "kind"), [("adamw", torch.optim.AdamW), ("adam", torch.optim.Adam), ("sgd", torch.optim.SGD)]
)
def test_the_optimiser_that_was_asked_for(name: str, kind: type) -> None:
    options = TrainOptions(optimizer=name, weight_decay=0.25, momentum=0.75, betas=(0.8, 0.9))
    optimizer = make_optimizer(learner(), options)
    assert type(optimizer) is kind
    for group in optimizer.param_groups:
        assert group["weight_decay"] == 0.25
        assert group["momentum"] == 0.75 if name == "sgd" else group["betas"] == (0.8, 0.9)


def test_groups_hold_what_is_trained_and_nothing_twice() -> None:
    for frozen in (False, True):
        whole = learner(frozen=frozen)
        held = [p for group in make_optimizer(whole, TrainOptions()).param_groups for p in group["params"]]
        wanted = [p for name, p in whole.named_parameters() if not (frozen and name.startswith("encoder.backbone."))]
        assert sorted(map(id, held)) == sorted(map(id, wanted))
    empty = Learner(build("small", dim=None, size=16, head="none"), pm.method("triplet", classes=3, dim=8), True)
    with pytest.raises(ValueError, match="got nothing to train"):
        make_optimizer(empty, TrainOptions())


def gradients(*values: list[float]) -> list[Tensor]:
    made = [nn.Parameter(torch.zeros(len(value))) for value in values]
    for parameter, value in zip(made, values):
        parameter.grad = torch.tensor(value)
    return made


def test_clipping_by_value() -> None:
    a, b = gradients([3.0, -0.5], [-20.0])
    idle = nn.Parameter(torch.zeros(2))
    assert clip_gradients([a, idle, b], [], TrainOptions(clip_value=1.0)).item() == pytest.approx(
        (9 + 0.25 + 400) ** 0.5
    )
    assert a.grad.tolist() == [1.0, -0.5]
    assert b.grad.tolist() == [-1.0]
    assert idle.grad is None


def test_clipping_by_norm() -> None:
    a, b = gradients([3.0], [4.0])
    assert clip_gradients([a, b], [], TrainOptions(clip_value=None, clip_norm=1.0)).item() == 5
    torch.testing.assert_close(torch.cat([a.grad, b.grad]), torch.tensor([0.6, 0.8]))
    a, b = gradients([3.0], [4.0])
    assert clip_gradients([a], [b], TrainOptions(clip_value=None, clip_norm=1.0)).item() == 5, "rows count in the norm"
    torch.testing.assert_close(torch.cat([a.grad, b.grad]), torch.tensor([0.6, 0.8]))
    a, b = gradients([3.0], [4.0])
    assert clip_gradients([a, b], [], TrainOptions(clip_value=None, clip_norm=10.0)).item() == 5
    assert (a.grad.item(), b.grad.item()) == (3.0, 4.0), "a small gradient is left as it is"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_is_found(bad: float) -> None:
    for in_rows in (False, True):
        good, wrong = gradients([1.0], [bad])
        parameters, rows = ([good], [wrong]) if in_rows else ([good, wrong], [])
        assert not clip_gradients(parameters, rows, TrainOptions()).isfinite()


def test_without_clipping_gradients_are_left_alone() -> None:
    (a,) = gradients([1e6, -3.0])
    assert clip_gradients([a], [], TrainOptions(clip_value=None)).isfinite()
    assert a.grad.tolist() == [1e6, -3.0]


def test_a_schedule_is_a_function_of_the_epoch_alone() -> None:
    cosine = TrainOptions(decay="cosine", decay_every=10, epochs=40)
    assert decay_factor(cosine, 0) == 1
    assert decay_factor(cosine, 10) == decay_factor(cosine, 25) == pytest.approx(0)
    assert decay_factor(TrainOptions(decay="step", decay_every=None, epochs=4), 3) == 1


def test_seeds_make_runs_repeatable(photos: Path, tmp_path: Path) -> None:
    """The same seed gives the same bits, here and in another process; another seed gives another run."""
    elsewhere = Process(command(photos, tmp_path / "there", train__epochs=1), tmp_path / "text")
    here = run(photos, tmp_path / "here", train__epochs=1)
    assert elsewhere.finish() == 0, elsewhere.text()
    same_tensors(here.folder / "last.safetensors", tmp_path / "there" / "last.safetensors")
    other = run(photos, tmp_path / "other", train__epochs=1, seed=1)
    assert state(other.folder)["curve"] != state(here.folder)["curve"]


@pytest.mark.parametrize("kind", ["adam", "adamw", "sgd"])
def test_an_optimiser_that_looks_itself_trains_the_same(
    kind: str, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxymetric.training.optim._fused", lambda *given: True)
    settings = {"train__optimizer": kind, "train__epochs": 1, "train__warmup": 0}
    asked: list[Tensor] = []
    with monkeypatch.context() as patch:
        here, there = "proxymetric.training.stepper.step_if", step_if
        patch.setattr(here, lambda optimizer, fine: (asked.append(fine), there(optimizer, fine)))
        looked = tensors(run(photos, tmp_path / "looked", **settings))
    assert len(asked) == (0 if kind == "sgd" else 8)
    monkeypatch.setattr("proxymetric.training.stepper.can_step_unchecked", lambda optimizer: False)
    told = tensors(run(photos, tmp_path / "told", **settings))
    assert all(torch.equal(looked[name], told[name]) for name in told)
