"""Margins, scales and temperatures outside a sensible range raise an error or a warning that names the argument."""

from __future__ import annotations

import re
import warnings

import pytest

import proxymetric as pm
from proxymetric.papers import options

COSINE = "expected a number from -1 to 1: it is compared with cosines"
MARGIN = [name for name in pm.methods() if "margin" in options(name)]


def test_every_margin_of_the_catalogue_is_checked() -> None:
    for name in MARGIN:
        with pytest.raises(ValueError, match=r"^margin: got -9, expected "):
            pm.method(name, classes=3, dim=2, margin=-9)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises((ValueError, UserWarning), match=r"^margin: got 9, expected "):
                pm.method(name, classes=3, dim=2, margin=9)


@pytest.mark.parametrize(
    ("name", "arguments", "sentence"),
    [
        ("proxy-anchor", {"margin": -1.5}, f"margin: got -1.5, {COSINE}"),
        ("proxy-anchor", {"margin": float("nan")}, f"margin: got nan, {COSINE}"),
        ("mpa-ap", {"margin": 1.01}, f"margin: got 1.01, {COSINE}"),
        ("soft-triple", {"margin": 5}, f"margin: got 5, {COSINE}"),
        ("soft-triple", {"gamma": float("inf")}, "gamma: got inf, expected a number above 0"),
        ("circle", {"margin": -2}, f"margin: got -2, {COSINE}"),
        ("contrastive", {"margin": 1.5}, f"margin: got 1.5, {COSINE}"),
        ("multi-similarity", {"base": 2}, f"base: got 2, {COSINE}"),
        (
            "multi-similarity",
            {"epsilon": 3},
            "epsilon: got 3, expected a number from 0 to 2: two cosines are at most 2",
        ),
        ("cosface", {"margin": 2.5}, "margin: got 2.5, expected a number from 0 to 2: two cosines are at most 2 apart"),
        ("arcface", {"margin": 4}, "margin: got 4, expected radians below pi"),
        ("supcon", {"temperature": -1}, "temperature: got -1, expected a number above 0"),
        ("triplet", {"margin": -1}, "margin: got -1, expected a number above 0"),
        ("margin-contrastive", {"positive_margin": -1}, "positive_margin: got -1, expected a number of at least 0"),
        ("proxy-nca++", {"temperature": 0}, "temperature: got 0, expected a number above 0"),
        ("proxy-nca", {"scale": -1}, "scale: got -1, expected a number above 0"),
    ],
)
def test_refused(name, arguments, sentence) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
        pm.method(name, classes=3, dim=2, **arguments)


@pytest.mark.parametrize(
    ("name", "arguments", "sentence"),
    [
        ("proxy-anchor", {"margin": -0.1}, "margin: got -0.1, expected a number from 0 to 1: a negative margin"),
        ("proxy-anchor", {"scale": 1e5}, "scale: got 100000.0, expected a number from 0.1 to 1000"),
        ("norm-softmax", {"scale": 1e-3}, "scale: got 0.001, expected a number from 0.1 to 1000"),
        ("proxy-nca++", {"temperature": 1e-4}, "temperature: got 0.0001, expected a number from 0.001 to 10"),
        ("soft-triple", {"gamma": 1e-6}, "gamma: got 1e-06, expected a number from 0.001 to 10"),
        (
            "triplet",
            {"margin": 3},
            "margin: got 3, expected a number from 0 to 2: vectors of unit length are at most 2",
        ),
        ("margin-contrastive", {"positive_margin": 3}, "positive_margin: got 3, expected a number from 0 to 2"),
        ("multi-similarity", {"alpha": 1e-9}, "alpha: got 1e-09, expected a number from 0.1 to 1000"),
    ],
)
def test_warned_about_at_the_line_of_the_caller(name, arguments, sentence) -> None:
    with pytest.warns(UserWarning, match=f"^{re.escape(sentence)}") as caught:
        pm.method(name, classes=3, dim=2, **arguments)
    assert [warning.filename for warning in caught] == [__file__]


def test_the_papers_own_numbers_are_silent(recwarn) -> None:
    for name in pm.methods():
        pm.method(name, classes=3, dim=2)
    pm.losses.Circle(margin=-0.2)  # the paper tries margins from -0.2
    pm.losses.Circle(scale=256, margin=0.25)
    pm.losses.ProxyAnchor(scale=1, margin=0)
    pm.losses.ArcFace(margin=0)
    assert not recwarn.list
