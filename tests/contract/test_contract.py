"""Every row of the catalogue keeps the contract; so do its variants with another kind of proxies."""

import pytest
import torch

import proxymetric as pm
from proxymetric.core.pieces import Compare, Outcome
from proxymetric.papers import CATALOGUE, options
from proxymetric.testing import CHECKS, builder

ISA_ON = {"memory_epoch": 0, "filter_epoch": 0, "memory": 20}
CCP = {"per_class": 2, "pool": 4}
PROXY = (
    "proxy-anchor",
    "proxy-nca",
    "proxy-nca++",
    "norm-softmax",
    "cosface",
    "soft-triple",
    "mpa",
    "mpa-dw",
    "mpa-ap",
)
PAIR = ("contrastive", "margin-contrastive", "triplet", "multi-similarity")
VARIANTS = {name: (name, {}) for name in CATALOGUE}
VARIANTS |= {
    f"{name} (rows of the batch)": (name, {"touched": "batch"}) for name in CATALOGUE if "touched" in options(name)
}
VARIANTS |= {f"{name} (ball)": (name, {"normalise": "ball"}) for name in CATALOGUE if "normalise" in options(name)}
VARIANTS |= {f"proxy-isa on {name}": ("proxy-isa", ISA_ON | {"base": name}) for name in PROXY}
VARIANTS |= {f"ccp on {name}": ("ccp", CCP | {"base": name}) for name in (*PROXY, *PAIR, "vcpa")}
VARIANTS |= {
    f"ccp on proxy-isa on {n}": ("ccp", CCP | {"base": {"method": "proxy-isa", **ISA_ON, "base": n}}) for n in PROXY
}
VARIANTS |= {
    "mpa (max)": ("mpa", {"similarity": "max", "per_class": 3}),
    "mpa-ap (mean)": ("mpa-ap", {"similarity": "mean", "per_class": 3}),
    "proxy-anchor (all, 3 proxies)": ("proxy-anchor", {"positive_norm": "all", "per_class": 3}),
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


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_method_keeps_the_contract(variant: str, check: str) -> None:
    name, arguments = VARIANTS[variant]
    CHECKS[check](builder(name, **arguments))


class Leaky(Compare):
    """Remembers in forward instead of in commit."""

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


@pytest.mark.parametrize(("objective", "check"), [(Leaky, "commit"), (Forgetful, "resume")])
def test_the_contract_catches_a_method_that_breaks_it(objective, check) -> None:
    def build(classes, dim):
        return pm.Criterion(objective(pm.losses.ProxyAnchor(), pm.sources.LearnedProxies(classes, dim)))

    with pytest.raises(AssertionError):
        CHECKS[check](build)


def test_class_absent_from_the_batch_is_still_pushed() -> None:
    criterion = pm.method("proxy-anchor", classes=5, dim=6)
    criterion(torch.randn(4, 6), torch.tensor([0, 1, 2, 3])).backward()
    assert criterion.objective.source.vectors.grad[4].abs().sum() > 0
