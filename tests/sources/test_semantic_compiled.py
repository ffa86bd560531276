"""Compiled and recorded steps of two passes in one run, and class prompts that are copied to a GPU and back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import proxymetric as pm
from proxymetric.core.pieces import Batch
from proxymetric.core.second_pass import ClassPrompts
from proxymetric.sources import RowTable
from proxymetric.system.watcher import Silent, Tick
from proxymetric.training.learner import Learner
from proxymetric.training.options import TrainOptions
from proxymetric.training.process_group import ProcessGroup
from proxymetric.training.trainer import Trainer
from sources.test_semantic_towers import EXACT, LABELS, VPT, B, C, D, alike, slopes, small
from training.test_parallel import close
from training_runs import run
from vits import drawn, pictures, two_blocks

pytestmark = pytest.mark.slow

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def afresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("afresh")
@pytest.mark.parametrize("checkpointing", [False, True, "mlp"])
def test_a_pass_is_traced_as_a_whole(checkpointing: bool | str, monkeypatch: pytest.MonkeyPatch) -> None:
    two_blocks(monkeypatch)
    encoder, calls = small(checkpointing=checkpointing).double(), []
    traced = torch.compile(encoder._pooled, backend="aot_eager", fullgraph=True)

    def counted(*given: Any) -> Tensor:
        calls.append(1)
        return traced(*given)

    rows, x = drawn(3, 3, 4, 64).requires_grad_(), pictures(B)
    prompts = ClassPrompts(rows, torch.tensor([2, 0, 2, 1]), [3, 1])
    expected = encoder.features_twice(x, prompts, True)
    encoder._compiled = counted
    actual = encoder.features_twice(x, prompts, True)
    for got, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, want, **EXACT)
    alike(slopes(encoder, actual, [rows]), slopes(encoder, expected, [rows]), **EXACT)
    assert len(calls) == 1
    with torch.no_grad():
        encoder.features(x)
    encoder.eval().features(x)
    assert len(calls) == 1, "neither without gradients nor in evaluation mode"


@pytest.mark.usefixtures("afresh")
def test_a_copy_runs_its_own_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    two_blocks(monkeypatch)
    encoder, x = small(), pictures(B)
    encoder._compiled = torch.compile(encoder._pooled, backend="aot_eager")
    assert encoder.features(x).any()
    other = copy.deepcopy(encoder)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert not other.features(x).any()


class Compiled:
    """Replaces `torch.compile` by a backend that needs no compiler; records its arguments and its calls."""

    def __init__(self) -> None:
        self.modes: list[str | None] = []
        self.calls = 0
        self.compile = torch.compile

    def __call__(self, function: Callable[..., Tensor], mode: str | None = None) -> Callable[..., Tensor]:
        self.modes.append(mode)
        traced = self.compile(function, backend="aot_eager")

        def counted(*given: Any) -> Tensor:
            self.calls += 1
            return traced(*given)

        return counted


@pytest.mark.usefixtures("afresh", "only_training")
def test_a_run_compiles_its_steps(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two_blocks(monkeypatch)
    monkeypatch.setattr(torch, "compile", compiled := Compiled())
    settings: dict[str, Any] = {
        "method": "vptsp-g",
        "encoder__backbone": "test_vit",
        "encoder__pretrained": False,
        "encoder__tuning": "vpt+bitfit",
        "train__optimizer": "sgd",
        "train__epochs": 1,
        "train__warmup": 0,
        "train__per_class": 2,
    }
    plain = run(photos, tmp_path / "plain", **settings)
    assert not compiled.modes
    made = run(photos, tmp_path / "made", **settings, train__compile=True)
    assert compiled.modes == [None]
    assert compiled.calls == 8, "every step, and no evaluation"
    close(made.folder, plain.folder)


class Feed:
    """Six batches of eight images, of four classes and then of three."""

    advice = ""

    def __init__(self, device: str) -> None:
        labels = [torch.tensor(4 * [number, 1, 2] if number > 3 else 2 * [0, 1, 2, 3])[:8] for number in range(6)]
        self.batches = [Batch(pictures(8).roll(i, 0).to(device), own) for i, own in enumerate(labels)]

    def __len__(self) -> int:
        return len(self.batches)

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        yield from self.batches[start:]


@pytest.mark.parametrize(
    ("device", "accumulate", "size", "frozen", "modes"),
    [
        ("cpu", 1, 1, False, [None]), ("cuda", 1, 1, False, ["reduce-overhead"]), ("cuda", 2, 1, False, [None]),
        ("cuda", 1, 2, False, [None]), ("cuda", 1, 1, True, []),
    ],
)  # fmt: skip
def test_steps_are_recorded_where_gradients_go_at_once(
    device: str, accumulate: int, size: int, frozen: bool, modes: list[str | None], tmp_path: Path, monkeypatch: Any
) -> None:
    two_blocks(monkeypatch)
    monkeypatch.setattr(torch, "compile", compiled := Compiled())
    learner = Learner(small(), pm.method("proxy-anchor", classes=C, dim=D), frozen)
    options = TrainOptions(compile=True, accumulate=accumulate, amp="off")
    Trainer(learner, Feed("cpu"), options, tmp_path, Silent(), world=ProcessGroup(0, size), device=torch.device(device))
    assert compiled.modes == modes


# On a GPU


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The same bits every time."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    with sdpa_kernel(SDPBackend.MATH):
        yield
    torch.use_deterministic_algorithms(False)


class There:
    """A learner on the GPU with an optimiser; with `host`, its class prompts lie in host memory."""

    def __init__(self, kind: str, host: bool) -> None:
        encoder = small()
        self.learner = Learner(encoder, pm.method("vptsp-g", classes=C, dim=D, dropout=0.1, **VPT)).train()
        (self.table,) = self.learner.criterion.row_tables()
        self.table.host = host
        self.table.follow(kind, (0.9, 0.999), 0.01, 0.9)
        self.learner.cuda()
        groups = [{"params": encoder.parameters()}, *self.learner.criterion.param_groups(lr=1e-2, network_lr=1e-2)]
        self.optimizer = torch.optim.SGD(groups, lr=1e-2, momentum=0.9)

    def step(self, number: int) -> Tensor:
        torch.manual_seed(number)
        loss = self.learner(pictures(6).roll(number, 0).cuda(), (LABELS + number) % C)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        torch.cuda._sleep(20_000_000)  # some ten milliseconds in which the rows cannot arrive
        self.learner.criterion.commit(self.optimizer)
        return loss.detach()

    def late(self) -> bool:
        return {"values", "average"} <= set(self.table._arriving)

    def state(self) -> dict[str, Tensor]:
        return state(self.learner)


def state(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.cpu().clone() for name, value in module.state_dict().items()}


@needs_gpu
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_rows_that_travel_are_those_that_stay(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, also if rows are taken, or the module is copied, before the copies have finished."""
    two_blocks(monkeypatch)
    host, there = There(kind, True), There(kind, False)
    assert [part.table.values.device.type for part in (host, there)] == ["cpu", "cuda"]
    begun = host.state()
    for number in range(6):
        assert torch.equal(host.step(number), there.step(number)), number
        assert host.late()
        if number == 1:
            alike(host.state(), there.state(), rtol=0, atol=0)
        if number == 3:
            copied = copy.deepcopy(host.learner)
            (table,) = copied.criterion.row_tables()
            assert isinstance(table, RowTable)
            assert not table._arriving
            alike(state(copied), there.state(), rtol=0, atol=0)
    alike(host.state(), there.state(), rtol=0, atol=0)
    assert not host.late()
    key = "criterion.objective.source.prompts."
    assert host.state()[key + "steps"].sum() == 18
    assert (host.state()[key + "values"] - begun[key + "values"]).abs().amax((1, 2)).min() > 1e-5


@needs_gpu
@pytest.mark.usefixtures("exact")
def test_what_is_loaded_is_not_overtaken_by_rows_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    two_blocks(monkeypatch)
    straight, again = There("adamw", True), There("adamw", True)
    for number in range(3):
        straight.step(number)
    assert straight.late()
    kept, moments = straight.state(), copy.deepcopy(straight.optimizer.state_dict())
    after = [straight.step(number) for number in range(3, 6)]
    again.step(9)
    assert again.late()
    again.learner.load_state_dict(kept)
    again.optimizer.load_state_dict(moments)
    alike(again.state(), kept, rtol=0, atol=0)
    assert all(map(torch.equal, [again.step(number) for number in range(3, 6)], after))
    alike(again.state(), straight.state(), rtol=0, atol=0)


class Losses(Silent):
    def __init__(self) -> None:
        self.found: list[float] = []

    def tick(self, tick: Tick) -> None:
        self.found.append(tick.loss)


@needs_gpu
@pytest.mark.usefixtures("afresh")
def test_recorded_steps_are_the_eager_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two_blocks(monkeypatch)

    def losses(name: str, compiled: bool, evaluated: int | None) -> list[float]:
        torch.manual_seed(1)
        learner = Learner(small(), pm.method("vptsp-g", classes=C, dim=D, scale=4.0, **VPT)).cuda()
        options = TrainOptions(
            epochs=2, warmup=0, lr=1e-3, proxy_lr=1e-2, amp="off", compile=compiled, evaluate_steps=evaluated
        )

        @torch.inference_mode()
        def score() -> dict[str, float]:
            return {options.monitor: float(learner.encoder.eval()(pictures(8).cuda()).std())}

        (folder := tmp_path / name).mkdir()
        watcher = Losses()
        Trainer(learner, Feed("cuda"), options, folder, watcher, score, device=torch.device("cuda")).run()
        return watcher.found

    eager = losses("eager", False, None)
    assert len(eager) == 12
    assert eager[-1] < eager[0] - 1e-3
    assert losses("recorded", True, None) == pytest.approx(eager, rel=1e-3)
    assert losses("evaluated", True, 2) == pytest.approx(eager, rel=1e-3)
