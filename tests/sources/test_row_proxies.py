"""Proxies of a few classes per step: those of the batch and random others; one number of optimiser state per row."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import proxymetric as pm
from proxymetric.core.pieces import Batch, Context, Progress
from proxymetric.core.row_optimizers import OPTIMIZER_STATE
from proxymetric.sources import RowProxies, RowTable
from proxymetric.training.rowwise_adagrad import with_rowwise
from training.test_parallel import STILL, Pair, close
from training_runs import command, records, run, same_run

C, D = 400, 3
LABELS = torch.tensor([7, 3, 7, 399])


def seen(source: RowProxies) -> torch.Tensor:
    batch = Batch(None, LABELS)
    refs, _ = source(Context(batch, torch.randn(4, D), Progress(0, 0)), None)
    assert torch.equal(refs.labels[:: source.per_class], refs.labels.unique())
    return refs.labels


def test_a_share_of_the_other_classes_is_drawn_anew_at_each_step() -> None:
    source = RowProxies(C, D, others=0.25)
    times, sizes = torch.zeros(C), []
    for _ in range(400):
        labels = seen(source)
        assert torch.isin(LABELS, labels).all(), "the classes of the batch are always included"
        times[labels] += 1
        sizes.append(len(labels))
    # 100 draws of 400 with replacement find 400 (1 - (1 - 1/400)^100) = 88.5 classes; three are in the batch.
    assert sum(sizes) / 400 == pytest.approx(88.5 + 3 * (1 - 0.221), abs=1)
    others = torch.ones(C, dtype=torch.bool)
    others[LABELS] = False
    assert (times[~others] == 400).all()
    assert times[others].min() > 40, "every class has its turn"
    assert times[others].max() < 150
    with torch.no_grad():
        assert seen(source).unique().tolist() == [3, 7, 399], "nothing is drawn without training"


def test_only_what_was_drawn_moves_and_all_of_it() -> None:
    torch.manual_seed(0)
    criterion = pm.method("proxy-anchor", classes=C, dim=D, touched=0.1)
    (table,) = criterion.row_tables()
    before = table.values.clone()
    criterion(torch.randn(4, D), LABELS).backward()
    (leaf,) = table.leaves()
    criterion.commit(lr=0.1)
    moved = (table.values != before).any(1)
    assert int(moved.sum()) == len(leaf)
    assert moved[LABELS].all()
    assert torch.equal(moved.long(), table.steps)


def test_row_wise_adagrad_by_hand() -> None:
    """One row, gradients (3, 4) and (0, 2): G is 25/2, then 25/2 + 4/2."""
    table = RowTable(torch.zeros(2, 2), optimizer="rowwise-adagrad")
    for gradient, total in (((3.0, 4.0), 12.5), ((0.0, 2.0), 14.5)):
        before = table.values.clone()
        rows = table.take(torch.tensor([1]))
        (rows * torch.tensor([gradient])).sum().backward()
        table.step(lr=0.5)
        assert table.square.tolist() == [[0.0], [total]]
        torch.testing.assert_close(table.values[1], before[1] - 0.5 * torch.tensor(gradient) / total**0.5)
        assert not table.values[0].any()


def test_row_wise_adagrad_is_adagrad_where_a_row_is_one_number() -> None:
    """Compare with torch's dense Adagrad on rows that all have a gradient."""
    torch.manual_seed(0)
    start = torch.randn(5, 1, dtype=torch.float64)
    table, dense = RowTable(start, optimizer="rowwise-adagrad", eps=1e-10), torch.nn.Parameter(start.clone())
    optimizer = torch.optim.Adagrad([dense], lr=0.3, eps=1e-10)
    for _ in range(4):
        rows = table.take(torch.arange(5))
        rows.pow(4).sum().backward()
        table.step(lr=0.3)
        optimizer.zero_grad()
        dense.pow(4).sum().backward()
        optimizer.step()
        torch.testing.assert_close(table.values, dense.detach(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind", OPTIMIZER_STATE)
def test_state_is_as_large_as_the_optimiser_wants(kind: str) -> None:
    table = RowTable(torch.zeros(10, 4, 6), optimizer=kind)
    numbers = {"adamw": 480, "adam": 480, "sgd": 240, "rowwise-adagrad": 10}[kind]
    assert table.average.numel() + table.square.numel() == numbers
    again = RowTable(torch.zeros(10, 4, 6))
    again.follow(kind, (0.9, 0.999), 0.0, 0.9)
    again.load_state_dict(table.state_dict())


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_beside_another_optimiser_both_step_as_they_would_alone(kind: type[torch.optim.Optimizer]) -> None:
    """Rows move as in `RowTable`, the network moves as with `kind` alone, and the state can be saved and loaded."""
    torch.manual_seed(0)
    start = torch.randn(6, 4), torch.randn(3, 3)
    rows, weight, alone = (torch.nn.Parameter(each.clone()) for each in (*start, start[1]))
    table = RowTable(start[0], optimizer="rowwise-adagrad", weight_decay=0.01)
    options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.01}
    groups = [{"params": [rows], "rowwise": True}, {"params": [weight], "rowwise": False}]
    mixed, plain = with_rowwise(kind)(groups, **options), kind([alone], **options)
    for number in range(4):
        for p in (rows, weight, alone):
            p.grad = None
        taken = table.take(torch.arange(6))
        (rows.pow(3).sum() + weight.pow(4).sum() + alone.pow(4).sum() + taken.pow(3).sum()).backward()
        mixed.step()
        plain.step()
        table.step(lr=0.1)
        torch.testing.assert_close(rows.detach(), table.values)
        assert torch.equal(weight, alone)
        if number == 1:
            saved = mixed.state_dict()
            assert {tuple(state["square"].shape) for state in saved["state"].values() if "square" in state} == {(6, 1)}
            mixed = with_rowwise(kind)(groups, **options)
            mixed.load_state_dict(saved)


ROWS = {"loss__touched": 0.3, "train__proxy_optimizer": "rowwise-adagrad", "train__proxy_lr": 0.1}


@pytest.mark.usefixtures("only_training")
@pytest.mark.parametrize("settings", [ROWS, ROWS | {"loss__touched": "all", "train__shard": True}])
def test_two_processes_are_one(settings: dict[str, Any], photos: Path, tmp_path: Path) -> None:
    Pair(command(photos, tmp_path / "two", **STILL | settings), tmp_path).finish()
    close(tmp_path / "two", run(photos, tmp_path / "one", **STILL | settings).folder)


@pytest.mark.release
@pytest.mark.usefixtures("only_training")
def test_torchrun_starts_a_lost_worker_again_and_the_run_goes_on(photos: Path, tmp_path: Path) -> None:
    """One of two workers is killed in the second epoch; the result is that of an undisturbed run."""
    settings = STILL | ROWS | {"train__epochs": 6, "train__save_every": 1, "data__validation": 0.0}
    out = tmp_path / "lost"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--max_restarts=2"]
    words = [*launcher, "--standalone", "-m", "proxymetric", *command(photos, out, **settings)]
    said = tmp_path / "said"
    with open(said, "w") as file, subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT) as torchrun:
        killed = False
        while torchrun.poll() is None and not killed:
            time.sleep(0.02)
            if any(record.get("epoch", 0) >= 1 for record in (records(out) if (out / "log.jsonl").is_file() else [])):
                children = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()
                os.kill(int(children[-1]), signal.SIGKILL)
                killed = True
        try:
            torchrun.wait(120)
        except subprocess.TimeoutExpired:
            torchrun.kill()
            raise
    assert killed, said.read_text()
    assert torchrun.returncode == 0, said.read_text()
    Pair(command(photos, tmp_path / "whole", **settings), tmp_path).finish()
    same_run(out, tmp_path / "whole")


@pytest.mark.parametrize("others", [-0.1, 1.0, 7.0])
def test_a_share_of_classes_that_is_none_is_refused(others: float) -> None:
    with pytest.raises(ValueError, match="others: got"):
        RowProxies(3, 4, others=others)
