"""The recipes of `recipes/backbones`: names that timm knows, normalisation, and shapes with random weights."""

import pytest
import torch

from proxymetric.encoders import build
from proxymetric.encoders.backbones import make_backbone
from proxymetric.runs.recipe import check, load, names
from proxymetric.system import _torchvision  # noqa: F401

IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
NORMALISATION = {
    "dinov2-vit-s": IMAGENET, "dinov3-vit-s": IMAGENET, "siglip2-vit-b": HALF, "clip-vit-b": CLIP, "eva02-vit-b": CLIP,
    "convnext-b": IMAGENET,
}  # fmt: skip
RECIPES = sorted(name.removeprefix("backbones/") for name in names() if name.startswith("backbones/"))


def known(backbone: str) -> bool:
    import timm

    return timm.is_model(backbone)


def test_every_recipe_is_tested():
    assert sorted(NORMALISATION) == RECIPES


@pytest.mark.parametrize("name", RECIPES)
def test_timm_has_weights_of_this_name(name):
    import timm

    recipe = check(load(f"backbones/{name}"))
    backbone = recipe.encoder["backbone"]
    if not known(backbone):
        pytest.skip(f"timm {timm.__version__} does not know {backbone}")
    preset = timm.get_pretrained_cfg(backbone, allow_unregistered=False)
    assert preset.has_weights
    assert (preset.mean, preset.std) == NORMALISATION[name]
    assert preset.interpolation == recipe.view["interpolation"]
    if name != "dinov2-vit-s":  # trained at 518 pixels
        assert recipe.view["size"] == preset.input_size[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_shapes_with_random_weights(name):
    recipe = check(load(f"backbones/{name}"))
    backbone, size = recipe.encoder["backbone"], recipe.view["size"]
    if not known(backbone):
        pytest.skip(f"this timm does not know {backbone}")
    with torch.device("meta"):  # shapes without memory
        encoder = build(**recipe.encoder | {"pretrained": False}, size=size)
        vectors = encoder(torch.empty(2, 3, size, size))
        made = make_backbone(backbone, size, False)
    assert vectors.shape == (2, recipe.encoder["dim"])
    assert (made.mean, made.std) == NORMALISATION[name]
    assert all(p.requires_grad for p in encoder.head.parameters())
