"""The memory of past embeddings, against a plain list."""

import pytest
import torch

import proxymetric as pm
from proxymetric.core.normalisation import unit
from proxymetric.core.pieces import References
from proxymetric.losses import Contrastive


def batches(count: int, size: int = 5, dim: int = 4):
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        yield torch.randn(size, dim, generator=generator), torch.randint(0, 3, (size,), generator=generator)


@pytest.mark.parametrize("size", [3, 5, 12, 100])
def test_xbm_is_the_base_loss_plus_the_same_against_a_list_of_the_past(size):
    start = 2
    criterion = pm.method("xbm", classes=3, dim=4, memory=size, start=start, weight=0.5)
    loss = Contrastive()
    past: list[tuple[torch.Tensor, int]] = []
    for step, (x, y) in enumerate(batches(9)):
        x = x.requires_grad_()
        got = criterion(x, y)
        queries = unit(x)
        itself = torch.eye(len(y), dtype=torch.bool)
        expected = loss(queries, y, References(queries, y, same=itself))
        if past:
            rows = torch.stack([v for v, _ in past]), torch.tensor([c for _, c in past])
            expected = expected + 0.5 * loss(queries, y, References(*rows))
        torch.testing.assert_close(got, expected)
        (gradient,) = torch.autograd.grad(got, x, retain_graph=True)
        (wanted_gradient,) = torch.autograd.grad(expected, x)
        torch.testing.assert_close(gradient, wanted_gradient)
        criterion.commit()
        if step >= start:
            past = [*past, *zip(unit(x).detach(), y.tolist(), strict=True)][-size:]
    assert len(past) == min(size, 7 * 5)


def test_a_skipped_step_is_not_remembered():
    criterion = pm.method("xbm", classes=3, dim=4, memory=10, start=0)
    (x, y), (x2, y2) = batches(2)
    criterion(x.requires_grad_(), y)
    criterion.discard()
    criterion(x2.requires_grad_(), y2)
    criterion.commit()
    memory = criterion.objective.parts["memory"].source
    assert len(memory) == 5
    torch.testing.assert_close(memory.vectors[:5], unit(x2.detach()))


def test_backward_after_commit_still_sees_what_was_compared_with():
    criterion = pm.method("xbm", classes=3, dim=4, memory=5, start=0)
    for x, y in batches(2):
        loss = criterion(x.requires_grad_(), y)
        criterion.commit()
    loss.backward()
    assert x.grad.isfinite().all()
