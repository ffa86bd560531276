"""The head of an encoder: features of length 1, and a linear layer that can be replaced."""

from __future__ import annotations

import pytest
import torch

from proxymetric.encoders import build, linear_layer
from proxymetric.models.export import trace
from proxymetric.models.model import Model

IMAGES = torch.randint(0, 256, (5, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def encoder(**settings):
    torch.manual_seed(0)
    return build("small", dim=6, size=32, **settings).eval()


def test_features_are_divided_by_their_length_before_the_linear_layer():
    plain, unit = encoder(), encoder(normalise_features=True)
    features = plain.features(IMAGES)
    linear = linear_layer(unit.head)
    assert torch.equal(linear.weight, linear_layer(plain.head).weight), "the same seed makes the same head"
    torch.testing.assert_close(unit(IMAGES), linear(features / features.norm(dim=1, keepdim=True)))
    torch.testing.assert_close(unit.head(100 * features), unit.head(features))


def test_the_lengths_of_low_precision_features_are_those_of_float32():
    head = encoder(normalise_features=True).head
    large = torch.full((1, 256), 3e4).half()
    assert head[0](large).norm().item() == pytest.approx(1, abs=1e-4), "the square of the length overflows in float16"


def test_the_backbone_gets_the_gradient_of_the_division():
    unit = encoder(normalise_features=True)
    features = unit.features(IMAGES).detach().double().requires_grad_()
    assert torch.autograd.gradcheck(unit.double().head, (features,))


def test_encoders_that_differ_in_the_head_share_their_features():
    assert encoder().fingerprint() == encoder(normalise_features=True).fingerprint()


def test_a_head_of_other_dimensions():
    for settings in ({}, {"normalise_features": True}, {"layer_norm": True}):
        unit = encoder(**settings)
        names, random_state = list(unit.state_dict()), torch.get_rng_state()
        unit.set_head(torch.eye(3, 256), torch.arange(3.0))
        assert torch.equal(torch.get_rng_state(), random_state)
        assert (unit.dim, unit.config["dim"], unit(IMAGES).shape) == (3, 3, (5, 3))
        again = build(**unit.config)
        again.load_state_dict(unit.state_dict())
        assert torch.equal(again.eval()(IMAGES), unit(IMAGES))
        assert list(unit.state_dict()) == names
        assert [name for name, p in unit.named_parameters() if p.requires_grad and name.startswith("head")]


@pytest.mark.parametrize("setting", ["normalise_features", "layer_norm"])
def test_a_head_without_a_layer_is_refused(setting):
    with pytest.raises(ValueError, match=f"{setting}: got True with head='none', expected head='linear'"):
        build("small", dim=None, size=32, head="none", **{setting: True})


def test_an_exported_program_divides_too():
    model = Model(encoder(normalise_features=True), normalise="l2", classes=[], view={"size": 32, "resize": None})
    torch.testing.assert_close(trace(model).module()(IMAGES), model.embed(IMAGES), atol=1e-6, rtol=0)
