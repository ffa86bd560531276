"""Layers with a trained bias and a frozen weight: torch's values and gradients, also for many rows on CUDA."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from proxymetric.encoders import build
from proxymetric.encoders.tuning.bias_gradients import SummedConv2d, SummedNorm, SummedNorm2d, sum_biases
from vits import TINY_VIT, drawn, pictures, two_blocks

WIDTH = 24
SHAPES = {"rows": (5, 7, WIDTH), "one row": (WIDTH,), "maps": (3, WIDTH, 4, 5)}


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def norms(maps: bool = False, trained: str = "bias") -> tuple[nn.LayerNorm, SummedNorm]:
    """Return timm's norm in float64 with changed weights, and the same norm as a `SummedNorm`."""
    from timm.layers import LayerNorm, LayerNorm2d

    plain = (LayerNorm2d if maps else LayerNorm)(WIDTH, eps=1e-3).double()
    for i, (name, parameter) in enumerate(plain.named_parameters()):
        parameter.data.add_(drawn(i, WIDTH))
        parameter.requires_grad_(name in trained)
    sum_biases(summed := copy.deepcopy(plain))
    assert type(summed) is (SummedNorm2d if maps else SummedNorm)
    assert repr(plain.state_dict()) == repr(summed.state_dict())
    return plain, summed


def slopes(norm: nn.LayerNorm, x: Tensor, run: Any = None) -> list[Tensor]:
    """Return the output, and its gradients for the input and all trained parameters of the norm."""
    x = x.clone().requires_grad_()
    y = (norm if run is None else run)(x)
    wanted = [x, *(p for p in norm.parameters() if p.requires_grad)]
    return [y.detach(), *torch.autograd.grad(y, wanted, drawn(4, *x.shape).to(y))]


def asked_for_a_bias_alone(y: Tensor) -> list[bool]:
    """Return, for each norm of torch in the graph of `y`, whether it computes only the gradient of the bias."""
    found, seen, left = [], set(), [y.grad_fn]
    while left:
        if (node := left.pop()) is None or node in seen:
            continue
        seen.add(node)
        behind = [each for each, _ in node.next_functions]
        if node.name() == "NativeLayerNormBackward0":
            found.append(behind[1] is None and behind[2] is not None)
        left += behind
    return found


@pytest.mark.parametrize("kind", SHAPES)
def test_values_and_gradients_are_torchs(kind: str) -> None:
    plain, summed = norms(kind == "maps")
    x = 3 * drawn(2, *SHAPES[kind]) + 1
    wanted, found = slopes(plain, x), slopes(summed, x)
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])
    torch.testing.assert_close(found[2], wanted[2], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_so_they_are_under_autocast(given: torch.dtype) -> None:
    plain, summed = (norm.float() for norm in norms())
    x = (3 * drawn(2, 5, 7, WIDTH) + 1).to(given)
    with torch.autocast("cpu", torch.bfloat16):
        wanted, found = slopes(plain, x), slopes(summed, x)
    assert [each.dtype for each in found] == [each.dtype for each in wanted]
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])
    exact = drawn(4, *x.shape).to(found[0]).double().sum((0, 1))
    torch.testing.assert_close(found[2].double(), exact, rtol=1e-5, atol=1e-5)
    rounded = 1e-5 if given is torch.float32 else 0.1  # on a CPU, torch sums in the type of its input
    torch.testing.assert_close(wanted[2].double(), exact, rtol=rounded, atol=rounded)


@pytest.mark.parametrize("autocast", [False, True])
def test_so_they_are_compiled(autocast: bool) -> None:
    plain, summed = norms()
    if autocast:
        plain, summed = plain.float(), summed.float()
    x = (3 * drawn(2, 5, 7, WIDTH) + 1).to(summed.weight.dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        wanted = slopes(plain, x)
        found = slopes(summed, x, torch.compile(summed, backend="aot_eager_decomp_partition", fullgraph=True))
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want)


def test_it_may_be_changed_in_place_and_differentiated_twice() -> None:
    _, summed = norms()
    x = drawn(2, 5, WIDTH).requires_grad_()
    assert torch.equal(summed(x).relu_(), summed(x).relu())
    assert torch.autograd.gradgradcheck(lambda x, _: summed(x).square(), (x, summed.bias))


@pytest.mark.parametrize("trained", ["", "weight", "weight and bias", "bias"])
def test_the_gradient_is_summed_for_a_bias_alone(trained: str) -> None:
    plain, summed = norms(trained=trained)
    x = drawn(2, 5, WIDTH).requires_grad_()
    alone = trained == "bias"
    assert asked_for_a_bias_alone(plain(x)) == [alone], "torch's own is what must not be asked"
    assert asked_for_a_bias_alone(y := summed(x)) == [False]
    assert (y.grad_fn.name() == "BiasGradientBackward") is alone
    with torch.no_grad():
        assert torch.equal(summed(x), plain(x))


def kept(norm: nn.Module, x: Tensor) -> int:
    """Return the bytes that are kept for the backward pass."""
    found: dict[int, int] = {}

    def seen(x: Tensor) -> Tensor:
        found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(seen, lambda x: x):
        norm(x)
    return sum(found.values())


def test_no_more_is_kept_for_the_backward_pass() -> None:
    plain, summed = norms()
    x = drawn(2, 50, WIDTH).requires_grad_()
    assert kept(summed, x) == kept(plain, x) == 8 * (50 * WIDTH + 2 * 50 + 2 * WIDTH)


@pytest.mark.parametrize("trained", ["bias", "weight", "weight and bias", ""])
def test_a_convolution_of_images_does_not_keep_them(trained: str) -> None:
    plain = nn.Conv2d(3, WIDTH, 4, 4).double()
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_(name in trained)
    sum_biases(summed := copy.deepcopy(plain))
    assert type(summed) is SummedConv2d
    x, moved = drawn(2, 5, 3, 8, 8), drawn(3, 5, 3, 8, 8).requires_grad_()
    wanted = [p for p in plain.parameters() if p.requires_grad]
    for images in (x, moved, x[0]):
        y, z = summed(images), plain(images)
        assert torch.equal(y, z)
        if y.requires_grad:
            back, more = drawn(4, *y.shape), [moved] if images is moved else []
            found = torch.autograd.grad(y, [*(p for p in summed.parameters() if p.requires_grad), *more], back)
            for got, want in zip(found, torch.autograd.grad(z, [*wanted, *more], back), strict=True):
                torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert (kept(summed, x) > 0) is ("weight" in trained)
    assert kept(summed, moved) == kept(plain, moved) > 0


@pytest.mark.parametrize("autocast", [False, True])
def test_nor_does_a_compiled_one(autocast: bool) -> None:
    plain = nn.Conv2d(3, WIDTH, 4, 4)
    plain.weight.requires_grad_(False)
    sum_biases(summed := copy.deepcopy(plain))
    run = torch.compile(summed, backend="aot_eager_decomp_partition", fullgraph=True)
    x = drawn(2, 5, 3, 8, 8).float()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert kept(run, x) == 0 < kept(plain, x)
        found, wanted = run(x), plain(x)
    assert torch.equal(found, wanted)
    for y in (found, wanted):
        y.backward(drawn(4, *y.shape).to(y))
    rounded = 2**-7 if autocast else 1e-5
    torch.testing.assert_close(summed.bias.grad, plain.bias.grad, rtol=rounded, atol=rounded)


@pytest.mark.parametrize(
    "options",
    [
        {"tuning": "bitfit"},
        {"tuning": "vpt+bitfit"},
        {"tuning": "adapter+bitfit"},
        {"tuning": {"name": "vpt+bitfit", "depth": 1}, "checkpointing": True},
        {"tuning": "bitfit", "checkpointing": "mlp"},
        {"tuning": "bitfit", "backbone": "vit_base_patch16_clip_224"},
        {"tuning": "bitfit", "backbone": "convnext_atto"},
        {"tuning": "bitfit", "backbone": "swin_tiny_patch4_window7_224"},
    ],
    ids=str,
)
def test_no_norm_of_a_backbone_is_asked_for_a_bias_alone(options: dict[str, Any], monkeypatch: Any) -> None:
    if "vit" in options.get("backbone", "vit"):
        two_blocks(monkeypatch, embed_dim=24, num_heads=2)
    encoder = build(**TINY_VIT | options)
    images = pictures()
    found = asked_for_a_bias_alone(encoder(images))
    assert len(found) > (0 if "checkpointing" in options else 4)
    assert not any(found)
    encoder.set_backbone_trainable(False)
    assert not encoder.features(images).requires_grad


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("maps", [False, True])
def test_many_rows_on_a_gpu(maps: bool) -> None:
    _, summed = norms(maps)
    x = drawn(2, 700, WIDTH, 10, 10) if maps else drawn(2, 70_000, WIDTH)
    wanted = slopes(summed, x)
    for got, want in zip(slopes(summed.cuda(), x.cuda()), wanted, strict=True):
        torch.testing.assert_close(got.cpu(), want)
