"""Weights and margins of classes: by frequency, in every implementation, and what is refused."""

import numpy as np
import pytest
import torch

import proxymetric as pm
from proxymetric import losses, sources
from proxymetric.core.pair_weights import PairWeights, StepFunction
from proxymetric.core.pieces import Compare, References
from proxymetric.criterion import Criterion
from proxymetric.ops import using
from proxymetric.weightings import ClassBalance, EmbeddingLengths, InformativeSamples

COUNTS = [100, 25, 4, 1]


def test_by_frequency_a_rare_class_counts_more_and_has_a_larger_margin() -> None:
    balance = ClassBalance(4, "frequency", "frequency", COUNTS, margin=0.5)
    assert balance.weights.mean().item() == pytest.approx(1)
    assert (balance.weights * torch.tensor(COUNTS)).unique().numel() == 1, "all classes count the same in a mean"
    assert balance.margins.tolist() == pytest.approx([0.5 * n**-0.25 for n in COUNTS])


@pytest.mark.parametrize("name", ["norm-softmax", "cosface", "arcface", "proxy-anchor"])
def test_equal_numbers_for_all_classes_change_nothing(name: str) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(9, 5, dtype=torch.float64), torch.arange(9) % 3
    losses = []
    margins = {} if name == "norm-softmax" else {"margin": 0.2, "margins": [0.2] * 4}
    for arguments in (
        {key: value for key, value in margins.items() if key == "margin"},
        margins | {"weights": [3] * 4},
    ):
        torch.manual_seed(1)
        losses.append(pm.method(name, classes=4, dim=5, scale=8.0, **arguments).double()(x, y))
    torch.testing.assert_close(*losses, rtol=1e-6, atol=1e-6)  # numbers of classes are float32


@pytest.mark.parametrize("name", ["cosface", "arcface"])
def test_all_implementations_of_the_softmax_family_agree(name: str) -> None:
    torch.manual_seed(0)
    criterion = pm.method(name, classes=4, dim=5, weights="frequency", margins="frequency", counts=COUNTS).double()
    found = []
    for impl in ("plain", "dense", "chunked"):
        x = torch.randn(9, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
        with using(impl, rows=2):
            loss = criterion(x, torch.arange(9) % 3)
        loss.backward()
        criterion.discard()
        found.append((loss.detach(), x.grad))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
def test_numbers_may_be_an_array_or_a_tensor(kind) -> None:
    criterion = pm.method("cosface", classes=4, dim=5, weights=kind([1.0, 2.0, 3.0, 4.0]), margins="frequency",
                          counts=kind(COUNTS))  # fmt: skip
    assert criterion.objective.weighting.weights.tolist() == [1, 2, 3, 4]
    assert criterion.objective.weighting.margins[-1].item() == pytest.approx(criterion.objective.loss.margin)


def test_a_loss_that_makes_no_use_of_a_weighting_refuses_it() -> None:
    source = pm.sources.LearnedProxies(4, 5)
    for weighting, asks in (
        (ClassBalance(4, [1] * 4), "has_class_balance"),
        (EmbeddingLengths(4), "has_length_scores"),
    ):
        with pytest.raises(ValueError, match=f"weighting: got .* for MPA, which makes no use of it.*{asks}"):
            Compare(pm.losses.MPA(), source, weighting)


@pytest.mark.parametrize("weighting", [ClassBalance(3, [1] * 3), InformativeSamples(3, 5, memory=8)])
def test_a_weighting_of_another_number_of_classes_is_refused(weighting) -> None:
    with pytest.raises(ValueError, match="with classes=3, expected classes=4, as LearnedProxies has"):
        Compare(pm.losses.ProxyAnchor(), pm.sources.LearnedProxies(4, 5), weighting)
    Compare(pm.losses.ProxyAnchor(), pm.sources.LearnedProxies(3, 5), weighting)


@pytest.mark.parametrize("name", ["arcface", "cosface", "proxy-anchor"])
def test_margins_of_classes_have_the_range_of_the_margin(name: str) -> None:
    for nested in (None, [2, 4]):
        with pytest.raises(ValueError, match="margins: got 9 for a class; margin: got 9"):
            pm.method(name, classes=3, dim=4, margins=[0.1, 9.0, 0.1], nested=nested)


def test_nested_takes_what_its_loss_takes() -> None:
    weighting = ClassBalance(3, weights=[1.0, 2.0, 3.0])
    objective = Compare(losses.Nested(losses.CosFace(), (2, 4)), sources.LearnedProxies(3, 4), weighting)
    assert Criterion(objective)(torch.randn(2, 4), torch.tensor([0, 2])).isfinite()
    with pytest.raises(ValueError, match="which makes no use of it"):
        Compare(losses.Nested(losses.Circle(), (2, 4)), sources.LearnedProxies(3, 4), weighting)


def test_weights_of_pairs_beside_numbers_of_classes_are_used_or_refused() -> None:
    torch.manual_seed(0)
    refs = References(torch.randn(3, 4), torch.arange(3), per_class=1, normalise="l2")
    queries, labels = torch.nn.functional.normalize(torch.randn(5, 4)), torch.tensor([0, 1, 2, 0, 1])
    one = torch.ones(3, 1)
    pairs = PairWeights(StepFunction(one[:, :0], 3 * one), StepFunction(one[:, :0], 2 * one))
    both = pairs._replace(class_weights=torch.ones(3))
    loss = losses.CosFace(scale=4.0, margin=0.0)
    assert loss(queries, labels, refs, both) == loss(queries, labels, refs, pairs) != loss(queries, labels, refs)
    with pytest.raises(ValueError, match="expected only one of them"):
        losses.ProxyAnchor()(queries, labels, refs, both)
