"""The texts of criteria and their pieces: short, and different for each method."""

from __future__ import annotations

import inspect

import pytest

import proxymetric as pm
from proxymetric import losses, sources
from proxymetric.core.pieces import Compare, Sum
from proxymetric.encoders import build


@pytest.mark.parametrize("name", pm.methods())
def test_a_criterion_shows_how_it_was_made(name) -> None:
    criterion = pm.method(name, classes=5, dim=6)
    assert repr(criterion) == f"Criterion('{name}', classes=5, dim=6)"
    assert eval(repr(criterion).replace("Criterion", "pm.method")).objective is not criterion.objective
    assert len(repr(criterion.objective)) < 250
    assert "\n" not in repr(criterion.objective)


def test_arguments_are_shown() -> None:
    criterion = pm.method("proxy-isa", classes=5, dim=6, steps_per_epoch=3, base={"method": "mpa", "margin": 0.2})
    shown = "Criterion('proxy-isa', classes=5, dim=6, steps_per_epoch=3, base={'method': 'mpa', 'margin': 0.2})"
    assert repr(criterion) == shown


def test_objectives_of_other_methods_look_different() -> None:
    texts = [repr(pm.method(name, classes=5, dim=6).objective) for name in pm.methods()]
    assert len(set(texts)) == len(texts)


def test_a_criterion_of_ones_own_shows_its_pieces() -> None:
    objective = Compare(losses.ProxyAnchor(margin=0.2), sources.LearnedProxies(3, 2), regulariser=losses.Spread())
    shown = (
        "Compare(ProxyAnchor(scale=32.0, margin=0.2, positive_norm='present'), LearnedProxies(classes=3, dim=2), "
        "Spread(tau=0.2))"
    )
    assert repr(pm.Criterion(objective)) == f"Criterion({shown})"
    both = Sum(batch=(1.0, Compare(losses.Triplet(), sources.InBatch())), proxies=(0.5, objective))
    assert repr(both) == f"Sum(batch=1.0 * Compare(Triplet(margin=0.0961), InBatch()), proxies=0.5 * {shown})"


def test_sources() -> None:
    assert repr(sources.Memory(9, 2)) == "Memory(size=9, dim=2)"
    assert repr(sources.VariationalProxies(3, 2, tau=0.5)) == "VariationalProxies(classes=3, dim=2, tau=0.5)"
    assert repr(sources.RowProxies(9, 2, others=0.5)) == "RowProxies(classes=9, dim=2, others=0.5)"


def test_a_model_names_its_network() -> None:
    encoder = build("small", dim=8)
    model = pm.Model(encoder, normalise="l2", classes=["cat", "dog"], view={"size": 16, "resize": 16})
    count = sum(p.numel() for p in encoder.parameters())
    shown = f"Model('small', dim=8, tuning='full', size={encoder.size}, {count:,} parameters, 2 training classes)"
    assert repr(model) == shown


def test_help_tells_where_the_methods_are() -> None:
    text = inspect.getdoc(pm.method)
    assert "`pm.methods()` lists the names" in text
    assert "proxymetric methods NAME" in text
