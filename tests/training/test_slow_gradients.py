"""Backward passes of plain convolutions do without oneDNN where torch's own kernels are faster."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from proxymetric.training import slow_gradients
from proxymetric.training.slow_gradients import around_backward

CPU = torch.device("cpu")
PLAIN = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))
needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN")


def is_without(network: nn.Module, device: torch.device = CPU) -> bool:
    before = torch.backends.mkldnn.enabled
    context = around_backward(network, device)
    found = []
    for _ in range(2):  # it can be entered again
        with context:
            found.append(not torch.backends.mkldnn.enabled)
        assert torch.backends.mkldnn.enabled == before
    assert len(set(found)) == 1
    return found[0]


@needs_onednn
def test_plain_convolutions_on_an_arm_processor(monkeypatch):
    monkeypatch.setattr(slow_gradients, "HAS_MKL", False)
    assert is_without(PLAIN)
    assert not is_without(nn.Sequential(PLAIN, nn.Conv2d(2, 2, 3, groups=2))), "a depthwise convolution"
    assert not is_without(nn.Linear(2, 2)), "no convolution"
    assert not is_without(PLAIN, torch.device("cuda"))
    frozen = nn.Conv2d(3, 4, 3).requires_grad_(False)
    assert not is_without(nn.Sequential(frozen, nn.Linear(2, 2))), "no convolution is trained"
    monkeypatch.setattr(slow_gradients, "HAS_MKL", True)
    assert not is_without(PLAIN)


@needs_onednn
def test_the_gradients_are_the_same(monkeypatch):
    monkeypatch.setattr(slow_gradients, "HAS_MKL", False)
    images = torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(0))
    found = []
    for context in (around_backward(PLAIN, CPU), around_backward(nn.Linear(2, 2), CPU)):
        PLAIN.zero_grad()
        loss = PLAIN(images).square().sum()
        with context:
            loss.backward()
        found.append([parameter.grad.clone() for parameter in PLAIN.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@needs_onednn
def test_an_error_puts_onednn_back(monkeypatch):
    monkeypatch.setattr(slow_gradients, "HAS_MKL", False)
    before = torch.backends.mkldnn.enabled
    with pytest.raises(KeyError), around_backward(PLAIN, CPU):
        raise KeyError
    assert torch.backends.mkldnn.enabled == before
