"""Requirements in the header of a weights file: they are read, applied, checked against the recipe, and reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from proxymetric.encoders import build, load_weights
from proxymetric.encoders.needs import Needs
from proxymetric.models.load import load
from proxymetric.runs import recipe as recipes
from proxymetric.system import _torchvision  # noqa: F401
from training_runs import run

import timm  # isort: skip  (needs a torchvision that imports)

FIRST = {"backbone": "resnet26", "stride": "1x1", "bn_eps": 1.001e-5, "mean": [0.4, 0.5, 0.6], "std": [0.2, 0.3, 0.25]}


def weights(file: Path, name: str, needs: object, **options: object) -> Path:
    torch.manual_seed(3)
    network = timm.create_model(name, pretrained=False, num_classes=0, **options)
    header = needs if isinstance(needs, str) else json.dumps(needs)
    save_file({key: value.contiguous() for key, value in network.state_dict().items()}, file, {"proxymetric": header})
    return file


def test_the_header_is_applied_and_told(tmp_path: Path):
    file = weights(tmp_path / "first.safetensors", "resnet26", FIRST)
    encoder = build("resnet26", dim=8, size=64, weights=file)
    assert (encoder.config["stride"], encoder.config["bn_eps"]) == ("1x1", 1.001e-5)
    assert torch.equal(encoder.mean.flatten(), torch.tensor([0.4, 0.5, 0.6]))
    assert {module.eps for module in encoder.modules() if isinstance(module, torch.nn.BatchNorm2d)} == {1.001e-5}
    assert encoder.report is not None
    assert encoder.report.applied.keys() == {"stride", "bn_eps", "mean", "std"}
    assert "applied from its header: stride 1x1, bn_eps 1.001e-05" in str(encoder.report)


def test_the_stride_moves_to_the_first_convolution_and_back():
    torch.manual_seed(0)
    ours, theirs = (build("resnet26", dim=8, size=64, pretrained=False, stride=s).eval() for s in ("1x1", None))
    for stage in (2, 3, 4):
        block = getattr(ours.backbone, f"layer{stage}")[0]
        assert (block.conv1.stride, block.conv2.stride) == ((2, 2), (1, 1))
    for module in ours.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(module.weight, 0.5, 1.5)  # timm starts the last one of each block at 0
    theirs.load_state_dict(ours.state_dict())
    images = torch.rand(2, 3, 64, 64)
    one, other = ours.features(images), theirs.features(images)
    assert one.shape == other.shape
    assert not torch.allclose(one, other)
    # By hand: the 1x1 convolution of a stage's first block reads every second position; its 3x3 has no stride.
    block, x = ours.backbone.layer2[0], torch.rand(1, ours.backbone.layer2[0].conv1.in_channels, 8, 8)
    halved = torch.nn.functional.conv2d(x[:, :, ::2, ::2], block.conv1.weight)
    middle = torch.nn.functional.conv2d(torch.relu(block.bn1(halved)), block.conv2.weight, padding=1)
    last = block.bn3(torch.nn.functional.conv2d(torch.relu(block.bn2(middle)), block.conv3.weight))
    assert torch.allclose(block(x), torch.relu(last + block.downsample(x)), atol=1e-5)
    assert ours.fingerprint() != theirs.fingerprint()
    again = build(**ours.config)
    assert again.backbone.layer3[0].conv1.stride == (2, 2)
    assert build("resnet26", dim=8, size=64, pretrained=False, stride="3x3").backbone.layer2[0].conv2.stride == (2, 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backbone": "resnet50"}, "made for backbone='resnet26', but the recipe has backbone='resnet50'"),
        ({"stride": "3x3"}, "made with stride='1x1', but the recipe has stride='3x3'"),
        ({"bn_eps": 1e-5}, "made with bn_eps=1.001e-05, but the recipe has bn_eps=1e-05"),
    ],
)
def test_a_contradiction_names_both(tmp_path: Path, settings, message):
    file = weights(tmp_path / "first.safetensors", "resnet26", FIRST)
    with pytest.raises(ValueError, match=message):
        build(**{"backbone": "resnet26", "dim": 8, "size": 64, "weights": file, **settings})


def test_an_encoder_that_was_built_otherwise_refuses_the_file(tmp_path: Path):
    file = weights(tmp_path / "first.safetensors", "resnet26", {"stride": "1x1"})
    with pytest.raises(ValueError, match="made with stride='1x1', but the recipe has stride='3x3'"):
        load_weights(build("resnet26", dim=8, size=64, pretrained=False), file)


def test_normalisation_and_size_give_way_to_the_recipe(tmp_path: Path):
    needs = {"backbone": "vit_tiny_patch16_224", "img_size": 32, "mean": [0.1, 0.2, 0.3], "std": [0.5, 0.5, 0.5]}
    file = weights(tmp_path / "vit.safetensors", "vit_tiny_patch16_224", needs, img_size=32)
    asked = {"encoder": {"backbone": "vit_tiny_patch16_224", "weights": str(file)}}
    checked = recipes.check(asked)
    assert checked.view["size"] == 32
    assert checked.changed["view"]["size"] == 32
    assert recipes.check({**asked, "view": {"size": 48}}).view["size"] == 48
    encoder = build("vit_tiny_patch16_224", dim=8, size=48, weights=file, mean=(0.5, 0.5, 0.5))
    assert torch.equal(encoder.mean.flatten(), torch.full((3,), 0.5))
    assert encoder.report is not None
    assert encoder.report.overridden == {"mean": ((0.1, 0.2, 0.3), (0.5, 0.5, 0.5)), "img_size": (32, 48)}
    assert "img_size is 48 from the recipe; the header says 32" in str(encoder.report)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("{", "expected JSON"),
        ([1], r"got \[1\] under 'proxymetric', expected a JSON object"),
        ({"patch": 16}, "got 'patch', expected one of backbone, stride"),
        ({"stride": "2x2"}, "stride: got '2x2', expected '1x1' or '3x3'"),
        ({"bn_eps": 0}, "bn_eps: got 0, expected a number above 0"),
        ({"std": [0.2, 0.2]}, r"std: got \[0.2, 0.2\], expected three numbers"),
        ({"img_size": True}, "img_size: got True, expected a whole number"),
    ],
)
def test_a_wrong_header_is_a_sentence(tmp_path: Path, header, message):
    file = weights(tmp_path / "w.safetensors", "resnet10t", header)
    with pytest.raises(ValueError, match=message):
        build("resnet10t", dim=8, size=64, weights=file)


@pytest.mark.parametrize("name", ["resnet10t", "vit_tiny_patch16_224", "small", "resnetblur50"])
def test_a_network_without_plain_bottlenecks_has_no_stride_to_move(name: str):
    with pytest.raises(ValueError, match="expected a ResNet of plain bottleneck blocks"):
        build(name, dim=8, size=64, pretrained=False, stride="1x1")


def test_files_without_needs_have_none(tmp_path: Path):
    save_file({"a": torch.zeros(1)}, tmp_path / "w.safetensors")
    assert Needs.of(tmp_path / "w.safetensors") == Needs.of(tmp_path / "none.safetensors") == Needs()


@pytest.mark.slow
@pytest.mark.usefixtures("only_training")
def test_a_run_says_what_was_applied_and_goes_on_without_the_file(photos: Path, tmp_path: Path):
    file = weights(tmp_path / "w.safetensors", "resnet26", {**FIRST, "img_size": 32})
    settings = {"encoder__backbone": "resnet26", "encoder__weights": str(file), "train__epochs": 1, "train__batch": 32}
    settings |= {"view__size": 32, "view__resize": 32}
    done = run(photos, tmp_path / "run", **settings)
    assert done.result.weights["file"] == "w.safetensors"
    assert done.result.weights["applied"]["stride"] == "1x1"
    file.unlink()
    assert load(done.folder, device="cpu").encoder.backbone.layer2[0].conv1.stride == (2, 2)
    again = run(photos, tmp_path / "run", resume=True, **{**settings, "train__epochs": 2})
    assert again.result.weights["applied"]["stride"] == "1x1"
