"""Encoders: shapes, normalisation, pooling against NumPy, freezing, and rebuilding from the config."""

import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from proxymetric.encoders import Encoder, Pooling, build, parameter_counts


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: small networks gain nothing from more, and are much slower if the cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pictures(count: int = 2, size: int = 32, seed: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=random)


def stir(encoder: nn.Module) -> None:
    """Change every parameter and statistic, so that two encoders are not equal just because both are new."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, value in encoder.state_dict().items():
            if value.is_floating_point() and name not in ("mean", "std"):
                value.add_(0.05 * torch.rand(value.shape, generator=generator))


KINDS = {
    "small": {"backbone": "small", "dim": 16, "size": 32},
    "resnet": {"backbone": "resnet18", "dim": 16, "size": 64, "pooling": "avg+max", "bn_eps": 1e-3, "layer_norm": True},
    "vit": {"backbone": "vit_tiny_patch16_224", "dim": 16, "size": 64, "pooling": "gem", "learn_p": True},
    "channels last": {"backbone": "mambaout_femto", "dim": 16, "size": 64, "pooling": "max"},
    "mobilenet": {"backbone": "mobilenetv3_small_050", "dim": None, "size": 64, "head": "none", "freeze_bn": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_config_and_state_rebuild_the_same_encoder(kind: str) -> None:
    encoder = build(**KINDS[kind], pretrained=False)
    stir(encoder)
    again = build(**json.loads(json.dumps(encoder.config)))
    assert not torch.equal(again.eval()(pictures(size=encoder.size)), encoder.eval()(pictures(size=encoder.size)))
    again.load_state_dict(encoder.state_dict())
    x = pictures(size=encoder.size)
    ours, theirs = encoder.eval()(x), again.eval()(x)
    assert ours.shape == (2, encoder.dim)
    assert torch.equal(ours, theirs)
    assert again.fingerprint() == encoder.fingerprint()
    assert again.config == encoder.config
    trained = {name for name, p in encoder.named_parameters() if p.requires_grad}
    assert trained == {name for name, p in again.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("kind", KINDS)
def test_every_trainable_parameter_gets_a_gradient(kind: str) -> None:
    encoder = build(**KINDS[kind], pretrained=False).train()
    encoder(pictures(4, encoder.size)).square().sum().backward()
    for name, parameter in encoder.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name


def test_uint8_and_float_images_are_normalised_alike() -> None:
    encoder = build("resnet18", dim=8, size=64, pretrained=False).eval()
    x = pictures(3, 64)
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    want = (x.numpy() / 255 - mean[:, None, None]) / std[:, None, None]
    np.testing.assert_allclose(encoder.normalise(x), want, atol=1e-5)
    torch.testing.assert_close(encoder(x), encoder(x.float() / 255))
    torch.testing.assert_close(encoder(x), encoder.head(encoder.features(x)))
    assert encoder.interpolation == "bicubic"


def test_normalisation_travels_with_the_weights() -> None:
    one, other = build("small", dim=8, size=32), build("small", dim=8, size=32)
    one.mean.fill_(0.25)
    other.load_state_dict(one.state_dict())
    assert torch.equal(other.mean, one.mean)
    assert other.fingerprint() == one.fingerprint()


@pytest.mark.parametrize("bad", [torch.zeros(3, 32, 32), torch.zeros(1, 1, 32, 32), torch.zeros(1, 3, 32, 32).long()])
def test_images_of_another_kind_are_refused(bad: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"images: got (shape \(|torch\.int64)"):
        build("small", dim=8, size=32)(bad)


def test_channels_last_and_autocast() -> None:
    encoder = build("resnet18", dim=8, size=64, pooling="gem", pretrained=False).eval()
    x = pictures(2, 64)
    plain = encoder(x)
    turned = encoder.to(memory_format=torch.channels_last)(x.contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(turned, plain, rtol=1e-3, atol=1e-4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = encoder(x)
    assert low.dtype == torch.bfloat16
    assert torch.nn.functional.cosine_similarity(low.float(), plain).min() > 0.99


LAYOUTS = {"map": (2, 5, 3, 4), "map-last": (2, 3, 4, 5), "tokens": (2, 14, 5)}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["avg", "max", "avg+max", "gem"])
def test_pooling_against_numpy(name: str, layout: str) -> None:
    x = torch.randn(LAYOUTS[layout], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    prefix = 2 if layout == "tokens" else 0
    got = Pooling(name, layout, prefix, gem_p=2.5).double()(x)
    places = {
        "map": lambda a: a.reshape(2, 5, 12).transpose(0, 2, 1),
        "map-last": lambda a: a.reshape(2, 12, 5),
        "tokens": lambda a: a[:, 2:],
    }[layout](x.numpy())
    assert places.shape == (2, 12, 5)
    want = {
        "avg": places.sum(1) / 12,
        "max": places.max(1),
        "avg+max": places.sum(1) / 12 + places.max(1),
        "gem": (np.maximum(places, 1e-6) ** 2.5).mean(1) ** (1 / 2.5),
    }[name]
    np.testing.assert_allclose(got, want, rtol=1e-12)


@pytest.mark.parametrize("p", [1.0, 3.0, 6.0])
def test_gem_gradient_in_input_and_p(p: float) -> None:
    pool = Pooling("gem", gem_p=p, learn_p=True).double()
    x = torch.rand(2, 3, 2, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.1

    def pooled(x: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(pool, {"p": exponent}, (x,))

    assert torch.autograd.gradcheck(pooled, (x.requires_grad_(), pool.p.detach().clone().requires_grad_()))


def test_gem_stays_finite_where_powers_would_not() -> None:
    pool = Pooling("gem", gem_p=30.0, learn_p=True)
    x = torch.tensor([[[[0.0, -1.0]], [[1e4, 1.0]], [[1e-3, 2e-3]]]], requires_grad=True)
    y = pool(x)
    y.sum().backward()
    np.testing.assert_allclose(y.detach()[0, 1:], np.array([1e4, 2e-3]) * 0.5 ** (1 / 30), rtol=1e-4)
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()
    assert torch.isfinite(pool.p.grad)


@pytest.mark.parametrize(
    ("backbone", "changes"),
    [("small", True), ("resnet18", True), ("convnext_atto", False), ("vit_tiny_patch16_224", False)],
)
def test_the_maximum_is_added_to_a_plain_average_only(backbone: str, changes: bool) -> None:
    encoder = build(backbone, dim=8, size=64, pretrained=False, freeze_bn=True)
    stir(encoder)
    x = pictures(size=64)
    modes = [module.training for module in encoder.modules()]
    places = encoder.eval().backbone.forward_features(encoder.normalise(x))
    own = encoder.features(x)
    encoder.train()
    assert encoder.add_maximum() is changes
    assert [module.training for name, module in encoder.named_modules() if name != "pooling"] == modes
    pooled = encoder.eval().features(x)
    torch.testing.assert_close(pooled, own + places.amax((2, 3)) if changes else own)
    assert encoder.config["pooling"] == ("avg+max" if changes else "auto")
    assert not encoder.add_maximum(), "only once"


def test_the_backbones_own_pooling() -> None:
    import timm

    for name, size in (("resnet18", 64), ("vit_tiny_patch16_224", 64)):
        encoder = build(name, size=size, dim=8, pretrained=False).eval()
        options = {} if name == "resnet18" else {"img_size": size}
        theirs = timm.create_model(name, num_classes=0, **options).eval()
        theirs.load_state_dict(encoder.backbone.state_dict())
        torch.testing.assert_close(encoder.features(pictures(2, size)), theirs(encoder.normalise(pictures(2, size))))


def test_vit_pools_patch_tokens_without_the_class_token() -> None:
    encoder = build("vit_tiny_patch16_224", dim=8, size=64, pooling="avg", pretrained=False).eval()
    tokens = encoder.backbone.forward_features(encoder.normalise(pictures(2, 64)))
    assert tokens.shape[1] == 17
    torch.testing.assert_close(encoder.features(pictures(2, 64)), tokens[:, 1:].mean(1))


def test_maps_with_channels_last_are_recognised() -> None:
    encoder = build("mambaout_femto", dim=8, size=64, pooling="max", pretrained=False).eval()
    features = encoder.backbone.forward_features(encoder.normalise(pictures(2, 64)))
    assert features.shape == (2, 2, 2, 288)
    assert torch.equal(encoder.features(pictures(2, 64)), features.flatten(1, 2).max(1).values)


def test_frozen_batch_norm_stays_frozen() -> None:
    encoder = build("resnet18", dim=8, size=64, freeze_bn=True, pretrained=False)
    norms = [m for m in encoder.modules() if isinstance(m, nn.BatchNorm2d)]
    before = [(m.running_mean.clone(), m.weight.clone()) for m in norms]
    optimizer = torch.optim.SGD([p for p in encoder.parameters() if p.requires_grad], lr=0.1)
    encoder.set_backbone_trainable(False)
    encoder.set_backbone_trainable(True)
    encoder.eval()
    encoder.train()
    moved = encoder.backbone.conv1.weight.clone()
    encoder(pictures(4, 64)).square().mean().backward()
    optimizer.step()
    assert len(norms) == 20
    assert encoder.training
    assert encoder.backbone.layer1.training
    for norm, (mean, weight) in zip(norms, before):
        assert not norm.training
        assert torch.equal(norm.running_mean, mean)
        assert torch.equal(norm.weight, weight)
    assert not torch.equal(encoder.backbone.conv1.weight, moved)


def test_frozen_statistics_let_scale_and_shift_learn() -> None:
    whole, fixed = (build("resnet18", dim=8, size=64, freeze_bn=what, pretrained=False) for what in ("none", "all"))
    encoder = build("resnet18", dim=8, size=64, freeze_bn="statistics", pretrained=False)
    norms = [m for m in encoder.modules() if isinstance(m, nn.BatchNorm2d)]
    affine = sum(m.weight.numel() + m.bias.numel() for m in norms)
    trained = {name: parameter_counts(e)["trained"] for name, e in (("all", fixed), ("none", whole), ("own", encoder))}
    assert trained["own"] == trained["none"] == trained["all"] + affine
    encoder.set_backbone_trainable(False)
    assert not any(m.weight.requires_grad or m.bias.requires_grad for m in norms), "not during a warm-up"
    encoder.set_backbone_trainable(True)
    stir(encoder)  # timm starts the last norm of a block at 0, which lets no gradient through
    before = [{name: value.clone() for name, value in m.state_dict().items()} for m in norms]
    optimizer = torch.optim.SGD([p for p in encoder.parameters() if p.requires_grad], lr=0.1)
    encoder.train()(pictures(4, 64)).square().mean().backward()
    optimizer.step()
    for norm, old in zip(norms, before):
        moved = {name for name, value in norm.state_dict().items() if not torch.equal(value, old[name])}
        assert moved == {"weight", "bias"}


@pytest.mark.parametrize(("said", "meant"), [(True, "all"), (False, "none")])
def test_freeze_bn_may_be_true_or_false(said: bool, meant: str) -> None:
    first, second = (build("resnet18", dim=8, size=64, freeze_bn=value, pretrained=False) for value in (said, meant))
    assert [p.requires_grad for p in first.parameters()] == [p.requires_grad for p in second.parameters()]
    assert [m.training for m in first.modules()] == [m.training for m in second.modules()]


def test_an_unknown_freeze_bn_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"freeze_bn: got 'statistic', .*did you mean 'statistics'"):
        build("resnet18", dim=8, size=64, freeze_bn="statistic")  # before any weights are downloaded


def test_without_freezing_batch_norm_learns() -> None:
    encoder = build("small", dim=8, size=32).train()
    norm = encoder.backbone.stages[0][1]
    encoder(pictures(4))
    assert norm.weight.requires_grad
    assert norm.running_mean.abs().sum() > 0


def test_warm_up_trains_the_head_alone() -> None:
    encoder = build("small", dim=8, size=32, pooling="gem", learn_p=True)
    everything = parameter_counts(encoder)
    assert everything["trained"] == everything["total"] == sum(p.numel() for p in encoder.parameters())
    encoder.set_backbone_trainable(False)
    assert parameter_counts(encoder) == {"trained": 256 * 8 + 8, "total": everything["total"]}
    encoder.set_backbone_trainable(True)
    assert parameter_counts(encoder) == everything
    ids = [id(p) for p in encoder.head_parameters() + encoder.backbone_parameters()]
    assert sorted(ids) == sorted(id(p) for p in encoder.parameters())


def feature_gradient(encoder: Encoder, images: Tensor) -> float:
    """Return the summed lengths of the gradients of backbone and tuning."""
    encoder.zero_grad(set_to_none=True)
    encoder(images).float().sum().backward()
    return sum(float(p.grad.norm()) for p in encoder.backbone_parameters() if p.grad is not None)


def test_a_warm_up_does_not_use_the_compiled_step() -> None:
    encoder, calls = build("small", dim=8, size=32).train(), []
    eager = feature_gradient(encoder, pictures(4))

    def compiled(*inputs):
        calls.append(1)
        return encoder._pooled(*inputs)

    encoder._compiled = compiled
    encoder.set_backbone_trainable(False)
    assert feature_gradient(encoder, pictures(4)) == 0
    assert not calls
    encoder.set_backbone_trainable(True)
    assert feature_gradient(encoder, pictures(4)) == pytest.approx(eager, rel=1e-4)
    assert calls


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("recorded", [False, True])
def test_a_compiled_backbone_trains_after_a_warm_up(recorded: bool) -> None:
    encoder = build("resnet18", dim=16, size=32, pretrained=False, freeze_bn=True).cuda().train()
    images = pictures(4).cuda()
    eager = feature_gradient(encoder, images)
    encoder.compile_steps(recorded)
    encoder.set_backbone_trainable(False)
    for _ in range(3):
        assert feature_gradient(encoder, images) == 0
    encoder.set_backbone_trainable(True)
    for _ in range(3):
        assert feature_gradient(encoder, images) == pytest.approx(eager, rel=1e-2)


def test_head() -> None:
    torch.manual_seed(0)
    plain = build("small", dim=2000, size=32).head
    assert isinstance(plain, nn.Linear)
    assert plain.weight.std().item() == pytest.approx((2 / 2000) ** 0.5, rel=0.02)
    assert not plain.bias.any()
    normed = build("small", dim=4, size=32, layer_norm=True)
    features = normed.features(pictures(8))
    centred = features - features.mean(1, keepdim=True)
    want = nn.functional.linear(centred / (centred.square().mean(1, keepdim=True) + 1e-5).sqrt(), normed.head[1].weight)
    torch.testing.assert_close(normed.head(features), want, rtol=1e-4, atol=1e-5)
    bare = build("small", dim=None, size=32, head="none")
    assert bare.dim == 256
    assert build(**{**bare.config, "dim": 256}).dim == 256


def test_fingerprint_tells_features_apart_but_not_heads() -> None:
    one = build("small", dim=8, size=32)
    other = build("small", dim=16, size=32, layer_norm=True)
    assert one.fingerprint() != other.fingerprint()  # other random weights
    other.backbone.load_state_dict(one.backbone.state_dict())
    assert one.fingerprint() == other.fingerprint()
    before = one.fingerprint()
    one.backbone.stages[0][1].running_mean[0] += 1e-3
    assert one.fingerprint() != before
    pooled = build("small", dim=16, size=32, pooling="max")
    pooled.backbone.load_state_dict(other.backbone.state_dict())
    assert pooled.fingerprint() != other.fingerprint()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"backbone": "resnt18"}, "backbone: got 'resnt18', expected .*; did you mean resnet18"),
        ({"backbone": "resnet18.no_such_tag"}, "resnet18, resnet18.a1_in1k"),
        ({"pooling": "gme"}, "did you mean 'gem'"),
        ({"head": "mlp"}, "head: got 'mlp', expected one of linear, none"),
        ({"head": "none", "dim": 512}, "dim: got 512 .*256 features of 'small'"),
        ({"head": "none", "dim": None, "layer_norm": True}, "layer_norm: got True"),
        ({"dim": None}, "dim: got None"),
        ({"gem_p": 0.0}, "gem_p: got 0.0"),
        ({"learn_p": True}, "learn_p: got True with pooling='auto'"),
        ({"bn_eps": -1.0}, "bn_eps: got -1.0"),
        ({"size": 0}, "size: got 0"),
        ({"backbone": "inception_v4", "size": 16}, "size: got 16, expected a size that suits"),
        (
            {"backbone": "pit_ti_224", "size": 224, "pooling": "avg"},
            "pooling: got a backbone .*, expected pooling='auto'",
        ),
    ],
)
def test_mistakes_get_a_sentence(options: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        build(**{"backbone": "small", "dim": 8, "size": 32, "pretrained": False, **options})


def test_weights_that_cannot_be_fetched_are_named_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Port 9 of this machine stands for a hub that cannot be reached.
    from huggingface_hub import constants

    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match=r"'resnet18\.a1_in1k' could not be downloaded") as caught:
        build("resnet18", dim=8, size=32)
    assert "--weights FILE" in str(caught.value)
    assert "encoder.pretrained=false" in str(caught.value)
    assert not constants.HF_HUB_OFFLINE


def test_torchvision_imports() -> None:
    from torchvision.transforms import v2

    from proxymetric.system import _torchvision

    assert v2.functional.horizontal_flip(torch.tensor([[[1, 2]]])).tolist() == [[[2, 1]]]
    assert _torchvision.defined_operators == (
        not torch._C._dispatch_has_kernel_for_dispatch_key("torchvision::nms", "CPU")
    )


def test_a_torchvision_that_imports_is_left_alone_and_other_failures_are_not_hidden(tmp_path: Path) -> None:
    program = """
        import pathlib, sys, torch
        folder = pathlib.Path(sys.argv[1]) / "torchvision"
        folder.mkdir()
        sys.path.insert(0, sys.argv[1])
        (folder / "__init__.py").write_text("raise RuntimeError('operator torchvision::roi_align does not exist')")
        try:
            import proxymetric.system._torchvision
        except RuntimeError as error:
            print(error)
        (folder / "__init__.py").write_text("x = 1  # imports")
        from proxymetric.system import _torchvision
        print(_torchvision.defined_operators, hasattr(torch.ops.torchvision, "nms"))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["operator torchvision::roi_align does not exist", "False False"]
