"""`RowTable` against torch.optim, step by step, and in whole runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import proxymetric as pm
from proxymetric.sources import RowTable
from proxymetric.system.checkpoint import Checkpoint
from training_runs import LEARNING, run

TOUCHED = [[0, 2], [2, 5], [2], [0, 5], [2, 0, 5]]
"""the rows that each step takes; rows 1, 3 and 4 are never taken"""
KINDS = {
    "adamw": ({"optimizer": "adamw"}, lambda p, lr: torch.optim.AdamW(p, lr=lr, weight_decay=0.0)),
    "adamw, decay": (
        {"optimizer": "adamw", "weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-6},
        lambda p, lr: torch.optim.AdamW(p, lr=lr, weight_decay=0.1, betas=(0.8, 0.95), eps=1e-6),
    ),
    "sgd": ({"optimizer": "sgd", "momentum": 0.0}, lambda p, lr: torch.optim.SGD(p, lr=lr)),
    "sgd, momentum and decay": (
        {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.1},
        lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9, weight_decay=0.1),
    ),
}


def pull(rows: Tensor, goal: Tensor) -> Tensor:
    return ((rows - goal) ** 3).sum()


@pytest.mark.parametrize("kind", KINDS)
def test_each_row_steps_as_with_an_optimiser_of_its_own(kind: str) -> None:
    """Compare with one torch optimiser for each row, which steps when its row is taken."""
    torch.manual_seed(0)
    arguments, make = KINDS[kind]
    values, goal = torch.randn(6, 3), torch.randn(6, 3)
    table = RowTable(values, **arguments)
    alone = [torch.nn.Parameter(row.clone()) for row in values]
    optimizers = [make([row], 0.1) for row in alone]
    for step, index in enumerate(TOUCHED):
        lr = 0.1 / (1 + step)
        pull(table.take(torch.tensor(index)), goal[index]).backward()
        table.step(lr)
        for i in index:
            optimizers[i].param_groups[0]["lr"] = lr
            optimizers[i].zero_grad()
            pull(alone[i], goal[i]).backward()
            optimizers[i].step()
        torch.testing.assert_close(table.values, torch.stack([row.detach() for row in alone]), rtol=1e-6, atol=1e-7)
    for i in (1, 3, 4):
        assert torch.equal(table.values[i], values[i]), "never taken, so neither moved nor decayed"
        assert not table.average[i].any()
    assert table.steps.tolist() == [3, 0, 4, 0, 0, 3]


DEVICES = [torch.device("cpu")] + [torch.device("cuda", 0)] * torch.cuda.is_available()


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_prefetched_rows_are_those_that_take_would_copy(kind: str, device: torch.device) -> None:
    """Also rows that the current step moves, rows of a discarded step, and rows that are prefetched but not taken."""
    torch.manual_seed(0)
    values, goal = torch.randn(6, 3), torch.randn(6, 3, device=device)
    one, other = (RowTable(values, host=True, **KINDS[kind][0]) for _ in range(2))
    for step, index in enumerate(TOUCHED):
        for table in (one, other):
            pull(table.take(torch.tensor(index), device), goal[index]).backward()
            if table is one and step + 1 < len(TOUCHED):
                table.prefetch(torch.tensor(TOUCHED[step + 1] if step != 2 else [1, 4]), device)
            if step == 1:
                table.discard()
            else:
                table.step(0.1)
        assert one.state_dict().keys() == other.state_dict().keys()
        assert all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_rows_of_any_type(dtype: torch.dtype) -> None:
    values = torch.randn(5, 2, 3).to(dtype)
    table = RowTable(values, optimizer="sgd", momentum=0.0, host=True)
    rows = table.take(torch.tensor([3, 1]))
    assert torch.equal(rows, values[[3, 1]])
    (rows * torch.tensor([1.0, 2.0], dtype=dtype).view(2, 1, 1)).sum().backward()
    table.step(0.5)
    moved = values.clone()
    moved[3] -= 0.5
    moved[1] -= 1
    assert table.values.dtype == dtype
    assert torch.equal(table.values, moved)


def test_a_type_that_changes_before_the_step() -> None:
    table = RowTable(torch.ones(3, 2), optimizer="sgd", momentum=0.0, host=True)
    table.take(torch.tensor([2])).sum().backward()
    table.bfloat16().step(0.5)
    assert table.values.dtype == torch.bfloat16
    assert table.values[:, 0].tolist() == [1.0, 1.0, 0.5]


def test_no_rows_and_rows_of_a_transposed_table() -> None:
    table = RowTable(torch.arange(6.0).view(2, 3).T, host=True)
    assert table.take(torch.tensor([], dtype=torch.int64)).shape == (0, 2)
    assert table.take(torch.tensor([2])).tolist() == [[2.0, 5.0]]
    assert table.values.is_contiguous(), "otherwise the whole table would be copied to read a row"


def test_rows_lie_in_host_memory_whatever_the_default_device() -> None:
    table = RowTable(torch.ones(3, 2), host=True)
    with torch.device("meta"):
        assert table.take(torch.tensor([2], device="cpu")).tolist() == [[1.0, 1.0]]


def test_a_table_moves_with_its_module_unless_it_is_kept_in_host_memory() -> None:
    moved, kept = RowTable(torch.ones(3, 2)).to("meta"), RowTable(torch.ones(3, 2), host=True).to("meta")
    assert {tensor.device.type for tensor in moved.buffers()} == {"meta"}
    assert {tensor.device.type for tensor in kept.buffers()} == {"cpu"}


@pytest.mark.parametrize("index", [[5], [0, -1], [2, 7]])
def test_rows_that_a_table_does_not_have(index: list[int]) -> None:
    table = RowTable(torch.zeros(5, 2), host=True)
    with pytest.raises(IndexError, match=rf"index: got rows {min(index)} to {max(index)}, expected rows 0 to 4"):
        table.take(torch.tensor(index))


@pytest.mark.parametrize("index", [torch.tensor([True, False, True]), torch.tensor([[0], [1]]), torch.tensor([0.0])])
def test_what_is_no_index_of_rows(index: torch.Tensor) -> None:
    with pytest.raises(IndexError, match=r"index: got torch.* of shape .* expected whole numbers"):
        RowTable(torch.zeros(3, 2), host=True).take(index)


def test_prefetched_rows_are_dropped_when_the_table_changes() -> None:
    table = RowTable(torch.zeros(3, 2), host=True)
    table.prefetch(torch.tensor([1]), torch.device("cpu"))
    table.load_state_dict({name: value + 1 for name, value in table.state_dict().items()})
    assert table.take(torch.tensor([1])).tolist() == [[1.0, 1.0]]
    table.prefetch(torch.tensor([1]), torch.device("cpu"))
    assert table.double().take(torch.tensor([1])).dtype == torch.float64


def test_several_batches_in_a_step_after_a_prefetched_one() -> None:
    """Rows of two batches are merged from the table, which must hold the moves of the previous step."""
    one, other = (RowTable(torch.ones(3, 2), host=True, optimizer="sgd", momentum=0.0) for _ in range(2))
    for table in (one, other):
        table.take(torch.tensor([0, 1])).sum().backward()
        if table is one:
            table.prefetch(torch.tensor([0, 1]), torch.device("cpu"))
        table.step(0.5)
        for index in ([0, 1], [1, 2]):
            table.take(torch.tensor(index)).square().sum().backward()
        table.step(0.5)
    assert torch.equal(one.values, other.values)


def test_all_rows_at_every_step_are_plain_adamw() -> None:
    torch.manual_seed(0)
    values, goal = torch.randn(5, 4), torch.randn(5, 4)
    table, plain = RowTable(values, weight_decay=0.01), torch.nn.Parameter(values.clone())
    optimizer = torch.optim.AdamW([plain], lr=0.05, weight_decay=0.01)
    for _ in range(6):
        pull(table.take(torch.arange(5)), goal).backward()
        table.step(0.05)
        optimizer.zero_grad()
        pull(plain, goal).backward()
        optimizer.step()
    torch.testing.assert_close(table.values, plain.detach(), rtol=1e-6, atol=1e-7)


def test_loss_scale_is_divided_out_before_the_clip() -> None:
    def moved(scale: float, clip: float | None) -> Tensor:
        table = RowTable(torch.zeros(2, 2), optimizer="sgd", momentum=0.0)
        (scale * (table.take(torch.tensor([1])) * torch.tensor([3.0, -0.5])).sum()).backward()
        table.step(1.0, loss_scale=scale, clip=clip)
        return table.values[1]

    assert moved(1.0, None).tolist() == [-3.0, 0.5]
    assert moved(1024.0, None).tolist() == [-3.0, 0.5]
    assert moved(1024.0, 1.0).tolist() == [-1.0, 0.5]


def test_rows_taken_twice_move_once_by_the_summed_gradient() -> None:
    def take(table: RowTable, index: list[int], factor: float) -> None:
        (factor * table.take(torch.tensor(index))).sum().backward()

    table = RowTable(torch.zeros(4, 1), optimizer="sgd", momentum=0.0)
    take(table, [0, 1], 1.0)
    take(table, [1, 2], 10.0)
    table.step(1.0)
    assert table.values.flatten().tolist() == [-1.0, -11.0, -10.0, 0.0]
    assert table.steps.tolist() == [1, 1, 1, 0]
    # Clipped after the sum: 1 - 3 is within the limit, 1 + 3 is not.
    table = RowTable(torch.zeros(2, 1), optimizer="sgd", momentum=0.0)
    for factor in (torch.tensor([[1.0], [1.0]]), torch.tensor([[-3.0], [3.0]])):
        (factor * table.take(torch.tensor([0, 1]))).sum().backward()
    table.step(1.0, clip=2.5)
    assert table.values.flatten().tolist() == [2.0, -2.5]


def test_nothing_is_left_after_discard_or_without_gradients() -> None:
    table = RowTable(torch.ones(2, 2))
    table.take(torch.tensor([0])).sum().backward()
    table.discard()
    with torch.no_grad():
        table.take(torch.tensor([0]))
    table.eval().take(torch.tensor([0]))
    assert table.leaves() == []
    table.step(1.0)
    assert torch.equal(table.values, torch.ones(2, 2))


def rows_of_one_step(factor: float = 1.0, **commit: float) -> Tensor:
    """How far `commit` moves the rows; a scheduler multiplies the learning rates by `factor`."""
    torch.manual_seed(0)
    criterion, net = pm.method("norm-softmax", classes=4, dim=3, touched="batch"), torch.nn.Linear(3, 3)
    groups = criterion.param_groups(lr=0.5)
    assert [group["params"] for group in groups] == [[]], "no optimiser sees the rows"
    criterion.param_groups(lr=99.0)  # asking for groups changes nothing
    optimizer = torch.optim.AdamW([{"params": net.parameters()}, *groups], lr=1e-3)
    for group in optimizer.param_groups:
        group["lr"] *= factor
    before = criterion.objective.source.table.values.clone()
    criterion(net(torch.randn(2, 3)), torch.tensor([1, 3])).backward()
    optimizer.step()
    criterion.commit(optimizer, **commit)
    return criterion.objective.source.table.values - before


def test_commit_steps_rows_at_the_rate_of_the_groups_or_its_own() -> None:
    # The first step of Adam is lr in the direction of the sign.
    step = rows_of_one_step()
    assert not step[[0, 2]].any()
    torch.testing.assert_close(step[[1, 3]].abs(), torch.full((2, 3), 0.5), rtol=1e-3, atol=0)
    torch.testing.assert_close(rows_of_one_step(lr=0.25), step / 2, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(rows_of_one_step(factor=0.25), step / 4, rtol=1e-5, atol=1e-6)


def test_commit_refuses_rows_without_a_rate_and_changes_nothing() -> None:
    criterion, net = pm.method("norm-softmax", classes=4, dim=3, touched="batch"), torch.nn.Linear(3, 3)
    criterion.param_groups(lr=0.5)
    before = criterion.objective.source.table.values.clone()
    criterion(torch.randn(2, 3), torch.tensor([1, 3])).backward()
    with pytest.raises(ValueError, match=r"^lr: got none and no optimizer, expected criterion.commit\(optimizer\)"):
        criterion.commit()
    with pytest.raises(ValueError, match=r"^lr: got none and an optimizer with 0 groups 'proxy rows', expected"):
        criterion.commit(torch.optim.SGD(net.parameters(), lr=0.1))
    groups = [*criterion.param_groups(lr=0.5), *criterion.param_groups(lr=0.1)]
    with pytest.raises(ValueError, match=r"with 2 groups 'proxy rows'"):
        criterion.commit(torch.optim.SGD(groups, lr=0.1))
    assert criterion.pending == 1
    assert torch.equal(criterion.objective.source.table.values, before)


def test_a_run_whose_rows_step_themselves_learns(letters: Path, tmp_path: Path, only_training: None) -> None:
    done = run(letters, tmp_path / "run", loss__touched="batch", **LEARNING)
    assert done.result.parameters["trained"] == 2 * 256 + 256 * 32 + 32 + 42 * 32, "LayerNorm, head, rows"
    assert done.result.parameters["parts"]["proxies"] == 42 * 32
    assert done.result.validation["MAP@R"] > 1.3 * done.result.curve[0]["MAP@R"]
    tensors = Checkpoint.read(done.folder / "last.safetensors").tensors
    assert int(tensors["criterion.objective.source.table.steps"].max()) <= done.result.steps
    assert int(tensors["criterion.objective.source.table.steps"].min()) > 0


def test_rows_follow_the_schedule_and_the_clip_of_the_run(photos: Path, tmp_path: Path, only_training: None) -> None:
    """A learning rate that has decayed to almost 0 moves no row, and Adam averages clipped gradients."""
    gone = {"train__decay": "step", "train__decay_every": 1, "train__decay_by": 1e-20, "loss__touched": "batch"}
    one = run(photos, tmp_path / "one", train__epochs=1, **gone)
    two = run(photos, tmp_path / "two", train__epochs=2, **gone)
    table = "criterion.objective.source.table."
    first, second = (Checkpoint.read(r.folder / "last.safetensors").tensors for r in (one, two))
    assert torch.equal(first[table + "values"], second[table + "values"])
    assert first[table + "steps"].sum() < second[table + "steps"].sum(), "it stepped nevertheless"
    assert first[table + "average"].abs().max() > 1e-3
    clipped = run(photos, tmp_path / "clipped", loss__touched="batch", train__clip_value=1e-4, train__epochs=1)
    average = Checkpoint.read(clipped.folder / "last.safetensors").tensors[table + "average"]
    assert 0 < average.abs().max() < 1.001e-4


def test_the_state_of_another_optimiser_is_dropped() -> None:
    table = RowTable(torch.zeros(2, 2), optimizer="sgd")
    for _ in range(50):
        table.take(torch.tensor([0])).sum().backward()
        table.step(0.01)
    before = table.values.clone()
    table.follow("adamw", (0.9, 0.999), 0.0, 0.9)
    table.take(torch.tensor([0])).sum().backward()
    table.step(0.01)
    torch.testing.assert_close((table.values - before)[0], torch.full((2,), -0.01))
    average = table.average.clone()
    table.follow("adam", (0.9, 0.999), 0.0, 0.9)  # the same state
    assert torch.equal(table.average, average)
    assert table.steps.tolist() == [1, 0]


def test_a_large_table_is_in_memory_once():
    values = torch.zeros(4, 2)
    assert RowTable(values).values.data_ptr() != values.data_ptr()
    assert RowTable(values, copy=False).values.data_ptr() == values.data_ptr()
