"""Proxy-ISA against its oracle, step by step; its weights by hand; what it remembers, and when."""

import copy
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

import proxymetric as pm
from oracles import isa as oracle
from oracles import losses
from proxymetric.core.normalisation import unit
from proxymetric.criterion import Criterion
from proxymetric.ops import using
from proxymetric.papers.contract import same, snapshot
from proxymetric.weightings import InformativeSamples

B, C, D = 11, 5, 6
SCALE, MARGIN = 6.0, 0.1
NUMBERS = {"volume": 7.0, "h": 0.6, "k": 0.3, "lam": 0.02, "tau": 0.7}
"""small enough that a few batches make outliers, informative and easy samples, and that sigma falls"""
SCHEDULES = {  # with two steps per epoch
    "memory off": {"memory_epoch": 99, "filter_epoch": 99, "memory": 30},
    "memory on": {"memory_epoch": 1, "filter_epoch": 99, "memory": 200},
    "filter on": {"memory_epoch": 1, "filter_epoch": 2, "memory": 200},
    "all from the start": {"memory_epoch": 0, "filter_epoch": 0, "memory": 60},
    "queue overflows": {"memory_epoch": 0, "filter_epoch": 1, "memory": 13},
    "queue smaller than a batch": {"memory_epoch": 0, "filter_epoch": 1, "memory": 4},
    "filter without memory": {"memory_epoch": 99, "filter_epoch": 1, "memory": 30},
}


def batch(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Three of the classes, never the last one; some samples lie opposite to their class."""
    rng = np.random.default_rng(seed)
    y = rng.choice(rng.permutation(C - 1)[:3], B)
    centres = np.random.default_rng(99).normal(size=(C, D))
    x = centres[y] * rng.choice([1.0, 1.0, -0.6], (B, 1)) + 0.8 * rng.normal(size=(B, D))
    return x * rng.uniform(0.3, 3.0, (B, 1)), y


def build(base: object = None, seed: int = 0, **arguments: object) -> Criterion:
    """A criterion in float64, with two steps per epoch."""
    torch.manual_seed(seed)
    base = base or {"method": "proxy-anchor", "scale": SCALE, "margin": MARGIN}
    return pm.method("proxy-isa", classes=C, dim=D, steps_per_epoch=2, base=base, **NUMBERS | arguments).double()


def weighting(criterion: Criterion) -> InformativeSamples:
    piece = criterion.objective.weighting
    assert isinstance(piece, InformativeSamples)
    return piece


def state(criterion: Criterion) -> oracle.State:
    """The memory in the form of the oracle: the queue with the oldest row first."""
    w = weighting(criterion)
    queue, size = w.queue, len(w.queue.labels)
    oldest = int(queue.added_count) % size if len(queue) == size else 0
    order = [(oldest + i) % len(queue) for i in range(len(queue))]
    numbers = [t.numpy().copy() for t in (w.count, w.effective, w.hardness, queue.vectors[order], queue.labels[order])]
    return oracle.State(*numbers)


def agree(actual: oracle.State, expected: oracle.State) -> None:
    np.testing.assert_array_equal(actual.count, expected.count)
    np.testing.assert_array_equal(actual.labels, expected.labels)
    for name in ("effective", "hardness", "vectors"):
        np.testing.assert_allclose(getattr(actual, name), getattr(expected, name), rtol=1e-11, atol=1e-13, err_msg=name)


def taken(criterion: Criterion, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """One step: the optimiser moves the proxies by a large step, and the commit then updates the memory."""
    optimizer.zero_grad()
    loss = criterion(x, y)
    loss.backward()
    optimizer.step()
    criterion.commit()
    return loss.detach()


def schedule(step: int, arguments: dict[str, float]) -> dict[str, bool]:
    return {
        "memory_on": step // 2 >= arguments["memory_epoch"],
        "filter_on": step // 2 >= arguments["filter_epoch"],
    }


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_step_is_the_oracles(name: str) -> None:
    arguments = SCHEDULES[name]
    criterion = build(**arguments)
    proxies = criterion.objective.source.vectors
    optimizer = torch.optim.SGD(criterion.param_groups(lr=1.0), lr=1.0)
    numbers = {"scale": SCALE, "margin": MARGIN, "size": arguments["memory"], **NUMBERS}
    before, levels = state(criterion), set()
    for step in range(9):
        x, y = batch(step)
        p, on = proxies.detach().numpy().copy(), schedule(step, arguments)
        expected, slope_x, slope_p, after = oracle.step(before, x, y, p, **numbers, **on)
        kinds = {k: NUMBERS[k] for k in ("volume", "k", "lam", "tau")}
        omega = oracle.weights(before, losses.cosines(x, p), y, **kinds, filter_on=on["filter_on"])
        levels |= set(omega.round(9).ravel().tolist())
        tx = torch.from_numpy(x).requires_grad_()
        loss = taken(criterion, optimizer, tx, torch.from_numpy(y))
        np.testing.assert_allclose(loss.item(), expected, rtol=1e-11)
        np.testing.assert_allclose(tx.grad.numpy(), slope_x, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(proxies.grad.numpy(), slope_p, rtol=1e-9, atol=1e-12)
        assert np.abs(proxies.detach().numpy() - p).max() > 1e-2, "the proxies have moved before the commit"
        before = state(criterion)
        agree(before, after)
    assert min(levels) < 0.9, "some pair was weakened"
    if arguments["filter_epoch"] < 4:
        assert max(levels) > 1.1, "some sample was informative"
        assert before.count.sum() < 9 * B, "some sample was an outlier"
    if "queue" in name:
        assert len(before.labels) == arguments["memory"]


def test_soft_proxies_are_judged_by_the_similarity_of_their_class() -> None:
    arguments, K = SCHEDULES["queue overflows"] | {"h": 0.99, "k": 0.0}, 3
    criterion = build(base={"method": "mpa", "scale": SCALE, "per_class": K, "tau": 0.0}, **arguments)
    proxies = criterion.objective.source.vectors
    optimizer = torch.optim.SGD(criterion.param_groups(lr=1.0), lr=1.0)
    numbers = {"per_class": K, "scale": SCALE, "size": arguments["memory"], **NUMBERS, "h": 0.99, "k": 0.0}
    before = state(criterion)
    for step in range(7):
        x, y = batch(step)
        p, on = proxies.detach().numpy().copy(), schedule(step, arguments)

        def value(x: np.ndarray, p: np.ndarray, before=before, y=y, on=on) -> float:
            return oracle.step_multi(before, x, y, p, **numbers, **on)[0]

        expected, after = oracle.step_multi(before, x, y, p, **numbers, **on)
        tx = torch.from_numpy(x).requires_grad_()
        loss = taken(criterion, optimizer, tx, torch.from_numpy(y))
        np.testing.assert_allclose(loss.item(), expected, rtol=1e-11)
        for leaf, slope in zip((tx, proxies), losses.gradient(value, [x, p]) if step % 3 == 0 else ()):
            np.testing.assert_allclose(leaf.grad.numpy(), slope, rtol=2e-5, atol=1e-7)
        before = state(criterion)
        agree(before, after)
    assert before.count.sum() < 7 * B


def test_weights_by_hand() -> None:
    """Eqs. 14 to 17 with V = 2 and two samples seen.

    E = (1 - 1/4)/(1/2) = 1.5; nu = 1/(1 + ln 2.5) = 0.521841; with tau = 1, sigma = 1 + 1.367879 (nu - 1)/(1 + e^-0.5)
    = 0.592872; with S = 0.2, k = 0.5, lam = 0.1, eta = 1.4 nu + 0.1 = 0.830578, so outliers lie below -0.630578.
    """
    w = InformativeSamples(1, 2, volume=2.0, k=0.5, lam=0.1, tau=1.0, initial_hardness=0.2).double()
    w._count(torch.tensor([0, 0]))
    assert w.effective.item() == pytest.approx(1.5)
    assert w.band().item() == pytest.approx(0.830578, abs=1e-6)
    s = torch.tensor([[-0.64], [-0.63], [0.0], [0.2], [0.2000001]]).double()
    positive, negative = w.rule(filtering=True)[:2]
    torch.testing.assert_close(
        positive(s).T, torch.tensor([[0.592872, 1.592872, 1.592872, 1.592872, 0.592872]]).double(), atol=1e-6, rtol=0
    )
    torch.testing.assert_close(negative(s).T, torch.tensor([[2 / 3, 1, 1, 1, 1]]).double())
    assert w.rule(filtering=False).positive(s).unique().tolist() == [1.0]
    assert w.rule(filtering=False).negative(s)[0].item() == pytest.approx(2 / 3)


def test_both_bounds_of_the_band_are_informative() -> None:
    w = InformativeSamples(1, 2, lam=0.0, k=0.0, initial_hardness=0.3)  # E = 0, nu = 1: the band is [S - 1, S]
    low, high = w.hardness - w.band(), w.hardness
    s = torch.stack([torch.nextafter(low, low - 1), low, high, torch.nextafter(high, high + 1)])
    assert w.rule(filtering=True).positive(s).flatten().tolist() == [1, 2, 2, 1]


def test_without_penalties_it_is_proxy_anchor_to_the_bit() -> None:
    x, y = (torch.from_numpy(a) for a in batch(0))
    weighted = build(positive="none", negative="none", **SCHEDULES["all from the start"])
    plain = pm.method("proxy-anchor", classes=C, dim=D, scale=SCALE, margin=MARGIN).double()
    plain.objective.source.vectors.data.copy_(weighted.objective.source.vectors)
    results = []
    for criterion in (weighted, plain):
        leaf = x.clone().requires_grad_()
        with using("plain"):  # "auto" chooses closed forms where there is no weighting, and they round differently
            loss = criterion(leaf, y)
        loss.backward()
        results.append((loss, leaf.grad, criterion.objective.source.vectors.grad))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


NU = 1 / (1 + math.log(1 + 19 / 9))  # V = 3 and three samples: E = 3 (1 - (2/3)^3) = 19/9
SIGMA = 1 + (1 + math.exp(-0.5)) * (NU - 1) / (1 + math.exp(3 - 19 / 9 - 0.5))
LEVELS = {"none": 1.0, "1/E": 9 / 19, "nu": NU, "sigma": SIGMA}


@pytest.mark.parametrize("negative", LEVELS)
@pytest.mark.parametrize("positive", LEVELS)
def test_penalties_of_table_3(positive: str, negative: str) -> None:
    criterion = build(volume=3.0, tau=0.5, positive=positive, negative=negative)
    w = weighting(criterion)
    w._count(torch.tensor([1, 1, 1]))
    w.hardness[:] = 0.1
    low = float((w.hardness - w.band())[1])
    s = torch.tensor([low - 0.05, low + 0.05, 0.05, 0.2]).double()[:, None].expand(-1, C)
    rule, least = w.rule(filtering=True), LEVELS[positive]
    inside = 1.0 if positive == "none" else 1 + least
    assert rule.positive(s)[:, 1].tolist() == pytest.approx([least, inside, inside, least], rel=1e-12)
    assert rule.negative(s)[:, 1].tolist() == pytest.approx([LEVELS[negative], 1, 1, 1], rel=1e-12)
    # A class that was not seen: E = 0, where every penalty is 1.
    assert rule.negative(s - 5)[:, 0].unique().tolist() == [1.0]


def test_weights_are_a_rule_per_class_that_can_be_taken_in_chunks() -> None:
    criterion = build(**SCHEDULES["queue overflows"])
    optimizer = torch.optim.SGD(criterion.param_groups(lr=1.0), lr=1.0)
    for step in range(5):
        taken(criterion, optimizer, *(torch.from_numpy(a) for a in batch(step)))
    rule = weighting(criterion).rule(filtering=True)
    s = torch.linspace(-1, 1, 40).double()[:, None] + torch.linspace(-0.1, 0.1, C).double()
    for steps in rule[:2]:
        assert steps.edges.shape[0] == steps.levels.shape[0] == C
        assert steps.levels.numel() <= 3 * C
        chunks = [steps.of(columns)(s[:, columns]) for columns in torch.arange(C).split(2)]
        assert torch.equal(torch.cat(chunks, 1), steps(s))
        assert len(steps(s).unique()) >= C, "the classes differ"
    kinds = {k: NUMBERS[k] for k in ("volume", "k", "lam", "tau")}
    for own in range(C):
        expected = oracle.weights(state(criterion), s.numpy(), np.full(40, own), **kinds, filter_on=True)
        actual = rule.negative(s)
        actual[:, own] = rule.positive(s)[:, own]
        np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-12)


def test_a_skipped_step_leaves_no_trace() -> None:
    criterion = build(**SCHEDULES["all from the start"])
    optimizer = torch.optim.SGD(criterion.param_groups(lr=1.0), lr=1.0)
    taken(criterion, optimizer, *(torch.from_numpy(a) for a in batch(0)))
    before = snapshot(criterion)
    x, y = (torch.from_numpy(a) for a in batch(1))
    criterion(x.requires_grad_(), y).backward()
    assert same(before, snapshot(criterion)), "changed before commit"
    criterion.discard()
    criterion.commit()
    with torch.no_grad():
        criterion(x, y)
    criterion.eval()(x, y)
    criterion.train().commit()
    assert same(before, snapshot(criterion))


def test_forward_passes_before_one_commit_are_all_remembered() -> None:
    """Gradient accumulation: all weights use the state before the step; the parts are then remembered in order."""
    x, y = (torch.from_numpy(a) for a in batch(3))
    whole, parts = (build(**SCHEDULES["all from the start"]) for _ in range(2))
    whole(x, y)
    for part in (slice(0, 4), slice(4, None)):
        parts(x[part], y[part])
    whole.commit()
    parts.commit()
    agree(state(parts), state(whole))


def test_a_class_without_stored_samples_keeps_its_similarity() -> None:
    criterion = build(memory=1, memory_epoch=0, filter_epoch=99, initial_hardness=0.75)
    proxies = unit(criterion.objective.source.vectors.detach())
    criterion(proxies[:2].clone(), torch.tensor([0, 1]))
    criterion.commit()
    w = weighting(criterion)
    assert w.count.tolist() == [1, 1, 0, 0, 0]
    assert w.hardness.tolist() == pytest.approx([0.75, NUMBERS["h"], 0.75, 0.75, 0.75], rel=1e-12)


def test_an_outlier_is_neither_counted_nor_remembered() -> None:
    criterion = build(memory=9, memory_epoch=0, filter_epoch=0, initial_hardness=0.75, lam=0.0, k=0.0)
    proxies = unit(criterion.objective.source.vectors.detach())
    criterion(torch.cat([proxies[:2], -proxies[:1]]), torch.tensor([0, 1, 0]))  # below 0.75 - 1
    criterion.commit()
    w = weighting(criterion)
    assert w.count.tolist() == [1, 1, 0, 0, 0]
    assert w.queue.labels[: len(w.queue)].tolist() == [0, 1]


@pytest.mark.parametrize("count", [1, 3, 1000])
@pytest.mark.parametrize(("dtype", "digits"), [(torch.float32, 2**-23), (torch.float64, 1e-14)])
def test_a_volume_of_a_million_loses_no_digits(count: int, dtype: torch.dtype, digits: float) -> None:
    V = 10**6
    exact = V * (1 - Fraction(V - 1, V) ** count)
    w = InformativeSamples(2, 2, volume=float(V)).to(dtype)
    w._count(torch.ones(count, dtype=torch.int64))
    assert w.effective.tolist() == pytest.approx([0, float(exact)], rel=digits)
    assert w.effective.dtype == dtype


@pytest.mark.parametrize(("begun", "stored"), [(4, range(10, 50)), (9, range(60, 61))])
def test_resumes_to_the_bit_with_a_half_full_queue_and_with_a_full_one(begun: int, stored: range) -> None:
    def made(seed: int) -> tuple[Criterion, torch.optim.Optimizer]:
        criterion = build(seed=seed, memory=60, memory_epoch=0.5, filter_epoch=1).float()
        return criterion, torch.optim.AdamW(criterion.param_groups(lr=1e-1))

    def step(criterion: Criterion, optimizer: torch.optim.Optimizer, number: int) -> tuple[Tensor, Tensor]:
        x, y = batch(number)
        leaf = torch.from_numpy(x).float().requires_grad_()
        return taken(criterion, optimizer, leaf, torch.from_numpy(y)), leaf.grad

    straight, moves = made(0)
    for number in range(begun):
        step(straight, moves, number)
    assert len(weighting(straight).queue) in stored
    again, moves_again = made(7)
    again.load_state_dict(load(save(snapshot(straight))))
    moves_again.load_state_dict(copy.deepcopy(moves.state_dict()))
    for number in range(begun, begun + 8):
        for one, other in zip(step(straight, moves, number), step(again, moves_again, number), strict=True):
            assert torch.equal(one, other), number
    assert same(snapshot(straight), snapshot(again))
    assert len(weighting(again).queue) == 60


def test_a_forgotten_length_of_an_epoch_is_said() -> None:
    with pytest.raises(ValueError, match=r"epochs: got none, expected steps_per_epoch=.*; proxy-isa needs it"):
        pm.method("proxy-isa", classes=C, dim=D)(torch.randn(2, D), torch.tensor([0, 1]))
