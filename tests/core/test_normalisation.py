"""The normalisations against autograd: values, gradients, second derivatives, short and zero vectors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional

from proxymetric.core.normalisation import MIN_DIVISORS, NORMALISATIONS, Normalised


def vectors(dtype: torch.dtype = torch.float64) -> Tensor:
    """Rows of many lengths: some inside the unit ball, one on it, one of zeros."""
    rows = torch.randn(9, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows = rows * torch.logspace(-3, 3, 9, dtype=torch.float64)[:, None]
    rows[3] = torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0])
    rows[5] = 0
    return rows.to(dtype)


@pytest.mark.parametrize("name", NORMALISATIONS)
def test_value_and_gradient_are_those_of_autograd(name: str) -> None:
    grad = torch.randn(9, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ours, theirs = vectors().requires_grad_(), vectors().requires_grad_()
    wanted = functional.normalize(theirs, dim=-1, eps=MIN_DIVISORS[name])
    got = NORMALISATIONS[name](ours)
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    got.backward(grad)
    wanted.backward(grad)
    assert ours.grad is not None
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("name", NORMALISATIONS)
def test_first_and_second_derivatives_are_those_of_differences(name: str) -> None:
    away = torch.tensor([[3.0, 4.0], [0.2, -0.3], [-1.0, 2.0]], dtype=torch.float64, requires_grad=True)
    assert gradcheck(NORMALISATIONS[name], away)
    assert gradgradcheck(NORMALISATIONS[name], away)


@pytest.mark.parametrize("name", NORMALISATIONS)
def test_leading_dimensions_and_no_gradient(name: str) -> None:
    grouped = vectors().view(3, 3, 5)
    assert torch.equal(NORMALISATIONS[name](grouped).view(9, 5), NORMALISATIONS[name](vectors()))
    assert not NORMALISATIONS[name](vectors()).requires_grad
    with torch.no_grad():
        assert not NORMALISATIONS[name](vectors().requires_grad_()).requires_grad


def test_a_change_of_the_vectors_before_the_backward_pass_is_noticed() -> None:
    base = vectors().requires_grad_()
    changed = base * 1
    rows = NORMALISATIONS["l2"](changed)
    with torch.no_grad():
        changed.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        rows.sum().backward()


def test_single_precision_is_as_exact_as_autograd() -> None:
    grad = torch.randn(9, 5, generator=torch.Generator().manual_seed(2))
    exact = vectors().requires_grad_()
    functional.normalize(exact, dim=-1).backward(grad.double())
    ours, theirs = vectors(torch.float32).requires_grad_(), vectors(torch.float32).requires_grad_()
    NORMALISATIONS["l2"](ours).backward(grad)
    functional.normalize(theirs, dim=-1).backward(grad)
    assert exact.grad is not None
    lengths = vectors().norm(dim=1)
    kept = lengths > 0
    scale = lengths[kept, None]  # the gradient of a row is inversely proportional to its length

    def error(got: Tensor | None) -> float:
        assert got is not None
        assert exact.grad is not None
        return float(((got.double() - exact.grad)[kept] * scale).square().mean().sqrt())

    assert error(ours.grad) <= 2 * error(theirs.grad) + 2**-23


def test_rows_divisors_and_who_was_divided_by_its_length() -> None:
    made = Normalised.of(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), "ball")
    torch.testing.assert_close(made.rows, torch.tensor([[0.6, 0.8], [0.3, 0.4]]))
    assert made.divisors.squeeze(1).tolist() == [5, 1]
    assert made.by_length is not None
    assert made.by_length.squeeze(1).tolist() == [True, False]
