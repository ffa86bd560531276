"""Every loss against the NumPy oracle written from its equation: value and gradient; and against a peer library."""

import math

import numpy as np
import pytest
import torch

import proxymetric as pm
from oracles import losses as oracle
from proxymetric.core.normalisation import unit
from proxymetric.core.pair_weights import PairWeights, StepFunction
from proxymetric.core.pieces import Compare, References
from proxymetric.losses import (
    MPA,
    MPAAP,
    MPADW,
    AdaFace,
    ArcFace,
    Circle,
    Contrastive,
    CosFace,
    MarginContrastive,
    MultiSimilarity,
    ProxyAnchor,
    Spread,
    SupCon,
    Triplet,
)
from proxymetric.losses.pairs import _distances, distances
from proxymetric.ops import Similarity
from proxymetric.papers import options
from proxymetric.sources import LearnedProxies

B, C, K, D = 9, 5, 3, 6


def problem(seed: int, per_class: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    y = rng.integers(0, C - 1, B)  # the last class is absent
    p = rng.normal(size=(C * per_class, D))
    return p[y * per_class] * 0.5 + rng.normal(size=(B, D)), y, p


# name, options, proxies per class, and the same loss of the oracle
PROXY = [
    ("proxy-nca", {"scale": 3.0}, 1, lambda x, y, p: oracle.proxy_nca(x, y, p, scale=3.0)),
    # The oracle's temperature divides squared distances, ours divides cosines.
    ("proxy-nca++", {"temperature": 0.1}, 1, lambda x, y, p: oracle.proxy_nca_pp(x, y, p, temperature=0.2)),
    ("proxy-nca++", {}, 1, lambda x, y, p: oracle.proxy_nca_pp(x, y, p, temperature=1 / 9)),
    ("norm-softmax", {"scale": 8.0}, 1, lambda x, y, p: oracle.norm_softmax(x, y, p, 8.0)),
    ("cosface", {"scale": 8.0, "margin": 0.3}, 1, lambda x, y, p: oracle.cosface(x, y, p, 8.0, 0.3)),
    ("arcface", {"scale": 8.0, "margin": 0.5}, 1, lambda x, y, p: oracle.arcface(x, y, p, 8.0, 0.5)),
    ("arcface", {"scale": 2.0, "margin": 2.5}, 1, lambda x, y, p: oracle.arcface(x, y, p, 2.0, 2.5)),
    (
        "subcentre-arcface",
        {"scale": 8.0, "margin": 0.5, "per_class": K},
        K,
        lambda x, y, p: oracle.subcentre_arcface(x, y, p, K, 8.0, 0.5),
    ),
    (
        "subcentre-arcface",
        {"scale": 2.0, "margin": 2.5, "per_class": 2},
        2,
        lambda x, y, p: oracle.subcentre_arcface(x, y, p, 2, 2.0, 2.5),
    ),
    ("proxy-anchor", {}, 1, lambda x, y, p: oracle.proxy_anchor(x, y, p)),
    (
        "proxy-anchor",
        {"scale": 7.0, "margin": 0.2, "positive_norm": "all"},
        1,
        lambda x, y, p: oracle.proxy_anchor(x, y, p, 7.0, 0.2, "all"),
    ),
    (
        "soft-triple",
        {"per_class": K, "tau": 0.3},
        K,
        lambda x, y, p: oracle.soft_triple(x, y, p, K, 20.0, 0.1, 0.3, 0.01),
    ),
    (
        "soft-triple",
        {"per_class": K, "reduction": "sum"},
        K,
        lambda x, y, p: oracle.soft_triple(x, y, p, K, 20.0, 0.1, 0.2, 0.01, reduction="sum"),
    ),
]
WEIGHTS, MARGINS = (0.5, 3.0, 1.0, 0.25, 2.0), (0.125, 0.5, 0.0, 0.25, 0.375)  # exact in float32


def one_hot(y):
    return y[:, None] == np.arange(C)


PROXY += [
    (
        "norm-softmax",
        {"scale": 8.0, "weights": WEIGHTS},
        1,
        lambda x, y, p: oracle.balanced_cosface(x, y, p, 8.0, [0.0] * C, WEIGHTS),
    ),
    (
        "cosface",
        {"scale": 8.0, "weights": WEIGHTS, "margins": MARGINS},
        1,
        lambda x, y, p: oracle.balanced_cosface(x, y, p, 8.0, MARGINS, WEIGHTS),
    ),
    (
        "arcface",
        {"scale": 8.0, "weights": WEIGHTS, "margins": MARGINS},
        1,
        lambda x, y, p: oracle.balanced_arcface(x, y, p, 8.0, MARGINS, WEIGHTS),
    ),
    (
        "arcface",
        {"scale": 2.0, "margins": [5 * m for m in MARGINS]},
        1,
        lambda x, y, p: oracle.balanced_arcface(x, y, p, 2.0, [5 * m for m in MARGINS], [1.0] * C),
    ),
    (
        "proxy-anchor",
        {"scale": 7.0, "weights": WEIGHTS, "margins": MARGINS},
        1,
        lambda x, y, p: oracle.balanced_proxy_anchor(oracle.cosines(x, p), one_hot(y), 7.0, MARGINS, WEIGHTS),
    ),
    (
        "proxy-anchor",
        {"scale": 7.0, "margin": 0.2, "weights": WEIGHTS, "positive_norm": "all"},
        1,
        lambda x, y, p: oracle.balanced_proxy_anchor(oracle.cosines(x, p), one_hot(y), 7.0, [0.2] * C, WEIGHTS, "all"),
    ),
]
for kind in ("soft", "max", "mean"):
    for family, reference in (("mpa", oracle.mpa), ("mpa-dw", oracle.mpa_dw), ("mpa-ap", oracle.mpa_ap)):
        PROXY.append(
            (
                family,
                {"per_class": K, "similarity": kind, "scale": 9.0},
                K,
                lambda x, y, p, kind=kind, reference=reference: reference(x, y, p, K, 9.0, 0.1, 0.1, 0.2, kind=kind),
            )
        )

PAIR = [
    ("contrastive", Contrastive(0.1), lambda x, y, **r: oracle.contrastive(x, y, 0.1, **r)),
    (
        "margin-contrastive",
        MarginContrastive(1.2, 0.4),
        lambda x, y, **r: oracle.margin_contrastive(x, y, 0.4, 1.2, **r),
    ),
    (
        "margin-contrastive, all pairs",
        MarginContrastive(1.2, 0.4, "all"),
        lambda x, y, **r: oracle.margin_contrastive(x, y, 0.4, 1.2, averaging="all", **r),
    ),
    ("triplet", Triplet(0.3), lambda x, y, **r: oracle.triplet(x, y, 0.3, **r)),
    (
        "multi-similarity",
        MultiSimilarity(2.0, 10.0, 0.4, 0.1),
        lambda x, y, **r: oracle.multi_similarity(x, y, 2.0, 10.0, 0.4, 0.1, **r),
    ),
    ("supcon", SupCon(0.2), lambda x, y, **r: oracle.supcon(x, y, 0.2, **r)),
]


def tensors(*arrays):
    return [torch.from_numpy(a).requires_grad_(a.dtype == np.float64) for a in arrays]


def agrees(loss, arrays, leaves, reference):
    """Compare value and gradient; the gradient of the oracle is by finite differences."""
    np.testing.assert_allclose(loss.item(), reference(*arrays), rtol=1e-10)
    loss.backward()
    for leaf, expected in zip(leaves, oracle.gradient(reference, list(arrays)), strict=True):
        np.testing.assert_allclose(leaf.grad.numpy(), expected, rtol=2e-5, atol=2e-7)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("name", "arguments", "per_class", "reference"), PROXY)
def test_proxy_loss_is_its_equation(name, arguments, per_class, reference, seed):
    x, y, p = problem(seed, per_class)
    criterion = pm.method(name, classes=C, dim=D, **arguments).double()
    vectors = criterion.objective.source.vectors
    vectors.data.copy_(torch.from_numpy(p))
    (tx,) = tensors(x)
    loss = criterion(tx, torch.from_numpy(y))
    agrees(loss, (x, p), (tx, vectors), lambda x, p: reference(x, y, p))


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("name", "loss", "reference"), PAIR)
def test_pair_loss_is_its_equation_in_the_batch(name, loss, reference, seed):
    x, y, _ = problem(seed)
    (tx,) = tensors(x)
    value = Compare(loss, pm.sources.InBatch())
    agrees(pm.Criterion(value)(tx, torch.from_numpy(y)), (x,), (tx,), lambda x: reference(x, y))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_triplets_are_counted_in_sorted_distances_as_they_are_one_by_one(seed, monkeypatch):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(12, D, generator=generator, dtype=torch.float64)
    x[1] = x[0]  # a distance of 0
    y = torch.randint(C, (12,), generator=generator)
    y[2] = C  # a query without a positive
    found = []
    for most in (0, 12**3):
        monkeypatch.setattr("proxymetric.losses.triplet.MAX_TRIPLETS", most)
        leaf = x.clone().requires_grad_()
        loss = pm.Criterion(Compare(Triplet(0.3), pm.sources.InBatch()))(leaf, y)
        found.append((loss, torch.autograd.grad(loss, leaf)[0]))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert found[0][0] > 0


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("name", "loss", "reference"), PAIR)
def test_pair_loss_is_its_equation_against_proxies(name, loss, reference, seed):
    x, y, p = problem(seed, 2)
    labels = np.arange(C).repeat(2)
    source = LearnedProxies(C, D, 2).double()
    source.vectors.data.copy_(torch.from_numpy(p))
    (tx,) = tensors(x)
    value = pm.Criterion(Compare(loss, source))(tx, torch.from_numpy(y))
    agrees(value, (x, p), (tx, source.vectors), lambda x, p: reference(x, y, refs=(p, labels)))


@pytest.mark.parametrize("impl", ["dense", "plain", "chunked"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_adaface_is_its_equation_with_the_scores_of_lengths_frozen(seed, impl):
    x, y, p = problem(seed)
    criterion = pm.method("adaface", classes=C, dim=D, scale=6.0, margin=0.4).double().eval()
    criterion.objective.weighting.mean.fill_(2.5)
    criterion.objective.weighting.deviation.fill_(0.2)
    vectors = criterion.objective.source.vectors
    vectors.data.copy_(torch.from_numpy(p))
    z = oracle.length_scores(x, 2.5, 0.2, 0.333)
    assert min(z) < -0.5
    assert max(z) > 0.4
    (tx,) = tensors(x)
    with pm.ops.using(impl):
        loss = criterion(tx, torch.from_numpy(y))
    agrees(loss, (x, p), (tx, vectors), lambda x, p: oracle.adaface(x, y, p, 6.0, 0.4, z))


def test_adaface_is_arcface_for_short_embeddings_and_cosface_for_average_ones():
    x, y, p = (torch.from_numpy(each) for each in problem(0))
    refs = References(unit(p), torch.arange(C), 1)
    rule = StepFunction(torch.zeros(C, 0), torch.ones(C, 1))
    queries = unit(x)

    def adaface(score):
        return AdaFace(8.0, 0.3)(queries, y, refs, PairWeights(rule, rule, torch.full((B,), score).double()))

    torch.testing.assert_close(adaface(0.0), CosFace(8.0, 0.3)(queries, y, refs))
    torch.testing.assert_close(adaface(0.0), AdaFace(8.0, 0.3)(queries, y, refs))
    torch.testing.assert_close(adaface(-1.0), ArcFace(8.0, 0.3)(queries, y, refs))
    with pytest.raises(ValueError, match="weighting: got a weighting for AdaFace"):
        AdaFace()(queries, y, refs, PairWeights(rule, rule))


def circle_held_at(x, y, refs=None):
    """The oracle of Circle with its factors frozen at x: the function whose gradient the loss has."""
    factors = oracle.circle_factors(x, y, 0.3, refs)
    return lambda x, refs=None: oracle.circle(x, y, 5.0, 0.3, refs=refs, factors=factors)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_circle_has_the_value_of_eq_6_and_its_gradient_with_the_factors_frozen(seed):
    x, y, p = problem(seed, 2)
    labels = np.arange(C).repeat(2)
    (tx,) = tensors(x)
    in_batch = pm.Criterion(Compare(Circle(5.0, 0.3), pm.sources.InBatch()))(tx, torch.from_numpy(y))
    assert in_batch.item() == pytest.approx(oracle.circle(x, y, 5.0, 0.3), rel=1e-10)
    agrees(in_batch, (x,), (tx,), circle_held_at(x, y))
    (slope,) = oracle.gradient(lambda x: oracle.circle(x, y, 5.0, 0.3), [x])
    assert not np.allclose(tx.grad.numpy(), slope, rtol=0.05), "the gradient of the value is different"

    tx, tp = tensors(x, p)
    refs = References(unit(tp), torch.from_numpy(labels))
    against_rows = Circle(5.0, 0.3)(unit(tx), torch.from_numpy(y), refs)
    held = circle_held_at(x, y, (p, labels))
    agrees(against_rows, (x, p), (tx, tp), lambda x, p: held(x, (p, labels)))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_circle_has_the_gradient_of_eq_10_in_the_similarities(seed):
    x, y, p = problem(seed)
    s = torch.from_numpy(oracle.cosines(x, p)).requires_grad_()
    # Against the unit vectors, queries are their own similarities.
    loss = Circle(7.0, 0.25)(s, torch.from_numpy(y), References(torch.eye(C, dtype=torch.float64), torch.arange(C)))
    loss.backward()
    expected = oracle.circle_similarity_gradient(s.detach().numpy(), y, 7.0, 0.25)
    np.testing.assert_allclose(s.grad.numpy(), expected, rtol=1e-8, atol=1e-12)


def test_supcon_without_positives_is_zero():
    x = torch.randn(4, D, requires_grad=True)
    loss = pm.method("supcon", classes=4, dim=D)(x, torch.arange(4))
    loss.backward()
    assert loss.item() == 0
    assert (x.grad == 0).all()


def test_supcon_against_one_proxy_of_each_class_is_the_normalised_softmax():
    x, y, p = problem(0)
    refs = References(unit(torch.from_numpy(p)), torch.arange(C))
    value = SupCon(1 / 8)(unit(torch.from_numpy(x)), torch.from_numpy(y), refs)
    assert value.item() == pytest.approx(oracle.norm_softmax(x, y, p, 8.0), rel=1e-12)


def test_circle_without_positives_or_without_negatives_is_zero():
    for labels in (torch.arange(4), torch.zeros(4, dtype=torch.int64)):
        x = torch.randn(4, D, requires_grad=True)
        loss = pm.method("circle", classes=4, dim=D)(x, labels)
        loss.backward()
        assert loss.item() == 0
        assert (x.grad == 0).all()


@pytest.mark.parametrize("seed", [0, 1])
def test_proxy_anchor_against_any_labelled_rows(seed):
    x, y, p = problem(seed, 2)
    rows = np.array([0, 3, 3, 1, 1, 1, 2, 4, 0, 2])
    tx, tp = tensors(x, p)
    loss = ProxyAnchor()(unit(tx), torch.from_numpy(y), References(unit(tp), torch.from_numpy(rows)))
    agrees(loss, (x, p), (tx, tp), lambda x, p: oracle.proxy_anchor(x, y, refs=(p, rows)))


@pytest.mark.parametrize("per_class", [1, 2, 4])
def test_spread_is_equation_3(per_class):
    _, _, p = problem(0, per_class)
    (tp,) = tensors(p)
    refs = References(unit(tp), torch.arange(C).repeat_interleave(per_class), per_class)
    np.testing.assert_allclose(Spread(1.0)(refs).item(), oracle.spread(p, per_class), rtol=1e-12)


def test_spread_of_coinciding_proxies_has_a_finite_gradient():
    p = torch.ones(4, 3, requires_grad=True)
    Spread(1.0)(References(unit(p), torch.tensor([0, 0, 1, 1]), 2)).backward()
    assert p.grad.isfinite().all()


@pytest.mark.parametrize("seed", range(5))
def test_mpa_with_one_proxy_is_proxy_anchor(seed):
    x, y, p = problem(seed)
    refs = References(unit(torch.from_numpy(p)), torch.arange(C), 1)
    queries, labels = unit(torch.from_numpy(x)), torch.from_numpy(y)
    assert torch.equal(MPA()(queries, labels, refs), ProxyAnchor()(queries, labels, refs))


@pytest.mark.parametrize(
    ("loss", "reference"), [(MPA, oracle.mpa_of), (MPADW, oracle.mpa_dw_of), (MPAAP, oracle.mpa_ap_of)]
)
def test_the_mpa_family_has_scale_32_margin_0_1_and_soft_similarity_unless_told(loss, reference):
    x, y, p = problem(0, K)
    refs = References(unit(torch.from_numpy(p)), torch.arange(C).repeat_interleave(K), per_class=K)
    value = loss()(unit(torch.from_numpy(x)), torch.from_numpy(y), refs)
    similarity = oracle.class_similarity(x, p, K, "soft", gamma=0.1)
    np.testing.assert_allclose(value.item(), reference(similarity, y, scale=32.0, margin=0.1), rtol=1e-10)


def test_weights_of_one_change_nothing_and_others_multiply_the_exponent():
    x, y, p = problem(0)
    queries, labels = unit(torch.from_numpy(x)), torch.from_numpy(y)
    refs = References(unit(torch.from_numpy(p)), torch.arange(C), 1)
    one = StepFunction(torch.zeros(C, 1), torch.ones(C, 2))
    loss = ProxyAnchor(scale=4.0)
    torch.testing.assert_close(loss(queries, labels, refs, PairWeights(one, one)), loss(queries, labels, refs))

    edge = 0.2
    rule = StepFunction(torch.full((C, 1), edge), torch.tensor([[0.5, 1.5]]).expand(C, 2))
    s = (queries @ refs.vectors.T).numpy()
    w = np.where(s >= edge, 1.5, 0.5)
    own = y[:, None] == np.arange(C)
    pull = [np.log1p(np.exp(4 * w * (0.1 - s))[own[:, c], c].sum()) for c in range(C) if own[:, c].any()]
    push = [np.log1p(np.exp(4 * w * (s + 0.1))[~own[:, c], c].sum()) for c in range(C)]
    up = sum(w[own[:, c], c].mean() for c in range(C) if own[:, c].any())
    down = sum(w[~own[:, c], c].mean() for c in range(C))
    got = loss(queries, labels, refs, PairWeights(rule, rule)).item()
    assert got == pytest.approx(sum(pull) / up + sum(push) / down, rel=1e-6)


def softplus_of_sums(*exponents: list[float]) -> float:
    return math.log1p(math.prod(sum(math.exp(z) for z in part) for part in exponents))


def weighted_supcon(up: list[tuple[float, float]], down: list[tuple[float, float]]) -> float:
    logits = [w * s / 0.2 for s, w in up]
    log_sum = math.log(sum(math.exp(z) for z in logits + [w * s / 0.2 for s, w in down]))
    return log_sum - sum(logits) / len(logits)


def weighted_circle(up: list[tuple[float, float]], down: list[tuple[float, float]]) -> float:
    pull = [-7 * w * max(0.0, 1.25 - s) * (s - 0.75) for s, w in up]
    push = [7 * w * max(0.0, s + 0.25) * (s - 0.25) for s, w in down]
    return softplus_of_sums(pull, push)


def weighted_multi_similarity(up: list[tuple[float, float]], down: list[tuple[float, float]]) -> float:
    pull, push = [-2 * w * (s - 0.4) for s, w in up], [10 * w * (s - 0.4) for s, w in down]
    return softplus_of_sums(pull) / 2 + softplus_of_sums(push) / 10


@pytest.mark.parametrize(
    ("loss", "of_query"),
    [
        (SupCon(0.2), weighted_supcon),
        (Circle(7.0, 0.25), weighted_circle),
        (MultiSimilarity(2.0, 10.0, 0.4, epsilon=None), weighted_multi_similarity),
    ],
    ids=["supcon", "circle", "multi-similarity"],
)
def test_the_weights_of_pairs_multiply_the_exponents_of_pair_losses(loss, of_query):
    """Weights that depend on the class of the reference, on the similarity, and on the kind of the pair."""
    x, _, _ = problem(0)
    y = np.arange(B) % (C - 1)
    edges, levels = torch.linspace(-0.3, 0.3, C)[:, None], torch.rand(2, C, 2, generator=torch.manual_seed(0))
    weights = PairWeights(StepFunction(edges, levels[0]), StepFunction(edges, levels[1]))
    queries, labels = unit(torch.from_numpy(x)), torch.from_numpy(y)
    value = loss(queries, labels, References(queries, labels, are_queries=True), weights)
    s = (queries @ queries.T).numpy()

    def pair(i: int, j: int) -> tuple[float, float]:
        level = levels[int(y[i] != y[j]), y[j]]
        return s[i, j], float(level[1] if s[i, j] >= edges[y[j]] else level[0])

    expected = [
        of_query(
            [pair(i, j) for j in range(B) if y[j] == y[i] and j != i], [pair(i, j) for j in range(B) if y[j] != y[i]]
        )
        for i in range(B)
    ]
    assert value.item() == pytest.approx(np.mean(expected), rel=1e-6)
    one = StepFunction(edges, torch.ones(C, 2))
    plain = loss(queries, labels, References(queries, labels, are_queries=True))
    weighted = loss(queries, labels, References(queries, labels, are_queries=True), PairWeights(one, one))
    torch.testing.assert_close(plain, weighted)


def test_huge_scale_does_not_overflow():
    x, y, _ = problem(0, K)
    for name in (name for name in pm.methods() if "scale" in options(name)):
        own = {"source": "encoder"} if "class_prompts" in options(name) else {}  # its proxies are made of the batch
        criterion = pm.method(name, classes=C, dim=D, scale=1e4, **own).bind(torch.nn.Identity())
        tx = torch.from_numpy(x).float().requires_grad_()
        loss = criterion(tx, torch.from_numpy(y), images=tx)
        loss.backward()
        assert loss.isfinite(), name
        assert tx.grad.isfinite().all(), name


def test_a_loss_that_needs_classes_refuses_an_unstructured_source():
    criterion = pm.Criterion(Compare(MPA(), pm.sources.InBatch()))
    with pytest.raises(ValueError, match="expected K rows for each class"):
        criterion(torch.randn(4, D), torch.tensor([0, 0, 1, 1]))


def test_a_pair_loss_refuses_a_weighting_by_name():
    rule = StepFunction(torch.zeros(C, 1), torch.ones(C, 2))
    refs = References(torch.eye(C), torch.arange(C))
    with pytest.raises(ValueError, match="got a weighting for Triplet, which has no exponent"):
        Triplet()(torch.eye(C), torch.arange(C), refs, PairWeights(rule, rule))


@pytest.mark.parametrize(
    ("name", "arguments", "named"),
    [
        ("proxy-nca++", {"temperature": 0}, "temperature: got 0, expected a number above 0"),
        ("multi-similarity", {"alpha": 0.0}, "alpha: got 0.0"),
        ("proxy-anchor", {"scale": "x"}, "scale: got 'x'"),
        ("proxy-anchor", {"scale": -1.0}, "scale: got -1.0"),
        ("mpa", {"tau": -1.0}, "tau: got -1.0, expected a number of at least 0"),
        ("soft-triple", {"margin": float("nan")}, "margin: got nan"),
        ("arcface", {"margin": 4.0}, "margin: got 4.0, expected radians"),
        ("triplet", {"margin": 0}, "margin: got 0"),
    ],
)
def test_numbers_that_cannot_be_meant_are_refused(name, arguments, named):
    with pytest.raises(ValueError, match=named):
        pm.method(name, classes=C, dim=D, **arguments)


def test_the_number_of_classes_may_come_from_numpy():
    assert pm.method("proxy-anchor", classes=np.int64(4), dim=D)(torch.randn(2, D), torch.tensor([0, 3])).isfinite()


def test_labels_of_any_whole_type_mean_the_same():
    criterion = pm.method("mpa", classes=40, dim=D, per_class=10, touched="batch")
    x, y = torch.randn(4, D), torch.tensor([30, 31, 39, 30])
    assert torch.equal(criterion(x, y), criterion(x, y.to(torch.uint8)))


@pytest.mark.parametrize("kind", ["soft", "mean"])
def test_similarity_is_checked(kind):
    assert MPA(of_class=Similarity(kind)).of_class.kind == kind
    with pytest.raises(ValueError, match="similarity: got 'sofft'"):
        MPA(of_class=Similarity("sofft"))


class TestPeer:
    """pytorch-metric-learning agrees where it has the same loss."""

    @pytest.fixture
    def peer(self):
        return pytest.importorskip("pytorch_metric_learning.losses")

    def compare(self, theirs, name, **arguments):
        torch.manual_seed(0)
        x, y = torch.randn(B, D), torch.randint(0, C, (B,))
        ours = pm.method(name, classes=C, dim=D, **arguments)
        vectors = getattr(theirs, "proxies", None)
        vectors = vectors if vectors is not None else (theirs.W if hasattr(theirs, "W") else theirs.fc).T
        ours.objective.source.vectors.data.copy_(vectors.data)
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        mine, other = ours(a, y), theirs(b, y)
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
        mine.backward()
        other.backward()
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)

    def test_proxy_anchor(self, peer):
        self.compare(peer.ProxyAnchorLoss(C, D, margin=0.1, alpha=32), "proxy-anchor")

    def test_arcface(self, peer):
        theirs = peer.ArcFaceLoss(C, D, margin=math.degrees(0.5), scale=64)
        self.compare(theirs, "arcface", scale=64.0, margin=0.5)

    def test_subcentre_arcface(self, peer):
        theirs = peer.SubCenterArcFaceLoss(
            num_classes=C, embedding_size=D, margin=math.degrees(0.5), scale=64, sub_centers=K
        )
        self.compare(theirs, "subcentre-arcface", per_class=K)

    def test_cosface(self, peer):
        self.compare(peer.CosFaceLoss(C, D, margin=0.35, scale=64), "cosface", scale=64.0, margin=0.35)

    def test_soft_triple_without_its_regulariser(self, peer):
        theirs = peer.SoftTripleLoss(C, D, centers_per_class=K, la=20, gamma=0.1, margin=0.01)
        self.compare(theirs, "soft-triple", per_class=K, tau=0.0, scale=20.0, gamma=0.1, margin=0.01)

    def test_circle(self, peer):
        """The peer takes the mean over the queries that have a positive and a negative: here all have both."""
        torch.manual_seed(0)
        x, y = torch.randn(8, D), torch.arange(8) % 2
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        ours, theirs = pm.method("circle", classes=2, dim=D)(a, y), peer.CircleLoss(m=0.4, gamma=80)(b, y)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        ours.backward()
        theirs.backward()
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)

    def test_supcon(self, peer):
        torch.manual_seed(0)
        x, y = torch.randn(9, D), torch.tensor([0, 0, 1, 1, 1, 2, 2, 2, 3])  # the last one has no positive
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        ours, theirs = pm.method("supcon", classes=4, dim=D)(a, y), peer.SupConLoss(temperature=0.1)(b, y)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        ours.backward()
        theirs.backward()
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)

    def test_proxy_nca_is_our_plus_plus(self, peer):
        self.compare(peer.ProxyNCALoss(C, D, softmax_scale=3), "proxy-nca++", temperature=1 / 6)


@pytest.mark.parametrize("name", ["soft-triple", "mpa", "mpa-dw", "mpa-ap"])
def test_proxies_of_16_bits_that_lie_close_have_finite_losses_and_gradients(name):
    """Products of nearly equal proxies round to more than 1 in bfloat16: the root's argument would be negative."""
    beyond = 0
    for seed in range(20):
        torch.manual_seed(seed)
        criterion = pm.method(name, classes=4, dim=64, per_class=5).bfloat16()
        vectors = criterion.objective.source.vectors
        centres = torch.randn(4, 1, 64) + 1e-3 * torch.randn(4, 5, 64)
        vectors.data.copy_(centres.flatten(0, 1))
        w = unit(vectors.detach()).unflatten(0, (4, 5))
        beyond += int((2 - 2 * (w @ w.mT) + 1e-5 < 0).sum())
        x = torch.randn(8, 64, requires_grad=True)
        loss = criterion(x, torch.arange(8) % 4)
        loss.backward()
        assert loss.dtype == torch.float32
        assert loss.isfinite()
        assert x.grad.isfinite().all()
        assert vectors.grad.isfinite().all()
    assert beyond, "the case has products above 1"


@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16])
def test_the_spread_of_16_bits_is_that_of_the_same_numbers_in_float32(dtype):
    torch.manual_seed(0)
    p, labels = torch.randn(6, 32).to(dtype), torch.tensor([0, 0, 0, 1, 1, 1])
    short, full = (Spread(1.0)(References(v, labels, 3, normalise="l2")) for v in (p, p.float()))
    assert short.dtype == torch.float32
    assert torch.equal(short, full)


def test_products_above_one_count_as_no_distance():
    refs = References(torch.full((2, 1), 1.001), torch.tensor([0, 0]), 2)
    assert Spread(1.0)(refs).item() == pytest.approx(math.sqrt(1e-5) / 2, rel=1e-6)


class TestDistances:
    """The distances of the pair losses, whose gradient has a closed form."""

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        x = unit(torch.randn(6, 4, generator=generator, dtype=torch.float64))
        rows = unit(torch.randn(5, 4, generator=generator, dtype=torch.float64))
        rows[2] = x[1]  # a distance of 0
        return x, rows

    def test_value_and_gradients_are_those_of_autograd(self):
        found = []
        for compute in (distances, lambda x, refs: _distances(x, refs.vectors)):
            x, rows = (each.requires_grad_() for each in self.inputs())
            d = compute(x, References(rows, torch.arange(5)))
            d.square().sin().sum().backward()
            found.append((d.detach(), x.grad, rows.grad))
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)
        assert found[0][0][1, 2] == 0

    def test_the_batch_with_itself_and_second_derivatives(self):
        x, _ = self.inputs()
        away = ~torch.eye(6, dtype=torch.bool)

        def within(x: torch.Tensor) -> torch.Tensor:
            return distances(x, References(x, torch.arange(6), are_queries=True))[away]

        assert torch.autograd.gradcheck(within, x.clone().requires_grad_())
        assert torch.autograd.gradgradcheck(within, x.clone().requires_grad_())

    def test_one_side_alone(self):
        for which in range(2):
            grads = []
            for compute in (distances, lambda x, refs: _distances(x, refs.vectors)):
                given = list(self.inputs())
                given[which].requires_grad_()
                compute(given[0], References(given[1], torch.arange(5))).sum().backward()
                grads.append(given[which].grad)
            torch.testing.assert_close(*grads)
