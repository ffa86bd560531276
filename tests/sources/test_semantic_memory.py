"""VPTSP's memory: the order in which samples enter it, the class prompts in host memory, rates, and whole runs."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, load_file, save, save_file
from torch import Tensor, nn

import proxymetric as pm
from groups import together
from proxymetric.core.normalisation import unit
from proxymetric.core.second_pass import ClassPrompts
from proxymetric.criterion import Criterion
from proxymetric.papers.contract import Toy, same, snapshot
from proxymetric.sources import RowTable, SemanticProxies, accumulator, semantic_proxies
from proxymetric.sources.semantic_proxies import turns
from proxymetric.system.checkpoint import Checkpoint
from training.test_parallel import STILL, Pair, close
from training_runs import Snapshot, command, run, same_run, state
from vptsp_steps import C, D, batch, build, give

# The order


def test_turns_take_every_sample_once_in_the_order_of_the_keys() -> None:
    generator = torch.Generator().manual_seed(0)
    for size in (1, 2, 7, 40):
        labels = torch.randint(0, 9, (size,), generator=generator)
        keys = torch.rand(size, generator=generator)
        classes, place, samples = turns(labels, keys)
        assert torch.equal(classes[place], labels)
        assert sorted(torch.cat(samples).tolist()) == list(range(size))
        for c, label in enumerate(classes):
            own = [int(turn[c]) for turn in samples if len(turn) > c]
            members = (labels == label).nonzero().flatten()
            assert own == members[keys[members].argsort()].tolist()


def test_a_class_takes_its_samples_in_an_order_that_is_random_and_follows_the_seed() -> None:
    criterion, source, _ = build("ema", lam=0.2)
    x, y, images = batch(0)

    def moved(seed: int) -> Tensor:
        torch.manual_seed(seed)
        criterion(x, y, images=images)
        criterion.commit(lr=0.0, network_lr=0.0)
        actual = source.stored.clone()
        source.stored.copy_(before)
        return actual

    before = source.stored.clone()
    actual = torch.stack([moved(seed) for seed in range(60)])
    assert torch.equal(moved(7), actual[7])
    orders = [len(actual[:, c].round(decimals=9).unique(dim=0)) for c in (3, 0, 1)]
    assert orders == [6, 2, 1], "3!, 2!, 1! orders of its samples"


def test_the_batchs_order_means_nothing_where_the_keys_go_with_the_samples() -> None:
    criterion, source, _ = build()
    x, y, images = batch(0)
    keys, order = torch.rand(len(y)), torch.tensor([4, 2, 0, 5, 1, 3])
    give(source, keys, keys[order])
    straight = criterion(x, y, images=images)
    torch.testing.assert_close(criterion(x[order], y[order], images=images[order]), straight)


def draw(rank: int, folder: Path) -> None:
    """Write what one of two processes draws; their random states differ."""
    torch.manual_seed(rank)
    save_file({"keys": SemanticProxies(2, 3, source="encoder")._random(5)}, folder / str(rank))


def test_processes_draw_the_same_order_whatever_their_random_states(tmp_path: Path) -> None:
    together(2, draw, tmp_path)
    first, second = (load_file(file)["keys"] for file in (tmp_path / "0", tmp_path / "1"))
    assert torch.equal(first, second)


# Cells, counts, first values


def test_the_printed_average_is_another_share() -> None:
    """Eq. 3 as printed, normal(P + (1 - lam) p), is the convex form with 1 / (2 - lam)."""
    P, p = unit(torch.randn(4, D)), unit(torch.randn(4, D))
    printed = unit(P + (1 - 0.8) * p)
    torch.testing.assert_close(unit(accumulator("ema", D, lam=1 / (2 - 0.8))(P, p)), printed)


def test_what_is_trained_counts_as_the_papers_configuration_says() -> None:
    """ViT-S/16, 384-D, 100 classes, 3 class prompts in 12 blocks."""
    criterion = pm.method("vptsp-g", classes=100, dim=384).bind(Toy(width=384, blocks=12))
    source = criterion.objective.source
    assert sum(p.numel() for p in source.cell.parameters()) == 885_888
    assert sum(p.numel() for p in source.head.parameters()) == 148_608
    assert source.free.numel() == 38_400
    assert source.prompts.values.numel() == 1_382_400
    assert sum(p.numel() for p in criterion.parameters()) == 885_888 + 148_608 + 38_400
    # Initial values as in the released code: xavier of (100, 3, 384) and of (100, 384) / 8.
    assert float(source.prompts.values.std()) == pytest.approx(math.sqrt(2 / (103 * 384)), rel=0.01)
    assert float(source.free.detach().norm(dim=1).mean()) == pytest.approx(0.157, rel=0.02)
    torch.testing.assert_close(source.stored.norm(dim=1), torch.ones(100))
    linear = source.head[1]
    assert float(linear.weight.detach().std()) == pytest.approx(math.sqrt(2 / (384 + 384)), rel=0.01)
    assert not linear.bias.any()
    bound = math.sqrt(6 / (384 + 384))
    assert 0.99 * bound < float(source.cell.of_sample.weight.detach().abs().max()) <= bound, (
        "each matrix is initialised separately"
    )
    assert pm.method("vptsp-m", classes=100, dim=384).objective.source.cell.lam == 0.8


def test_groups_and_rates() -> None:
    criterion, source, _ = build()
    groups = {group["name"]: group for group in criterion.param_groups(lr=0.5, network_lr=0.01)}
    assert groups["proxies"]["params"] == [source.free]
    assert groups["proxies"]["lr"] == 0.5
    owned = {id(p) for part in (source.head, source.cell) for p in part.parameters()}
    assert {id(p) for p in groups["criterion"]["params"]} == owned
    assert groups["criterion"]["lr"] == 0.01
    assert groups["network rows"] == {"params": [], "name": "network rows", "lr": 0.01}
    optimizer = torch.optim.SGD([dict(group) for group in groups.values()], lr=7.0)
    before = source.prompts.values.clone()
    x, y, images = batch(0)
    for arguments, rate in (({}, 0.01), ({"lr": 9.0, "network_lr": 0.02}, 0.02)):
        source.prompts.average.zero_(), source.prompts.square.zero_(), source.prompts.steps.zero_()
        source.prompts.values.copy_(before)
        criterion(x, y, images=images).backward()
        criterion.commit(optimizer, **arguments)
        moved = (source.prompts.values - before).abs()
        assert not moved[[2, 4]].any(), "a class that is not in the batch is not moved"
        torch.testing.assert_close(moved[[0, 1, 3]], torch.full_like(moved[[0, 1, 3]], rate), rtol=1e-2, atol=0)
    default = torch.optim.SGD(criterion.param_groups(lr=0.5), lr=7.0)
    assert [group["lr"] for group in default.param_groups if group["name"] == "network rows"] == [7.0]
    criterion(x, y, images=images).backward()
    with pytest.raises(ValueError, match=r"^network_lr: got none and no optimizer, expected .*commit\(network_lr="):
        criterion.commit(lr=0.1)


# The table of class prompts


def test_few_class_prompts_move_with_the_method() -> None:
    criterion, source, _ = build()
    criterion.to("meta")
    assert {buffer.device.type for buffer in source.prompts.buffers()} == {"meta"}


def test_many_class_prompts_stay_in_host_memory_wherever_the_method_goes(monkeypatch) -> None:
    size = 3 * 4 * build()[1].prompts.values.numel()  # in float32, as they are made
    monkeypatch.setattr(semantic_proxies, "MAX_BYTES_ON_DEVICE", size)
    assert not build()[1].prompts.host
    monkeypatch.setattr(semantic_proxies, "MAX_BYTES_ON_DEVICE", size - 1)
    criterion, source, _ = build()
    values = source.prompts.values.clone()
    criterion.float()
    assert source.prompts.values.dtype == source.prompts.average.dtype == torch.float32
    assert source.prompts.steps.dtype == torch.int64
    criterion.double().to("meta")
    assert source.stored.device.type == source.free.device.type == source.head[1].weight.device.type == "meta"
    assert {buffer.device.type for buffer in source.prompts.buffers()} == {"cpu"}
    torch.testing.assert_close(source.prompts.values, values, rtol=1e-6, atol=1e-8)


class Dense(nn.Module):
    """All class prompts as one parameter on the device, with an optimiser that does not move absent classes."""

    def __init__(self, table: RowTable) -> None:
        super().__init__()
        self.values = nn.Parameter(table.values.clone())
        self.state = {name: torch.zeros_like(self.values.data) for name in ("average", "square")}
        self.steps = torch.zeros(len(self.values))

    def per_sample(self, labels: Tensor, per_block: list[int]) -> ClassPrompts:
        return ClassPrompts(self.values, labels, per_block)

    @torch.no_grad()
    def step(self, labels: Tensor, kind: str, lr: float, decay: float) -> None:
        """Move every class, then restore the classes that are not in the batch."""
        values, grad = self.values.data, self.values.grad
        here = torch.isin(torch.arange(len(values)), labels)
        old = [values.clone(), self.state["average"], self.state["square"], self.steps]
        steps = self.steps + 1
        if kind == "sgd":
            average, square = 0.9 * old[1] + (grad + decay * values), old[2]
            new = values - lr * average
        else:
            average, square = 0.9 * old[1] + (1 - 0.9) * grad, 0.999 * old[2] + (1 - 0.999) * grad.square()
            first, second = (1 - beta ** steps.double().view(-1, 1, 1) for beta in (0.9, 0.999))
            new = values * (1 - lr * decay)
            new = new - lr * (average / first.to(values)) / ((square / second.to(values)).sqrt() + 1e-8)
        kept = [
            torch.where(here.view(-1, *[1] * (a.ndim - 1)), a, b)
            for a, b in zip((new, average, square, steps), old, strict=True)
        ]
        self.values.data, self.state["average"], self.state["square"], self.steps = kept
        self.values.grad = None


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_rows_in_host_memory_move_bit_for_bit_as_all_of_them_would_on_the_device(kind: str, monkeypatch) -> None:
    """Two whole trainings in float32: one with the table, one with `Dense` in its place."""

    def make() -> tuple[Criterion, SemanticProxies, Toy, torch.optim.Optimizer]:
        criterion, source, toy = build(step=1, prompts=3)
        criterion.float(), toy.float()
        source.prompts.follow(kind, (0.9, 0.999), 0.01, 0.9)
        groups = [{"params": toy.parameters()}, *criterion.param_groups(lr=1e-2, network_lr=1e-2)]
        return criterion, source, toy, torch.optim.SGD(groups, lr=1e-2)

    bank, dense = make(), make()
    whole = Dense(dense[1].prompts)
    table = dense[1].prompts
    monkeypatch.setattr(
        dense[1], "prompts_of", lambda plan: whole.per_sample(plan.classes[plan.turns.place], dense[1].per_block)
    )
    for number in range(8):
        labels = torch.randint(0, C - 1, (6,), generator=torch.Generator().manual_seed(number)).tolist()
        losses = []
        for criterion, _, toy, optimizer in (bank, dense):
            torch.manual_seed(number)
            _, y, images = batch(number, labels)
            loss = criterion(toy(images.float()), y, images=images.float())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            criterion.commit(optimizer)
            losses.append(loss.detach())
        whole.step(y, kind, 1e-2, 0.01)
        assert torch.equal(*losses)
        assert torch.equal(bank[1].prompts.values, whole.values.data)
        assert torch.equal(bank[1].prompts.average, whole.state["average"])
        assert torch.equal(bank[1].prompts.steps, whole.steps.long())
        assert torch.equal(bank[1].stored, dense[1].stored)
    assert not table.steps.any(), "the dense run did not use its table"
    moved = (bank[1].prompts.values - table.values).abs().amax((1, 2))
    assert (moved[:-1] > 1e-5).all()
    assert moved[-1] == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_on_a_gpu_only_the_batchs_rows_are_there(kind: str) -> None:
    """Rows that are copied to the GPU and step there equal those of a table on the GPU, bit for bit."""
    values = torch.randn(1000, 4, 8)
    host, there = RowTable(values, optimizer=kind, host=True).cuda(), RowTable(values, optimizer=kind).cuda()
    assert host.values.device.type == "cpu"
    for number in range(5):
        index = torch.randperm(1000, generator=torch.Generator().manual_seed(number))[:7]
        for table in (host, there):
            (table.take(index, torch.device("cuda")) ** 3).sum().backward()
            table.step(1e-2)
        ours, theirs = host.state_dict(), there.state_dict()  # waits for the copies
        for name in ("values", "average", "square", "steps"):
            assert torch.equal(ours[name], theirs[name].cpu()), name


@pytest.mark.parametrize("name", ["gru", "lstm", "ema"])
def test_resumed_with_its_bank_it_goes_on_bit_for_bit(name: str) -> None:
    def make(seed: int) -> tuple[Criterion, Toy, torch.optim.Optimizer]:
        criterion, _, toy = build(name, seed=seed, dropout=0.1)
        groups = [{"params": toy.parameters()}, *criterion.param_groups(lr=1e-2, network_lr=1e-3)]
        return criterion, toy, torch.optim.AdamW(groups, lr=1e-3)

    def go(parts: tuple[Criterion, Toy, torch.optim.Optimizer], numbers: range) -> list[Tensor]:
        criterion, toy, optimizer = parts
        actual = []
        for number in numbers:
            _, y, images = batch(number, [number % C, (number + 1) % C, number % C])
            loss = criterion(toy(images), y, images=images)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            criterion.commit(optimizer)
            actual.append(loss.detach())
        return actual

    straight = make(0)
    go(straight, range(7))
    kept = [load(save(snapshot(module))) for module in straight[:2]]
    moments, random = copy.deepcopy(straight[2].state_dict()), torch.get_rng_state()
    assert kept[0]["objective.source.prompts.steps"].sum() == 14
    after = go(straight, range(7, 14))
    again = make(5)
    again[0].load_state_dict(kept[0])
    again[1].load_state_dict(kept[1])
    again[2].load_state_dict(moments)
    torch.set_rng_state(random)
    assert all(map(torch.equal, go(again, range(7, 14)), after))
    assert same(snapshot(again[0]), snapshot(straight[0]))
    assert same(snapshot(again[1]), snapshot(straight[1]))


# Whole runs

VIT = {
    "encoder__backbone": "test_vit",
    "encoder__pretrained": False,
    "encoder__tuning": "vpt+bitfit",
    "view__size": 32,
    "view__resize": 32,
    "train__optimizer": "sgd",
    "train__lr": 0.05,
    "train__proxy_lr": 0.5,
    "train__epochs": 2,
    "train__warmup": 0,
}
METHODS: dict[str, dict[str, Any]] = {
    "vptsp-m": {"method": "vptsp-m"},
    "vptsp-g": {"method": "vptsp-g"},
    "by adam, with dropout": {
        "method": "vptsp-g",
        "train__optimizer": "adamw",
        "train__lr": 1e-3,
        "loss__dropout": 0.1,
    },
}


@pytest.mark.parametrize("kind", METHODS)
def test_a_run_goes_on_bit_for_bit(kind: str, photos: Path, tmp_path: Path, only_training: None) -> None:
    settings = VIT | METHODS[kind] | {"train__save_every": 2}
    out, straight = tmp_path / "run", tmp_path / "straight"
    steps = 11
    run(photos, straight, watcher=Snapshot(steps, straight, out), **settings)
    assert state(out)["step"] == steps - 1 < state(straight)["step"]
    torch.manual_seed(99)
    run(photos, out, resume=True, **settings)
    same_run(out, straight)


def test_in_a_run_class_prompts_step_at_the_networks_rate(photos: Path, tmp_path: Path, only_training: None) -> None:
    """The network does not move, the free proxies do; and class prompts follow the schedule."""
    settings = VIT | {"method": "vptsp-g", "train__decay": "step", "train__decay_every": 1, "train__decay_by": 1e-20}

    def after(name: str, **more: Any) -> dict[str, Tensor]:
        tensors = Checkpoint.read(run(photos, tmp_path / name, **settings | more).folder / "last.safetensors").tensors
        return {key.rpartition("source.")[2]: value for key, value in tensors.items() if "criterion.objective" in key}

    still = after("still", train__lr=0.0, train__epochs=1)
    one, two = (after(f"{epochs}", train__epochs=epochs) for epochs in (1, 2))
    assert still["prompts.average"].any()
    assert (one["prompts.values"] - still["prompts.values"]).abs().max() > 1e-4
    assert (one["free"] - still["free"]).abs().max() > 1e-4
    assert torch.equal(one["prompts.values"], two["prompts.values"])
    assert one["prompts.steps"].sum() < two["prompts.steps"].sum()
    other = after("other", train__lr=0.0, train__proxy_lr=0.0, train__epochs=1)
    assert torch.equal(other["prompts.values"], still["prompts.values"]), "the initial values"
    assert not torch.equal(other["free"], still["free"])


def test_two_processes_equal_one(photos: Path, tmp_path: Path, only_training: None) -> None:
    settings = STILL | VIT | {"method": "vptsp-g", "train__epochs": 1, "train__per_class": 2, "loss__dropout": 0.1}
    Pair(command(photos, tmp_path / "two", **settings), tmp_path).finish()
    close(tmp_path / "two", run(photos, tmp_path / "one", **settings).folder)
