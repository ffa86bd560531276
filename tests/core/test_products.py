"""Products have the same values and gradients whichever library computes them."""

from __future__ import annotations

import pytest
import torch

from proxymetric.core import products
from proxymetric.core.products import products_in_groups, scaled_product

each_library = pytest.mark.parametrize("has_mkl", [True, False])


@each_library
@pytest.mark.parametrize("largest", [0, 2**21])
@pytest.mark.parametrize("shape", [(4, 3), (3, 4)])
@pytest.mark.parametrize("has_more", [True, False])
def test_a_scaled_product(has_mkl, largest, shape, has_more, monkeypatch):
    monkeypatch.setattr(products, "HAS_MKL", has_mkl)
    monkeypatch.setattr(products, "MAX_COPIED_PRODUCT", largest)
    queries, rows = (torch.randn(length, 5) for length in shape)
    plus = torch.ones(shape) if has_more else None
    expected = 0.3 * queries.double() @ rows.double().T + (0 if plus is None else plus)
    found = scaled_product(queries, rows, 0.3, plus)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    assert found.is_contiguous()


@each_library
def test_products_in_groups_and_their_derivatives(has_mkl, monkeypatch):
    monkeypatch.setattr(products, "HAS_MKL", has_mkl)
    groups = torch.randn(3, 4, 5, dtype=torch.double, requires_grad=True)
    torch.testing.assert_close(products_in_groups(groups), groups @ groups.mT)
    assert torch.autograd.gradcheck(products_in_groups, groups)
    assert torch.autograd.gradgradcheck(products_in_groups, groups)


def test_products_in_groups_without_gradients_and_of_no_group():
    groups = torch.randn(0, 4, 5, requires_grad=True)
    products_in_groups(groups).sum().backward()
    assert groups.grad.shape == groups.shape
    assert not products_in_groups(groups.detach()).requires_grad
