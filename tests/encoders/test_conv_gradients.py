"""Convolutions whose gradients are matrix products have the results and the gradients of torch's."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional

from proxymetric.encoders import conv_gradients
from proxymetric.encoders.conv_gradients import MatrixConv2d, is_plain, speed_up_gradients
from proxymetric.encoders.encoder import build

SHAPES = {
    "3x3": {"kernel_size": 3, "padding": 1},
    "3x3, stride 2": {"kernel_size": 3, "padding": 1, "stride": 2},
    "7x7, stride 2": {"kernel_size": 7, "padding": 3, "stride": 2, "bias": False},
    "1x1": {"kernel_size": 1},
    "1x1, stride 2": {"kernel_size": 1, "stride": 2},
    "patches": {"kernel_size": 4, "stride": 4},
    "not square": {"kernel_size": (1, 5), "padding": (0, 2), "stride": (3, 1)},
    "stride beyond the kernel": {"kernel_size": 2, "stride": 3},
}


def gradients(layer, images, weights):
    layer.zero_grad()
    leaf = images.clone().requires_grad_()
    result = layer(leaf)
    (result * weights).sum().backward()
    return [result.detach(), leaf.grad, *(parameter.grad for parameter in layer.parameters())]


@pytest.mark.parametrize("at_a_time", [2**22, 1])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("shape", SHAPES)
def test_results_and_gradients_are_those_of_torch(shape, layout, at_a_time, monkeypatch):
    monkeypatch.setattr(conv_gradients, "MAX_PATCH_VALUES", at_a_time)
    random = torch.Generator().manual_seed(0)
    layer = MatrixConv2d(5, 6, **SHAPES[shape])
    usual = copy.deepcopy(layer)
    usual.__class__ = nn.Conv2d
    images = torch.randn(4, 5, 13, 11, generator=random).contiguous(memory_format=layout)
    weights = torch.randn(layer(images).shape, generator=random)
    found, expected = gradients(layer, images, weights), gradients(usual.double(), images.double(), weights.double())
    assert torch.equal(found[0], functional.conv2d(images, layer.weight, layer.bias, layer.stride, layer.padding))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5 * float(other.abs().max()))
        assert one.stride() == other.stride() or one.shape != layer.weight.shape


@pytest.mark.parametrize("frozen", ["weight", "bias", "images"])
def test_only_what_is_trained_has_a_gradient(frozen):
    layer = MatrixConv2d(2, 3, 3)
    images = torch.randn(2, 2, 5, 5, requires_grad=frozen != "images")
    if frozen != "images":
        getattr(layer, frozen).requires_grad_(False)
    layer(images).sum().backward()
    given = {"weight": layer.weight.grad, "bias": layer.bias.grad, "images": images.grad}
    assert [name for name, gradient in given.items() if gradient is None] == [frozen]


def test_second_derivatives_are_those_of_torch():
    layer = MatrixConv2d(2, 3, 3, padding=1)
    usual = copy.deepcopy(layer)
    usual.__class__ = nn.Conv2d
    images = torch.randn(2, 2, 5, 5, generator=torch.Generator().manual_seed(0), requires_grad=True)
    found = []
    for each in (layer, usual):
        (first,) = torch.autograd.grad(each(images).square().sum(), images, create_graph=True)
        first.square().sum().backward()
        found.append([images.grad, each.weight.grad, each.bias.grad])
        images.grad = None
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))


def test_an_empty_batch():
    layer = MatrixConv2d(2, 3, 3)
    layer(torch.zeros(0, 2, 5, 5)).sum().backward()
    assert not layer.weight.grad.any()


def test_a_convolution_is_torch_s_own_without_gradients_and_in_half_precision():
    layer, images = MatrixConv2d(2, 3, 3), torch.randn(1, 2, 5, 5)
    assert type(layer(images).grad_fn).__name__ == "_ConvolutionBackward"
    with torch.autocast("cpu", torch.bfloat16):
        assert type(layer(images).grad_fn).__name__ == "ConvolutionBackward0"
    with torch.no_grad():
        assert layer(images).grad_fn is None
    assert type(layer.double()(images.double()).grad_fn).__name__ == "ConvolutionBackward0"
    assert layer.float()(images[0]).shape == (3, 3, 3), "an image without a batch"


def test_it_replaces_plain_convolutions_where_onednn_is_slow(monkeypatch):
    def network():
        depthwise, dilated = nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 4, 3, dilation=2)
        others = nn.Conv2d(4, 4, 3, padding="same"), nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect")
        return nn.Sequential(nn.Conv2d(3, 4, 3), depthwise, dilated, *others)

    for slow in (True, False):
        monkeypatch.setattr(conv_gradients, "ONEDNN_HAS_SLOW_GRADIENTS", slow)
        layers = network()
        before = repr(layers)
        speed_up_gradients(layers)
        assert [type(layer) is MatrixConv2d for layer in layers] == [slow, False, False, False, False]
        assert repr(layers) == before
        assert [is_plain(layer) for layer in layers] == [True, False, False, False, False]
        assert type(pickle.loads(pickle.dumps(layers))[0]) is type(layers[0])


def test_an_encoder_trains_to_the_same_gradients_with_it(monkeypatch):
    found = []
    for slow in (True, False):
        monkeypatch.setattr(conv_gradients, "ONEDNN_HAS_SLOW_GRADIENTS", slow)
        torch.manual_seed(0)
        encoder = build("small", dim=8, size=16, pretrained=False)
        assert any(type(module) is MatrixConv2d for module in encoder.modules()) == slow
        encoder(torch.rand(4, 3, 16, 16)).square().sum().backward()
        found.append([parameter.grad for parameter in encoder.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))
