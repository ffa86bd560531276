"""VCPA: closed forms against autograd, whole steps against the oracle, the order of a step, and its ablations."""

import copy
import math
from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor
from torch.distributions import Normal, kl_divergence

import proxymetric as pm
from oracles import losses
from oracles import vcpa as oracle
from proxymetric.core.normalisation import NORMALISATIONS, unit
from proxymetric.core.pieces import Compare, Energy, References
from proxymetric.criterion import Criterion
from proxymetric.losses import ProxyAnchor, ProxyNCA
from proxymetric.papers.contract import same, snapshot
from proxymetric.sources import VariationalProxies

B, C, D = 9, 4, 6
NUMBERS = {"scale": 6.0, "margin": 0.1}
CLOSE = {"rtol": 1e-9, "atol": 1e-11}


def batch(seed: int, classes: int = C - 1) -> tuple[np.ndarray, np.ndarray]:
    """Embeddings of several lengths with some class structure; the last class is absent."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, classes, B)
    centres = np.random.default_rng(99).normal(size=(C, D))
    return (centres[y] + 0.7 * rng.normal(size=(B, D))) * rng.uniform(0.3, 3.0, (B, 1)), y


def tensors(seed: int) -> tuple[Tensor, Tensor]:
    x, y = batch(seed)
    return torch.from_numpy(x).requires_grad_(), torch.from_numpy(y)


def build(seed: int = 0, **arguments: object) -> tuple[Criterion, VariationalProxies]:
    torch.manual_seed(seed)
    criterion = pm.method("vcpa", classes=C, dim=D, **NUMBERS | arguments).double()
    source = criterion.objective.source
    assert isinstance(source, VariationalProxies)
    return criterion, source


def noises(count: int, seed: int = 0, rows: int = C, dim: int = D) -> np.ndarray:
    return np.random.default_rng(1000 + seed).normal(size=(count, rows, dim))


def give(source: VariationalProxies, draws: Iterable[np.ndarray]) -> list[np.ndarray]:
    """Let the source draw these noises; return the list of those not drawn yet."""
    left = list(draws)
    source._noise = lambda: torch.from_numpy(left.pop(0))  # type: ignore[method-assign]
    return left


def q(source: VariationalProxies) -> tuple[np.ndarray, np.ndarray]:
    mu, sigma = source.q()
    return mu.detach().numpy().copy(), sigma.detach().numpy().copy()


@pytest.mark.parametrize("normalise", ["l2", "ball"])
@pytest.mark.parametrize("positive_norm", ["all", "present"])
@pytest.mark.parametrize(("per_class", "classes"), [(1, C), (3, C - 1), (1, 1)])
def test_closed_forms_are_autograds_with_the_length_held(normalise, positive_norm, per_class, classes) -> None:
    """With classes = 1 the batch has one class: its proxy has no negatives, and the others have no positives."""
    x, y = batch(per_class, classes)
    queries, labels = NORMALISATIONS[normalise](torch.from_numpy(x)), torch.from_numpy(y)
    loss = ProxyAnchor(8.0, 0.1, positive_norm)
    rows = torch.arange(C).repeat_interleave(per_class)
    points = torch.from_numpy(np.random.default_rng(5).normal(size=(len(rows), D)))
    points[0] *= 0.3  # inside the ball
    refs = References(points, rows, per_class)
    least = {"l2": 0.0, "ball": 1.0}[normalise]
    held = points.norm(dim=1, keepdim=True).clamp(min=least)

    def value(flat: Tensor) -> Tensor:
        return loss(queries, labels, refs._replace(rows=flat.view_as(points) / held))

    gradient, curvature = Energy(loss, queries, labels, normalise).closed_forms(refs)(refs.rows)
    flat = points.flatten().requires_grad_()
    (slope,) = torch.autograd.grad(value(flat), flat)
    hessian = torch.autograd.functional.hessian(value, flat).diagonal()
    torch.testing.assert_close(gradient.flatten(), slope, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(curvature.flatten(), hessian, rtol=1e-12, atol=1e-12)
    assert (curvature >= 0).all()
    assert curvature.max() > 1e-3


def test_newton_by_hand() -> None:
    """Eqs. 21 to 29 in one dimension, scale 1, margin 1, tau 1/4, one sample f = 1 of class 0 of two.

    First noise 1: p = 1 = |p|, s = 1. Class 0: h+ = e^0 = 1, G+ = 1/2, gradient -1/4, curvature (1/2 - 1/4)/2 = 1/8;
    mu = (1/4)/(1/4 + 1/8) = 2/3, sigma = 1 + (1/4)/(1/2 + 1/8) = 7/5.
    Class 1: h- = e^2, G- = e^2/(1 + e^2) = G, gradient G/2, curvature (G - G^2)/2.
    Second noise 0: p = mu. Class 0: s = 1, gradient -3/8, curvature (9/4)/8 = 9/32; mu = 2/3 + (5/24)/(17/32) = 18/17,
    sigma = 7/5 - (7/5 - 5/7)/(1 + 25/49) = 35/37. Class 1: mu < 0, so s = -1, h- = 1, G- = -mu/|mu| (-1/2).
    """
    criterion = pm.method("vcpa", classes=2, dim=1, scale=1.0, margin=1.0, tau=0.25, newton_steps=2).double()
    source = criterion.objective.source
    give(source, [np.ones((2, 1)), np.zeros((2, 1)), np.zeros((2, 1))])
    criterion(torch.tensor([[5.0]]).double(), torch.tensor([0]))
    criterion.commit()
    G = math.exp(2) / (1 + math.exp(2))
    mu = -(G / 2) / (1 / 4 + (G - G**2) / 2)
    sigma = 1 - (G / 2) / (1 / 2 + (G - G**2) / 2)
    length = abs(mu)
    mu_after = mu - (mu / 4 + 1 / (4 * length)) / (1 / 4 + 1 / (8 * length**2))
    sigma_after = sigma - (sigma - 1 / sigma) / (1 + 1 / sigma**2)
    assert source.mu.flatten().tolist() == pytest.approx([18 / 17, mu_after], rel=1e-12)
    assert source.sigma.flatten().tolist() == pytest.approx([35 / 37, sigma_after], rel=1e-12)


@pytest.mark.parametrize("tau", [1.0, 0.01])
@pytest.mark.parametrize("steps", [1, 10])
def test_every_step_is_the_oracles(steps: int, tau: float) -> None:
    criterion, source = build(newton_steps=steps, tau=tau)
    mu, sigma = np.zeros((C, D)), np.ones((C, D))
    for number in range(4):
        draws = noises(steps + 1, number)
        left = give(source, draws)
        x, y = tensors(number)
        loss = criterion(x, y)
        assert not left, "one noise for each Newton step and one for the loss"
        for actual, kept in zip(q(source), (mu, sigma), strict=True):
            np.testing.assert_array_equal(actual, kept, err_msg="q is written in commit only")
        loss.backward()
        expected, slope, mu, sigma = oracle.step(mu, sigma, x.detach().numpy(), y.numpy(), draws, tau=tau, **NUMBERS)
        np.testing.assert_allclose(loss.item(), expected, **CLOSE)
        np.testing.assert_allclose(x.grad.numpy(), slope, **CLOSE)
        criterion.commit()
        mu, sigma = _same_q(source, mu, sigma)
    assert np.abs(mu).max() > 0.1


def _same_q(source: VariationalProxies, mu: np.ndarray, sigma: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Check that both agree, and return ours, so that rounding does not grow from step to step."""
    actual = q(source)
    np.testing.assert_allclose(actual[0], mu, **CLOSE)
    np.testing.assert_allclose(actual[1], sigma, **CLOSE)
    return actual


@pytest.mark.parametrize("per_class", [1, 2])
def test_a_skipped_step_moves_nothing_and_of_several_the_last_is_kept(per_class: int) -> None:
    criterion, source = build(newton_steps=3, per_class=per_class, prior_lag=3)
    (x, y), (x2, y2) = tensors(0), tensors(1)
    kept = snapshot(criterion)
    criterion(x, y).backward()
    criterion.discard()
    criterion.commit()
    with torch.no_grad():
        criterion(x, y)
    criterion.eval()(x, y)
    assert same(kept, snapshot(criterion))
    criterion.train()
    criterion(x, y)
    after = torch.get_rng_state()
    criterion(x2, y2)
    criterion.commit()
    alone, _ = build(newton_steps=3, per_class=per_class, prior_lag=3)
    torch.set_rng_state(after)
    alone(x2, y2)
    alone.commit()
    torch.testing.assert_close(source.mu, alone.objective.source.mu, rtol=0, atol=0)


@pytest.mark.parametrize("halving", [False, True])
def test_sigma_is_clamped_and_clamps_are_counted(halving: bool) -> None:
    floor = 0.2
    told = {"tau": 1e-4, "floor": floor, "halving": halving, **NUMBERS}
    criterion, source = build(newton_steps=3, **told)
    mu, sigma = np.zeros((C, D)), np.ones((C, D))
    clamped = 0
    for number in range(3):
        draws = noises(4, number)
        give(source, draws)
        x, y = tensors(number)
        criterion(x, y)
        criterion.commit()
        prior = mu, sigma
        for noise in draws[:-1]:
            least = np.maximum(sigma / 2, floor) if halving else np.full_like(sigma, floor)
            mu, sigma = oracle.newton_step(mu, sigma, *prior, noise, x.detach().numpy(), y.numpy(), **told)
            clamped += int((sigma == least).sum())
        mu, sigma = _same_q(source, mu, sigma)
    assert clamped > 20
    assert source.clamps.item() == clamped
    figures = criterion.figures()
    assert (figures["mean sigma"], figures["sigmas clamped"]) == (pytest.approx(sigma.mean()), clamped)


@pytest.mark.parametrize("lag", [1, 2, 3])
def test_a_lagged_prior_is_q_of_so_many_batches_ago(lag: int) -> None:
    criterion, source = build(newton_steps=2, tau=0.5, prior_lag=lag)
    past = [(np.zeros((C, D)), np.ones((C, D)))]
    for number in range(6):
        draws = noises(3, number)
        give(source, draws)
        x, y = tensors(number)
        criterion(x, y)
        criterion.discard()  # a skipped step does not count as a batch
        give(source, draws)
        criterion(x, y)
        criterion.commit()
        prior = past[max(len(past) - lag, 0)]
        *_, mu, sigma = oracle.step(*past[-1], x.detach().numpy(), y.numpy(), draws, tau=0.5, prior=prior, **NUMBERS)
        past.append(_same_q(source, mu, sigma))


def loss_at(x: Tensor, y: Tensor, vectors: Tensor) -> Tensor:
    refs = References(unit(vectors), torch.arange(C), 1)
    value: Tensor = ProxyAnchor(**NUMBERS, positive_norm="all")(unit(x), y, refs)
    return value


@pytest.mark.parametrize("lag", [1, 2])
def test_without_newton_steps_mu_and_log_sigma_descend_on_the_kl_and_the_loss(lag: int) -> None:
    tau = 0.3
    criterion, source = build(newton_steps=0, tau=tau, prior_lag=lag)
    groups = criterion.param_groups(lr=0.05)
    assert [id(p) for p in groups[0]["params"]] == [id(source.mu), id(source.log_sigma)]
    optimizer = torch.optim.SGD(groups)
    past = []
    for number in range(4):
        draw = noises(1, number)
        give(source, draw)
        x, y = tensors(number)
        mu, log_sigma = (p.detach().clone().requires_grad_() for p in (source.mu, source.log_sigma))
        now, then = Normal(mu, log_sigma.exp()), Normal(mu.detach(), log_sigma.detach().exp())
        past.append(then)
        kl = tau * kl_divergence(now, past[max(number + 1 - lag, 0)]).sum()
        expected = loss_at(x, y, mu + log_sigma.exp() * torch.from_numpy(draw[0]))
        (pull,) = torch.autograd.grad(kl, mu, retain_graph=True)
        slopes = torch.autograd.grad(expected + kl, (x, mu, log_sigma))
        optimizer.zero_grad()
        loss = criterion(x, y)
        loss.backward()
        torch.testing.assert_close(loss, expected + kl)
        torch.testing.assert_close(criterion.terms["regulariser"], kl.detach())
        for actual, slope in zip((x, source.mu, source.log_sigma), slopes, strict=True):
            torch.testing.assert_close(actual.grad, slope)
        assert (pull.abs().max() > 1e-4) == (lag > 1 and number > 0), "at the prior the KL divergence has no gradient"
        optimizer.step()
        criterion.commit()


def test_first_order_steps_are_adams() -> None:
    steps, tau, lr = 3, 0.1, 0.05
    criterion, source = build(newton_steps=0, gradient_steps=steps, gradient_lr=lr, tau=tau)
    assert not list(criterion.parameters())
    mu, log_sigma = (torch.zeros(C, D).double().requires_grad_() for _ in range(2))
    optimizer = torch.optim.Adam([mu, log_sigma], lr=lr)
    for number in range(3):
        draws = noises(steps + 1, number)
        give(source, draws)
        x, y = tensors(number)
        prior = Normal(mu.detach().clone(), log_sigma.detach().exp())
        for draw in torch.from_numpy(draws[:-1]):
            value = loss_at(x.detach(), y, mu + log_sigma.exp() * draw)
            optimizer.zero_grad()
            (value + tau * kl_divergence(Normal(mu, log_sigma.exp()), prior).sum()).backward()
            optimizer.step()
        expected = loss_at(x, y, (mu + log_sigma.exp() * torch.from_numpy(draws[-1])).detach())
        loss = criterion(x, y)
        torch.testing.assert_close(loss, expected)
        (slope,) = torch.autograd.grad(expected, x, retain_graph=True)
        torch.testing.assert_close(torch.autograd.grad(loss, x)[0], slope)
        criterion.commit()
        torch.testing.assert_close(source.mu, mu.detach())
        torch.testing.assert_close(source.sigma, log_sigma.detach().exp())


def newton_updates(p: Tensor, x: np.ndarray, y: np.ndarray, state: dict) -> Tensor:
    for _ in range(4):
        g, h = oracle.gradient_and_curvature(p.numpy(), x, y, **NUMBERS)
        p = p - torch.from_numpy(g / (h + 1e-3))
    return p


def adam_updates(p: Tensor, x: np.ndarray, y: np.ndarray, state: dict) -> Tensor:
    leaf = state.setdefault("leaf", p.clone().requires_grad_())
    optimizer = state.setdefault("optimizer", torch.optim.Adam([leaf], lr=1e-2))
    for _ in range(4):
        optimizer.zero_grad()
        loss_at(torch.from_numpy(x), torch.from_numpy(y), leaf).backward()
        optimizer.step()
    return leaf.detach().clone()


@pytest.mark.parametrize(
    ("arguments", "updates"),
    [
        ({"newton_steps": 4, "damping": 1e-3}, newton_updates),
        ({"newton_steps": 0, "gradient_steps": 4}, adam_updates),
    ],
)
def test_proxy_anchor_with_several_updates_a_batch(arguments: dict, updates: Callable[..., Tensor]) -> None:
    criterion, source = build(sample=False, tau=0.0, **arguments)
    p, state = source.mu.clone(), {}
    assert p.abs().min() > 0, "without noise the initial proxies differ"
    for number in range(3):
        x, y = tensors(number)
        p = updates(p, x.detach().numpy(), y.numpy(), state)
        loss = criterion(x, y)
        expected = losses.proxy_anchor(x.detach().numpy(), y.numpy(), p.numpy(), **NUMBERS, positive_norm="all")
        assert loss.item() == pytest.approx(expected, rel=1e-8)
        criterion.commit()
        torch.testing.assert_close(source.mu, p, rtol=1e-8, atol=1e-10)


def test_no_sampling_compares_with_the_means() -> None:
    criterion, source = build(sample=False)
    x, y = tensors(0)
    random = torch.get_rng_state()
    first = criterion.eval()(x, y)
    torch.testing.assert_close(first, loss_at(x, y, source.mu), msg="in eval mode q does not settle on the batch")
    loss = criterion.train()(x, y)
    criterion.commit()
    assert torch.equal(random, torch.get_rng_state())
    torch.testing.assert_close(loss, loss_at(x, y, source.mu))
    assert loss < first


def test_uncertainty_of_a_class() -> None:
    wide = pm.method("vcpa", classes=3, dim=512)
    assert wide.uncertainty(draws=1000).tolist() == pytest.approx([22.6] * 3, abs=0.05)
    criterion, source = build()
    criterion(*tensors(0))
    criterion.commit()
    random = torch.get_rng_state()
    actual = criterion.uncertainty(draws=50)
    assert torch.equal(random, torch.get_rng_state())
    assert torch.equal(actual, criterion.uncertainty(draws=50))
    generator = torch.Generator().manual_seed(0)
    draws = torch.stack([torch.randn(50, D, generator=generator, dtype=torch.float64) for _ in range(C)], 1)
    np.testing.assert_allclose(actual.numpy(), oracle.uncertainty(*q(source), draws.numpy()), rtol=1e-10)


def test_uncertainty_of_several_proxies_is_their_mean_and_other_methods_have_none() -> None:
    criterion, source = build(newton_steps=0, per_class=2)
    source.log_sigma.data[1] = -20.0
    source.mu.data[:] = 1.0
    sure = criterion.uncertainty()
    assert sure.shape == (C,)
    assert sure[0].item() == pytest.approx(sure[1:].mean().item() / 2, rel=0.1)
    with pytest.raises(ValueError, match="uncertainty: got proxy-anchor, which does not estimate it, as vcpa does"):
        pm.method("proxy-anchor", classes=C, dim=D).uncertainty()


def test_resumes_to_the_bit_after_newton_steps() -> None:
    def step(criterion: Criterion, number: int) -> tuple[Tensor, Tensor]:
        x, y = tensors(number)
        x = x.detach().float().requires_grad_()
        loss = criterion(x, y)
        loss.backward()
        criterion.commit()
        return loss.detach(), x.grad

    straight, _ = build(prior_lag=3)
    straight.float()
    for number in range(3):
        step(straight, number)
    kept = copy.deepcopy(load(save(snapshot(straight)))), torch.get_rng_state()
    results = [step(straight, number) for number in range(3, 7)]
    again, _ = build(seed=8, prior_lag=3)
    again.float().load_state_dict(kept[0])
    torch.set_rng_state(kept[1])
    for number, expected in enumerate(results, 3):
        for one, other in zip(step(again, number), expected, strict=True):
            assert torch.equal(one, other), number
    assert same(snapshot(straight), snapshot(again))


def test_a_loss_without_closed_forms_is_refused_by_name() -> None:
    criterion = Criterion(Compare(ProxyNCA(), VariationalProxies(C, D)))
    with pytest.raises(ValueError, match=r"newton_steps: got a loss without closed-form curvature \(ProxyNCA\)"):
        criterion(torch.randn(2, D), torch.tensor([0, 1]))
