"""Proxies divided among processes: loss and gradients of one process, and checkpoints for any number of them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import proxymetric as pm
from groups import together
from proxymetric.core.class_shards import Shard
from proxymetric.core.normalisation import unit
from proxymetric.core.pieces import Compare, Objective, References
from proxymetric.encoders import build
from proxymetric.losses import ProxyAnchor
from proxymetric.ops import using
from proxymetric.runs import recipe as recipes
from proxymetric.runs.assemble import RunContext, make_learner
from proxymetric.sources import INITIALISATIONS, LearnedProxies, learned_proxies
from proxymetric.system.checkpoint import Checkpoint
from proxymetric.system.files import NotSaved
from proxymetric.system.watcher import Silent
from proxymetric.training import sharded_state
from proxymetric.training.learner import Learner
from proxymetric.training.options import TrainOptions
from proxymetric.training.process_group import ProcessGroup
from proxymetric.training.trainer import Trainer
from training.test_parallel import STILL, Pair, close
from training_runs import command, run

C, D, B = 11, 6, 9
LABELS = torch.tensor([0, 5, 5, 10, 3, 0, 7, 3, 3])
"""some classes occur several times, others never"""
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "proxy-anchor": ("proxy-anchor", {}),
    "proxy-anchor, all classes": ("proxy-anchor", {"positive_norm": "all"}),
    "mpa": ("mpa", {"per_class": 3}),
    "mpa-dw": ("mpa-dw", {"per_class": 2}),
    "mpa-ap": ("mpa-ap", {"per_class": 2, "tau": 0.3}),
    "soft-triple": ("soft-triple", {"per_class": 3, "tau": 0.2}),
    "proxy-nca": ("proxy-nca", {}),
    "proxy-nca++": ("proxy-nca++", {}),
    "norm-softmax": ("norm-softmax", {"per_class": 2}),
    "cosface": ("cosface", {}),
    "arcface": ("arcface", {}),
    "adaface": ("adaface", {"rate": 0.3}),
    "subcentre-arcface": ("subcentre-arcface", {"per_class": 2}),
    "proxy-isa": ("proxy-isa", {"memory": 20, "memory_epoch": 0, "filter_epoch": 0, "volume": 5}),
}
METHODS |= {
    f"{name}, nested": (name, METHODS[name][1] | {"nested": [2, D]})
    for name in ("proxy-anchor", "soft-triple", "arcface", "proxy-isa")
}


def steps(criterion: pm.Criterion, impl: str) -> dict[str, Tensor]:
    """Three steps of gradient descent: losses, gradients of the embeddings, and the proxies at the end."""
    criterion.double()
    optimizer = torch.optim.SGD(criterion.param_groups(lr=0.5), lr=0.5, momentum=0.9)
    actual = {}
    for number in range(3):
        x = torch.randn(B, D, generator=torch.Generator().manual_seed(number), dtype=torch.float64).requires_grad_()
        criterion.epoch(number)
        optimizer.zero_grad()
        with using(impl, rows=2 if impl == "chunked" else None):
            loss = criterion(x, LABELS.roll(number))
            loss.backward()
        optimizer.step()
        criterion.commit()
        actual |= {f"loss {number}": loss.detach(), f"embeddings {number}": x.grad}
    return actual | {name: value.clone() for name, value in criterion.state_dict().items()}


def of(name: str) -> pm.Criterion:
    method, arguments = METHODS[name]
    torch.manual_seed(0)
    return pm.method(method, classes=C, dim=D, **arguments)


def one_of_several(rank: int, size: int, folder: str) -> None:
    for name in METHODS:
        for impl in ("plain", "chunked"):
            actual = steps(of(name).shard(rank, size), impl)
            save_file(actual, f"{folder}/{name}.{impl}.{rank}")


@pytest.fixture(scope="module", params=[2, 3])
def parts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    """The results of two and of three processes, for all methods."""
    size, folder = request.param, tmp_path_factory.mktemp("parts")
    together(size, one_of_several, size, str(folder))
    return size, folder


@pytest.mark.parametrize("impl", ["plain", "chunked"])
@pytest.mark.parametrize("name", METHODS)
def test_several_processes_are_one(name: str, impl: str, parts: tuple[int, Path]) -> None:
    size, folder = parts
    actual = [load_file(folder / f"{name}.{impl}.{rank}") for rank in range(size)]
    expected = steps(of(name), "plain")
    start = of(name).state_dict()
    shared = set(expected)
    for key in expected:
        if key.endswith("source.vectors"):
            shared.remove(key)
            whole = torch.cat([each[key] for each in actual])
            torch.testing.assert_close(whole, expected[key], rtol=1e-9, atol=1e-12)
            assert (whole - start[key]).abs().amax(1).min() > 1e-9, "every proxy moved"
            per_class = len(whole) // C
            assert [len(each[key]) // per_class for each in actual] == [
                part.stop - part.start for part in (Shard.of(C, rank, size) for rank in range(size))
            ]
    assert len(shared) == len(expected) - 1
    for key in shared:
        for each in actual:
            torch.testing.assert_close(each[key], expected[key], rtol=1e-9, atol=1e-12, msg=key)


@pytest.mark.parametrize(
    ("method", "arguments", "sentence"),
    [
        ("vcpa", {}, "got VariationalProxies, whose proxies cannot be divided"),
        ("vptsp-g", {}, "got SemanticProxies, whose proxies cannot be divided"),
        ("triplet", {}, "got triplet, which has no proxies to divide"),
        ("proxy-anchor", {"touched": "batch"}, "touched: got 'batch' for proxies that are to be divided"),
    ],
)
def test_what_cannot_be_divided_says_so(method: str, arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        pm.method(method, classes=C, dim=D, **arguments).shard(0, 2)
    with pytest.raises(ValueError, match=sentence):
        pm.method(method, classes=C, dim=D, shard=(0, 2), **arguments)


def decidability(queries: Tensor, labels: Tensor, refs: References, weight: Any = None) -> Tensor:
    """A loss of a user: means and variances over all pairs, so that a part of the classes has another value."""
    s, own = queries @ refs.vectors.T, labels[:, None] == refs.labels
    return (s[own].var() + s[~own].var()).sqrt() / (s[own].mean() - s[~own].mean()).abs()


def own(classes: int, dim: int, declares: bool = False, regulariser: bool = False) -> Objective:
    proxies = LearnedProxies(classes, dim)
    if regulariser:
        return Compare(ProxyAnchor(), proxies, regulariser=lambda refs: refs.rows.square().mean())
    loss = partial(decidability)
    if declares:
        loss.can_shard = True
    return Compare(loss, proxies)


OWN = f"{__name__}:own"


def own_losses(rank: int, size: int) -> None:
    refused = "shard: got the loss partial, which does not declare `can_shard = True`, expected a loss that does"
    with pytest.raises(ValueError, match=refused):
        pm.method(OWN, classes=C, dim=D, shard=(rank, size))
    criterion = pm.method(OWN, classes=C, dim=D)
    with pytest.raises(ValueError, match=refused):
        criterion.shard(rank, size)
    assert not criterion.sharded(), "an error leaves nothing behind"
    with pytest.raises(ValueError, match="shard: got the loss Nested, which does not declare"):
        pm.method(OWN, classes=C, dim=D, nested=[2, D], shard=(rank, size))
    with pytest.raises(ValueError, match="shard: got the regulariser <lambda>, which does not declare"):
        pm.method(OWN, classes=C, dim=D, regulariser=True, shard=(rank, size))
    declared = pm.method(OWN, classes=C, dim=D, declares=True, shard=(rank, size))
    with pytest.raises(ValueError, match="got references divided among processes"):
        declared(torch.randn(B, D), LABELS)


def test_a_loss_that_does_not_declare_that_it_can_be_sharded_is_refused() -> None:
    together(2, own_losses, 2)


def test_a_run_refuses_it_before_it_trains() -> None:
    recipe = recipes.check({"data": {"path": "glyphs:4"}, "train": {"shard": True}, "method": OWN})
    context = RunContext(recipe, torch.device("cpu"), ProcessGroup(0, 2), Silent(), {})
    with pytest.raises(ValueError, match="shard: got the loss partial, which does not declare"):
        make_learner(context, build("small", dim=D, size=32), [2] * C)


def test_a_source_outside_of_a_comparison_is_refused() -> None:
    class Alone(Objective):
        def __init__(self) -> None:
            super().__init__()
            self.source = LearnedProxies(C, D)

    with pytest.raises(ValueError, match="shard: got LearnedProxies outside of a Compare"):
        pm.Criterion(Alone()).shard(0, 2)


def test_fewer_classes_than_processes() -> None:
    for refused in (
        lambda: pm.method("proxy-anchor", classes=C, dim=D).shard(0, 12),
        lambda: pm.method("proxy-anchor", classes=C, dim=D, shard=(0, 12)),
    ):
        with pytest.raises(ValueError, match=r"classes: got 11 for 12 processes"):
            refused()
    assert not pm.method("proxy-anchor", classes=C, dim=D).sharded(), "an error leaves nothing behind"


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_that_is_none_is_refused(rank: int) -> None:
    for refused in (
        lambda: pm.method("proxy-anchor", classes=C, dim=D).shard(rank, 2),
        lambda: pm.method("proxy-anchor", classes=C, dim=D, shard=(rank, 2)),
    ):
        with pytest.raises(ValueError, match=f"rank: got {rank} of 2 processes, expected 0 to 1"):
            refused()


def test_the_part_of_another_process_is_refused(tmp_path: Path) -> None:
    """12 classes in two equal parts, so that the shapes of both are the same."""
    torch.save(pm.method("mpa", classes=12, dim=D).shard(0, 2).state_dict(), tmp_path / "0.pt")
    state = torch.load(tmp_path / "0.pt", weights_only=True)
    again, other, whole = (pm.method("mpa", classes=12, dim=D) for _ in range(3))
    assert again.shard(0, 2).load_state_dict(state).missing_keys == []
    before = copy.deepcopy(other.shard(1, 2).state_dict())
    with pytest.raises(ValueError, match="with the classes from 0 to 5 of 12, expected the classes from 6"):
        other.load_state_dict(state)
    assert all(torch.equal(before[name], value) for name, value in other.state_dict().items())
    with pytest.raises(ValueError, match="got the part with the classes from 0 to 5 of 12, expected all classes"):
        torch.nn.ModuleDict({"criterion": whole}).load_state_dict(
            torch.nn.ModuleDict({"criterion": again}).state_dict()
        )


def test_proxies_are_divided_once() -> None:
    criterion = pm.method("proxy-anchor", classes=C, dim=D).shard(0, 2)
    with pytest.raises(ValueError, match="shard: got proxies that are divided already"):
        criterion.shard(0, 2)


def wrong_numbers(rank: int) -> None:
    for given in ((0, 3), (1 - rank, 2)):
        with pytest.raises(ValueError, match=f"this is process {rank} of 2 in its group; expected shard.{rank}, 2"):
            pm.method("proxy-anchor", classes=C, dim=D).shard(*given)
        with pytest.raises(ValueError, match=f"this is process {rank} of 2 in its group; expected shard.{rank}, 2"):
            pm.method("proxy-anchor", classes=C, dim=D, shard=given)


def test_numbers_of_another_process_are_refused() -> None:
    together(2, wrong_numbers)


def test_a_loss_that_wants_all_references_at_once_is_told() -> None:
    criterion = pm.method("ccp", classes=C, dim=D, base="proxy-anchor").shard(0, 2)
    with pytest.raises(ValueError, match="cannot be re-picked"):
        criterion.boundary(0.0, (torch.randn(44, D), torch.arange(C).repeat(4)))
    with pytest.raises(ValueError, match="cannot be re-picked"):
        pm.method("ccp", classes=C, dim=D, base="proxy-anchor", shard=(0, 2))


# Making only one's own proxies

MANY, PER_CHUNK = 211, 256
"""classes, and numbers that are drawn at once: several chunks, and parts that end within a chunk"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("init", INITIALISATIONS)
def test_numbers_drawn_in_chunks_are_those_drawn_at_once(init: str, dtype: torch.dtype, monkeypatch) -> None:
    monkeypatch.setattr(learned_proxies, "MAX_NUMBERS_PER_CHUNK", PER_CHUNK)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        for classes, dim, per_class in [(4, 1, 1), (5, 3, 1), (16, 1, 1), (33, 7, 1), (100, 2, 3), (1001, 17, 2)]:
            torch.manual_seed(classes)
            whole, random_state = learned_proxies.initial(classes, dim, per_class, init), torch.get_rng_state()
            for rank in range(3):
                part = Shard.of(classes, rank, 3)
                torch.manual_seed(classes)
                rows = learned_proxies.initial(classes, dim, per_class, init, part)
                assert torch.equal(rows, whole[part.start * per_class : part.stop * per_class]), (classes, dim, rank)
                assert torch.equal(torch.get_rng_state(), random_state)
    finally:
        torch.set_default_dtype(before)


def test_a_gpu_draws_all_numbers_at_once() -> None:
    """Its numbers depend on the size of a draw."""
    assert list(learned_proxies._chunks(10**7, 4, torch.device("cuda"))) == [(0, 10**7)]
    assert len(list(learned_proxies._chunks(10**7, 4, torch.device("cpu")))) > 5


@pytest.mark.parametrize("init", INITIALISATIONS)
def test_the_first_vectors_are_those_of_earlier_versions(init: str) -> None:
    rows, dim = 57, 5
    earlier = {
        "kaiming": lambda: torch.randn(rows, dim) * (2 / rows) ** 0.5,
        "kaiming-uniform": lambda: torch.empty(rows, dim).uniform_(-1, 1) / rows**0.5,
        "xavier": lambda: torch.empty(rows, dim).uniform_(-1, 1) * (6 / (rows + dim)) ** 0.5,
        "xavier/8": lambda: torch.empty(rows, dim).uniform_(-1, 1) * (6 / (rows + dim)) ** 0.5 / 8,
        "normal": lambda: torch.randn(rows, dim),
        "unit": lambda: unit(torch.randn(rows, dim)),
    }
    torch.manual_seed(1)
    expected = earlier[init]()
    torch.manual_seed(1)
    assert torch.equal(learned_proxies.initial(rows, dim, 1, init), expected)


def made_part(rank: int, size: int, folder: str) -> None:
    """What each process makes, and the random numbers that follow."""
    learned_proxies.MAX_NUMBERS_PER_CHUNK = PER_CHUNK
    for name, (method, arguments) in METHODS.items():
        torch.manual_seed(0)
        criterion = pm.method(method, classes=MANY, dim=D, shard=(rank, size), **arguments)
        assert criterion.sharded().keys() == {"objective.source.vectors"}
        assert criterion.sharded()["objective.source.vectors"] == Shard.of(MANY, rank, size)
        state = criterion.state_dict() | {"labels": criterion.objective.source.labels, "next": torch.randn(5)}
        save_file(state, f"{folder}/{name}.{rank}")


@pytest.mark.parametrize("size", [2, 3])
def test_each_process_makes_its_rows_of_the_undivided_proxies(size: int, tmp_path: Path) -> None:
    together(size, made_part, size, str(tmp_path))
    for name, (method, arguments) in METHODS.items():
        torch.manual_seed(0)
        criterion = pm.method(method, classes=MANY, dim=D, **arguments)
        expected = criterion.state_dict() | {"labels": criterion.objective.source.labels, "next": torch.randn(5)}
        actual = [load_file(tmp_path / f"{name}.{rank}") for rank in range(size)]
        for key, value in expected.items():
            if key in ("objective.source.vectors", "labels"):
                assert torch.equal(torch.cat([each[key] for each in actual]), value), (name, key)
            else:
                assert all(torch.equal(each[key], value) for each in actual), (name, key)


class LargestTensor(TorchDispatchMode):
    """Records the bytes of the largest tensor that any operator returns."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() * leaf.element_size() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.largest = max([self.largest, *sizes])
        return result


@pytest.mark.parametrize("settings", [{"method": "arcface"}, {"method": "soft-triple", "loss": {"per_class": 3}}])
def test_no_process_makes_the_proxies_of_all_classes(settings: dict[str, Any], monkeypatch) -> None:
    monkeypatch.setattr(learned_proxies, "MAX_NUMBERS_PER_CHUNK", 2**12)
    classes, dim, size = 4000, 32, 8
    per_class = settings.get("loss", {}).get("per_class", 1)
    table = classes * per_class * dim * 4

    def largest(shard: bool) -> int:
        recipe = recipes.check({"data": {"path": "glyphs:4"}, "train": {"shard": shard}, **settings})
        context = RunContext(recipe, torch.device("cpu"), ProcessGroup(3, size), Silent(), {})
        encoder = build("small", dim=dim, size=32)
        with LargestTensor() as record:
            learner = make_learner(context, encoder, [2] * classes)
        assert bool(learner.criterion.sharded()) is shard
        return record.largest

    assert largest(shard=False) == table
    assert largest(shard=True) == table // size


# Checkpoints


class NoImages:
    """A feed for a trainer that takes no step."""

    advice = ""

    def __len__(self) -> int:
        return 1

    def epoch(self, number: int, start: int = 0) -> Iterator[Any]:
        return iter(())


def trainer_of(rank: int, size: int, folder: Path, seed: int) -> Trainer:
    """A trainer with 40,000 classes of 32 numbers, 5 MB: more than any other tensor of the run."""
    torch.manual_seed(seed)
    criterion = pm.method("arcface", classes=40_000, dim=32, shard=(rank, size))
    learner = Learner(build("small", dim=32, size=32), criterion, world=size)
    options = TrainOptions(shard=True, warmup=0)
    trainer = Trainer(learner, NoImages(), options, folder, Silent(), world=ProcessGroup(rank, size))
    trainer.curve.append({"epoch": 0, "step": 0})
    return trainer


def saved_and_resumed(rank: int, size: int, folder: str) -> None:
    sharded_state.MAX_MESSAGE_BYTES = 100_001  # not a whole number of rows
    trainer = trainer_of(rank, size, Path(folder), seed=1)
    vectors = trainer.learner.criterion.objective.source.vectors
    vectors.grad = torch.randn(vectors.shape, generator=torch.Generator().manual_seed(rank))
    trainer.optimizer.step()
    with LargestTensor() as record:
        trainer.save()
    assert record.largest == vectors.nbytes, "not even the first process had all proxies"
    mine = {"vectors": vectors, **{f"state.{key}": value for key, value in trainer.optimizer.state[vectors].items()}}
    save_file({name: value.detach() for name, value in mine.items()}, f"{folder}/{rank}")
    torch.distributed.barrier()  # the first process has written the file
    again = trainer_of(rank, size, Path(folder), seed=2)
    assert not torch.equal(again.learner.criterion.objective.source.vectors, vectors)
    assert again.resume()
    resumed = again.learner.criterion.objective.source.vectors
    assert torch.equal(resumed, vectors)
    for key, value in trainer.optimizer.state[vectors].items():
        assert torch.equal(again.optimizer.state[resumed][key], value), key


def test_a_checkpoint_has_the_proxies_of_all_processes_and_none_of_them_does(tmp_path: Path) -> None:
    size = 3
    together(size, saved_and_resumed, size, str(tmp_path))
    parts = [load_file(tmp_path / str(rank)) for rank in range(size)]
    tensors = Checkpoint.read(tmp_path / "last.safetensors").tensors
    assert torch.equal(tensors["criterion.objective.source.vectors"], torch.cat([part["vectors"] for part in parts]))
    states = {name.rpartition(".")[2]: value for name, value in tensors.items() if name.startswith("optimizer.")}
    assert {"exp_avg", "exp_avg_sq"} <= states.keys()
    for key in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(states[key], torch.cat([part[f"state.{key}"] for part in parts])), key


def not_saved(rank: int, size: int, folder: str) -> None:
    sharded_state.MAX_MESSAGE_BYTES = 100_001
    trainer = trainer_of(rank, size, Path(folder), seed=1)
    with pytest.raises(NotSaved if rank == 0 else RuntimeError):
        trainer.save()


def test_no_process_waits_for_a_first_one_that_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "last.safetensors").mkdir()
    together(2, not_saved, 2, str(tmp_path))


# Whole runs

SHARDED = {"train__shard": True, "train__clip_norm": 0.5, "train__clip_value": 1e9}


@pytest.mark.usefixtures("only_training")
@pytest.mark.parametrize(
    "settings",
    [
        {"method": "proxy-anchor"},
        {"method": "mpa-ap"},
        pytest.param({"method": "mpa-ap", "loss__nested": [2, 8]}, marks=pytest.mark.slow),
    ],
)
def test_a_run_of_two_processes_is_that_of_one(settings: dict[str, Any], photos: Path, tmp_path: Path) -> None:
    settings = STILL | SHARDED | settings
    Pair(command(photos, tmp_path / "two", **settings), tmp_path).finish()
    close(tmp_path / "two", run(photos, tmp_path / "one", **settings).folder)


@pytest.mark.slow
@pytest.mark.usefixtures("only_training")
def test_it_goes_on_with_another_number_of_processes(photos: Path, tmp_path: Path) -> None:
    settings = STILL | SHARDED | {"train__epochs": 2}
    one = run(photos, tmp_path / "one", **settings)
    first = run(photos, tmp_path / "changed", **settings | {"train__epochs": 1})
    Pair([*command(photos, first.folder, **settings), "--resume"], tmp_path).finish()
    close(first.folder, one.folder)
    Pair(command(photos, tmp_path / "again", **settings | {"train__epochs": 1}), tmp_path).finish()
    run(photos, tmp_path / "again", resume=True, **settings)
    close(tmp_path / "again", one.folder)


def not_finite(rank: int) -> None:
    for name in METHODS:
        criterion = of(name).shard(rank, 2)
        criterion.epoch(0)
        x = torch.ones(B, D)
        x[4, 1] = torch.nan
        assert criterion(x, LABELS).isnan(), name
        criterion.discard()


@pytest.mark.slow
def test_embeddings_that_are_not_finite_have_no_finite_loss() -> None:
    together(2, not_finite)
