"""BN-Inception: the names, shapes and numbers of the usual port, RGB in, and weights from a file.

Numbers marked "port" were computed with pretrainedmodels 0.7.4 on the tensors of `drawn`; in the same session the two
networks gave bit-equal maps, in float32 and float64, at 224, 227 and 256 pixels.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from proxymetric.encoders import build, parameter_counts
from proxymetric.encoders.backbones import check_name
from proxymetric.encoders.bn_inception import BLOCKS, BNInception

PORT_KEYS = "1b2f6380c6e1d8612ccf2d584b9a2817c9bf292d59e65a2785560586196e862a"
"""port: sha256 of its sorted names and shapes, classifier and counters left out"""
PORT_FEATURES = {
    224: [-658.768313208, 341.5791609, 301.650635291, 756.674589149],
    227: [-652.953660479, 321.263848055, 323.687094225, 744.742074437],
    256: [-687.058663609, 331.518151466, 328.040517419, 743.49026329],
}
"""port: `summary` of its averaged map of `photo(size)`, float64"""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def drawn(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Draw a tensor for each name, including statistics, such that maps neither vanish nor grow without bound."""
    random = np.random.default_rng(7)
    tensors = {}
    for name, shape in sorted(shapes.items()):
        if name.endswith("running_var"):
            value = random.uniform(0.5, 1.5, shape)
        elif name.endswith("_bn.weight"):
            value = random.uniform(0.6, 1.2, shape)
        elif len(shape) == 1:
            value = random.normal(0, 0.2, shape)
        else:
            value = random.normal(0, (2 / np.prod(shape[1:])) ** 0.5, shape)
        tensors[name] = torch.from_numpy(value)
    return tensors


def shapes_of(net: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    state = net.state_dict()
    return {name: tuple(value.shape) for name, value in state.items() if not name.endswith("num_batches_tracked")}


def photo(size: int, count: int = 1) -> Tensor:
    pixels = np.random.default_rng(size).integers(0, 256, (count, 3, size, size), dtype=np.uint8)
    return torch.from_numpy(pixels)


def summary(features: Tensor) -> list[float]:
    """One weighted sum for each of the last block's four branches."""
    weighted = features[0].double() * torch.arange(1024).cos()
    return [float(part.sum()) for part in weighted.split([352, 320, 224, 128])]


def test_names_and_shapes_are_the_ports() -> None:
    shapes = shapes_of(BNInception())
    lines = "\n".join(f"{name} {shape}" for name, shape in sorted(shapes.items()))
    assert hashlib.sha256(lines.encode()).hexdigest() == PORT_KEYS
    assert {"conv1_7x7_s2.weight", "inception_5b_double_3x3_2_bn.running_var"} < shapes.keys()


def test_parameters_are_the_ports_less_its_classifier() -> None:
    assert parameter_counts(BNInception())["total"] == 11_295_240 - (1024 + 1) * 1000


@pytest.mark.parametrize("size", [224, 227, 256])
def test_features_are_the_ports(size: int) -> None:
    encoder = build("bn_inception", dim=None, head="none", size=size, pretrained=False).double().eval()
    encoder.backbone.load_state_dict(drawn(shapes_of(encoder.backbone)), strict=False)
    with torch.no_grad():
        features = encoder(photo(size))
    assert features.shape == (1, 1024)
    np.testing.assert_allclose(summary(features), PORT_FEATURES[size], rtol=1e-6)  # float32's mean and std


@pytest.mark.parametrize(
    ("size", "side"), [(31, 1), (38, 1), (64, 2), (96, 3), (223, 7), (224, 7), (230, 7), (255, 8), (256, 8), (324, 10)]
)
def test_sizes_that_suit(size: int, side: int) -> None:
    with torch.no_grad():
        assert BNInception().eval().forward_features(torch.zeros(1, 3, size, size)).shape == (1, 1024, side, side)


@pytest.mark.parametrize(("size", "block"), [(222, "3c"), (231, "3c"), (240, "4e"), (299, "3c")])
def test_sizes_that_do_not_suit_are_refused(size: int, block: str) -> None:
    with pytest.raises(
        ValueError,
        match=rf"size: got {size}, expected a size that suits.*inception_{block}: got .*32 k - 1 to 32 k \+ 6",
    ):
        build("bn_inception", size=size, pretrained=False)


def test_images_come_as_rgb_and_the_weights_see_bgr_less_its_mean() -> None:
    encoder = build("bn_inception", size=64, pretrained=False).eval()
    seen: list[Tensor] = []
    encoder.backbone.conv1_7x7_s2.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    colour = torch.tensor([200, 90, 15], dtype=torch.uint8).view(1, 3, 1, 1).expand(1, 3, 64, 64)
    with torch.no_grad():
        encoder(colour)
        encoder(colour.float() / 255)
    blue, green, red = 15 - 104, 90 - 117, 200 - 128
    for x in seen:
        wanted = torch.tensor([blue, green, red]).view(1, 3, 1, 1).expand_as(x).float()
        torch.testing.assert_close(x, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("pooling", ["auto", "avg", "max", "avg+max", "gem"])
def test_poolings(pooling: str) -> None:
    encoder = build("bn_inception", dim=None, head="none", size=64, pooling=pooling, pretrained=False).eval()
    x = photo(64, 2)
    with torch.no_grad():
        places = encoder.backbone.forward_features(encoder.normalise(x)).flatten(2)
        got = encoder(x)
    mean, top = places.mean(2), places.amax(2)
    cubes = places.clamp(min=1e-6).pow(3).mean(2).pow(1 / 3)
    wanted = {"auto": mean, "avg": mean, "max": top, "avg+max": mean + top, "gem": cubes}[pooling]
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_frozen_normalisation_stands_still_while_the_rest_trains() -> None:
    encoder = build("bn_inception", dim=8, size=64, pretrained=False, freeze_bn=True).train()
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    encoder(photo(64, 2)).square().sum().backward()
    after = encoder.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before if "_bn." in name)
    without = {name for name, parameter in encoder.named_parameters() if parameter.grad is None}
    norms = [name for name, _ in encoder.named_parameters() if "_bn." in name]
    assert len(norms) == 2 * 69
    assert without == set(norms)


def test_weights_from_a_file_in_the_ports_form(tmp_path: Path) -> None:
    """The file is like the public one: it has a classifier, no counters, and the vectors of BatchNorm as (1, C)."""
    tensors = drawn(shapes_of(BNInception()))
    old = {name: value[None] if "_bn." in name else value for name, value in tensors.items()}
    old["last_linear.weight"], old["last_linear.bias"] = torch.zeros(1000, 1024), torch.zeros(1000)
    save_file({name: value.float().contiguous() for name, value in old.items()}, tmp_path / "bn.safetensors")
    encoder = build("bn_inception", dim=8, size=64, weights=tmp_path / "bn.safetensors")
    report = encoder.report
    assert report is not None
    assert (len(report.matched), report.missing, report.unexpected) == (len(tensors), [], [])
    assert sorted(report.dropped) == ["last_linear.bias", "last_linear.weight"]
    state = encoder.backbone.state_dict()
    assert all(torch.equal(state[name], value.float()) for name, value in tensors.items())
    del old["inception_4c_1x1.weight"]
    save_file({name: value.float().contiguous() for name, value in old.items()}, tmp_path / "bn.safetensors")
    with pytest.raises(ValueError, match=r"looks like a BN-Inception(.|\n)*inception_4c_1x1.weight"):
        build("bn_inception", dim=8, size=64, weights=tmp_path / "bn.safetensors")


def test_no_hub_has_its_weights() -> None:
    with pytest.raises(ValueError, match=r"no weights of backbone='bn_inception'.*weights=FILE.*torch.load.*save_file"):
        build("bn_inception")
    check_name("bn_inception")
    with pytest.raises(ValueError, match="did you mean bn_inception"):
        check_name("bninception")


def test_the_table_adds_up() -> None:
    assert sum(1 for block in BLOCKS.values() if not block.one) == 2
    assert BNInception().num_features == 1024
