"""The oracles of the methods with a memory: against numbers worked out by hand, and their slopes by differences."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from oracles import ccp, isa, losses, vcpa

LN2, E = math.log(2), math.e


def fresh(C: int, D: int) -> isa.State:
    """As training begins: nothing counted, nothing stored, hardness 1."""
    return isa.State(np.zeros(C, int), np.zeros(C), np.ones(C), np.zeros((0, D)), np.zeros(0, int))


def worn(C: int, D: int, seed: int = 0) -> isa.State:
    """In the middle of training: classes of every age, a half-full queue that lacks the last class."""
    rng = np.random.default_rng(seed)
    count = rng.integers(0, 500, C)
    effective = np.array([isa.effective_number(int(n), 100.0) for n in count])
    return isa.State(count, effective, rng.uniform(-0.1, 0.5, C), rng.normal(size=(6, D)), np.arange(6) % (C - 1))


def batch(B: int = 8, C: int = 4, D: int = 3, seed: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Vectors of several lengths; class C - 1 has no query."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(B, D)) * rng.uniform(0.5, 3.0, (B, 1))
    return x, np.arange(B) % (C - 1), rng.normal(size=(C, D))


def test_isa_effective_number_and_decay() -> None:
    # V = 2, beta = 1/2: 0, 1, 1 + 1/2, 1 + 1/2 + 1/4; its limit is V
    assert [isa.effective_number(n, 2.0) for n in range(4)] == [0, 1, 1.5, 1.75]
    assert isa.effective_number(5000, 100.0) == pytest.approx(100, rel=1e-12)
    # sigma goes from 1 to nu
    assert isa.decay(0.0, 100.0, 1.5) == 1  # nu = 1
    assert isa.decay(1.0, 100.0, 1.5) == pytest.approx(1, abs=1e-12)
    # Eq. 22: with E = V the denominator is 1 + e^-tau, and sigma = nu
    assert isa.decay(100.0, 100.0, 1.5) == pytest.approx(1 / (1 + math.log(101)), rel=1e-14)


def test_isa_weights_by_hand() -> None:
    """Eqs. 14-17 where everything is a round number.

    Class 0: E = e - 1, so nu = 1 / (1 + log e) = 1/2. tau = log 2 and V = E + tau, so e^-tau = 1/2,
    e^(V - E - tau) = 1, and sigma = 1 + (3/2)(-1/2)/2 = 0.625. hardness 0.2, k = 0.5, lambda = 0.1:
    eta = (1 + 0.5 * 0.8)/2 + 0.1 = 0.8, so informative is [-0.6, 0.2]. Weakened negatives: 1/E = 1/1.71828.
    Class 1: E = 0, so nu = 1, sigma = 1; hardness 1: eta = 1.1, so informative is [-0.1, 1]; 1/max(1, 0) = 1.
    Class 2: E = 0.5, hardness 0.2: nu = 1/(1 + log 1.5), eta = 1.4 nu + 0.1; 1/max(1, 0.5) = 1.
    """
    state = fresh(3, 2)
    state.effective[:] = [E - 1, 0, 0.5]
    state.hardness[:] = [0.2, 1, 0.2]
    # own class 0: informative, informative at the bound, easy, an outlier; own class 1: to class 0 weakened, full
    to_0 = [0.0, 0.2, 0.5, -0.7, -0.7, -0.5]
    to_1 = [-0.05, 0, 0, -0.5, 0.3, -0.2]  # its own are informative and an outlier
    similarity = np.array([to_0, to_1, [-0.99, 0, 0, 0, 0, 0]]).T
    labels = np.array([0, 0, 0, 0, 1, 1])
    rule: dict[str, Any] = {"volume": E - 1 + LN2, "k": 0.5, "lam": 0.1, "tau": LN2}
    got = isa.weights(state, similarity, labels, **rule, filter_on=True)
    weak = 1 / (E - 1)
    assert got[:, 0] == pytest.approx([1.625, 1.625, 0.625, 0.625, weak, 1], rel=1e-12)
    assert got[:, 1] == pytest.approx([1, 1, 1, 1, 2, 1], rel=1e-12)
    assert got[:, 2].tolist() == [1] * 6
    before = isa.weights(state, similarity, labels, **rule, filter_on=False)
    assert before[:, 0] == pytest.approx([1, 1, 1, 1, weak, 1], rel=1e-12)


def test_isa_bounds_of_the_informative_are_inclusive() -> None:
    state = fresh(1, 2)
    state.hardness[:] = 0.5
    s = np.array([[-1], [0.5]])  # eta = 1 + 0.5 * 0.5 + 0.25 = 1.5, and 0.5 - 1.5 = -1, exact in binary
    got = isa.weights(state, s, np.array([0, 0]), volume=100, k=0.5, lam=0.25, tau=1.5, filter_on=True)
    assert got.tolist() == [[2], [2]]


def hand_step(memory_on: bool = True, filter_on: bool = True) -> tuple[float, isa.State]:
    """Proxies on the axes; V = 2, tau = 1, k = 0.5, lambda = 0.1, h = 0.5, scale 1, margin 0, a queue of 5."""
    state = isa.State(np.array([2, 0]), np.array([1.5, 0]), np.array([0.4, 1]), np.eye(2), np.array([0, 1]))
    x = np.array([[3.0, 4], [-4, 3], [0, 5], [0, -2], [-8, 6]])
    rule: dict[str, Any] = {"volume": 2, "h": 0.5, "k": 0.5, "lam": 0.1, "tau": 1, "size": 5, "scale": 1, "margin": 0}
    y, p = np.array([0, 0, 1, 0, 1]), np.array([[2.0, 0], [0, 1]])
    loss, _, _, after = isa.step(state, x, y, p, **rule, memory_on=memory_on, filter_on=filter_on)
    assert state.count.tolist() == [2, 0]
    assert len(state.labels) == 2, "the input state does not change"
    return loss, after


def test_isa_step_by_hand() -> None:
    """Similarities of the five queries to (class 0, class 1): (.6, .8) (-.8, .6) (0, 1) (0, -1) (-.8, .6).

    Class 0: E = 1.5, nu = 1/(1 + log 2.5) = 0.521842, sigma = 1 + (1 + e^-1)(nu - 1)/(1 + e^-0.5) = 0.592872,
    eta = 1.3 nu + 0.1 = 0.778394, informative [-0.378394, 0.4]. Own: .6 easy, -.8 outlier, 0 informative.
    Others: 0 full, -.8 weakened to 1/1.5. Class 1: E = 0, sigma = 1, informative [-0.1, 1]: own 1 and .6 both
    informative, weight 2; others .8, .6 and -1 have weight 1, the last by max(1, E) = 1.
    """
    sigma = 0.5928723
    positive = math.log(1 + math.exp(-0.6 * sigma) + math.exp(0.8 * sigma) + 1)
    positive += math.log(1 + math.exp(-2) + math.exp(-1.2))
    negative = math.log(1 + 1 + math.exp(-0.8 * 2 / 3)) + math.log(1 + math.exp(0.8) + math.exp(0.6) + math.exp(-1))
    expected = positive / ((3 * sigma + 1) / 3 + 2) + negative / ((1 + 2 / 3) / 2 + 1)
    loss, after = hand_step()
    assert loss == pytest.approx(expected, rel=1e-6)
    # the outlier is neither counted nor stored; of 2 + 4 rows the oldest goes
    assert after.count.tolist() == [4, 2]
    assert after.effective.tolist() == [2 * (1 - 1 / 16), 1.5]
    assert after.labels.tolist() == [1, 0, 1, 0, 1]
    assert after.vectors == pytest.approx(np.array([[0, 1], [0.6, 0.8], [0, 1], [0, -1], [-0.8, 0.6]]))
    assert after.hardness == pytest.approx([0.5 * (0.6 + 0) / 2, 0.5 * (1 + 1 + 0.6) / 3])


def test_isa_switches() -> None:
    _, after = hand_step(memory_on=False)
    assert [v.tolist() for v in (after.count, after.labels, after.hardness)] == [[4, 2], [0, 1], [0.4, 1]]
    _, after = hand_step(filter_on=False)
    assert [v.tolist() for v in (after.count, after.labels)] == [[5, 2], [0, 0, 1, 0, 1]]
    assert after.hardness == pytest.approx([0.5 * (0.6 - 0.8 + 0) / 3, 0.5 * (1 + 0.6) / 2])


def test_isa_which_hardness_is_taken_anew() -> None:
    """Class 0: its one sample is an outlier, yet it is in the batch. 1: nothing is stored. 2: not in the batch."""
    n, S = np.array([9, 9, 9]), np.array([0.9, 0.9, 0.9])
    state = isa.State(n, n * 1.0, S, np.array([[3.0, 4], [3, 4]]), np.array([0, 2]))
    x, y, p = np.array([[-1.0, 0], [-1, 0]]), np.array([0, 1]), np.array([[1.0, 0]] * 3)
    *_, after = isa.step(state, x, y, p, h=0.5, memory_on=True, filter_on=True)
    assert [v.tolist() for v in (after.count, after.effective, after.labels)] == [[9] * 3, [9] * 3, [0, 2]]
    assert after.hardness == pytest.approx([0.5 * 0.6, 0.9, 0.9])


def test_isa_begins_as_proxy_anchor() -> None:
    x, y, p = batch()
    loss, gx, gp, after = isa.step(fresh(4, 3), x, y, p, memory_on=False, filter_on=False)
    assert loss == pytest.approx(losses.proxy_anchor(x, y, p), rel=1e-12)
    for got, slope in zip((gx, gp), losses.gradient(lambda x, p: losses.proxy_anchor(x, y, p), [x, p])):
        assert got == pytest.approx(slope, rel=1e-6, abs=1e-7)
    assert [v.tolist() for v in (after.count, after.hardness)] == [[3, 3, 2, 0], [1] * 4]


@pytest.mark.parametrize("filter_on", [False, True])
def test_isa_slopes(filter_on: bool) -> None:
    x, y, p = batch()
    state = worn(4, 3)
    omega = isa.weights(state, losses.cosines(x, p), y, volume=100, k=0.9, lam=0.1, tau=1.5, filter_on=filter_on)
    assert len(np.unique(omega.round(6))) >= 3, "no slope is tested unless the weights differ"

    def step(x: np.ndarray, p: np.ndarray) -> tuple[float, np.ndarray, np.ndarray, isa.State]:
        return isa.step(state, x, y, p, scale=8, memory_on=True, filter_on=filter_on)

    _, gx, gp, _ = step(x, p)
    for got, slope in zip((gx, gp), losses.gradient(lambda x, p: step(x, p)[0], [x, p])):
        assert got == pytest.approx(slope, rel=1e-6, abs=1e-8)


def test_isa_class_without_negatives_drops_out() -> None:
    """Both queries are of class 0, so of the negative half class 1 alone is left: its mean weight divides it."""
    state = fresh(2, 2)
    state.effective[:] = [50, 4]
    x, y, p = np.array([[1.0, 0], [0, 1]]), np.array([0, 0]), np.array([[1.0, 0], [-1, 0]])
    loss, _, _, _ = isa.step(state, x, y, p, scale=1, margin=0, memory_on=False, filter_on=False)
    # class 1: nu = 1/(1 + log 5), threshold 1 - nu - .1 = .517; s = -1 and 0 are both weakened to 1/4
    assert loss == pytest.approx(math.log(1 + 1 / E + 1) + math.log(1 + math.exp(-0.25) + 1) / 0.25)


def test_isa_of_several_proxies() -> None:
    x, y, p = batch()
    state = worn(4, 3)
    one, _, _, after = isa.step(state, x, y, p, memory_on=True, filter_on=True)
    for K in (1, 2):  # copies of a proxy give the same result
        many, then = isa.step_multi(state, x, y, p.repeat(K, 0), per_class=K, memory_on=True, filter_on=True)
        assert many == pytest.approx(one, rel=1e-12)
        assert then.count.tolist() == after.count.tolist()
        assert then.hardness == pytest.approx(after.hardness, rel=1e-12)
    # one class with proxies e1, e2, gamma 1: a query at e1 has S = e/(e + 1)
    S = E / (E + 1)
    rule: dict[str, Any] = {"per_class": 2, "gamma": 1, "scale": 1, "margin": 0, "h": 0.5}
    x, y = np.array([[2.0, 0]]), np.array([0])
    loss, then = isa.step_multi(fresh(1, 2), x, y, np.eye(2), **rule, memory_on=True, filter_on=True)
    assert loss == pytest.approx(math.log(1 + math.exp(-2 * S)) / 2)  # informative, weight 1 + sigma = 2
    assert then.hardness == pytest.approx([S / 2])


def test_vcpa_newton_step_by_hand() -> None:
    """Eqs. 21-29 for one class, one sample, two dimensions.

    p = (3, 0) + (1, 2)(0, 2) = (3, 4), of length 5; f = (0, 1); s = 0.8; margin 0.8 makes h+ = e^0 = 1.
    G+ = (0, 1/2); scale 5: gradient -(5/5)(0, 1/2) = (0, -0.5), Hessian (25/25)(1/2 - 1/4) = 0.25 in f^2 = (0, 1).
    KL from mean (2, 1), deviations (1, 0.5): in mu gradient (1/1, -1/0.25) = (1, -4), Hessian (1, 4); in sigma
    gradient (1 - 1, 2/0.25 - 1/2) = (0, 7.5), Hessian (1 + 1, 4 + 1/4) = (2, 4.25). With tau = 0.5:
    mu: gradient (0.5, -2 - 0.5), Hessian (0.5, 2 + 0.25): (3 - 1, 0 + 2.5/2.25) = (2, 10/9);
    sigma: gradient (0, 3.75 - 2 * 0.5), Hessian (1, 2.125 + 4 * 0.25): (1, 2 - 2.75/3.125) = (1, 1.12).
    """
    mu, sigma, noise = np.array([[3.0, 0]]), np.array([[1.0, 2]]), np.array([[0.0, 2]])
    x, y = np.array([[0.0, 7]]), np.array([0])
    g, h = vcpa.gradient_and_curvature(mu + sigma * noise, x, y, scale=5, margin=0.8)
    assert g == pytest.approx(np.array([[0, -0.5]]))
    assert h == pytest.approx(np.array([[0, 0.25]]))
    args = (mu, sigma, np.array([[2.0, 1]]), np.array([[1, 0.5]]), noise, x, y)
    moved, spread = vcpa.newton_step(*args, tau=0.5, scale=5, margin=0.8)
    assert moved == pytest.approx(np.array([[2, 10 / 9]]))
    assert spread == pytest.approx(np.array([[1, 1.12]]))
    assert vcpa.newton_step(*args, tau=0.5, scale=5, margin=0.8, floor=1.05)[1][0] == pytest.approx([1.05, 1.12])


def test_vcpa_both_halves_by_hand() -> None:
    """Two classes, one sample f = 1 of class 0, one dimension; p = (2, -4), so s = (1, -1).

    margin 1 makes h+ = e^(1 - 1) and h- = e^(-1 + 1) both 1, G = 1/2, and the variances 1/2 - 1/4. scale 4, C = 2:
    gradients -4/(2 * 2)/2 = -0.5 and 4/(2 * 4)/2 = 0.25; Hessians 16/(2 * 4)/4 = 0.5 and 16/(2 * 16)/4 = 0.125.
    """
    g, h = vcpa.gradient_and_curvature(np.array([[2.0], [-4]]), np.array([[3.0]]), np.array([0]), scale=4, margin=1)
    assert g == pytest.approx(np.array([[-0.5], [0.25]]))
    assert h == pytest.approx(np.array([[0.5], [0.125]]))


def test_vcpa_variance_below_zero_is_none() -> None:
    """One sample far off: odds e^35, a variance of about e^-35 that rounding turns negative for some directions."""
    for angle in np.linspace(0.1, 1.4, 500):
        x, p, y = np.array([[math.cos(angle), math.sin(angle)]]), np.array([[-1.0, -1]]), np.array([0])
        g, h = vcpa.gradient_and_curvature(p, x, y, scale=36, margin=0.1)
        if h.min() < 0:
            break
    assert h.min() < 0, "no direction was found that needs the clamp"
    one = np.ones((1, 2))
    mu, sigma = vcpa.newton_step(
        p - one, one, p - one, one, one, x, y, tau=1e-30, scale=36, margin=0.1, floor=-math.inf
    )
    # at the prior KL has no gradient, and tau or 2 tau is all there is of H
    assert (mu - (p - one))[h < 0] == pytest.approx((-g / 1e-30)[h < 0])
    assert (sigma - one)[h < 0] == pytest.approx((-g / 2e-30)[h < 0])


def test_vcpa_halving() -> None:
    """KL alone (no sample): sigma = 2 under a prior of 0.1 goes to 2 - (200 - .5)/(100 + .25) = 0.00998, or to 1."""
    none = (np.zeros((1, 1)), np.zeros((0, 1)), np.zeros(0, int))
    args = (np.array([[4.0]]), np.array([[2.0]]), np.array([[3.0]]), np.array([[0.1]]), *none)
    rest: dict[str, Any] = {"tau": 0.01, "scale": 32.0, "margin": 0.1}
    mu, sigma = vcpa.newton_step(*args, **rest)
    assert mu == pytest.approx(np.array([[3.0]])), "a quadratic: one step to the prior"
    assert sigma == pytest.approx(np.array([[2 - 199.5 / 100.25]]))
    assert vcpa.newton_step(*args, **rest, halving=True)[1].tolist() == [[1]]
    assert vcpa.newton_step(*args, **rest, halving=True, floor=1.5)[1].tolist() == [[1.5]]


def held(p: np.ndarray, lengths: np.ndarray, x: np.ndarray, y: np.ndarray, scale: float, margin: float) -> float:
    """L_PA of Eq. 4 with the proxies divided by ``lengths`` instead of their own."""
    s = losses.unit(x) @ (p / lengths).T
    return losses.proxy_anchor_of(s, y[:, None] == np.arange(len(p)), scale, margin, positive_norm="all")


def second(f: Callable[[np.ndarray], float], v: np.ndarray, h: float = 1e-3) -> np.ndarray:
    """Second differences of ``f`` in each entry of ``v``: the diagonal of its Hessian."""
    out = np.zeros_like(v)
    for at in np.ndindex(*v.shape):
        shift = np.zeros_like(v)
        shift[at] = h
        out[at] = (f(v + shift) - 2 * f(v) + f(v - shift)) / h**2
    return out


def test_vcpa_newton_step_by_differences() -> None:
    """The step is -gradient/Hessian, entry by entry, of tau * KL + L_PA with the lengths held."""
    x, y, mu = batch()
    rng = np.random.default_rng(5)
    sigma, noise = rng.uniform(0.3, 1.5, mu.shape), rng.normal(size=mu.shape)
    prior = (mu + rng.normal(size=mu.shape), rng.uniform(0.5, 2, mu.shape))
    lengths = np.linalg.norm(mu + sigma * noise, axis=1, keepdims=True)

    def value(mu: np.ndarray, sigma: np.ndarray) -> float:
        return 0.1 * vcpa.kl(mu, sigma, *prior) + held(mu + sigma * noise, lengths, x, y, 6, 0.1)

    g_mu, g_sigma = losses.gradient(value, [mu, sigma])
    h_mu, h_sigma = second(lambda v: value(v, sigma), mu), second(lambda v: value(mu, v), sigma)
    rest: dict[str, Any] = {"tau": 0.1, "scale": 6.0, "margin": 0.1, "floor": -math.inf}
    moved, spread = vcpa.newton_step(mu, sigma, *prior, noise, x, y, **rest)
    assert moved == pytest.approx(mu - g_mu / h_mu, rel=1e-4, abs=1e-4)
    assert spread == pytest.approx(sigma - g_sigma / h_sigma, rel=1e-4, abs=1e-4)


def test_vcpa_gradient_and_curvature_by_differences() -> None:
    x, y, p = batch()
    lengths = np.linalg.norm(p, axis=1, keepdims=True)
    g, h = vcpa.gradient_and_curvature(p, x, y, scale=6, margin=0.1)
    assert g == pytest.approx(losses.gradient(lambda p: held(p, lengths, x, y, 6, 0.1), [p])[0], rel=1e-6, abs=1e-9)
    assert h == pytest.approx(second(lambda p: held(p, lengths, x, y, 6, 0.1), p), rel=1e-3, abs=1e-6)


def test_vcpa_step() -> None:
    x, y, mu = batch()
    rng = np.random.default_rng(6)
    sigma, noises = rng.uniform(0.3, 1.5, mu.shape), rng.normal(size=(3, *mu.shape))
    rest: dict[str, Any] = {"tau": 0.01, "scale": 8.0, "margin": 0.1}
    loss, grad, new_mu, new_sigma = vcpa.step(mu, sigma, x, y, noises, **rest)
    # the prior stays where the batch found q while q itself moves on
    first = vcpa.newton_step(mu, sigma, mu, sigma, noises[0], x, y, **rest)
    second = vcpa.newton_step(*first, mu, sigma, noises[1], x, y, **rest)
    assert (new_mu.tolist(), new_sigma.tolist()) == (second[0].tolist(), second[1].tolist())
    drawn = new_mu + new_sigma * noises[2]
    assert loss == pytest.approx(losses.proxy_anchor(x, y, drawn, 8, 0.1, "all"), rel=1e-12)
    # q is fixed while the network moves: the slope does not pass through the Newton steps
    slope = losses.gradient(lambda x: losses.proxy_anchor(x, y, drawn, 8, 0.1, "all"), [x])[0]
    assert grad == pytest.approx(slope, rel=1e-6, abs=1e-8)
    assert vcpa.step(mu, sigma, x, y, noises, floor=1.4, **rest)[3].min() == 1.4
    lagged = vcpa.step(mu, sigma, x, y, noises, prior=(mu + 1, sigma / 2), **rest)
    assert abs(lagged[2] - new_mu).max() > 1e-3
    still = vcpa.step(mu, sigma, x, y, noises[2:], **rest)
    assert (still[2].tolist(), still[3].tolist()) == (mu.tolist(), sigma.tolist())


def test_vcpa_kl_by_hand() -> None:
    one = np.ones((1, 1))
    assert vcpa.kl(one, one, 0 * one, one) == pytest.approx(0.5)
    assert vcpa.kl(0 * one, 2 * one, 0 * one, one) == pytest.approx(1.5 - LN2)  # (4 - 1 - 2 log 2)/2
    assert vcpa.kl(3 * one, 2 * one, one, 4 * one) == pytest.approx((0.25 + 0.25 - 1) / 2 + LN2)
    assert vcpa.kl(np.ones((2, 3)), np.ones((2, 3)), np.zeros((2, 3)), np.ones((2, 3))) == pytest.approx(3)


def test_vcpa_uncertainty() -> None:
    # unit draws (1, 0), (-1, 0): mean 0, deviation sqrt(2/1) in the first dimension, 0 in the second
    draws = np.array([[[3.0, 0]], [[-7.0, 0]]])
    assert vcpa.uncertainty(np.zeros((1, 2)), np.ones((1, 2)), draws) == pytest.approx([math.sqrt(2)])
    # mean (4, 0), deviation (1, 3): (4, 3)/5 and (4, -3)/5 differ in the second dimension by 1.2
    draws = np.array([[[0.0, 1]], [[0, -1]]])
    got = vcpa.uncertainty(np.array([[4.0, 0]]), np.array([[1.0, 3]]), draws)
    assert got == pytest.approx([math.sqrt(2 * 0.6**2)])
    # as training begins: 512 dimensions of deviation 1/sqrt(512)
    draws = np.random.default_rng(0).normal(size=(1000, 1, 512))
    assert vcpa.uncertainty(np.zeros((1, 512)), np.ones((1, 512)), draws) == pytest.approx([22.6], abs=0.05)


def test_ccp_normal() -> None:
    got = ccp.normal(np.array([[3.0, 4], [0.3, 0.4], [0, 0], [1, 0]]))
    assert got.tolist() == [[0.6, 0.8], [0.3, 0.4], [0, 0], [1, 0]]


def test_ccp_k_center_by_hand() -> None:
    # on a line, from a converged 0: 10 is farthest; then 4 (4 from 0) before 8 (2 from 10); 8 (2) before 1 (1)
    pool = np.array([[1.0], [8], [10], [4]])
    assert ccp.k_center(pool, np.zeros((1, 1)), 4) == [2, 3, 1, 0]
    assert ccp.k_center(pool, np.array([[9.0]]), 1) == [0], "it is the nearest converged vector that counts"
    assert ccp.k_center(pool, np.array([[0.0], [9]]), 1) == [3]
    assert ccp.k_center(np.array([[1.0], [-1], [1]]), np.zeros((1, 1)), 3) == [0, 1, 2], "ties: the lowest index"
    assert ccp.k_center(np.array([[1.0], [2]]), np.zeros((1, 1)), 4) == [1, 0, 0, 0], "again only when none is left"
    assert ccp.k_center(np.array([[1.0], [2], [5]]), np.zeros((0, 1)), 2) == [0, 2]


def test_ccp_contrastive_by_hand() -> None:
    """x = (3, 0) becomes (1, 0); own proxies (0.4, 0) and (1, 0) lie at 0.6 and 0, the other's (0.7, 0.4) at 0.5.

    m+ = 0.1: 0.5 and nothing, mean over the one that is left 0.5; m- = 0.9: 0.4.
    """
    p, py = np.array([[0.4, 0], [1, 0], [0.7, 0.4]]), np.array([0, 0, 1])
    kinds = {"margin": 0.9, "positive_margin": 0.1}
    loss, gx, gp = ccp.contrastive(np.array([[3.0, 0]]), np.array([0]), p, py, **kinds)
    assert loss == pytest.approx(0.9)
    # slope in (1, 0): (1, 0) from the first proxy, -(0.6, -0.8) from the third; tangent over the length 3 is left
    assert gx == pytest.approx(np.array([[0, 0.8 / 3]]))
    assert gp == pytest.approx(np.array([[-1, 0], [0, 0], [0.6, -0.8]]))
    # on top of a proxy of another class: the whole margin, no slope
    loss, gx, gp = ccp.contrastive(np.array([[5.0, 0]]), np.array([1]), p[1:2], py[1:2], **kinds)
    assert (loss, gx.tolist(), gp.tolist()) == (0.9, [[0, 0]], [[0, 0]])
    # nothing violated: 0, not 0/0
    loss, gx, gp = ccp.contrastive(np.array([[5.0, 0]]), np.array([0]), p[1:2], py[1:2], **kinds)
    assert (loss, gx.tolist(), gp.tolist()) == (0, [[0, 0]], [[0, 0]])


def test_ccp_step_slopes() -> None:
    rng = np.random.default_rng(3)
    theta, anchor, features = rng.normal(size=(4, 3)), rng.normal(size=(4, 3)), rng.normal(size=(7, 4)) / 2
    p, y, py = rng.normal(size=(6, 3)) / 2, np.arange(7) % 3, np.arange(6) // 2
    lengths = np.linalg.norm(np.concatenate([features @ theta, p]), axis=1)
    assert 2 < (lengths > 1).sum() < len(lengths) - 2, "both sides of the unit ball"

    def step(theta: np.ndarray, p: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        return ccp.step(theta, anchor, features, y, p, py, lam=0.3, margin=0.9, positive_margin=0.2)

    loss, gt, gp = step(theta, p)
    without = ccp.contrastive(features @ theta, y, p, py, margin=0.9, positive_margin=0.2)[0]
    assert loss == pytest.approx(without + 0.15 * ((theta - anchor) ** 2).sum(), rel=1e-12)
    for got, slope in zip((gt, gp), losses.gradient(lambda theta, p: step(theta, p)[0], [theta, p])):
        assert got == pytest.approx(slope, rel=1e-6, abs=1e-8)


def test_ccp_contrastive_of_long_vectors_is_that_of_unit_ones() -> None:
    rng = np.random.default_rng(4)
    x, p = 9 * losses.unit(rng.normal(size=(7, 3))), 4 * losses.unit(rng.normal(size=(6, 3)))
    y, py = np.arange(7) % 3, np.arange(6) // 2
    expected = losses.margin_contrastive(x, y, 0.2, 0.9, refs=(p, py))
    assert ccp.contrastive(x, y, p, py, margin=0.9, positive_margin=0.2)[0] == pytest.approx(expected, rel=1e-12)


def test_ccp_problems() -> None:
    problems = ccp.Problems(patience=3)
    first = [0.5, 0.4, 0.6, 0.600009, 0.6, 0.6]  # 0.600009 is no gain over 0.6
    second = [0.1, 0.100009, 0.100018, 0.1, 0.1, 0.1]  # starts from nothing; 0.100018 is a gain over 0.1
    assert [problems.evaluated(s) for s in first + second] == ([False] * 5 + [True]) * 2
