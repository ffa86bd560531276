"""Every row of the catalogue keeps the contract; so do its variants with another kind of proxies."""

import pytest
import torch

import proxymetric as pm
from proxymetric.papers import CATALOGUE, options
from proxymetric.seam import Compare, Outcome
from proxymetric.testing import CHECKS, builder

VARIANTS = {name: (name, {}) for name in CATALOGUE}
VARIANTS |= {
    f"{name} (rows of the batch)": (name, {"touched": "batch"}) for name in CATALOGUE if "touched" in options(name)
}
VARIANTS |= {f"{name} (ball)": (name, {"normalise": "ball"}) for name in CATALOGUE if "normalise" in options(name)}
VARIANTS |= {
    "mpa (max)": ("mpa", {"similarity": "max", "per_class": 3}),
    "mpa-ap (mean)": ("mpa-ap", {"similarity": "mean", "per_class": 3}),
    "proxy-anchor (all, 3 proxies)": ("proxy-anchor", {"positive_norm": "all", "per_class": 3}),
    "multi-similarity (no mining)": ("multi-similarity", {"epsilon": None}),
    "xbm (memory on)": ("xbm", {"start": 0, "memory": 20}),
    "xbm (triplet, starts later)": ("xbm", {"start": 2, "memory": 9, "base": {"method": "triplet", "margin": 0.2}}),
    "xbm (proxy-anchor)": ("xbm", {"start": 0, "memory": 64, "base": "proxy-anchor"}),
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
        return pm.Criterion(objective(pm.losses.ProxyAnchor(), pm.references.LearnedProxies(classes, dim)))

    with pytest.raises(AssertionError):
        CHECKS[check](build)


def test_class_absent_from_the_batch_is_still_pushed() -> None:
    criterion = pm.method("proxy-anchor", classes=5, dim=6)
    criterion(torch.randn(4, 6), torch.tensor([0, 1, 2, 3])).backward()
    assert criterion.objective.source.vectors.grad[4].abs().sum() > 0
