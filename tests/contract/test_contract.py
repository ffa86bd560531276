"""Every row of the catalogue keeps the contract; so do its variants with another kind of proxies."""

from dataclasses import replace

import pytest
import torch

import proxymetric as pm
from catalogue import BUILT_AROUND, RE_PICKED, REDUCTIONS, WEIGHTED, refusal
from proxymetric.core.pieces import Compare, Outcome
from proxymetric.core.surrogate import held
from proxymetric.papers import CATALOGUE, options
from proxymetric.papers.contract import CHECKS, Subject, builder, check_method
from sampled import some

ISA_ON = {"memory_epoch": 0, "filter_epoch": 0, "memory": 20}
CCP = {"per_class": 2, "pool": 4}
BALANCED = {"weights": "frequency", "margins": "frequency", "counts": [9, 1, 3, 4, 7]}
VARIANTS = {name: (name, {}) for name in CATALOGUE}
VARIANTS |= {
    f"{name} (rows of the batch)": (name, {"touched": "batch"}) for name in CATALOGUE if "touched" in options(name)
}
VARIANTS |= {f"{name} (ball)": (name, {"normalise": "ball"}) for name in CATALOGUE if "normalise" in options(name)}
VARIANTS |= {f"proxy-isa on {name}": ("proxy-isa", ISA_ON | {"base": name}) for name in WEIGHTED}
VARIANTS |= {f"ccp on {name}": ("ccp", CCP | {"base": name}) for name in RE_PICKED}
VARIANTS |= {
    f"ccp on proxy-isa on {name}": ("ccp", CCP | {"base": {"method": "proxy-isa", **ISA_ON, "base": name}})
    for name in REDUCTIONS.values()
    if name in RE_PICKED
}
VARIANTS |= {
    "mpa (max)": ("mpa", {"similarity": "max", "per_class": 3}),
    "mpa-ap (mean)": ("mpa-ap", {"similarity": "mean", "per_class": 3}),
    "proxy-anchor (all, 3 proxies)": ("proxy-anchor", {"positive_norm": "all", "per_class": 3}),
    "proxy-anchor (balanced)": ("proxy-anchor", BALANCED),
    "cosface (balanced)": ("cosface", BALANCED),
    "arcface (balanced, nested)": ("arcface", BALANCED | {"nested": [2, 6]}),
    "multi-similarity (no mining)": ("multi-similarity", {"epsilon": None}),
    "xbm (memory on)": ("xbm", {"start": 0, "memory": 20}),
    "xbm (triplet, starts later)": ("xbm", {"start": 2, "memory": 9, "base": {"method": "triplet", "margin": 0.2}}),
    "xbm (proxy-anchor)": ("xbm", {"start": 0, "memory": 64, "base": "proxy-anchor"}),
    "proxy-isa (rows of the batch)": ("proxy-isa", ISA_ON | {"base": {"method": "proxy-anchor", "touched": "batch"}}),
    "vcpa (by gradient)": ("vcpa", {"newton_steps": 0, "prior_lag": 3}),
    "vcpa (lagged prior)": ("vcpa", {"newton_steps": 3, "prior_lag": 3, "halving": True}),
    "vcpa (first-order steps)": ("vcpa", {"newton_steps": 0, "gradient_steps": 3}),
    "vcpa (no sampling)": ("vcpa", {"sample": False}),
    "vcpa (Newton on Proxy-Anchor)": ("vcpa", {"sample": False, "tau": 0.0, "damping": 1e-3}),
    "vcpa (mpa-ap by gradient)": ("vcpa", {"newton_steps": 0, "per_class": 3, "base": {"method": "mpa-ap"}}),
    "vcpa (weighted)": ("vcpa", {"base": {"method": "proxy-isa", **ISA_ON}}),
    "ccp (released code)": ("ccp", CCP | {"first_lam": 0, "start": "zero", "anchor": "best", "in_batch": 0.1}),
    "ccp (rolled back)": ("ccp", CCP | {"anchor": "best", "roll_back": True, "normalise": "l2"}),
    "ccp (with a memory)": ("ccp", CCP | {"base": "contrastive", "memory": 20, "memory_start": 0}),
    "moco (short queue)": ("moco", {"memory": 7, "momentum": 0.5}),
    "margin-contrastive (all pairs)": ("margin-contrastive", {"averaging": "all"}),
}
NESTED = {f"{name} (nested)": (name, {"nested": [2, 3, 6]}) for name in CATALOGUE}
NESTED |= {
    "proxy-isa (nested, weights on)": ("proxy-isa", ISA_ON | {"nested": [2, 6]}),
    "ccp on mpa-ap (nested)": ("ccp", CCP | {"base": "mpa-ap", "nested": [2, 6]}),
    "ccp (nested, l2, memory)": ("ccp", CCP | {"normalise": "l2", "memory": 20, "memory_start": 0, "nested": [2, 6],
                                               "base": "contrastive"}),
    "xbm (nested, memory on)": ("xbm", {"start": 0, "memory": 20, "nested": [4, 6]}),
    "vcpa (nested, by gradient)": ("vcpa", {"newton_steps": 0, "nested": [3, 6]}),
    "mpa (nested, rows of the batch)": ("mpa", {"touched": "batch", "nested": [3, 6]}),
    "moco (nested, short queue)": ("moco", {"memory": 7, "momentum": 0.5, "nested": [2, 6]}),
    "proxy-anchor (nested, balanced)": ("proxy-anchor", BALANCED | {"nested": [2, 6]}),
}  # fmt: skip
NESTED |= {
    f"{name} (nested, ball)": (name, {"normalise": "ball", "nested": [2, 6]})
    for name in CATALOGUE
    if "normalise" in options(name)
}
NESTED |= {
    f"proxy-isa on {name} (nested)": ("proxy-isa", ISA_ON | {"base": name, "nested": [2, 6]}) for name in WEIGHTED
}
NESTED |= {f"ccp on {name} (nested)": ("ccp", CCP | {"base": name, "nested": [2, 6]}) for name in RE_PICKED}
NESTED |= {
    f"xbm on {name} (nested)": ("xbm", {"start": 0, "memory": 20, "base": name, "nested": [4, 6]})
    for name in CATALOGUE
    if not refusal("xbm", base=name)
}
VARIANTS |= NESTED


def subject_of(variant: str) -> Subject:
    name, arguments = VARIANTS[variant]
    return builder(name, **arguments)


QUICK_SHARE = 4
"""`make test` runs one of this many pairs of a variant and a check; the slow tests run some others"""
QUICK_SHARE_NESTED = len(CHECKS)
"""the same for the nested variants: each runs one check"""
SLOW_PAIRS = 180
"""other pairs that `make test-slow` runs"""
PAIRS = [(variant, check) for variant in VARIANTS for check in CHECKS]
QUICK = [
    (variant, check)
    for row, variant in enumerate(VARIANTS)
    for column, check in enumerate(CHECKS)
    for share in [QUICK_SHARE_NESTED if variant in NESTED else QUICK_SHARE]
    if variant in CATALOGUE or (row + column) % share == 0
]
CASES = [pytest.param(*pair, id="-".join(pair)) for pair in QUICK]
CASES += [
    pytest.param(*pair, id="-".join(pair), marks=pytest.mark.slow(cases=SLOW_PAIRS))
    for pair in some([pair for pair in PAIRS if pair not in set(QUICK)])
]


@pytest.mark.parametrize(("variant", "check"), CASES)
def test_method_keeps_the_contract(variant: str, check: str) -> None:
    """Gradients are compared along random directions."""
    CHECKS[check](replace(subject_of(variant), fast=True))


@pytest.mark.slow(cases=3)
@pytest.mark.parametrize("variant", some([variant for variant in VARIANTS if not subject_of(variant).fast]))
def test_gradients_entry_by_entry(variant: str) -> None:
    CHECKS["gradient"](subject_of(variant))


class Leaky(Compare):
    """Changes its memory in forward instead of in commit."""

    def forward(self, ctx):
        outcome = super().forward(ctx)
        self.source.vectors.data += 1
        return outcome


class Forgetful(Compare):
    """Keeps a count that its state does not hold."""

    count = 0

    def forward(self, ctx):
        terms, _ = super().forward(ctx)

        def commit():
            self.count += 1

        return Outcome({"loss": terms["loss"] * (1 + self.count)}, commit)


def marked(queries, labels, refs, weight=None):
    """A loss whose factor has no gradient."""
    s = queries @ refs.normalised(queries).T
    return (held(s.exp()) * s).mean()


def unmarked(queries, labels, refs, weight=None):
    """The same loss, whose row does not declare it."""
    s = queries @ refs.normalised(queries).T
    return (s.exp().detach() * s).mean()


def against_proxies(loss, objective=Compare):
    def build(classes, dim):
        return pm.Criterion(objective(loss, pm.sources.LearnedProxies(classes, dim)))

    return build


@pytest.mark.parametrize(("objective", "check"), [(Leaky, "commit"), (Forgetful, "resume")])
def test_the_contract_catches_a_method_that_breaks_it(objective, check) -> None:
    with pytest.raises(AssertionError, match=f"^build fails the check '{check}': "):
        CHECKS[check](against_proxies(pm.losses.ProxyAnchor(), objective))


def test_a_failure_names_the_method_and_the_check_and_is_short(monkeypatch) -> None:
    monkeypatch.setattr(pm.losses.ProxyAnchor, "__call__", lambda self, *arguments: unmarked(*arguments))
    with pytest.raises(AssertionError) as failure:
        check_method("proxy-anchor", margin=0.2)
    message = str(failure.value)
    assert message.startswith("proxy-anchor(margin=0.2) fails the check 'gradient': the gradient is not that of")
    assert len(message) < 400


def test_a_surrogate_gradient_must_be_declared_and_true() -> None:
    build = against_proxies(marked)
    check_method(build, surrogate_gradient=True)
    with pytest.raises(
        AssertionError, match="'gradient': surrogate_gradient: got False, expected True: the loss has 1 held factors"
    ):
        check_method(build)
    with pytest.raises(
        AssertionError, match="'gradient': surrogate_gradient: got True, expected False: the loss has 0 held factors"
    ):
        check_method(against_proxies(pm.losses.ProxyAnchor()), surrogate_gradient=True)
    with pytest.raises(ValueError, match="surrogate_gradient: got True for 'circle', expected it in the catalogue"):
        check_method("circle", surrogate_gradient=True)


def test_a_factor_without_gradient_that_is_not_marked_is_found() -> None:
    with pytest.raises(AssertionError, match="A factor without gradient must be marked with"):
        CHECKS["gradient"](against_proxies(unmarked))


@pytest.mark.parametrize(
    ("loss", "sums_over", "grouped", "message"),
    [
        (pm.losses.ProxyAnchor(), "classes", False, "sums_over: got 'classes', but the loss does not sum over it"),
        (pm.losses.CosFace(), "batch", False, "sums_over: got 'batch', but the loss does not sum over it"),
        (pm.losses.MPA(), "batch", False, "grouped: got False, expected True"),
        (pm.losses.MultiSimilarity(), "classes", False, "expected one written on ops"),
    ],
)
def test_a_row_that_states_a_wrong_reduction_is_found(loss, sums_over, grouped, message) -> None:
    subject = Subject(against_proxies(loss), "wrong", sums_over=sums_over, grouped=grouped)
    with pytest.raises(AssertionError, match=f"^wrong fails the check 'reduction': .*{message}"):
        CHECKS["reduction"](subject)


def test_methods_that_cannot_be_built_around_one_another_say_why() -> None:
    assert BUILT_AROUND == ["proxy-isa", "vcpa", "ccp", "xbm", "moco"]
    for outer in BUILT_AROUND:
        sentences = [refusal(outer, base=name) for name in CATALOGUE]
        assert any(sentences)
        assert not all(sentences)
        for sentence in filter(None, sentences):
            assert sentence.startswith(("base: ", "references: ", "weighting: ", "newton_steps: ")), sentence


def test_class_absent_from_the_batch_is_still_pushed() -> None:
    criterion = pm.method("proxy-anchor", classes=5, dim=6)
    criterion(torch.randn(4, 6), torch.tensor([0, 1, 2, 3])).backward()
    assert criterion.objective.source.vectors.grad[4].abs().sum() > 0
