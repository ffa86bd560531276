"""The oracles themselves: against numbers worked out by hand, and their closed-form slopes against differences."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from oracles import losses as oracle

LN2, E = math.log(2), math.e
X = np.array([[3.0, 0.0], [0.0, 0.5]])  # unit: e1, e2
Y = np.array([0, 1])
P = np.array([[2.0, 0.0], [0.0, 7.0]])  # each query lies on its own proxy and is orthogonal to the other


def drawn(B: int = 9, C: int = 5, K: int = 3, D: int = 4, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Vectors of several lengths; class C - 1 has no query."""
    rng = np.random.default_rng(seed)
    lengths = rng.uniform(0.5, 3.0, (B, 1))
    return rng.normal(size=(B, D)) * lengths, np.arange(B) % (C - 1), rng.normal(size=(C * K, D))


def test_unit_and_distances() -> None:
    assert oracle.unit(np.array([[3.0, 4.0]])).tolist() == [[0.6, 0.8]]
    assert oracle.distances(X, P) == pytest.approx(np.array([[0, math.sqrt(2)], [math.sqrt(2), 0]]))


@pytest.mark.parametrize(
    ("value", "by_hand"),
    [
        # s_y = 1 and the one other class has s = 0: -a + log(exp 0)
        (oracle.proxy_nca(X, Y, P), -1.0),
        (oracle.proxy_nca(X, Y, P, scale=12.0), -12.0),
        # squared distances 0 and 2, T = 1/9: scale 18 on the cosine
        (oracle.proxy_nca_pp(X, Y, P), math.log(1 + math.exp(-18))),
        (oracle.proxy_nca_pp(X, Y, P, temperature=0.5), math.log(1 + math.exp(-4))),
        (oracle.proxy_nca_pp(X, 1 - Y, P, temperature=0.5), 4 + math.log(1 + math.exp(-4))),
        (oracle.norm_softmax(X, Y, P, scale=1.0), math.log(1 + 1 / E)),
        (oracle.cosface(X, Y, P, scale=2.0, margin=0.25), math.log(1 + math.exp(-1.5))),
        # theta = 0 to the own proxy, so cos(theta + pi/3) = 1/2
        (oracle.arcface(X, Y, P, scale=2.0, margin=math.pi / 3), math.log(1 + math.exp(-1))),
        # theta = pi/2: cos(pi/2 + pi/6) = -1/2 for the own class, 1 for the other
        (oracle.arcface(X, 1 - Y, P, scale=2.0, margin=math.pi / 6), math.log(1 + math.exp(3))),
    ],
)
def test_softmax_family_by_hand(value: float, by_hand: float) -> None:
    assert value == pytest.approx(by_hand, rel=1e-12)


def test_arcface_past_pi_takes_the_straight_line() -> None:
    opposite = np.array([[-1.0, 0.0]])  # theta = pi to its own proxy
    own = -1 - 0.5 * math.sin(0.5)
    expected = math.log(1 + math.exp(-own))  # the other class is orthogonal
    assert oracle.arcface(opposite, np.array([0]), P, scale=1.0, margin=0.5) == pytest.approx(expected, rel=1e-12)


def test_proxy_anchor_by_hand() -> None:
    # positives s = 1, negatives s = 0: exponents -2(1 - .5) = -1 and 2(0 + .5) = 1
    attract, repel = math.log(1 + 1 / E), math.log(1 + E)
    assert oracle.proxy_anchor(X, Y, P, 2.0, 0.5) == pytest.approx(attract + repel, rel=1e-12)


def test_proxy_anchor_norms_differ_by_absent_classes() -> None:
    # one query of class 0; class 1 has only a negative, class 2 (opposite to x) only one with s = -1
    x, y, p = X[:1], Y[:1], np.array([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    attract, repel = math.log(1 + 1 / E), math.log(1 + E) + math.log(1 + 1 / E)
    assert oracle.proxy_anchor(x, y, p, 2.0, 0.5) == pytest.approx(attract + repel / 3, rel=1e-12)
    assert oracle.proxy_anchor(x, y, p, 2.0, 0.5, "all") == pytest.approx((attract + repel) / 3, rel=1e-12)


def test_proxy_anchor_against_rows_with_labels() -> None:
    # rows e1, e1, e2 labelled 0, 0, 4; one query e1 of class 0: two anchors have a positive, one has a negative
    refs = (np.array([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]]), np.array([0, 0, 4]))
    expected = math.log(1 + 1 / E) + math.log(1 + E) / 3
    assert oracle.proxy_anchor(X[:1], Y[:1], None, 2.0, 0.5, refs=refs) == pytest.approx(expected, rel=1e-12)
    x, y, p = drawn(K=1)
    assert oracle.proxy_anchor(x, y, refs=(p, np.arange(len(p)))) == pytest.approx(oracle.proxy_anchor(x, y, p))


def test_class_similarity_by_hand() -> None:
    # class 0 has e1 and e2, class 1 has e2 and -e1: e1 sees (1, 0) and (0, -1)
    p = np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [-1.0, 0.0]])
    soft = oracle.class_similarity(X[:1], p, 2, "soft", gamma=0.5)
    w = math.exp(2) / (math.exp(2) + 1)
    assert soft == pytest.approx(np.array([[w, -(1 - w)]]), rel=1e-12)
    assert oracle.class_similarity(X[:1], p, 2, "max").tolist() == [[1.0, 0.0]]
    assert oracle.class_similarity(X[:1], p, 2, "mean").tolist() == [[0.5, -0.5]]


def test_spread_is_half_the_mean_distance() -> None:
    # class 0: orthogonal pair at sqrt(2); class 1: opposite pair at 2; each pair once over C K (K - 1) = 4
    p = np.array([[1.0, 0.0], [0.0, 3.0], [0.0, 1.0], [0.0, -2.0]])
    expected = (math.sqrt(2 + 1e-5) + math.sqrt(4 + 1e-5)) / 4
    assert oracle.spread(p, 2) == pytest.approx(expected, rel=1e-12)
    assert oracle.spread(p, 1) == 0.0
    assert oracle.spread(np.ones((3, 2)), 3) == pytest.approx(math.sqrt(1e-5) / 2, rel=1e-6)


def test_soft_triple_by_hand() -> None:
    plain = math.log(1 + math.exp(-(2 * (1 - 0.25))))
    assert oracle.soft_triple(X, Y, P, 1, 2.0, 0.1, 0.2, 0.25) == pytest.approx(plain, rel=1e-12)
    assert oracle.soft_triple(X, Y, P, 1, 2.0, 0.1, 0.2, 0.25, "sum") == pytest.approx(2 * plain, rel=1e-12)
    twice = np.repeat(P, 2, axis=0)  # both proxies of a class coincide: the same similarities, a known regulariser
    known = 0.2 * math.sqrt(1e-5) / 2
    assert oracle.soft_triple(X, Y, twice, 2, 2.0, 0.1, 0.2, 0.25, "sum") == pytest.approx(2 * plain + known, rel=1e-6)


def test_mpa_family_by_hand() -> None:
    attract, repel = math.log(1 + 1 / E), math.log(1 + E)
    assert oracle.mpa(X, Y, P, 1, 2.0, 0.5, 0.1, 0.2) == pytest.approx(attract + repel, rel=1e-12)
    assert oracle.mpa_dw(X, Y, P, 1, 2.0, 0.5, 0.1, 0.2) == pytest.approx(attract + repel, rel=1e-12)
    assert oracle.mpa_ap(X, Y, P, 1, 2.0, 0.5, 0.1, 0.2) == pytest.approx(math.log(1 + 1 / E + E), rel=1e-12)
    # a third class, opposite to e1 and orthogonal to e2, tells class-wise from data-wise
    p = np.array([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    third = math.log(1 + 1 / E + E)  # over the batch: s = -1 and 0
    assert oracle.mpa(X, Y, p, 1, 2.0, 0.5, 0.1, 0.2) == pytest.approx(attract + (2 * repel + third) / 3, rel=1e-12)
    first, second = math.log(1 + E + 1 / E), math.log(1 + 2 * E)  # over the classes: (0, -1) and (0, 0)
    assert oracle.mpa_dw(X, Y, p, 1, 2.0, 0.5, 0.1, 0.2) == pytest.approx(attract + (first + second) / 2, rel=1e-12)
    first, second = math.log(1 + 1 / E + E + 1 / E), math.log(1 + 1 / E + 2 * E)
    assert oracle.mpa_ap(X, Y, p, 1, 2.0, 0.5, 0.1, 0.2) == pytest.approx((first + second) / 2, rel=1e-12)


@pytest.mark.parametrize("loss", [oracle.mpa, oracle.mpa_dw, oracle.mpa_ap])
def test_mpa_family_adds_tau_times_spread(loss: Callable[..., float]) -> None:
    x, y, p = drawn()
    added = loss(x, y, p, 3, 8.0, 0.1, 0.1, 0.7) - loss(x, y, p, 3, 8.0, 0.1, 0.1, 0.0)
    assert added == pytest.approx(0.7 * oracle.spread(p, 3), rel=1e-9)


@pytest.mark.parametrize("kind", ["soft", "max", "mean"])
def test_mpa_with_one_proxy_is_proxy_anchor(kind: str) -> None:
    x, y, p = drawn(K=1)
    expected = oracle.proxy_anchor(x, y, p, 32.0, 0.1)
    assert oracle.mpa(x, y, p, 1, 32.0, 0.1, 0.1, 0.2, kind) == pytest.approx(expected, rel=1e-12)


def test_mpa_leaves_out_the_class_without_a_negative() -> None:
    # a batch of one class is the one case where MPA with K = 1 is not Proxy-Anchor: C - 1 instead of C
    x, y, p = X[:1], Y[:1], np.array([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    attract, repel = math.log(1 + 1 / E), math.log(1 + E) + math.log(1 + 1 / E)
    assert oracle.mpa(x, y, p, 1, 2.0, 0.5, 0.1, 0.2) == pytest.approx(attract + repel / 2, rel=1e-12)


# e1; e1 turned by 60 degrees, of its class; by -60, of another. Cosines 1/2, 1/2, -1/2; distances 1, 1, sqrt 3
FAN = np.array([[2.0, 0.0], [0.5, math.sqrt(3) / 2], [0.5, -math.sqrt(3) / 2]])
FAN_Y = np.array([4, 4, 9])


def test_contrastive_by_hand() -> None:
    # ordered pairs: two positives at 1/2, negatives at 1/2 (twice) and -1/2 (twice)
    assert oracle.contrastive(FAN, FAN_Y, threshold=0.4) == pytest.approx((2 * 0.5 + 2 * 0.5) / 3, rel=1e-12)
    assert oracle.contrastive(FAN, FAN_Y, threshold=0.6) == pytest.approx(2 * 0.5 / 3, rel=1e-12)
    # against the same rows there is no self to leave out: it adds 1 - 1 = 0 to positives, and B divides, not R
    assert oracle.contrastive(FAN[:1], FAN_Y[:1], 0.4, (FAN, FAN_Y)) == pytest.approx(0.5 + 0.5, rel=1e-12)


def test_margin_contrastive_by_hand() -> None:
    # positive terms 1 - .2, twice; negative terms 1.5 - 1 twice, and 1.5 - sqrt 3 < 0 twice
    assert oracle.margin_contrastive(FAN, FAN_Y, 0.2, 1.5) == pytest.approx(0.8 + 0.5, rel=1e-12)
    assert oracle.margin_contrastive(FAN, FAN_Y, 0.2, 1.5, "all") == pytest.approx((1.6 + 1.0) / 6, rel=1e-12)
    assert oracle.margin_contrastive(FAN, FAN_Y, 1.2, 0.9) == 0.0
    assert oracle.margin_contrastive(FAN, FAN_Y, 1.2, 1.5) == pytest.approx(0.5, rel=1e-12)
    # e1 against all three rows: positives at 0 and 1, negative at 1
    value = oracle.margin_contrastive(FAN[:1], FAN_Y[:1], 0.2, 1.5, refs=(FAN, FAN_Y))
    assert value == pytest.approx(0.8 + 0.5, rel=1e-12)
    value = oracle.margin_contrastive(FAN[:1], FAN_Y[:1], 0.2, 1.5, "all", refs=(FAN, FAN_Y))
    assert value == pytest.approx((0 + 0.8 + 0.5) / 3, rel=1e-12)


def test_triplet_by_hand() -> None:
    # anchors e1 (1 - 1 + m) and its positive (1 - sqrt 3 + m); the third has no positive
    assert oracle.triplet(FAN, FAN_Y, 0.3) == pytest.approx(0.3, rel=1e-12)
    assert oracle.triplet(FAN, FAN_Y, 0.8) == pytest.approx((0.8 + 1.8 - math.sqrt(3)) / 2, rel=1e-12)
    assert oracle.triplet(X, np.array([0, 0]), 0.3) == 0.0
    # e1 against all three rows: positives at 0 and 1, negative at 1, so -1 + m (left out) and m
    assert oracle.triplet(FAN[:1], FAN_Y[:1], 0.3, refs=(FAN, FAN_Y)) == pytest.approx(0.3, rel=1e-12)


def test_multi_similarity_by_hand() -> None:
    # anchor e1: positive 1/2 and negative 1/2, both kept; its positive: 1/2 against -1/2, neither kept; third: alone
    expected = (LN2 / 2 + LN2 / 40) / 3
    assert oracle.multi_similarity(FAN, FAN_Y, 2.0, 40.0, 0.5) == pytest.approx(expected, rel=1e-12)
    # a wide epsilon keeps the second anchor's pairs too: 1/2 and -1/2
    second = LN2 / 2 + math.log(1 + math.exp(-40)) / 40
    wide = oracle.multi_similarity(FAN, FAN_Y, 2.0, 40.0, 0.5, epsilon=1.1)
    assert wide == pytest.approx(expected + second / 3, rel=1e-12)
    # e1 against all three rows: positives 1 and 1/2, negative 1/2; the positive at 1 is too easy to be kept
    value = oracle.multi_similarity(FAN[:1], FAN_Y[:1], 2.0, 40.0, 0.5, refs=(FAN, FAN_Y))
    assert value == pytest.approx(LN2 / 2 + LN2 / 40, rel=1e-12)


def test_gradient_of_a_known_function() -> None:
    a, b = np.array([[1.0, 2.0]]), np.array([3.0])
    slopes = oracle.gradient(lambda u, v: float((u**2).sum() * v[0]), [a, b])
    assert slopes[0] == pytest.approx(np.array([[6.0, 12.0]]), rel=1e-8)
    assert slopes[1] == pytest.approx(np.array([5.0]), rel=1e-8)
    assert a.tolist() == [[1.0, 2.0]]


def anchored(S: np.ndarray, y: np.ndarray, scale: float, margin: float, norm: str = "present") -> float:
    return oracle.proxy_anchor_of(S, y[:, None] == np.arange(S.shape[1]), scale, margin, norm)


@pytest.mark.parametrize("one_class", [False, True])
@pytest.mark.parametrize(
    ("loss", "closed", "extra"),
    [
        (anchored, oracle.proxy_anchor_similarity_gradient, ("present",)),
        (anchored, oracle.proxy_anchor_similarity_gradient, ("all",)),
        (oracle.mpa_of, oracle.mpa_similarity_gradient, ()),
        (oracle.mpa_dw_of, oracle.mpa_dw_similarity_gradient, ()),
        (oracle.mpa_ap_of, oracle.mpa_ap_similarity_gradient, ()),
        (oracle.soft_triple_of, oracle.soft_triple_similarity_gradient, ("mean",)),
        (oracle.soft_triple_of, oracle.soft_triple_similarity_gradient, ("sum",)),
    ],
)
def test_closed_slopes_in_the_similarities(
    loss: Callable[..., float], closed: Callable[..., np.ndarray], extra: tuple[str, ...], one_class: bool
) -> None:
    S = np.random.default_rng(1).uniform(-0.6, 0.6, (8, 5))
    y = np.zeros(8, dtype=np.int64) if one_class else np.arange(8) % 4  # class 4 absent
    (slope,) = oracle.gradient(lambda s: loss(s, y, 6.0, 0.1, *extra), [S])
    gradient = closed(S, y, 6.0, 0.1, *extra)
    assert np.abs(gradient).max() > 0.05
    assert gradient == pytest.approx(slope, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, y, p: oracle.proxy_nca(x, y, p, 4.0),
        oracle.proxy_nca_pp,
        lambda x, y, p: oracle.norm_softmax(x, y, p, 8.0),
        lambda x, y, p: oracle.cosface(x, y, p, 8.0, 0.2),
        lambda x, y, p: oracle.arcface(x, y, p, 8.0, 0.2),
        oracle.proxy_anchor,
        lambda x, y, p: oracle.soft_triple(x, y, p, 3, 20.0, 0.1, 0.2, 0.01),
        lambda x, y, p: oracle.mpa(x, y, p, 3, 32.0, 0.1, 0.1, 0.2),
        lambda x, y, p: oracle.mpa_dw(x, y, p, 3, 32.0, 0.1, 0.1, 0.2),
        lambda x, y, p: oracle.mpa_ap(x, y, p, 3, 32.0, 0.1, 0.1, 0.2),
        lambda x, y, p: oracle.contrastive(x, y),
        lambda x, y, p: oracle.margin_contrastive(x, y, 0.2, 0.9),
        lambda x, y, p: oracle.triplet(x, y, 0.1),
        lambda x, y, p: oracle.multi_similarity(x, y),
    ],
)
def test_only_directions_matter_and_order_does_not(loss: Callable[..., float]) -> None:
    x, y, p = drawn()
    expected = loss(x, y, p)
    assert expected != 0.0
    lengths = np.random.default_rng(2).uniform(0.1, 9.0, (len(x), 1))
    turn = np.random.default_rng(3).permutation(len(x))
    assert loss(x * lengths, y, p * 5.0) == pytest.approx(expected, rel=1e-10)
    assert loss(x[turn], y[turn], p) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("scale", [1.0, 9.0])
def test_relations_between_the_losses(scale: float) -> None:
    x, y, p = drawn(K=1)
    softmax = oracle.norm_softmax(x, y, p, 2 * scale)
    assert oracle.proxy_nca_pp(x, y, p, 1 / scale) == pytest.approx(softmax, rel=1e-10)
    assert oracle.cosface(x, y, p, 2 * scale, 0.0) == pytest.approx(softmax, rel=1e-12)
    assert oracle.arcface(x, y, p, 2 * scale, 0.0) == pytest.approx(softmax, rel=1e-10)
    margined = oracle.cosface(x, y, p, scale, 0.3)
    assert oracle.soft_triple(x, y, p, 1, scale, 0.1, 0.2, 0.3) == pytest.approx(margined, rel=1e-10)
