"""Steps that are launched before the figures of the last one are read give the results of steps that wait."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from conftest import write_photos
from proxymetric import method
from proxymetric.core.pieces import Boundary, Compare, Context, Objective, Outcome
from proxymetric.core.tally import close_tallies
from proxymetric.criterion import Criterion
from proxymetric.losses import ProxyAnchor
from proxymetric.papers import CATALOGUE, needs
from proxymetric.papers.about import about
from proxymetric.papers.contract import builder, make, optimizer_of, sample, train_step
from proxymetric.papers.contract import run as loss_of
from proxymetric.sources import LearnedProxies
from proxymetric.training.committed_state import MAX_SNAPSHOT_BYTES, committed_state
from proxymetric.training.stepper import Stepper
from training_runs import Notes, records, run, same_tensors, state

pytestmark = pytest.mark.usefixtures("only_training")


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten classes of four pictures; eight are trained on, in four steps per epoch. Only read it."""
    return write_photos(tmp_path_factory.mktemp("few") / "photos", images=4)


class Poisoned(Objective):
    """An objective with noise; the batches `poisoned`, counted from 0, have a bad loss or gradient.

    A batch that comes again, because its step is repeated, keeps its number.
    """

    def __init__(self, objective: Objective, poison: str, poisoned: set[int]) -> None:
        super().__init__()
        self.objective, self.poison, self.poisoned = objective, poison, poisoned
        self.normalise, self.classes, self.dim = objective.normalise, objective.classes, objective.dim
        self.batches: list[int] = []

    def bind(self, encoder: nn.Module) -> None:
        self.objective.bind(encoder)

    def boundary(self, run: Boundary) -> None:
        self.objective.boundary(run)

    def forward(self, ctx: Context) -> Outcome:
        outcome: Outcome = self.objective(ctx)
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
        ("loss", {0, 3, 4}, {}),  # the first step, the last one of an epoch, the first one of the next
        ("gradient", {1}, {"train__accumulate": 3}),
        ("loss", {1, 2}, {"train__save_every": 3, "train__evaluate_steps": 2}),
    ],
)
def test_running_ahead_changes_nothing(
    poison: str, poisoned: set[int], settings: dict[str, Any], few: Path, tmp_path: Path, monkeypatch
) -> None:
    """Parameters, BatchNorm, optimiser, random state, log and messages are those of a run whose steps wait."""
    compare_with_waiting("proxy-anchor", {}, poison, poisoned, settings, few, tmp_path, monkeypatch)


PROMPTED = {
    "encoder__backbone": "test_vit",
    "encoder__pretrained": False,
    "encoder__tuning": "vpt+bitfit",
    "view__size": 32,
}
MEMORIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # name and arguments of the method, settings of the run
    "proxy-isa": ("proxy-isa", {"memory": 21, "memory_epoch": 0, "filter_epoch": 1, "k": 0.0, "lam": 0.0}, {}),
    "proxy-isa, several proxies": (
        "proxy-isa",
        {"base": "mpa", "memory": 21, "memory_epoch": 0, "filter_epoch": 0},
        {},
    ),
    "vcpa": ("vcpa", {}, {}),
    "vcpa, an older prior": ("vcpa", {"prior_lag": 3}, {}),
    "vcpa, first order": ("vcpa", {"newton_steps": 0, "gradient_steps": 2}, {}),
    "vcpa, trained": ("vcpa", {"newton_steps": 0, "prior_lag": 3}, {}),
    "ccp": (
        "ccp",
        {"base": "proxy-anchor", "per_class": 2, "pool": 2, "patience": 1, "memory": 0},
        {"data__validation": 0.3, "train__per_class": 2},
    ),
    "mpa": ("mpa", {}, {}),
    "soft-triple": ("soft-triple", {}, {}),
    "xbm": ("xbm", {"memory": 21, "start": 3}, {"train__per_class": 2}),
    "vptsp-m": ("vptsp-m", {}, PROMPTED),
    "vptsp-g": ("vptsp-g", {}, PROMPTED),
}


POISONS: list[tuple[str, set[int], dict[str, Any]]] = [
    ("loss", {0, 3, 4, 6}, {}),  # the first step, the last one of an epoch, the first one of the next
    ("gradient", {1, 2, 4, 5}, {"train__accumulate": 2, "train__batch": 4, "train__evaluate_steps": 3}),
]


@pytest.mark.parametrize(
    ("name", "poison", "poisoned", "settings"),
    [
        pytest.param(name, *poison, marks=[pytest.mark.slow] * ((row + column) % 2))
        for row, name in enumerate(MEMORIES)
        for column, poison in enumerate(POISONS)
    ],
)
def test_a_memory_does_not_show_that_steps_run_ahead(
    name: str,
    poison: str,
    poisoned: set[int],
    settings: dict[str, Any],
    few: Path,
    tmp_path: Path,
    monkeypatch,
) -> None:
    """The memory of a step that is not finite, and of the step launched after it, is undone."""
    row, arguments, more = MEMORIES[name]
    compare_with_waiting(row, arguments, poison, poisoned, settings | more, few, tmp_path, monkeypatch)


def compare_with_waiting(
    name: str,
    arguments: dict[str, Any],
    poison: str,
    poisoned: set[int],
    settings: dict[str, Any],
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Train twice, with steps that run ahead and with steps that wait, and compare all that is left of the runs."""
    monkeypatch.setattr("proxymetric.training.optim._fused", lambda *given: True)
    monkeypatch.setattr("proxymetric.training.stepper.AHEAD_DEVICES", ("cpu", "cuda"))

    @about(paper="none", choose="never", needs=tuple(needs(name, arguments)))
    def row(classes: int, dim: int) -> Objective:
        return Poisoned(CATALOGUE[name](classes, dim, **arguments), poison, poisoned)

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
    monkeypatch.setattr("proxymetric.training.stepper.committed_state", lambda *given: None)
    waiting = run(photos, tmp_path / "waiting", watcher=notes[1], **chosen)
    assert max(in_flight) == 1
    assert ahead.result.skipped_steps == waiting.result.skipped_steps
    assert bool(poisoned) == bool(waiting.result.skipped_steps)
    same_tensors(ahead.folder / "last.safetensors", waiting.folder / "last.safetensors")
    assert records(ahead.folder) == records(waiting.folder)
    assert [text for text in notes[0].said if "finite" in text] == [t for t in notes[1].said if "finite" in t]
    keys = ("step", "position", "epoch", "losses", "skipped", "images")
    assert [state(ahead.folder)[key] for key in keys] == [state(waiting.folder)[key] for key in keys]


class NeverWaits(TorchDispatchMode):
    """Refuses operators whose result a GPU would have to send to the CPU: numbers, and shapes that depend on values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten.nonzero.default,
            torch.ops.aten.masked_select.default,
        ), func
        if func in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default):
            assert all(index is None or index.dtype != torch.bool for index in args[1]), "an index by a mask"
        return func(*args, **kwargs or {})


def contents(criterion: Criterion) -> dict[tuple[str, str], Any]:
    """All tensors and Python values that a copy of a criterion's pieces holds, by the path of the piece and a name."""
    found: dict[tuple[str, str], Any] = {}
    for path, module in criterion.named_modules():
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        found |= {(path, name): value.detach().clone() for name, value in tensors}
        if module is not criterion:
            plain = {key: value for key, value in module.__getstate__().items() if key not in nn.Module().__dict__}
            found |= {(path, name): list(v) if isinstance(v, list | set | dict) else v for name, v in plain.items()}
    return found


def differences(before: dict[tuple[str, str], Any], after: dict[tuple[str, str], Any]) -> set[tuple[str, str]]:
    assert before.keys() == after.keys()
    return {
        key
        for key, value in before.items()
        if not (torch.equal(value, after[key]) if isinstance(value, Tensor) else value == after[key])
    }


VARIANTS: dict[str, dict[str, Any]] = {
    **{name: {} for name in CATALOGUE},
    "proxy-isa from the start": {"memory": 21, "memory_epoch": 0, "filter_epoch": 0},
    "xbm": {"memory": 21, "start": 0},
    "vcpa with an older prior": {"prior_lag": 3},
    "vcpa by first order": {"newton_steps": 0, "gradient_steps": 2},
    "vcpa by the optimiser": {"newton_steps": 0, "prior_lag": 3},
    "ccp of vcpa": {"base": "vcpa", "per_class": 1},
    "ccp with a memory": {"memory": 21, "memory_start": 0},
    "proxy-anchor of touched rows": {"touched": "batch"},
}
WAITING = {"moco", "proxy-anchor of touched rows"}
"""variants whose commits cannot be undone"""


def built(variant: str) -> tuple[Criterion, torch.optim.Optimizer | None, list[Tensor]]:
    """A criterion that is ready to train, its optimiser, and the parameters of this optimiser."""
    criterion = make(builder(variant.split(" ")[0], **VARIANTS[variant]))
    optimizer = optimizer_of(criterion)
    return criterion, optimizer, [] if optimizer is None else [p for g in optimizer.param_groups for p in g["params"]]


def test_methods_that_run_ahead() -> None:
    criteria = {variant: built(variant) for variant in VARIANTS}
    waiting = {
        name for name, (criterion, _, trained) in criteria.items() if committed_state(criterion, trained) is None
    }
    assert waiting == WAITING


@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if variant not in WAITING])
def test_a_commit_can_be_undone(variant: str) -> None:
    """A commit changes only what its pieces declare, draws no random numbers and does not wait for a GPU."""
    criterion, optimizer, trained = built(variant)
    memory = committed_state(criterion, trained)
    assert memory is not None
    changed: set[tuple[str, str]] = set()
    for seed in range(4):
        train_step(criterion, optimizer, seed)
        close_tallies(criterion)
        embeddings, labels = sample(seed)
        loss_of(criterion, embeddings.requires_grad_(), labels).backward()  # row tables step in the commit
        for table in criterion.row_tables():
            table.leaves()
        before, step, random = contents(criterion), criterion.step, torch.get_rng_state()
        tensors, attributes = [value.clone() for value in memory.tensors()], memory.attributes()
        with NeverWaits():
            criterion.commit(lr=0.1, network_lr=0.1)
        assert torch.equal(random, torch.get_rng_state())
        assert criterion.step == step + 1
        changed |= differences(before, contents(criterion))
        for target, value in zip(memory.tensors(), tensors, strict=True):
            target.copy_(value)
        memory.set_attributes(attributes)
        assert not differences(before, contents(criterion))
    assert bool(changed) == bool(memory.tensors())


def test_what_cannot_be_undone_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece with a buffer that declares nothing, and a memory that is too large to be copied at each step."""

    class Counting(LearnedProxies):
        def __init__(self) -> None:
            super().__init__(classes=3, dim=2)
            self.register_buffer("commits", torch.zeros(()))

    def waits(criterion: Criterion) -> bool:
        return committed_state(criterion, list(criterion.parameters())) is None

    assert not waits(Criterion(Compare(ProxyAnchor(), LearnedProxies(classes=3, dim=2))))
    assert waits(Criterion(Compare(ProxyAnchor(), Counting())))
    row_bytes = 2 * 4 + 8
    build: Callable[[int], Criterion] = lambda rows: method("xbm", classes=3, dim=2, memory=rows)  # noqa: E731
    monkeypatch.setattr("proxymetric.training.committed_state.MAX_SNAPSHOT_BYTES", 10 * row_bytes)
    assert [waits(build(rows)) for rows in (10, 11)] == [False, True]
    assert MAX_SNAPSHOT_BYTES == 2**28


def test_a_parameter_that_the_optimiser_does_not_move_is_a_memory() -> None:
    criterion = method("proxy-anchor", classes=3, dim=2)
    assert committed_state(criterion, []) is None
