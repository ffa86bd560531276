"""Tunings of a ViT, compared with plain loops and with timm: what they train and what they do not change."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from oracles.tuning import Bottleneck, Delta
from oracles.tuning import vit as oracle
from proxymetric.encoders import TUNINGS, Encoder, build, tuned_parameters
from proxymetric.encoders.tuning import complete_tuning, compose_tuning
from proxymetric.encoders.vit import Tower, first_tokens, is_vit, last_tokens
from vits import TINY_VIT, drawn, pictures, stir, two_blocks

HEADS = 2


@pytest.fixture
def vit() -> Any:
    """Two blocks of width 8, two heads, four patches and a class token, in double precision."""
    from timm.models.vision_transformer import VisionTransformer

    net = VisionTransformer(
        img_size=8, patch_size=4, embed_dim=8, depth=2, num_heads=HEADS, mlp_ratio=2, num_classes=0
    ).double()
    stir(net)
    return net


def tuned(vit: Any, tuning: str | dict[str, Any]) -> Any:
    made_of = compose_tuning(complete_tuning(tuning, TUNINGS), vit, TUNINGS, is_vit(vit)).double()
    stir(made_of, 100)
    return made_of


def forward_features(vit: Any, images: Tensor, tuning: Any, *tower: Any) -> Tensor:
    """Return the tokens after the final norm, with one tower."""
    return last_tokens(vit, first_tokens(vit, images), tuning, [Tower(*tower)])


def weights_of(module: nn.Module) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in module.state_dict().items()}


IMAGES = drawn(7, 2, 3, 8, 8)


def same(got: Tensor, want: np.ndarray) -> None:
    np.testing.assert_allclose(got.detach().numpy(), want, rtol=1e-9, atol=1e-10)


def same_gradient(got: Callable[[], Tensor], want: Callable[[], np.ndarray], parameter: Tensor) -> None:
    """Compare some entries of the gradient of a random sum of all outputs with central differences of the oracle."""
    upstream = drawn(9, *got().shape)
    (gradient,) = torch.autograd.grad((got() * upstream).sum(), parameter)
    values, step = parameter.detach().view(-1), 1e-5
    for place in range(0, len(values), max(1, len(values) // 3)):
        kept, sides = values[place].item(), []
        for sign in (1, -1):
            values[place] = kept + sign * step
            sides.append(float((want() * upstream.numpy()).sum()))
        values[place] = kept
        expected = (sides[0] - sides[1]) / (2 * step)
        assert gradient.flatten()[place].item() == pytest.approx(expected, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize(
    ("options", "counts"),
    [
        ({"prompts": 3}, [3, 3]),
        ({"prompts": 3, "step": 2}, [3, 1]),
        ({"prompts": 3, "depth": 1}, [3]),
        ({"prompts": 3, "step": 4}, [3]),
        ({"prompts": 0}, []),
    ],
)
def test_prompts_are_those_of_the_oracle(vit: Any, options: dict[str, int], counts: list[int]) -> None:
    tuning = tuned(vit, {"name": "vpt", **options})
    assert [tuple(p.shape) for p in tuning.parameters()] == [(n, 8) for n in counts]

    def want() -> np.ndarray:
        return oracle(IMAGES.numpy(), weights_of(vit), HEADS, [p.detach().numpy() for p in tuning.parameters()])

    same(forward_features(vit, IMAGES, tuning), want())
    for parameter in tuning.parameters():
        same_gradient(lambda: forward_features(vit, IMAGES, tuning), want, parameter)


def test_prompts_begin_as_the_released_ones() -> None:
    """Their standard deviation is sqrt(2 / ((N + 1) D)), even in a block with fewer than N prompts."""
    from timm.models.vision_transformer import VisionTransformer

    torch.manual_seed(0)
    wide = VisionTransformer(img_size=8, patch_size=4, embed_dim=384, depth=12, num_heads=6, num_classes=0)
    many = compose_tuning(complete_tuning({"name": "vpt", "step": 1, "depth": 9}, TUNINGS), wide, TUNINGS, True)
    assert [len(p) for p in many.parameters()] == [10, 9, 8, 7, 6, 5, 4, 3, 2]
    for parameter in many.parameters():
        assert parameter.std().item() == pytest.approx((2 / (11 * 384)) ** 0.5, rel=0.06)
        assert abs(parameter.mean().item()) < 0.003


@pytest.mark.parametrize("shared", [False, True])
def test_prompts_from_outside(vit: Any, shared: bool) -> None:
    """Each image has its own prompts, in one block and not in the other; gradients flow to them."""
    tuning = tuned(vit, {"name": "vpt+bitfit", "prompts": 2})
    given = drawn(3, 2, 3, 8).requires_grad_()
    own = [p.detach().numpy() for p in tuning.parameters()]

    def want() -> np.ndarray:
        theirs = given.detach().numpy()
        both = [np.stack([np.concatenate([own[1], rows]) for rows in theirs])]
        return oracle(IMAGES.numpy(), weights_of(vit), HEADS, [own[0], *both] if shared else [None, theirs])

    def got() -> Tensor:
        return forward_features(vit, IMAGES, tuning, [None, given], shared)

    same(got(), want())
    same_gradient(got, want, given)
    alone = forward_features(vit, IMAGES, tuned(vit, "bitfit"), [None, given])
    same(alone, oracle(IMAGES.numpy(), weights_of(vit), HEADS, [None, given.detach().numpy()]))
    none = forward_features(vit, IMAGES, tuning, ())
    same(none, oracle(IMAGES.numpy(), weights_of(vit), HEADS))


@pytest.mark.parametrize("norm", ["none", "pre", "post"])
@pytest.mark.parametrize("position", ["parallel", "sequential"])
def test_adapters_are_those_of_the_oracle(vit: Any, position: str, norm: str) -> None:
    options = {"bottleneck": 3, "position": position, "norm": norm, "scale": 0.7}
    tuning = tuned(vit, {"name": "vpt+adapter", "prompts": 1, "blocks": 2, **options})

    def want() -> np.ndarray:
        adapters = [
            Bottleneck(
                *(w[f"{layer}.{kind}"] for layer in ("down", "up") for kind in ("weight", "bias")),
                scale=0.7,
                position=position,
                pre=(w["pre.weight"], w["pre.bias"]) if norm == "pre" else None,
                post=(w["post.weight"], w["post.bias"]) if norm == "post" else None,
            )
            for w in map(weights_of, tuning["adapter"].blocks.values())
        ]
        prompts = [p.detach().numpy() for p in tuning["vpt"].parameters()]
        return oracle(IMAGES.numpy(), weights_of(vit), HEADS, prompts, adapters)

    same(forward_features(vit, IMAGES, tuning), want())
    for parameter in tuning["adapter"].blocks["0"].parameters():
        same_gradient(lambda: forward_features(vit, IMAGES, tuning), want, parameter)


def test_adapters_of_the_last_blocks_alone(vit: Any) -> None:
    tuning = tuned(vit, {"name": "adapter", "blocks": 1, "bottleneck": 3})
    assert list(tuning["adapter"].blocks) == ["1"], "the number of the block, of two"
    w = weights_of(tuning["adapter"].blocks["1"])
    only = Bottleneck(w["down.weight"], w["down.bias"], w["up.weight"], w["up.bias"])
    expected = oracle(IMAGES.numpy(), weights_of(vit), HEADS, adapters=[None, only])
    same(forward_features(vit, IMAGES, tuning), expected)
    first = oracle(IMAGES.numpy(), weights_of(vit), HEADS, adapters=[only])
    assert not np.allclose(first, expected), "the block matters"


@pytest.mark.parametrize(
    ("init", "down", "up"),
    [("lora", 384**-0.5 / 3**0.5, 0.0), ("bert", 0.02, 0.02), ("uniform", 384**-0.5 / 3**0.5, 64**-0.5 / 3**0.5),
     ("kaiming", (2 / 384) ** 0.5, (2 / 64) ** 0.5)],
)  # fmt: skip
def test_adapters_begin_as_named(init: str, down: float, up: float) -> None:
    from proxymetric.encoders.tuning.adapter import Bottleneck as Layer

    torch.manual_seed(0)
    layer = Layer(384, 64, "parallel", "none", init, 1.0)
    assert layer.down.weight.std().item() == pytest.approx(down, rel=0.02)
    assert layer.up.weight.std().item() == pytest.approx(up, rel=0.02)
    assert not layer.down.bias.any()
    assert not layer.up.bias.any()


@pytest.mark.parametrize("layers", ["qkv", "proj", "qkv+proj"])
def test_low_rank_is_that_of_the_oracle(vit: Any, layers: str) -> None:
    tuning = tuned(vit, {"name": "lora", "rank": 2, "alpha": 3.0, "layers": layers})

    def want() -> np.ndarray:
        deltas = {
            layer: [Delta(b[layer].a.detach().numpy(), b[layer].b.detach().numpy(), 3.0) for b in tuning["lora"].blocks]
            for layer in layers.split("+")
        }
        return oracle(IMAGES.numpy(), weights_of(vit), HEADS, **deltas)

    before = forward_features(vit, IMAGES, tuning)
    same(before, want())
    for parameter in tuning["lora"].blocks[0].parameters():
        same_gradient(lambda: forward_features(vit, IMAGES, tuning), want, parameter)
    tuning["lora"].fold(vit)
    assert not any(p.any() for name, p in tuning.named_parameters() if name.endswith(".b"))
    same(forward_features(vit, IMAGES, tuning), before.detach().numpy())
    same(vit.forward_features(IMAGES), before.detach().numpy())


def test_a_copy_of_an_encoder_has_low_rank_layers_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    two_blocks(monkeypatch)
    encoder = build(**TINY_VIT, tuning="lora").eval()
    stir(encoder.tuning)
    other, before = copy.deepcopy(encoder), encoder(pictures())
    assert torch.equal(other(pictures()), before)
    with torch.no_grad():
        for parameter in other.tuning.parameters():
            parameter.zero_()
    assert torch.equal(encoder(pictures()), before)
    assert not torch.allclose(other(pictures()), before)


TIMMS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "vit": ("vit_tiny_patch16_224", 64, {}),
    "deit, distilled": ("deit_tiny_distilled_patch16_224", 64, {}),
    "deit 3, no place for the class token": ("deit3_small_patch16_224", 64, {}),
    "dino": ("vit_small_patch16_224.dino", 64, {}),
    "dino v2, registers": ("vit_small_patch14_reg4_dinov2", 56, {}),
    "clip, pre-norm": ("vit_base_patch32_clip_224", 64, {}),
    "mae, averaged": ("vit_base_patch16_224.mae", 64, {"global_pool": "avg"}),
    "no class token": ("vit_base_patch16_gap_224", 64, {}),
    "norm behind": ("vit_base_patch16_rpn_224", 64, {}),
    "parallel": ("vit_small_patch16_18x2_224", 64, {}),
}


def timms(encoder: Encoder, images: Tensor) -> Tensor:
    """Return the features that timm computes."""
    tokens = encoder.backbone.forward_features(encoder.normalise(images))
    if encoder.pooling is None:
        return encoder.backbone.forward_head(tokens, pre_logits=True)
    return encoder.pooling(tokens)


@pytest.mark.parametrize("pooling", ["auto", "avg", "gem"])
@pytest.mark.parametrize("kind", TIMMS)
def test_without_prompts_features_are_timms_bit_for_bit(
    kind: str, pooling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, size, options = TIMMS[kind]
    two_blocks(monkeypatch, embed_dim=96, num_heads=3, **options)
    own = build(name, dim=8, size=size, pooling=pooling, pretrained=False, tuning="full").eval()
    assert own.is_vit
    x = pictures(2, size)
    want = timms(own, x)
    assert torch.equal(own.features(x), want)
    empty = build(
        name, dim=8, size=size, pooling=pooling, pretrained=False, tuning={"name": "vpt", "prompts": 0}
    ).eval()
    empty.load_state_dict(own.state_dict())
    # timm runs with the same frozen weights: on some CPUs, torch multiplies in another way if nothing has a gradient.
    assert torch.equal(empty.features(x), timms(empty, x))
    torch.testing.assert_close(empty.features(x), want)
    deep = build(name, dim=8, size=size, pooling=pooling, pretrained=False, tuning="vpt").eval()
    deep.load_state_dict(own.state_dict(), strict=False)
    features = deep.features(x)
    assert features.shape == want.shape
    assert not torch.equal(features, want), "LayerScale begins at 1e-5: the difference may be small"


def test_a_vit_of_another_class_runs_as_timm_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    two_blocks(monkeypatch)
    encoder = build("vit_small_patch16_dinov3", dim=8, size=64, pretrained=False, tuning="bitfit").eval()
    assert not encoder.is_vit
    tokens = encoder.backbone.forward_features(encoder.normalise(pictures(2, 64)))
    assert torch.equal(encoder.features(pictures(2, 64)), encoder.backbone.forward_head(tokens, pre_logits=True))


SMALL = {"backbone": "vit_small_patch16_224", "dim": 384, "layer_norm": True, "pretrained": False}
HEAD, PROMPTS, BIASES, ADAPTER = 148_608, 46_080, 51_456, 2 * 384 * 256 + 256 + 384


@pytest.mark.parametrize(
    ("tuning", "counts", "printed"),
    [
        ("linear", {"head": HEAD}, 0.19),
        ("bitfit", {"head": HEAD, "biases": BIASES}, 0.26),
        ("vpt", {"head": HEAD, "prompts": PROMPTS}, 0.23),
        ("vpt+bitfit", {"head": HEAD, "prompts": PROMPTS, "biases": BIASES}, 0.30),
        ({"name": "adapter", "blocks": 7, "bottleneck": 256}, {"head": HEAD, "adapters": 7 * ADAPTER}, 1.57),
        (
            {"name": "adapter+bitfit", "blocks": 1, "bottleneck": 256},
            {"head": HEAD, "adapters": ADAPTER, "biases": BIASES},
            0.46,
        ),
        ("lora", {"head": HEAD, "lora": 12 * 8 * (384 + 3 * 384)}, None),
        ("full", {"head": HEAD, "backbone": 21_665_664}, None),
    ],
)
def test_counts_are_those_of_table_1(tuning: Any, counts: dict[str, int], printed: float | None) -> None:
    """They include 100 free proxies of 384 numbers and, with BitFit, the 21,843 biases of the unused classifier."""
    found = tuned_parameters(build(**SMALL, tuning=tuning))
    assert found == counts
    if printed is not None:
        unused = 21_843 if "biases" in counts else 0
        assert (sum(found.values()) + 38_400 + unused) / 1e6 == pytest.approx(printed, rel=0.03)
