"""Products have the same values and gradients whichever library computes them."""

from __future__ import annotations

import pytest
import torch

from proxymetric.core import products
from proxymetric.core.products import products_in_groups, scaled_product

each_library = pytest.mark.parametrize("has_mkl", [True, False])


@each_library
@pytest.mark.parametrize("plus", [None, torch.ones(4, 3)])
def test_a_scaled_product(has_mkl, plus, monkeypatch):
    monkeypatch.setattr(products, "HAS_MKL", has_mkl)
    queries, rows = torch.randn(4, 5), torch.randn(3, 5)
    expected = 0.3 * queries.double() @ rows.double().T + (0 if plus is None else plus)
    torch.testing.assert_close(scaled_product(queries, rows, 0.3, plus).double(), expected, rtol=1e-5, atol=1e-5)


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
