"""Combinations of methods that no paper describes: they run, learn and resume, or raise a clear error."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load, load_file, save, save_file
from torch import Tensor, nn

import proxymetric as pm
from catalogue import IN_BATCH, PLANNED, REDUCTIONS, WEIGHTED
from groups import together
from oracles import isa as oracle
from oracles import losses
from proxymetric.core.normalisation import ball, unit
from proxymetric.criterion import Criterion
from proxymetric.papers.contract import same, snapshot
from proxymetric.sources import VariationalProxies
from proxymetric.weightings import InformativeSamples
from training.test_parallel import STILL, Pair, close
from training_runs import command, run

CLASSES, DIM, PIXELS = 6, 8, 10
ISA = {"method": "proxy-isa", "memory": 50, "memory_epoch": 0.5, "filter_epoch": 1}
VCPA = {"method": "vcpa", "newton_steps": 3}
CCP = {"per_class": 2, "pool": 4, "patience": 1}


def isa(base: object) -> tuple[str, dict[str, Any]]:
    return "proxy-isa", {**{key: value for key, value in ISA.items() if key != "method"}, "base": base}


COMBINATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    f"proxy-isa on {name}": isa(name) for name in PLANNED if name in WEIGHTED
}
COMBINATIONS |= {
    f"ccp on {name}": ("ccp", CCP | {"base": name})
    for name in (*IN_BATCH, REDUCTIONS["batch", False], REDUCTIONS["batch", True])
}
COMBINATIONS |= {
    "proxy-isa on vcpa": isa(VCPA),
    "proxy-isa on rows of the batch": isa({"method": "proxy-anchor", "touched": "batch"}),
    "vcpa on proxy-isa": ("vcpa", {"newton_steps": 3, "base": ISA}),
    "vcpa on mpa-ap by gradient": ("vcpa", {"newton_steps": 0, "prior_lag": 2, "per_class": 2, "base": "mpa-ap"}),
    "vcpa on soft-triple by first-order steps": (
        "vcpa", {"newton_steps": 0, "gradient_steps": 2, "per_class": 2, "base": "soft-triple"}
    ),
    "ccp on proxy-isa": ("ccp", CCP | {"base": ISA}),
    "ccp on proxy-isa on mpa-ap": ("ccp", CCP | {"base": ISA | {"base": "mpa-ap"}}),
    "ccp on vcpa of three proxies on mpa": (
        "ccp", CCP | {"base": {"method": "vcpa", "newton_steps": 0, "per_class": 3, "base": "mpa"}}
    ),
    "ccp on triplet": ("ccp", CCP | {"base": {"method": "triplet", "margin": 0.5}}),
    "ccp on vcpa": ("ccp", CCP | {"base": VCPA}),
    "ccp on vcpa on proxy-isa": ("ccp", CCP | {"base": VCPA | {"base": ISA}}),
    "ccp with a memory": ("ccp", CCP | {"base": "contrastive", "memory": 40, "memory_start": 5, "in_batch": 0.1}),
    "ccp on proxy-anchor with a memory": ("ccp", CCP | {"base": "proxy-anchor", "memory": 40, "memory_start": 0}),
    "xbm on proxy-isa": ("xbm", {"base": ISA, "memory": 40, "start": 4}),
    "xbm on vcpa": ("xbm", {"base": VCPA, "memory": 40, "start": 4}),
    "moco": ("moco", {"memory": 40, "momentum": 0.9}),
    "moco on vcpa": ("moco", {"base": VCPA, "memory": 40, "momentum": 0.9}),
    "moco on contrastive": ("moco", {"base": "contrastive", "memory": 40, "momentum": 0.9}),
}  # fmt: skip


class Loop:
    """A user's training loop around a small network."""

    def __init__(self, name: str, arguments: dict[str, Any], seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.encoder = nn.Sequential(nn.Linear(PIXELS, 16), nn.Tanh(), nn.Linear(16, DIM))
        self.criterion = pm.method(name, classes=CLASSES, dim=DIM, steps_per_epoch=8, **arguments).bind(self.encoder)
        groups = [{"params": self.encoder.parameters()}, *self.criterion.param_groups(lr=2e-2)]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2)

    def batch(self, number: int, size: int = 24) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(number)
        labels = torch.randint(0, CLASSES, (size,), generator=generator)
        centres = torch.randn(CLASSES, PIXELS, generator=torch.Generator().manual_seed(99))
        return centres[labels] + 0.6 * torch.randn(size, PIXELS, generator=generator), labels

    def evaluate(self, number: int) -> None:
        """Evaluate with scores that go down and up, so that problems of CCP end."""
        with torch.no_grad():
            x, y = self.batch(number, 80)
            self.criterion.boundary([0.3, 0.2, 0.4][number // 6 % 3], (self.encoder(x), y))

    def go(self, steps: range) -> list[Tensor]:
        """Take these steps; return their losses, the main term of each first."""
        values = []
        for number in steps:
            if number % 6 == 0 and "pool" in self.criterion.needs:
                self.evaluate(number)
            x, y = self.batch(number)
            self.optimizer.zero_grad()
            loss = self.criterion(self.encoder(x), y, images=x if "images" in self.criterion.needs else None)
            loss.backward()
            self.optimizer.step()
            self.criterion.commit(self.optimizer)
            values.append(torch.stack([next(iter(self.criterion.terms.values())), loss.detach()]))
        return values


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_it_learns_and_resumes_to_the_bit(combination: str) -> None:
    name, arguments = COMBINATIONS[combination]
    straight = Loop(name, arguments)
    before = straight.go(range(20))
    states = [load(save(snapshot(module))) for module in (straight.encoder, straight.criterion)]
    moments, random = copy.deepcopy(straight.optimizer.state_dict()), torch.get_rng_state()
    after = straight.go(range(20, 40))
    late = before[14:18] if name == "ccp" else after[-4:]  # the last steps of its first problem
    first, last = (torch.stack(part)[:, 0].mean() for part in (before[:4], late))
    assert last < 0.9 * first, (first, last)

    again = Loop(name, arguments, seed=5)
    again.encoder.load_state_dict(states[0])
    again.criterion.load_state_dict(states[1])
    again.optimizer.load_state_dict(moments)
    torch.set_rng_state(random)
    for number, (one, other) in enumerate(zip(again.go(range(20, 40)), after, strict=True)):
        assert torch.equal(one, other), number
    assert same(snapshot(again.criterion), snapshot(straight.criterion))
    assert same(snapshot(again.encoder), snapshot(straight.encoder))
    figures = again.criterion.figures()
    assert figures == straight.criterion.figures()
    assert "ccp" not in combination or figures["problem"] > 2
    assert "isa" not in combination or figures["remembered"] == 50
    assert all(np.isfinite(value) for value in figures.values())


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("proxy-isa", {"base": "contrastive"}, "base: got 'contrastive', which has no proxies"),
        ("proxy-isa", {"base": "multi-similarity"}, "base: got 'multi-similarity', which has no proxies"),
        ("proxy-isa", {"base": "arcface"}, "weighting: got a weighting for ArcFace, whose exponent"),
        ("proxy-isa", {"base": "proxy-isa"}, "base: got 'proxy-isa', whose pairs are weighted already"),
        ("proxy-isa", {"base": "xbm"}, "base: got 'xbm', which is built around another method; expected"),
        ("proxy-isa", {"base": {"k": 1}}, "expected a method's name, or a table with the key method"),
        ("vcpa", {"base": "mpa"}, "newton_steps: got 10, but MPA offers no closed-form curvature"),
        ("vcpa", {"base": "triplet"}, "base: got 'triplet', which has no proxies"),
        ("vcpa", {"base": "vcpa"}, "base: got 'vcpa', whose proxies are Gaussian already"),
        (
            "vcpa",
            {"base": {"method": "mpa", "per_class": 3}, "newton_steps": 0},
            "base: got per_class=3 for mpa, whose proxies are",
        ),
        (
            "vcpa",
            {"base": ISA | {"base": {"method": "proxy-anchor", "touched": "batch"}}},
            "base: got touched='batch' for proxy-anchor, whose proxies are replaced by vcpa's",
        ),
        ("vcpa", {"base": "ccp"}, "base: got 'ccp', which is built around another method; expected"),
        (
            "ccp",
            {"base": {"method": "proxy-anchor", "touched": "batch"}},
            "cannot be re-picked; expected touched='all'",
        ),
        ("ccp", {"base": "mpa", "in_batch": 0.1}, "references: got single rows, expected K rows for each class"),
        (
            "ccp",
            {"base": ISA | {"base": "soft-triple"}, "memory": 9},
            "references: got single rows, expected K rows for each class",
        ),
        ("ccp", {"base": "xbm"}, "base: got 'xbm', which is built around another method; expected"),
        (
            "ccp",
            {"base": {"method": "proxy-anchor", "k": 1}},
            r"k: got an unknown argument \(1\), expected an argument of proxy-anchor: scale, margin",
        ),
        ("moco", {"base": "proxy-isa"}, "whose weighting would count the samples of the queue again at every step"),
        ("moco", {"base": "ccp"}, "base: got 'ccp', which is built around another method; expected"),
        ("moco", {"momentum": 1.5}, "momentum: got 1.5, expected at most 1"),
        ("xbm", {"base": ISA | {"base": "mpa-ap"}}, "references: got single rows, expected K rows for each class"),
    ],
)
def test_what_cannot_make_sense_is_refused(name: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pm.method(name, classes=CLASSES, dim=DIM, **arguments)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("moco", {}, r"images: got none, expected criterion\(embeddings, labels, images=images\); moco needs it"),
        ("ccp", {"base": "proxy-isa"}, "epochs: got none, expected steps_per_epoch=.*; ccp needs it"),
        ("xbm", {"base": "proxy-isa"}, "epochs: got none, expected steps_per_epoch=.*; xbm needs it"),
    ],
)
def test_what_a_method_or_its_base_lacks_is_said(name: str, arguments: dict[str, Any], message: str) -> None:
    criterion = pm.method(name, classes=CLASSES, dim=DIM, **arguments).bind(nn.Linear(2, DIM))
    with pytest.raises(ValueError, match=message):
        criterion(torch.randn(2, DIM), torch.tensor([0, 1]))


@pytest.mark.parametrize("name", ["proxy-nca", "proxy-nca++", "mpa-dw", "mpa-ap"])
def test_a_query_wise_loss_keeps_its_own_mean_and_has_its_exponents_weighted(name: str) -> None:
    rng = np.random.default_rng(0)
    K = 1 if "nca" in name else 3
    x, y, p = rng.normal(size=(9, DIM)), rng.integers(0, CLASSES, 9), rng.normal(size=(CLASSES * K, DIM))
    several = {"per_class": K, "tau": 0.0}
    base = {"method": name} | ({"temperature": 0.2} if name == "proxy-nca++" else {"scale": 5.0})
    arguments = isa(base | several if K > 1 else base)[1] | {"filter_epoch": 0, "volume": 6.0}
    criterion = pm.method("proxy-isa", classes=CLASSES, dim=DIM, **arguments).double()
    criterion.epoch(0)
    criterion.objective.source.vectors.data.copy_(torch.from_numpy(p))
    weighting = criterion.objective.weighting
    assert isinstance(weighting, InformativeSamples)
    weighting._count(torch.arange(CLASSES).repeat(9))
    weighting.hardness.copy_(torch.linspace(-0.2, 0.5, CLASSES))
    numbers = (t.numpy() for t in (weighting.count, weighting.effective, weighting.hardness))
    state = oracle.State(*numbers, np.zeros((0, DIM)), np.zeros(0, int))
    s = losses.class_similarity(x, p, K, "soft", 0.1) if K > 1 else losses.cosines(x, p)
    w = oracle.weights(state, s, y, volume=6.0, k=0.9, lam=0.1, tau=1.5, filter_on=True)
    assert len(np.unique(w.round(9))) > 3
    own = y[:, None] == np.arange(CLASSES)
    margin = 0.1 if K > 1 else 0.0
    pull, push = np.exp(5 * w * (margin - s)), np.exp(5 * w * (s + margin))
    positive, negative = (pull * own).sum(1), (push * ~own).sum(1)
    expected = {
        "proxy-nca": np.log(positive * negative),
        "proxy-nca++": np.log1p(positive * negative),
        "mpa-dw": np.log1p(positive) + np.log1p(negative),
        "mpa-ap": np.log1p(positive + negative),
    }[name].mean()
    assert criterion(torch.from_numpy(x), torch.from_numpy(y)).item() == pytest.approx(expected, rel=1e-10)


def test_moco_is_the_base_on_the_batch_and_a_list_of_what_a_slow_copy_saw() -> None:
    loop = Loop("moco", {"memory": 30, "momentum": 0.7})
    slow, past, labels = copy.deepcopy(loop.encoder), torch.zeros(0, DIM), torch.zeros(0, dtype=torch.int64)
    plain = pm.method("proxy-anchor", classes=CLASSES, dim=DIM)
    for number in range(6):
        x, y = loop.batch(number, 12)
        plain.objective.source.vectors.data.copy_(loop.criterion.objective.objective.source.vectors)
        embeddings = loop.encoder(x)
        expected = plain(torch.cat([embeddings, past]), torch.cat([y, labels]))
        loop.optimizer.zero_grad()
        loss = loop.criterion(embeddings, y, images=x)
        torch.testing.assert_close(loss, expected)
        (slope,) = torch.autograd.grad(expected, embeddings, retain_graph=True)
        torch.testing.assert_close(torch.autograd.grad(loss, embeddings, retain_graph=True)[0], slope)
        with torch.no_grad():
            keys = slow(x)
        loss.backward()
        loop.optimizer.step()
        loop.criterion.commit()
        past, labels = torch.cat([past, keys])[-30:], torch.cat([labels, y])[-30:]
        with torch.no_grad():
            for own, theirs in zip(slow.parameters(), loop.encoder.parameters(), strict=True):
                own.copy_(0.7 * own + 0.3 * theirs)
    assert not any(p.requires_grad for p in loop.criterion.objective.encoder.parameters())
    embeddings = loop.encoder(x)
    assert torch.equal(loop.criterion.eval()(embeddings, y), loop.criterion(embeddings, y, images=x)), "not asked"


def test_gaussian_proxies_settle_by_the_ball_under_ccp() -> None:
    """Newton steps use the normalisation of CCP."""
    loop = Loop("ccp", CCP | {"base": VCPA})
    loop.evaluate(0)
    (source,) = (module for module in loop.criterion.modules() if isinstance(module, VariationalProxies))
    seen = []
    energies = source._settle
    source._settle = lambda q_before, energy: seen.append(energy) or energies(q_before, energy)  # type: ignore
    x, y = loop.batch(0)
    embeddings = loop.encoder(x)
    loop.criterion(embeddings, y)
    assert seen[0].normalise == "ball"
    torch.testing.assert_close(seen[0].queries, ball(embeddings.detach()))
    assert not torch.allclose(seen[0].queries, unit(embeddings))
    assert not seen[0].queries.requires_grad


PARALLEL: dict[str, dict[str, Any]] = {
    "vcpa": {"method": "vcpa", "loss__newton_steps": 3},
    "vcpa by gradient": {"method": "vcpa", "loss__newton_steps": 0, "loss__prior_lag": 2},
    "proxy-isa": {"method": "proxy-isa", "loss__memory": 20, "loss__memory_epoch": 0, "loss__filter_epoch": 0},
    "ccp on vcpa": {
        "method": "ccp", "loss__base": "vcpa", "train__evaluate_steps": 2, "loss__patience": 1, "train__per_class": 2
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("only_training")
@pytest.mark.parametrize("kind", PARALLEL)
def test_two_processes_equal_one(kind: str, photos: Path, tmp_path: Path) -> None:
    settings = STILL | PARALLEL[kind]
    Pair(command(photos, tmp_path / "two", **settings), tmp_path).finish()
    close(tmp_path / "two", run(photos, tmp_path / "one", **settings).folder)


def draw(rank: int, folder: Path) -> None:
    """Write the noise of one of two processes; their random states differ."""
    torch.manual_seed(rank)
    save_file({"noise": VariationalProxies(2, 3)._noise()}, folder / str(rank))


def test_processes_draw_the_same_noise_whatever_their_random_states(tmp_path: Path) -> None:
    together(2, draw, tmp_path)
    first, second = (load_file(file)["noise"] for file in (tmp_path / "0", tmp_path / "1"))
    assert torch.equal(first, second)


def test_a_criterion_in_a_loop_of_ones_own_needs_no_more_than_it_says() -> None:
    """Proxy-ISA and VCPA need embeddings, labels, commit, and the number of steps in an epoch."""
    for name in ("proxy-isa", "vcpa"):
        criterion: Criterion = pm.method(name, classes=3, dim=4, steps_per_epoch=1)
        for _ in range(4):
            loss = criterion(torch.randn(6, 4, requires_grad=True), torch.tensor([0, 0, 1, 1, 2, 2]))
            loss.backward()
            criterion.commit()
        assert criterion.step == 4
