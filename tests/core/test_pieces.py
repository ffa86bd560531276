"""Proxy-ISA, VCPA, CCP and MoCo assembled by hand: missing inputs are named, and several passes are one step."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import proxymetric as pm
from proxymetric.core.pieces import Boundary, Compare, Sum
from proxymetric.criterion import Criterion
from proxymetric.losses import ProxyAnchor
from proxymetric.schemes import AlternatingProjections, MomentumQueue
from proxymetric.sources import InBatch, LearnedProxies, VariationalProxies
from proxymetric.weightings import InformativeSamples

C, D = 5, 6
LABELS = torch.arange(8) % C


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, D, generator=torch.Generator().manual_seed(0)).requires_grad_(), LABELS


def anchors() -> Compare:
    return Compare(ProxyAnchor(), LearnedProxies(C, D))


def test_a_weighting_without_epochs_says_how_to_count_them() -> None:
    criterion = Criterion(Compare(ProxyAnchor(), LearnedProxies(C, D), InformativeSamples(C, D)))
    with pytest.raises(ValueError, match="steps_per_epoch"):
        criterion(*batch())


def decidability(queries, labels, refs, weight=None):
    """The distance of the mean cosines of equal and of different classes, in standard deviations (d')."""
    s, own = queries @ refs.vectors.T, labels[:, None] == refs.labels
    return (s[own].mean() - s[~own].mean()) / ((s[own].var() + s[~own].var()) / 2).sqrt()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("normalise", ["l2", "ball"])
@pytest.mark.parametrize("source", [lambda: LearnedProxies(C, D), InBatch], ids=["proxies", "batch"])
def test_the_vectors_of_references_are_ready_to_compare(source, normalise: str, dtype: torch.dtype) -> None:
    """An own loss in plain NumPy: normalised as the queries are, and in their type."""
    torch.manual_seed(0)
    criterion = Criterion(Compare(decidability, source(), normalise=normalise))
    x = torch.randn(8, D, dtype=torch.float32).double() * torch.tensor([[0.1], [3.0]]).repeat(4, 1)
    x = x.to(torch.float32 if dtype == torch.bfloat16 else dtype)
    in_batch = isinstance(criterion.objective.source, InBatch)
    if not in_batch:
        vectors = criterion.objective.source.vectors
        vectors.data = (5 * vectors.data).to(torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
    rows = x if in_batch else vectors.detach()

    def ready(v: np.ndarray) -> np.ndarray:
        lengths = np.linalg.norm(v, axis=1, keepdims=True)
        return v / (lengths if normalise == "l2" else np.maximum(lengths, 1))

    s = ready(x.double().numpy()) @ ready(rows.double().numpy()).T
    own = LABELS.numpy()[:, None] == (LABELS if in_batch else torch.arange(C)).numpy()
    expected = (s[own].mean() - s[~own].mean()) / np.sqrt((s[own].var(ddof=1) + s[~own].var(ddof=1)) / 2)
    loss = criterion(x.requires_grad_(), LABELS)
    assert loss.dtype == x.dtype
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-5)
    loss.backward()
    assert x.grad.isfinite().all()


def test_schemes_that_were_not_bound_say_so() -> None:
    scheme = AlternatingProjections(anchors(), pool=2)
    scheme.boundary(Boundary(None, lambda count: (torch.randn(C * count, D), torch.arange(C * count) % C)))
    with pytest.raises(ValueError, match="bind"):
        Criterion(scheme)(*batch())
    with pytest.raises(ValueError, match="bind"):
        Criterion(MomentumQueue(anchors(), D))(*batch())
    with pytest.raises(ValueError, match="images"):
        Criterion(MomentumQueue(anchors(), D)).bind(nn.Linear(3, D))(*batch())


def test_a_boundary_waits_for_the_pending_step() -> None:
    criterion = pm.method("proxy-anchor", classes=C, dim=D)
    criterion(*batch())
    with pytest.raises(ValueError, match="pending"):
        criterion.boundary(0.5)
    criterion.discard()
    criterion.boundary(0.5)


@pytest.mark.parametrize("passes", [1, 3])
def test_the_momentum_encoder_follows_once_a_step(passes: int) -> None:
    net = nn.Linear(3, D)
    criterion = pm.method("moco", classes=C, dim=D, momentum=0.9).bind(net)
    before = net.weight.detach().clone()
    for _ in range(passes):
        criterion(*batch(), images=torch.rand(8, 3))
    with torch.no_grad():
        net.weight += 1
    criterion.commit()
    torch.testing.assert_close(criterion.objective.encoder.weight, before + 0.1)
    assert len(criterion.objective.queue) == 8 * passes


@pytest.mark.parametrize("passes", [1, 3])
def test_the_prior_lags_in_steps(passes: int) -> None:
    criterion = Criterion(Compare(ProxyAnchor(), VariationalProxies(C, D, newton_steps=2, prior_lag=3)))
    source = criterion.objective.source
    means = [source.mu.clone()]
    for _ in range(5):
        for _ in range(passes):
            criterion(*batch())
        criterion.commit()
        means.append(source.mu.clone())
    torch.testing.assert_close(source.prior().mu, means[-3])


def test_picks_forget_the_moments_of_first_order_steps() -> None:
    criterion = Criterion(Compare(ProxyAnchor(), VariationalProxies(C, D, newton_steps=0, gradient_steps=2)))
    criterion(*batch())
    criterion.commit()
    source = criterion.objective.source
    assert source.first.abs().sum() > 0
    source.reseed(torch.ones(C, D))
    assert not source.first.any()
    assert not source.second.any()
    assert int(source.steps) == 0


def test_uncertainty_of_one_draw_is_refused() -> None:
    with pytest.raises(ValueError, match="draws: got 1"):
        pm.method("vcpa", classes=C, dim=D).uncertainty(draws=1)


def test_a_loss_that_is_not_a_scalar_is_refused():
    """The sum of a (B,) loss would be B times too large, and no gradient check would notice."""

    def per_sample(queries, labels, refs, weight=None):
        return queries.sum(1)

    objective = pm.Criterion(Compare(per_sample, LearnedProxies(3, 4)))
    with pytest.raises(ValueError, match=r"loss: got a tensor of shape \(6,\) from function, expected a scalar"):
        objective(torch.randn(6, 4, requires_grad=True), torch.arange(6) % 3)


def test_proxies_of_an_isa_take_one_label_a_query():
    criterion = pm.method("proxy-isa", classes=3, dim=4)
    with pytest.raises(ValueError, match="labels: got shape"):
        criterion(torch.randn(6, 4), torch.tensor([[True, False, True]] * 6))
    balanced = pm.method("proxy-anchor", classes=3, dim=4, weights=[1.0, 2.0, 3.0])
    assert balanced(torch.randn(6, 4), torch.tensor([[True, False, True]] * 6)).isfinite()


def test_the_parts_of_a_sum_have_the_same_classes_and_width():
    def part(classes, dim):
        return 1.0, Compare(ProxyAnchor(), LearnedProxies(classes, dim))

    for other in (part(3, 4), part(5, 8)):
        with pytest.raises(ValueError, match="expected the same number in all parts"):
            Sum(a=part(5, 4), b=other)
    assert Sum(a=part(5, 4), b=part(5, 4)).classes == 5


@pytest.mark.parametrize(("name", "arguments"), [("vcpa", {"prior_lag": 3}), ("moco", {"memory": 8})])
def test_a_step_after_earlier_state_is_loaded_is_the_step_that_it_was(name, arguments):
    """Also if its number is that of the last step of the module."""
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(12, 4))
    criterion = pm.method(name, classes=3, dim=4, **arguments).bind(encoder)
    labels, images = torch.tensor([0, 1, 2, 0, 1, 2]), torch.rand(6, 3, 2, 2)

    def step():
        torch.manual_seed(1)
        criterion(encoder(images), labels, images=images).backward()
        criterion.commit()
        return {key: value.clone() for key, value in criterion.state_dict().items() if torch.is_tensor(value)}

    step()
    encoder[1].weight.data.add_(1.0)  # the momentum encoder has somewhere to go
    before = copy.deepcopy(criterion.state_dict())
    once = step()
    criterion.load_state_dict(before)
    again = step()
    assert all(torch.equal(once[key], again[key]) for key in once), [
        k for k in once if not torch.equal(once[k], again[k])
    ]
    assert any(not torch.equal(once[key], before[key]) for key in once), "the step changes something"


def test_the_momentum_encoder_has_the_precision_of_the_step():
    class Watched(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.types = nn.Linear(12, 4), []

        def forward(self, images):
            embeddings = self.linear(images.flatten(1))
            self.types.append(embeddings.dtype)
            return embeddings

    encoder, images = Watched(), torch.rand(6, 3, 2, 2)
    criterion = pm.method("moco", classes=3, dim=4).bind(encoder)
    with torch.autocast("cpu", torch.bfloat16):
        criterion(encoder(images), torch.tensor([0, 1, 2, 0, 1, 2]), images=images)
    (momentum_encoder,) = (module for module in criterion.modules() if isinstance(module, Watched))
    assert momentum_encoder.types[-1] == torch.bfloat16
