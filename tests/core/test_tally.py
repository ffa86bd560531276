"""What a method counts between two evaluations: each figure against a direct computation, and when it restarts."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import proxymetric as pm
from oracles import vptsp as oracle
from proxymetric.core.normalisation import ball, unit
from proxymetric.core.pieces import Energy
from proxymetric.core.tally import Counts, ProxyUse
from proxymetric.criterion import Criterion
from proxymetric.papers.contract import Toy, same, snapshot
from proxymetric.sources import VariationalProxies
from proxymetric.weightings import InformativeSamples
from vptsp_steps import D, array, batch, build, features, give, head, weights

CLASSES, DIM = 6, 8


def batches(count: int, size: int = 10) -> Iterator[tuple[Tensor, Tensor]]:
    """Samples around two points for each class; the last class never occurs."""
    generator = torch.Generator().manual_seed(1)
    centres = torch.randn(CLASSES, 2, DIM, generator=generator)
    for _ in range(count):
        y = torch.randint(0, CLASSES - 1, (size,), generator=generator)
        side = torch.randint(0, 2, (size,), generator=generator)
        yield (centres[y, side] + 0.8 * torch.randn(size, DIM, generator=generator)).requires_grad_(), y


def stepped(criterion: Criterion, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer | None = None) -> None:
    criterion(x, y).backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    criterion.commit(lr=0.1)


# When counts restart


def test_numbers_stay_until_the_step_after_an_evaluation() -> None:
    counts = Counts("samples", "hits")
    assert counts.share("hits", "samples") is None
    counts.add(samples=3, hits=1)
    counts.add(samples=5, hits=torch.tensor(1))
    for _ in range(2):
        counts.close()
        assert (counts.total("samples"), counts.share("hits", "samples")) == (8, 0.25)
    counts.add(samples=2)
    assert (counts.total("samples"), counts.total("hits")) == (2, 0)
    counts.add(samples=2, hits=4)
    assert counts.share("hits", "samples") == 1


COUNTING: dict[str, tuple[str, dict[str, Any]]] = {
    "proxies in use": ("mpa", {"per_class": 3}),
    "informative share": ("proxy-isa", {"memory_epoch": 0, "filter_epoch": 0, "memory": 30}),
    "semantic accuracy": ("vptsp-m", {"source": "encoder"}),
    "gate z": ("vptsp-g", {"source": "encoder"}),
}


def counting(figure: str, seed: int = 0) -> Criterion:
    name, arguments = COUNTING[figure]
    torch.manual_seed(seed)
    criterion = pm.method(name, classes=CLASSES, dim=DIM, steps_per_epoch=4, **arguments)
    criterion.needs = criterion.needs - {"images", "encoder"}  # proxies from embeddings need neither
    return criterion


@pytest.mark.parametrize("figure", COUNTING)
def test_counts_change_in_commit_alone_and_begin_anew_after_an_evaluation(figure: str) -> None:
    criterion = counting(figure)
    criterion.boundary(0.0)
    assert figure not in criterion.figures(), "nothing was counted yet"
    (first, second), (x, y) = list(batches(2)), next(batches(1))
    stepped(criterion, *first)
    counted = snapshot(criterion)
    once = criterion.figures()[figure]
    criterion(x, y).backward()
    assert criterion.figures()[figure] == once
    criterion.discard()
    criterion.commit(lr=0.1)
    with torch.no_grad():
        criterion(x, y)
    criterion.eval()(x, y)
    criterion.train()
    assert criterion.figures()[figure] == once
    assert same(counted, snapshot(criterion)), "reading leaves no trace"
    criterion.boundary(0.1)
    assert criterion.figures()[figure] == once, "the evaluation reads what came before it"
    # The same state without the first batch in its counts.
    alone = counting(figure)
    kept = {key: value for key, value in counted.items() if ".tally." not in key and ".use." not in key}
    alone.load_state_dict(kept, strict=False)
    for one in (criterion, alone):
        torch.manual_seed(3)
        stepped(one, *second)
    assert criterion.figures() == alone.figures()
    assert all(math.isfinite(value) for value in criterion.figures().values())


@pytest.mark.parametrize("figure", COUNTING)
def test_a_loaded_criterion_goes_on_counting(figure: str) -> None:
    straight = counting(figure)
    steps = list(batches(6))
    for number, (x, y) in enumerate(steps[:3]):
        torch.manual_seed(number)
        stepped(straight, x, y)
        if number == 1:
            straight.boundary(0.0)
    again = counting(figure, seed=5)
    again.load_state_dict(load(save({key: value.contiguous() for key, value in straight.state_dict().items()})))
    assert again.figures() == straight.figures()
    for number, (x, y) in enumerate(steps[3:]):
        for criterion in (straight, again):
            torch.manual_seed(number)
            stepped(criterion, x, y)
    assert again.figures() == straight.figures()


@pytest.mark.parametrize("figure", COUNTING)
def test_evaluations_and_figures_change_no_step(figure: str) -> None:
    """Losses, parameters and random numbers are those of a run that is never evaluated."""
    ends = []
    for evaluated in (False, True):
        criterion = counting(figure)
        optimizer = torch.optim.SGD(criterion.param_groups(lr=0.1, network_lr=0.1), lr=0.1)
        torch.manual_seed(0)
        losses = []
        for x, y in batches(5):
            stepped(criterion, x, y, optimizer)
            losses.append(sum(criterion.terms.values()))
            if evaluated:
                criterion.boundary(0.0)
                criterion.figures()
        ends.append((torch.stack(losses), torch.rand(4), *(p.detach() for p in criterion.parameters())))
    assert all(map(torch.equal, *ends))


class Waits(TorchDispatchMode):
    """Records the operations that synchronise with a GPU: those that copy a number, or a size, to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        places = args[1] if name in ("index", "index_put", "index_put_") else ()
        masked = any(place is not None and place.dtype == torch.bool for place in places)
        if masked or name in ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "bincount"):
            self.found.append(name)
        return func(*args, **kwargs or {})


def test_counting_does_not_synchronise_with_the_gpu() -> None:
    x, y = next(batches(1))
    use, counts = ProxyUse(CLASSES, 3), Counts("samples", "hits")
    source = pm.method("vptsp-g", classes=CLASSES, dim=DIM, source="encoder").objective.source
    rows, of = torch.randn(CLASSES * 3, DIM), torch.arange(CLASSES).repeat_interleave(3)
    energy = Energy(pm.losses.ProxyAnchor(), unit(x.detach()), y)
    with Waits() as waits:
        for _ in range(2):
            use.mark(use.nearest(energy.queries, y, rows, of, unit))
            counts.add(samples=len(y), hits=(y == 0).sum())
            source.tally.add(**source._batch_counts(energy, [torch.rand(4, DIM), torch.rand(2, DIM)]))
            use.close()
            counts.close()
        assert waits.found == []
        use.figures()
        counts.total("hits")
        y[y > 1].nonzero()
    assert {"_local_scalar_dense", "index", "nonzero"} <= set(waits.found), "it records what it should"
    assert source.tally.total("steps") == 12


# Proxies in use


def in_use(criterion: Criterion, steps: list[tuple[Tensor, Tensor]], normal: Any = unit) -> float:
    """Take steps and count by hand: the proxies of each class that are nearest for at least one sample."""
    used: dict[int, set[int]] = {}
    (compare,) = (module for module in criterion.modules() if isinstance(module, pm.core.pieces.Compare))
    optimizer = torch.optim.SGD(groups, lr=0.5) if (groups := criterion.param_groups(lr=0.5)) else None
    for x, y in steps:
        source = compare.source
        vectors = source.table.values if hasattr(source, "table") else source.vectors
        proxies = normal(vectors.detach()).view(CLASSES, -1, DIM).numpy().copy()
        for sample, label in zip(normal(x.detach()).numpy(), y.tolist(), strict=True):
            used.setdefault(label, set()).add(int((proxies[label] @ sample).argmax()))
        stepped(criterion, x, y, optimizer)
    return sum(map(len, used.values())) / len(used)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("mpa", {}),
        ("mpa-dw", {}),
        ("mpa-ap", {"similarity": "max"}),
        ("soft-triple", {}),
        ("mpa", {"touched": "batch"}),
        ("mpa-ap", {"touched": 0.5}),
        ("proxy-isa", {"base": {"method": "mpa", "per_class": 4}}),
    ],
)
def test_proxies_in_use_are_counted_by_class(name: str, arguments: dict[str, Any]) -> None:
    torch.manual_seed(0)
    told = arguments if "base" in arguments else {"per_class": 4, **arguments}
    criterion = pm.method(name, classes=CLASSES, dim=DIM, steps_per_epoch=9, **told)
    steps = list(batches(5, size=6))
    first = in_use(criterion, steps[:4])
    assert criterion.figures()["proxies in use"] == pytest.approx(first)
    criterion.boundary(0.0)
    last = in_use(criterion, steps[4:])
    assert criterion.figures()["proxies in use"] == pytest.approx(last)
    assert 1 < last < first < 4


def test_proxies_in_use_are_nearest_as_they_are_compared() -> None:
    """With CCP, vectors inside the ball keep their length, so that a short proxy is far from a long sample."""
    torch.manual_seed(0)
    criterion = pm.method("ccp", classes=CLASSES, dim=DIM, base="mpa", per_class=4, pool=4, lam=0.0).bind(Toy())
    pool = torch.randn(CLASSES * 4, DIM), torch.arange(CLASSES).repeat(4)
    criterion.boundary(0.0, pool)
    (source,) = criterion.objective._source
    source.vectors.data = 2 * unit(source.vectors.data) * torch.rand(CLASSES * 4, 1)
    other = copy.deepcopy(criterion)
    expected, by_angle = in_use(criterion, list(batches(4)), ball), in_use(other, list(batches(4)), unit)
    assert criterion.figures()["proxies in use"] == pytest.approx(expected)
    assert abs(by_angle - expected) > 0.1


@pytest.mark.parametrize(("name", "arguments"), [("mpa", {"per_class": 1}), ("proxy-anchor", {"per_class": 3})])
def test_where_every_proxy_is_an_anchor_none_is_counted(name: str, arguments: dict[str, Any]) -> None:
    criterion = pm.method(name, classes=CLASSES, dim=DIM, **arguments)
    stepped(criterion, *next(batches(1)))
    assert criterion.figures() == {}
    assert not [module for module in criterion.modules() if isinstance(module, ProxyUse)]


# Proxy-ISA


@pytest.mark.parametrize("base", ["proxy-anchor", {"method": "mpa", "per_class": 3}])
def test_filtered_and_informative_samples_are_counted(base: object) -> None:
    torch.manual_seed(0)
    numbers = {"volume": 7.0, "h": 0.9, "k": 0.1, "lam": 0.0, "memory": 60, "memory_epoch": 0, "filter_epoch": 1}
    criterion = pm.method("proxy-isa", classes=CLASSES, dim=DIM, steps_per_epoch=3, base=base, **numbers)
    weighting = criterion.objective.weighting
    assert isinstance(weighting, InformativeSamples)
    optimizer = torch.optim.SGD(criterion.param_groups(lr=0.2), lr=0.2)
    judged, filtered, informative, kinds = 0, 0, 0, set()
    for number, (x, y) in enumerate(batches(9, size=24)):
        if number == 6:
            criterion.boundary(0.0)
            judged = filtered = informative = 0
        own = unit(criterion.objective.source.vectors.detach()).view(CLASSES, -1, DIM)[y]
        s = weighting.of_class(torch.einsum("bd,bkd->bk", unit(x.detach()), own))
        high, low = weighting.hardness[y].clone(), (weighting.hardness - weighting.band())[y]
        stepped(criterion, x, y, optimizer)
        if number < 3:
            assert "filtered share" not in criterion.figures(), "the filter has not started"
            continue
        kinds |= set((s >= low).int().add((s > high).int()).tolist())
        judged += len(y)
        filtered += int((s < low).sum())
        informative += int(((s >= low) & (s <= high)).sum())
        figures = criterion.figures()
        assert figures["filtered share"] == pytest.approx(filtered / judged)
        assert figures["informative share"] == pytest.approx(informative / judged)
    assert kinds == {0, 1, 2}, "below the band, in it and above it"
    assert 0 < informative < judged
    E = weighting.effective.numpy().astype(float)
    nu = 1 / (1 + np.log(1 + E))
    sigma = 1 + (1 + math.exp(-1.5)) * (nu - 1) / (1 + np.exp(7.0 - E - 1.5))
    assert figures["mean weight sigma"] == pytest.approx(sigma.mean(), rel=1e-5)
    assert figures["effective number"] == pytest.approx(E.mean(), rel=1e-5)


# VCPA


def test_uncertainty_is_a_figure_that_touches_no_random_state() -> None:
    torch.manual_seed(0)
    criterion = pm.method("vcpa", classes=CLASSES, dim=DIM, newton_steps=2, tau=1.0)
    for x, y in batches(3):
        stepped(criterion, x, y)
    before = torch.get_rng_state()
    figures = criterion.figures()
    assert figures == criterion.figures()
    assert torch.equal(before, torch.get_rng_state())
    assert figures["mean uncertainty"] == pytest.approx(float(criterion.uncertainty(100).mean()))
    assert figures["mean uncertainty"] == pytest.approx(float(criterion.uncertainty().mean()), rel=0.05)


def test_of_many_proxies_an_even_choice_is_measured() -> None:
    source = VariationalProxies(classes=450, dim=4)
    source.sigma.copy_(torch.rand(450, 1).expand(-1, 4))
    source.mu.copy_(torch.randn(450, 4))
    some = VariationalProxies(classes=150, dim=4)
    some.sigma.copy_(source.sigma[::3])
    some.mu.copy_(source.mu[::3])
    assert source.figures()["mean uncertainty"] == some.figures()["mean uncertainty"]
    assert some.figures()["mean uncertainty"] == pytest.approx(float(some.uncertainty(100).mean()))


# VPTSP


@pytest.mark.parametrize("normalise_free", [False, True])
@pytest.mark.parametrize("name", ["gru", "ema", "ema-mean", "lstm"])
def test_the_figures_of_semantic_proxies(name: str, normalise_free: bool) -> None:
    a = 0.3
    criterion, source, toy = build(name, a=a, normalise_free=normalise_free)
    samples = right_p = right_o = 0
    gates: list[float] = []
    for number in range(4):
        if number == 2:
            criterion.boundary(0.0)
            samples = right_p = right_o = 0
            gates = []
        x, y, images = batch(number)
        keys = torch.rand(len(y), generator=torch.Generator().manual_seed(number))
        give(source, keys)
        own = {key: array(value) for key, value in head(source).items()}
        seen = oracle.head(array(features(source, toy, images, y)), own)
        P, O = array(source.stored), array(source.free)  # noqa: E741 - the paper's letters
        for sample, label in zip(array(x), y.tolist(), strict=True):
            samples += 1
            right_p += int(np.argmax([sample @ p for p in P[:, :D]])) == label
            right_o += int(np.argmax([sample @ o / np.linalg.norm(o) for o in O])) == label
        if name == "gru":
            w, states = weights(source.cell, name), P.copy()
            for i in keys.argsort().tolist():
                p, c = oracle.normal(seen[i]), int(y[i])
                gates.append(oracle.sigmoid(w["Wz"] @ p + w["Uz"] @ states[c] + w["bz"]).mean())
                states[c] = oracle.normal(oracle.gru(states[c], p, w))
        criterion(x, y, images=images).backward()
        criterion.commit(lr=0.1, network_lr=0.1)
        source.free.data *= 1.5
    figures = criterion.figures()
    P, O = array(source.stored)[:, :D], array(source.free)  # noqa: E741
    lengths = np.linalg.norm(O, axis=1)
    cosines = [P[i] @ P[j] for i in range(len(P)) for j in range(len(P)) if i != j]
    mixed = np.ones_like(lengths) if normalise_free else lengths
    assert figures["semantic cosine"] == pytest.approx(np.mean(cosines), abs=1e-6)
    assert figures["free length"] == pytest.approx(lengths.mean())
    assert figures["semantic share"] == pytest.approx(np.mean((1 - a) / (1 - a + a * mixed)))
    assert figures["semantic accuracy"] == right_p / samples
    assert figures["free accuracy"] == right_o / samples
    assert 0 < right_p + right_o < 2 * samples
    assert ("gate z" in figures) == (name == "gru")
    if name == "gru":
        assert figures["gate z"] == pytest.approx(np.mean(gates), abs=1e-6)


def test_free_proxies_without_a_share_have_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    criterion, _, _ = build("ema", a=0.0)
    x, y, images = batch(0)
    criterion(x, y, images=images)
    criterion.commit(lr=0.1, network_lr=0.1)
    assert set(criterion.figures()) == {"semantic cosine", "semantic accuracy"}
    monkeypatch.setattr("proxymetric.sources.semantic_proxies.MAX_COUNTED_PAIRS", len(y) * 5 - 1)
    criterion.boundary(0.0)
    criterion(x, y, images=images)
    criterion.commit(lr=0.1, network_lr=0.1)
    assert set(criterion.figures()) == {"semantic cosine"}, "a batch of too many pairs is not counted"
