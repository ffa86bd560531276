"""Weights from files: cast up, classifier left out, wrong files refused with a reason, pickles never opened."""

import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from proxymetric.encoders import build, load_weights
from proxymetric.system import _torchvision  # noqa: F401

import timm  # isort: skip  (needs a torchvision that imports)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: small networks gain nothing from more, and are much slower if the cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def saved(path: Path, name: str, dtype: torch.dtype = torch.float32, drop: str = "~", **options: object) -> Path:
    torch.manual_seed(3)
    state = timm.create_model(name, pretrained=False, num_classes=7, **options).state_dict()
    cast = {k: v.to(dtype) if v.is_floating_point() else v for k, v in state.items() if not k.startswith(drop)}
    save_file({k: v.contiguous() for k, v in cast.items()}, path)
    return path


def test_half_precision_is_cast_up_and_the_classifier_left_out(tmp_path: Path) -> None:
    file = saved(tmp_path / "half.safetensors", "resnet18", torch.float16)
    encoder = build("resnet18", dim=8, size=32, weights=file)
    report = encoder.report
    assert report is not None
    assert report.dropped == ["fc.bias", "fc.weight"]
    assert (len(report.matched), report.missing, report.unexpected, report.mismatched) == (120, [], [], {})
    assert "120 of 120 tensors of 'resnet18' matched" in str(report)
    assert "classifier left out (2): fc.bias, fc.weight" in str(report)
    assert {p.dtype for p in encoder.parameters()} == {torch.float32}
    torch.manual_seed(3)
    first = timm.create_model("resnet18", pretrained=False, num_classes=7).conv1.weight
    assert torch.equal(encoder.backbone.conv1.weight, first.half().float())
    assert encoder.source == "file half.safetensors"
    assert encoder.config["weights"] is None
    assert encoder.config["pretrained"] is False


@pytest.mark.parametrize("name", ["convnext_atto", "vit_tiny_patch16_224", "mobilenetv3_small_050"])
def test_classifiers_under_other_names(tmp_path: Path, name: str) -> None:
    options = {"img_size": 64} if name.startswith("vit") else {}
    encoder = build(name, dim=8, size=64, weights=saved(tmp_path / "w.safetensors", name, **options))
    assert encoder.report is not None
    assert len(encoder.report.dropped) == 2
    assert encoder.report.fits


def test_counters_may_be_missing_and_foreign_parts_are_reported(tmp_path: Path) -> None:
    file = tmp_path / "w.safetensors"
    state = timm.create_model("resnet18", pretrained=False, num_classes=0).state_dict()
    state = {key: value for key, value in state.items() if not key.endswith("num_batches_tracked")}
    save_file({**state, "decoder.weight": torch.zeros(2)}, file)
    report = build("resnet18", dim=8, size=32, weights=file).report
    assert report is not None
    assert report.unexpected == ["decoder.weight"]
    assert "not part of the backbone (1): decoder.weight" in str(report)


def test_another_width_is_refused_and_nothing_changed(tmp_path: Path) -> None:
    file = saved(tmp_path / "w.safetensors", "resnet50")
    encoder = build("resnet18", dim=8, size=32, pretrained=False)
    before = {key: value.clone() for key, value in encoder.state_dict().items()}
    with pytest.raises(ValueError, match="do not fit backbone='resnet18'; the file looks like a ResNet-50") as caught:
        load_weights(encoder, file)
    assert "layer1.0.conv1.weight (64, 64, 1, 1) instead of (64, 64, 3, 3)" in str(caught.value)
    assert all(torch.equal(before[key], value) for key, value in encoder.state_dict().items())


def test_another_family_is_refused(tmp_path: Path) -> None:
    file = saved(tmp_path / "w.safetensors", "vit_tiny_patch16_224")
    with pytest.raises(ValueError, match=r"a ViT of width 192, depth 12 and patch size 16[\s\S]*missing.*conv1.weight"):
        build("resnet18", dim=8, size=32, weights=file)


def test_a_deeper_relative_is_refused_although_every_tensor_is_there(tmp_path: Path) -> None:
    file = saved(tmp_path / "w.safetensors", "resnet34")
    with pytest.raises(ValueError, match=r"more blocks than backbone='resnet18' has: layer1\.2\.\S+.*ResNet-34"):
        build("resnet18", dim=8, size=32, weights=file)


def test_position_embeddings_follow_the_image_size(tmp_path: Path) -> None:
    file = saved(tmp_path / "w.safetensors", "vit_tiny_patch16_224", img_size=96)
    encoder = build("vit_tiny_patch16_224", dim=8, size=64, weights=file)
    assert encoder.report is not None
    assert encoder.report.resized == ["pos_embed 6 x 6 to 4 x 4"]
    torch.manual_seed(3)
    given = timm.create_model("vit_tiny_patch16_224", pretrained=False, num_classes=7, img_size=96).pos_embed
    assert encoder.backbone.pos_embed.shape == (1, 17, 192)
    assert torch.equal(
        encoder.backbone.pos_embed[:, 0], given[:, 0]
    )  # the class token's embedding is not a position in the grid


class Trap:
    opened = False

    def __reduce__(self) -> tuple:
        return (setattr, (Trap, "opened", True))


@pytest.mark.parametrize("suffix", [".pth", ".pt", ".bin", ".safetensors"])
def test_pickles_are_refused_unopened(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"w{suffix}"
    file.write_bytes(pickle.dumps(Trap()))
    with pytest.raises(ValueError, match=r"safetensors\.torch\.save_file"):
        build("small", dim=8, size=32, weights=file)
    assert not Trap.opened
    pickle.loads(file.read_bytes())
    assert Trap.opened  # the trap works: opening the pickle would have been noticed
    Trap.opened = False


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere\.safetensors.*does not exist"):
        build("small", dim=8, size=32, weights=tmp_path / "nowhere.safetensors")
