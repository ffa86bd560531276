"""CCP: picking and one step against the oracle, whole runs of projections against a plain loop, exact resume."""

import copy
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor, nn

import proxymetric as pm
from oracles import ccp as oracle
from proxymetric.core.k_center import k_center
from proxymetric.core.pools import pool_from
from proxymetric.metrics import covering_radius, inter_class_distance
from proxymetric.papers.contract import same, snapshot
from proxymetric.schemes import AlternatingProjections
from proxymetric.schemes.proximal import proximal
from proxymetric.sources import VariationalProxies

C, K, D, F = 4, 2, 3, 5
MARGINS = {"margin": 1.1, "positive_margin": 0.2}
BASE = {"method": "margin-contrastive", **MARGINS}


def samples(seed: int, size: int, classes: int = C) -> tuple[Tensor, Tensor]:
    """Features with class structure, long and short, and labels."""
    rng = np.random.default_rng(seed)
    y = rng.permutation(np.arange(size) % classes)
    x = np.random.default_rng(99).normal(size=(C, F))[y] * 0.7 + 0.5 * rng.normal(size=(size, F))
    return torch.from_numpy(x), torch.from_numpy(y)


class Toy:
    """A linear encoder under CCP in float64, its optimiser, and a pool that records what it returned."""

    def __init__(self, seed: int = 0, bound: bool = True, **arguments: object) -> None:
        torch.manual_seed(seed)
        self.encoder = nn.Linear(F, D, bias=False).double()
        self.encoder.weight.data *= 2  # embeddings inside the unit ball and outside of it
        complete = {"base": BASE, "per_class": K, "pool": 5, "patience": 2, "lam": 0.3} | arguments
        self.criterion = pm.method("ccp", classes=C, dim=D, steps_per_epoch=4, **complete).double()
        if bound:
            self.criterion.bind(self.encoder)
        groups = [{"params": self.encoder.parameters()}, *self.criterion.param_groups(lr=0.1)]
        self.optimizer = torch.optim.SGD(groups, lr=0.1)
        self.per_class = [9] * C
        """images of each class that a pool can draw from"""
        self.asked: list[int] = []
        self.given: tuple[Tensor, Tensor] | None = None

    @property
    def scheme(self) -> AlternatingProjections:
        assert isinstance(self.criterion.objective, AlternatingProjections)
        return self.criterion.objective

    def theta(self) -> Tensor:
        return self.encoder.weight.detach().clone()

    def star(self) -> Tensor:
        (theta,) = self.scheme.theta.buffers()
        return theta.clone()

    def rho(self) -> Tensor:
        return self.scheme._source[0].seated()

    def pool(self, count: int) -> tuple[Tensor, Tensor]:
        self.asked.append(count)
        x, y = samples(1000 + len(self.asked), C * max(self.per_class))
        rows = torch.cat([(y == c).nonzero().flatten()[: min(count, n)] for c, n in enumerate(self.per_class)])
        rows = rows[torch.from_numpy(np.random.default_rng(1).permutation(len(rows)))]
        with torch.no_grad():
            self.given = self.encoder(x[rows]), y[rows]
        return self.given

    def step(self, number: int, size: int = 12) -> Tensor:
        x, y = samples(number, size)
        self.optimizer.zero_grad()
        loss: Tensor = self.criterion(self.encoder(x), y)
        loss.backward()
        self.optimizer.step()
        self.criterion.commit()
        return loss.detach()


def groups(toy: Toy, count: int) -> Iterator[np.ndarray]:
    """What the pool returned, by class and in its order, repeated up to `count`."""
    assert toy.given is not None
    vectors, labels = (t.numpy() for t in toy.given)
    for c in range(C):
        own = vectors[labels == c]
        yield own[np.arange(count) % len(own)] if len(own) else own


def picked(toy: Toy, converged: np.ndarray | None, first: bool = False) -> np.ndarray:
    """The proxies (C * K, D) that Algorithm 2 picks; converged (C * K, D), or None for random ones at the start."""
    extra, out = (K if first and converged is None else 0), []
    for c, own in enumerate(groups(toy, extra + 5)):
        before = own[:extra] if converged is None else converged.reshape(C, K, D)[c]
        rest = own[extra:]
        out.append(rest[oracle.k_center(oracle.normal(rest), oracle.normal(before), K)])
    return np.concatenate(out)


@pytest.mark.parametrize("kind", ["random", "grid", "duplicates", "one point"])
@pytest.mark.parametrize("seed", range(4))
def test_k_center_is_algorithm_2(kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    G, n, m, picks = 6, 9, 3, int(rng.integers(1, 10))
    pool, converged = rng.normal(size=(G, n, D)), rng.normal(size=(G, m, D))
    if kind == "grid":  # equal distances, exactly
        pool, converged = (rng.integers(0, 3, a.shape).astype(float) for a in (pool, converged))
    if kind == "duplicates":
        pool[:, 4:8] = pool[:, :4]
        pool[:, 8] = converged[:, 0]
    if kind == "one point":
        pool[:] = converged[:, :1]
    picked = k_center(torch.from_numpy(pool), torch.from_numpy(converged), picks)
    assert picked.tolist() == [oracle.k_center(p, c, picks) for p, c in zip(pool, converged, strict=True)]
    assert all(len(set(row)) == picks for row in picked.tolist())


@pytest.mark.parametrize("lam", [0.0, 0.3])
def test_every_step_is_the_oracles(lam: float) -> None:
    toy = Toy(lam=lam)
    toy.criterion.boundary(0.0, toy.pool)
    anchor, rows = toy.theta().T.numpy().copy(), np.arange(C).repeat(K)
    for number in range(5):
        x, y = samples(number, 12)
        theta, rho = toy.theta().T.numpy(), toy.rho().numpy()
        expected, slope, slope_rho = oracle.step(theta, anchor, x.numpy(), y.numpy(), rho, rows, lam=lam, **MARGINS)
        loss = toy.step(number)
        np.testing.assert_allclose(loss.item(), expected, rtol=1e-10)
        np.testing.assert_allclose(toy.encoder.weight.grad.T.numpy(), slope, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(toy.scheme._source[0].vectors.grad.numpy(), slope_rho, rtol=1e-9, atol=1e-12)
        np.testing.assert_array_equal(toy.star().T.numpy(), anchor)
    assert np.abs(toy.theta().T.numpy() - anchor).max() > 1e-2
    assert ("proximal" in toy.criterion.terms) == bool(lam)


def test_proximal_term_is_plain_autograds() -> None:
    torch.manual_seed(0)
    parameters = [torch.randn(shape).double().requires_grad_() for shape in ((3, 4), (5,), (), (2, 1, 2))]
    anchors = [torch.randn_like(p) for p in parameters]
    anchors[1] = parameters[1].detach().clone()  # no movement, so the gradient is 0
    expected = 0.7 / 2 * sum((p - a).square().sum() for p, a in zip(parameters, anchors, strict=True))
    actual = proximal(parameters, anchors, 0.7)
    torch.testing.assert_close(actual, expected)
    slopes = torch.autograd.grad(3 * expected, parameters)
    for one, other in zip(torch.autograd.grad(3 * actual, parameters), slopes, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("patience", [1, 2, 3])
def test_a_problem_ends_when_the_oracle_says_so(patience: int) -> None:
    toy = Toy(patience=patience)
    toy.criterion.boundary(0.0, toy.pool)
    problems, problem = oracle.Problems(patience), 1
    for score in np.random.default_rng(patience).choice([0.5, 0.5 + 9e-6, 0.5 + 1.8e-5, 0.6, 0.7, -1.0, 0.0], 60):
        problem += problems.evaluated(float(score))
        toy.criterion.boundary(float(score), toy.pool)
        assert toy.criterion.figures()["problem"] == problem
        assert len(toy.asked) == problem, "a pool is asked for when it is needed, and only then"
    assert problem > 5


@pytest.mark.parametrize("start", ["random", "zero"])
@pytest.mark.parametrize(("anchor", "roll_back"), [("last", False), ("best", False), ("best", True)])
def test_projections_are_a_plain_loop(anchor: str, roll_back: bool, start: str) -> None:
    toy = Toy(anchor=anchor, roll_back=roll_back, start=start)
    theta = toy.theta()
    toy.criterion.boundary(0.0, toy.pool)
    assert toy.asked == [5 + (K if start == "random" else 0)]
    np.testing.assert_array_equal(toy.rho(), picked(toy, None if start == "random" else np.zeros((C * K, D)), True))
    assert torch.equal(toy.star(), theta)
    problems, best, star, projected = oracle.Problems(2), (-np.inf, theta, toy.rho()), theta, 0
    for number, score in enumerate(np.random.default_rng(3).normal(size=14)):
        toy.step(2 * number)
        toy.step(2 * number + 1)
        theta, rho = toy.theta(), toy.rho()
        assert not torch.equal(theta, star)
        if score > best[0] + 1e-5:
            best = (score, theta, rho)
        ended = problems.evaluated(float(score))
        toy.criterion.boundary(float(score), toy.pool)
        if not ended:
            assert torch.equal(toy.star(), star)
            assert torch.equal(toy.rho(), rho)
            assert torch.equal(toy.theta(), theta)
            continue
        _, star, converged = best if anchor == "best" else (None, theta, rho)
        projected += 1
        assert torch.equal(toy.star(), star)
        assert torch.equal(toy.scheme.rho, converged)
        assert torch.equal(toy.theta(), star if roll_back else theta)
        assert toy.asked[-1] == 5
        np.testing.assert_array_equal(toy.rho(), picked(toy, converged.numpy()))
        best = (-np.inf, theta, rho)
        given, _ = toy.given
        toy.asked.pop()
        assert torch.equal(toy.pool(5)[0], given), "the pool was embedded by the network that is trained further"
    assert projected > 2


def test_the_first_problem_may_go_without_the_proximal_term() -> None:
    toy = Toy(first_lam=0.0)
    toy.criterion.boundary(0.0, toy.pool)
    toy.step(0)
    toy.step(1)
    assert "proximal" not in toy.criterion.terms
    for _ in range(3):
        toy.criterion.boundary(0.5, toy.pool)
    before = toy.theta()
    toy.step(2)
    assert toy.criterion.terms["proximal"] == 0
    gap = (toy.theta() - before).square().sum()
    toy.step(3)
    torch.testing.assert_close(toy.criterion.terms["proximal"], 0.15 * gap)


def test_without_alternation_the_first_picks_stay() -> None:
    toy = Toy(alternate=False)
    toy.criterion.boundary(0.0, toy.pool)
    proxies = toy.rho()
    for _ in range(6):
        toy.criterion.boundary(0.1, toy.pool)
    assert torch.equal(toy.rho(), proxies)
    assert toy.asked == [5 + K]
    assert toy.criterion.figures()["problem"] == 1


def test_a_pool_of_one_gives_random_proxies() -> None:
    toy = Toy(pool=1, start="zero")
    toy.criterion.boundary(0.0, toy.pool)
    assert toy.asked == [K]
    for own, proxies in zip(groups(toy, K), toy.rho().view(C, K, D), strict=True):
        assert sorted(own.tolist()) == sorted(proxies.tolist())


def test_small_classes_repeat_and_missing_ones_keep_their_proxies() -> None:
    toy = Toy(start="zero")
    toy.per_class = [9, 1, 3, 0]
    before = toy.rho().view(C, K, D)
    toy.criterion.boundary(0.0, toy.pool)
    after = toy.rho().view(C, K, D)
    assert torch.equal(after[3], before[3])
    (alone,) = toy.given[0][toy.given[1] == 1]
    assert torch.equal(after[1], torch.stack([alone, alone]))
    for c in (0, 2):
        own = next(own for i, own in enumerate(groups(toy, 5)) if i == c)
        chosen = oracle.k_center(oracle.normal(own), np.zeros((K, D)), K)
        np.testing.assert_array_equal(after[c], own[chosen])


def test_all_training_embeddings_serve_as_a_pool() -> None:
    """Two tensors instead of a function: each call draws as many random embeddings of each class as it needs."""
    toy = Toy(pool=1, start="zero")
    x, y = samples(5, 40)
    assert pool_from(x[:18], y[:18])(5)[1].bincount().tolist() == y[:18].bincount().clamp(max=5).tolist()
    drawn = set()
    for _ in range(4):
        toy.criterion.boundary(0.0, (x[:, :D], y))
        rows = [[int((x[:, :D] == p).all(1).nonzero()) for p in own] for own in toy.rho().view(C, K, D)]
        assert all(y[row] == c for c in range(C) for row in rows[c])
        assert all(len(set(own)) == K for own in rows)
        drawn.add(str(rows))
    assert len(drawn) == 2, "picked at the start and after two evaluations without gain"


def test_figures_are_the_geometry_of_the_pool() -> None:
    toy = Toy(start="zero")
    toy.criterion.boundary(0.0, toy.pool)
    vectors = torch.from_numpy(np.concatenate([oracle.normal(own) for own in groups(toy, 5)]))
    labels = torch.arange(C).repeat_interleave(5)
    radius = covering_radius(vectors, labels, distance="euclidean")
    distance = inter_class_distance(vectors, labels, distance="euclidean")
    assert toy.criterion.figures() == {
        "problem": 1,
        "problems solved": 0,
        "covering radius": pytest.approx(radius),
        "inter-class distance": pytest.approx(distance),
        "radius over distance": pytest.approx(radius / distance),
        "proxies moved": 0,
    }


@pytest.mark.parametrize("base", ["margin-contrastive", "proxy-anchor"])
def test_figures_say_how_far_proxies_moved_from_where_they_were_picked(base: str) -> None:
    toy = Toy(base=base)
    toy.criterion.boundary(0.0, toy.pool)
    picked = toy.rho()
    for number in range(8):
        problem = toy.scheme.problem
        toy.step(number)
        expected = ((toy.rho() - picked).square().sum() / picked.square().sum()).sqrt()
        toy.criterion.boundary(-number, toy.pool)
        figures = toy.criterion.figures()
        assert expected > 0
        assert figures["proxies moved"] == pytest.approx(float(expected))
        assert figures["problems solved"] == toy.scheme.problem - 1
        if toy.scheme.problem > problem:
            picked = toy.rho()
    assert figures["problems solved"] >= 2


def test_gaussian_proxies_are_wide_again_after_a_pick() -> None:
    toy = Toy(base={"method": "vcpa", "newton_steps": 2, "prior_lag": 3})
    toy.criterion.boundary(0.0, toy.pool)
    source = toy.scheme._source[0]
    assert isinstance(source, VariationalProxies)
    for number in range(4):
        toy.step(number)
    assert (source.sigma != 1).all()
    for _ in range(3):
        toy.criterion.boundary(0.1, toy.pool)
    np.testing.assert_array_equal(source.mu, picked(toy, toy.scheme.rho.numpy()))
    assert (source.sigma == 1).all()
    assert torch.equal(source.past_mu, source.mu.expand(2, -1, -1))
    assert (source.past_sigma == 1).all()


def test_resumes_to_the_bit_in_the_third_projection() -> None:
    """Encoder, criterion and optimiser are saved; the new criterion is bound before the state is loaded."""

    def made(seed: int) -> Toy:
        toy = Toy(seed, anchor="best", in_batch=0.1, memory=20, memory_start=3)
        toy.optimizer = torch.optim.Adam(toy.optimizer.param_groups, lr=0.05)
        return toy

    def go(toy: Toy, steps: range) -> list[Tensor]:
        losses = []
        for number in steps:
            losses.append(toy.step(number))
            if number % 2:
                toy.criterion.boundary([0.5, 0.6, 0.4, 0.3][number // 2 % 4], samples_of(toy, number))
        return losses

    def samples_of(toy: Toy, number: int) -> tuple[Tensor, Tensor]:
        x, y = samples(number, 60)
        with torch.no_grad():
            return toy.encoder(x), y  # the random state of torch decides what is drawn

    straight = made(0)
    straight.criterion.boundary(0.0, samples_of(straight, 0))
    go(straight, range(22))
    assert straight.scheme.problem == 3
    assert straight.scheme.stale == 1
    states = [load(save(state)) for state in (straight.encoder.state_dict(), snapshot(straight.criterion))]
    moments, random = copy.deepcopy(straight.optimizer.state_dict()), torch.get_rng_state()
    expected = go(straight, range(22, 44))
    assert straight.scheme.problem > 4

    again = made(9)
    again.encoder.load_state_dict(states[0])
    again.criterion.load_state_dict(states[1])
    again.optimizer.load_state_dict(moments)
    torch.set_rng_state(random)
    for one, other in zip(go(again, range(22, 44)), expected, strict=True):
        assert torch.equal(one, other)
    assert same(snapshot(straight.criterion), snapshot(again.criterion))
    assert torch.equal(straight.theta(), again.theta())


def test_what_is_forgotten_is_said() -> None:
    x, y = samples(0, 8)
    toy = Toy(bound=False)
    with pytest.raises(ValueError, match=r"encoder: got none, expected criterion.bind\(encoder\).*; ccp needs it"):
        toy.criterion(toy.encoder(x), y)
    toy.criterion.bind(toy.encoder)
    with pytest.raises(ValueError, match=r"boundary: got no call, expected boundary\(...\) before the first step"):
        toy.criterion(toy.encoder(x), y)
    with pytest.raises(ValueError, match=r"validation: got none, expected criterion.boundary"):
        toy.criterion.boundary(pool=toy.pool)
    with pytest.raises(ValueError, match=r"pool: got none, expected criterion.boundary"):
        toy.criterion.boundary(0.0)
    with pytest.raises(ValueError, match=r"pool: got embeddings \(8, 5\) and 8 labels, expected \(n, 3\)"):
        toy.criterion.boundary(0.0, lambda count: (x, y))
    with pytest.raises(ValueError, match="pool: got labels from 1 to 4, expected 0 to 3"):
        toy.criterion.boundary(0.0, lambda count: (x[:, :D], y + 1))
    toy.criterion.boundary(0.0, toy.pool)
    toy.encoder.bias = nn.Parameter(torch.zeros(D).double())
    with pytest.raises(ValueError, match="bind: got bias, which became trainable after bind"):
        toy.criterion(toy.encoder(x), y)
