"""A wrong line in a registry is named."""

from __future__ import annotations

import pytest

from proxymetric.arguments.registry import load_registry


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("circl:circle", "expected a module of this package before the colon"),
        ("circle:circl", r"expected a name in circle\.py; did you mean 'circle'\?"),
    ],
)
def test_a_wrong_line_is_named(place, expected):
    with pytest.raises(ValueError, match=f"proxymetric.papers, line 'mine': got '{place}', {expected}"):
        load_registry("proxymetric.papers", {"mine": place})
