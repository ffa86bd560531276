"""Encoders divided among processes by FSDP2: trained as by one process, saved whole, or refused."""

from __future__ import annotations

import json
import math
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard, distribute_tensor

import proxymetric as pm
from groups import together
from proxymetric.encoders import build
from proxymetric.papers import needs
from proxymetric.training import sharded_state
from proxymetric.training.learner import Learner
from proxymetric.training.optim import clip_gradients, make_optimizer
from proxymetric.training.options import TrainOptions
from proxymetric.training.parallel import Parallel, check, gathered_parameters, shard_encoder
from proxymetric.training.process_group import ProcessGroup
from proxymetric.training.sharded_state import ShardedState
from training.test_parallel import STILL, Pair, close
from training_runs import command, kill_in_epoch, run, same_run, state

pytestmark = [pytest.mark.usefixtures("only_training"), pytest.mark.slow]
FSDP = STILL | {"train__parallel": "fsdp"}
VIT: dict[str, Any] = {
    "encoder__backbone": "test_vit", "encoder__pretrained": False, "encoder__freeze_bn": False, "view__size": 32,
    "view__resize": 32,
}  # fmt: skip
"""six blocks of width 64. Their biases are trained with SGD below: the gradients of key biases are only rounding, which
Adam would turn into whole steps"""
KINDS: dict[str, dict[str, Any]] = {
    "convolutions, clipped": {"train__clip_norm": 0.5, "train__clip_value": 0.01},
    "proxies in parts too": {"train__shard": True, "train__clip_norm": 0.5},
    "pairs of all ranks": {"method": "triplet"},
    "accumulated": {"train__accumulate": 2, "train__batch": 4},
    "evaluated on the way": {"train__evaluate_steps": 3},
    "only a test": {"data__validation": 0.0, "data__test": 0.3},
    "refitted": {"train__refit": True, "data__test": 0.3, "train__lr": 1e-3},
    "sgd": {"train__optimizer": "sgd", "train__lr": 1e-2},
    "vit": VIT | {"train__clip_norm": 0.5},
    "vit, prompts and biases": VIT
    | {"encoder__tuning": "vpt+bitfit", "train__evaluate_steps": 3, "train__optimizer": "sgd", "train__lr": 1e-2},
    "vit, adapters": VIT | {"encoder__tuning": "adapter"},
    "vit, lora, computed again": VIT | {"encoder__tuning": "lora", "encoder__checkpointing": True},
    "vit, prompts, mlps computed again": VIT | {"encoder__tuning": "vpt", "encoder__checkpointing": "mlp"},
}


@pytest.mark.slow(cases=2)
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_equal_one(kind: str, photos: Path, tmp_path: Path) -> None:
    settings = FSDP | KINDS[kind]
    Pair(command(photos, tmp_path / "two", **settings), tmp_path).finish()
    one = run(photos, tmp_path / "one", **settings)
    close(tmp_path / "two", one.folder)
    two = json.loads((tmp_path / "two" / "result.json").read_text())
    assert two["parameters"] == one.result.parameters, "the count is of whole tensors"
    for row, scores in one.result.rows.items():
        assert two["rows"][row] == pytest.approx(scores, abs=0.05), row
    if settings.get("train__refit"):
        close(tmp_path / "two" / "refit", one.folder / "refit")


@pytest.mark.release
def test_statistics_of_batches_are_those_of_plain_data_parallelism(photos: Path, tmp_path: Path) -> None:
    settings = FSDP | {"encoder__freeze_bn": False, "train__evaluate_steps": 3}
    for kind in ("fsdp", "ddp"):
        Pair(command(photos, tmp_path / kind, **settings | {"train__parallel": kind}), tmp_path).finish()
    close(tmp_path / "fsdp", tmp_path / "ddp")


@pytest.mark.release
def test_images_that_one_of_them_cannot_read(photos: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(photos, tmp_path / "photos")
    for c in range(10):
        (broken / f"class{c}" / "3.png").write_text("no picture")
    settings = FSDP | {"train__batch": 2, "data__validation": 0.5}
    Pair(command(broken, tmp_path / "two", **settings), tmp_path).finish()
    close(tmp_path / "two", run(broken, tmp_path / "one", **settings).folder)


PROMPTS = VIT | {"encoder__tuning": "vpt", "train__shard": False}
WAYS: dict[str, tuple[tuple[str | None, str | None], dict[str, Any]]] = {
    "two to one": (("fsdp", None), {}),
    "one to two": ((None, "fsdp"), {}),
    "whole to parts": (("ddp", "fsdp"), {}),
    "a vit, two to one": (("fsdp", None), PROMPTS),
    "a vit, one to two": ((None, "fsdp"), PROMPTS),
}
"""the numbers of processes that begin and that resume; None: a single process"""


@pytest.mark.parametrize("way", WAYS)
def test_it_goes_on_as_something_else(way: str, photos: Path, tmp_path: Path) -> None:
    """A head of seven rows and a token of one row: the parts are unequal, and some are empty."""
    kinds, changed = WAYS[way]
    settings = STILL | {"train__epochs": 2, "train__clip_norm": 0.5, "train__shard": True, "encoder__dim": 7} | changed
    straight = run(photos, tmp_path / "straight", **settings)
    for kind, more in zip(kinds, ({"train__epochs": 1}, {}), strict=True):
        begun = (tmp_path / "changed" / "run.json").is_file()
        if kind is None:
            run(photos, tmp_path / "changed", resume=begun, **settings | more)
        else:
            words = command(photos, tmp_path / "changed", **settings | more | {"train__parallel": kind})
            Pair([*words, "--resume"] if begun else words, tmp_path).finish()
    close(tmp_path / "changed", straight.folder)


@pytest.mark.release
def test_asked_to_stop_it_goes_on_bit_for_bit(photos: Path, tmp_path: Path) -> None:
    out, settings = tmp_path / "two", FSDP | {"train__save_every": 1}
    kill_in_epoch(lambda: Pair(command(photos, out, **settings), tmp_path), out, signal.SIGINT, epoch=0).finish(130)
    assert not state(out)["done"]
    Pair(command(photos, out, "--resume", **settings), tmp_path).finish()
    Pair(command(photos, tmp_path / "straight", **settings), tmp_path).finish()
    same_run(out, tmp_path / "straight")


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "warm-up": ({"warmup": 2}, "proxy-anchor", r"train\.warmup=2, .*; expected train\.warmup=0$"),
    "fp16": ({"amp": "fp16"}, "proxy-anchor", r"train\.amp='fp16', .*; expected train\.amp 'bf16' or 'off'$"),
    "frozen": ({"frozen": True}, "proxy-anchor", r"train\.frozen, .*; expected 'ddp'$"),
    "compile": ({"compile": True}, "proxy-anchor", r"train\.compile, .*; expected 'ddp'$"),
    "ccp": ({}, "ccp", r"a method that reads the encoder's weights or runs the encoder itself; expected 'ddp'$"),
    "vptsp": ({}, "vptsp-g", r"a method that reads"),
    "moco": ({}, "moco", r"a method that reads"),
}


@pytest.mark.slow(cases=7)
@pytest.mark.parametrize("kind", REFUSED)
def test_what_does_not_go_together_is_refused(kind: str) -> None:
    options, method, sentence = REFUSED[kind]
    asked = TrainOptions(**{"warmup": 0, "parallel": "fsdp", **options})
    with pytest.raises(ValueError, match=rf"^train\.parallel: got 'fsdp' with {sentence}"):
        check(asked, needs(method, {}), ProcessGroup(0, 2), torch.device("cpu"))
    check(asked, needs(method, {}), ProcessGroup(), torch.device("cpu"))
    check(TrainOptions(**{"warmup": 0, **options}), needs(method, {}), ProcessGroup(0, 2), torch.device("cpu"))


@pytest.mark.release
def test_refusals_reach_people(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"train\.parallel: got 'zero', expected one of ddp, fsdp"):
        TrainOptions(parallel="zero")
    for more, sentence in (
        ({"train__warmup": 1}, "train.parallel: got 'fsdp' with train.warmup=1"),
        ({"encoder__pooling": "gem", "encoder__learn_p": True}, "pooling.p is a single number and cannot be sharded"),
    ):
        pair = Pair(command(photos, tmp_path / "out", **FSDP | more), tmp_path).finish(1)
        for rank in pair.ranks:
            assert sentence in rank.text()
            assert "Traceback" not in rank.text()
    assert not (tmp_path / "out").exists()


def test_a_torch_without_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch.distributed.fsdp.fully_shard")
    with pytest.raises(ValueError, match=r"^train\.parallel: got 'fsdp', which needs torch 2\.6 .*; expected 'ddp'$"):
        shard_encoder(build("small", dim=8, size=32))


def test_alone_it_changes_nothing(photos: Path, tmp_path: Path) -> None:
    plain, asked = (
        run(photos, tmp_path / kind, train__epochs=2, train__warmup=1, train__parallel=kind) for kind in ("ddp", "fsdp")
    )
    assert plain.scores == asked.scores
    close(asked.folder, plain.folder)


# Which process holds what

BACKBONES = {"small": 32, "test_vit": 32, "resnet18": 32, "bn_inception": 64, "test_convnext": 32}


def one_of_two(rank: int, folder: str) -> None:
    found: dict[str, dict[str, Any]] = {}
    for name, size in BACKBONES.items():
        torch.manual_seed(0)
        encoder = build(name, dim=8, size=size, pretrained=False)
        images = torch.rand(2, 3, size, size, generator=torch.Generator().manual_seed(rank))
        wanted = encoder.eval()(images).detach()
        total = sum(p.numel() for p in encoder.parameters())
        shard_encoder(encoder)
        here: Any = list(encoder.parameters())
        about = found[name] = {
            "here": sum(p.to_local().numel() for p in here) / total,
            "counted": sum(p.numel() for p in here) / total,
            "stages": sum(hasattr(module, "unshard") for module in encoder.modules()),
        }
        with gathered_parameters(encoder), torch.no_grad():
            about["whole"] = sum(p.numel() for p in encoder.parameters() if not hasattr(p, "to_local")) / total
            if rank == 0:  # the other process does not call this: the first must not wait for it
                about["alone"] = float((encoder(images) - wanted).abs().max())
                about["features"] = float((encoder.head(encoder.features(images)) - wanted).abs().max())
        about["divided again"] = all(hasattr(p, "to_local") for p in encoder.parameters())
        about["together"] = float((encoder(images) - wanted).abs().max().detach())
        encoder(images).sum().backward()
        about["gradients"] = all(p.grad is None or hasattr(p.grad, "to_local") for p in encoder.parameters())
    found["learner"] = begun_apart(rank)
    Path(folder, str(rank)).write_text(json.dumps(found))


def begun_apart(rank: int) -> dict[str, Any]:
    """Two learners that start with different numbers, and proxies whose gradients differ."""
    torch.manual_seed(rank)
    learner = Learner(build("small", dim=8, size=32), pm.method("proxy-anchor", classes=5, dim=8), world=2)
    mine = learner.criterion.state_dict()["objective.source.vectors"].clone()
    parallel = Parallel(learner, TrainOptions(warmup=0, parallel="fsdp"), ProcessGroup(rank, 2))
    own = ShardedState(learner, make_optimizer(learner, TrainOptions()))
    proxies, weight = learner.criterion.objective.source.vectors, learner.encoder.head.weight
    proxies.grad = torch.full_like(proxies, 1.0 + 2 * rank)
    parallel.average_gradients()
    averaged = proxies.grad.unique().tolist()
    proxies.grad, weight.grad = torch.full_like(proxies, 3.0), torch.full_like(weight, 4.0)
    norm = clip_gradients([proxies, weight], [], TrainOptions(clip_norm=1.0), own)
    return {
        "moved": float((proxies - mine).abs().max().detach()),
        "proxies": proxies.tolist(),
        "averaged": averaged,
        "norm": float(norm),
        "clipped": [float(proxies.grad.max()), float(weight.grad.to_local().max())],
    }


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    """The results of each of two processes, for all backbones."""
    folder = tmp_path_factory.mktemp("halves")
    together(2, one_of_two, str(folder))
    return [json.loads((folder / str(rank)).read_text()) for rank in (0, 1)]


@pytest.mark.slow(cases=5)
@pytest.mark.parametrize("name", BACKBONES)
def test_each_process_holds_half(name: str, halves: list[dict[str, dict[str, Any]]]) -> None:
    first, second = (half[name] for half in halves)
    assert first["here"] + second["here"] == pytest.approx(1)
    for about in (first, second):
        assert about["here"] == pytest.approx(0.5, abs=0.05)
        assert about["counted"] == about["whole"] == 1
        assert about["stages"] > 3, "it is divided stage by stage"
        assert about["divided again"]
        assert about["gradients"]
        assert about["together"] < 1e-5
    assert first["alone"] < 1e-5
    assert first["features"] < 1e-5


def test_what_is_not_divided_stays_alike(halves: list[dict[str, dict[str, Any]]]) -> None:
    first, second = (half["learner"] for half in halves)
    assert first["moved"] == 0
    assert second["moved"] > 0.1, "it has the initial values of the first process"
    assert first["proxies"] == second["proxies"]
    assert first["averaged"] == second["averaged"] == [2.0]


def test_the_norm_is_that_of_all_parts(halves: list[dict[str, dict[str, Any]]]) -> None:
    """The norm of 40 threes that both processes hold and 8 x 256 fours that are sharded."""
    norm = math.sqrt(40 * 9 + 8 * 256 * 16)
    for half in halves:
        assert half["learner"]["norm"] == pytest.approx(norm)
        assert half["learner"]["clipped"] == pytest.approx([3 / norm, 4 / norm])


def one_of_three(rank: int, folder: str) -> None:
    """Tensors of seven rows, of one (two parts are empty), of 16 bits and of 0 bytes, in messages of several sizes."""
    mesh = torch.distributed.init_device_mesh("cpu", (3,))
    full = {
        "seven": torch.rand(7, 3),
        "one": torch.rand(1, 2, 2),
        "short": torch.rand(5).bfloat16(),
        "no": torch.rand(4, 0),
    }
    mine: dict[str, Any] = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in full.items()}
    torch.manual_seed(rank)
    mine |= {"here": torch.rand(2), "count": torch.tensor(3.0)}
    learner = Learner(build("small", dim=8, size=32), pm.method("proxy-anchor", classes=5, dim=8))
    own = ShardedState(learner, make_optimizer(learner, TrainOptions()))
    for message, larger in ((1, {"seven", "one", "short"}), (30, {"seven"}), (2**20, set())):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sharded_state, "MAX_MESSAGE_BYTES", message)
            found, streamed = own.gather(mine)
            assert streamed.keys() == (set() if rank else larger)
            found |= {name: torch.cat(list(streamed[name].parts)) for name in sorted(streamed)}
        assert found.keys() == mine.keys()
        for name, value in found.items():
            wanted = full[name] if rank == 0 and name in full else mine[name]
            assert value is wanted or torch.equal(value, wanted), name
    Path(folder, str(rank)).touch()


@pytest.mark.release
def test_three_put_their_parts_together_for_the_first(tmp_path: Path) -> None:
    together(3, one_of_three, str(tmp_path))
    assert len(list(tmp_path.iterdir())) == 3
