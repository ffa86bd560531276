"""What compiled steps in 16 bits keep for their backward pass: less, and as exact as what autocast keeps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from proxymetric.encoders import Encoder, build, lean
from proxymetric.look import ByClass
from vits import TINY_VIT, drawn, pictures, two_blocks

WIDTH = 24


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def slopes(module: nn.Module, function: Callable[[Tensor], Tensor], x: Tensor, back: Tensor) -> list[Tensor]:
    """What comes out, and its gradients by the input and all that the module trains."""
    x = x.clone().requires_grad_()
    wanted = [x, *(p for p in module.parameters() if p.requires_grad)]
    y = function(x)
    return [y.detach(), *torch.autograd.grad(y, wanted, back.to(y))]


@pytest.mark.parametrize("trained", ["weight and bias", "bias", ""])
def test_a_norm_and_its_gradients(trained: str) -> None:
    norm = nn.LayerNorm(WIDTH, eps=1e-3)
    for i, (name, parameter) in enumerate(norm.named_parameters()):
        parameter.data.add_(drawn(i, WIDTH)).requires_grad_(name in trained)
    x, back = 3 * drawn(2, 5, 7, WIDTH) + 1, drawn(3, 5, 7, WIDTH)
    exact = copy.deepcopy(norm).double()
    wanted = slopes(exact, exact, x, back)

    def run(x: Tensor) -> Tensor:
        return lean.Norm.apply(x, norm.weight, norm.bias, norm.eps, torch.float32)

    for got, want in zip(slopes(norm, run, x.float(), back.float()), wanted, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_a_gelu_and_its_slope() -> None:
    gelu, x = nn.GELU(), torch.linspace(-9, 9, 20_001)
    y, slope = slopes(gelu, lean.Gelu.apply, x, torch.ones_like(x))
    assert torch.equal(y, gelu(x))
    exact = slopes(gelu, gelu, x.double(), torch.ones_like(x))[1]
    assert exact.min() > lean.LOW
    assert exact.max() < lean.HIGH
    assert (slope - exact).abs().max() < 1 / 400


def step(encoder: Encoder, kind: torch.dtype | None = torch.bfloat16) -> list[Tensor]:
    """Gradients of all that is trained and of class prompts, of a pass of two towers; and its features."""
    rows = drawn(3, 3, 4, encoder.width).to(encoder.mean.dtype).requires_grad_()
    with torch.autocast("cpu", kind, enabled=kind is not None):
        found = torch.cat(encoder.features_twice(pictures(4), ByClass(rows, torch.tensor([2, 0, 2, 1]), [3, 1])))
    back = drawn(5, *found.shape).to(found)
    wanted = [rows, *(p for p in encoder.parameters() if p.requires_grad)]
    grads = torch.autograd.grad(found, wanted, back, allow_unused=True)
    return [found.detach(), *(grad for grad in grads if grad is not None)]


def error(got: list[Tensor], exact: list[Tensor]) -> float:
    """How far all gradients lie from the exact ones, in lengths of these."""
    away, long = (torch.cat([each.flatten() for each in all_[1:]]) for all_ in (got, exact))
    return float((away - long).norm() / long.norm())


def compiled(encoder: Encoder) -> tuple[list[Tensor], int]:
    """`step`, and the bytes of activations that were kept for its backward pass."""
    torch.compiler.reset()
    encoder._compiled = torch.compile(encoder._pooled, backend="aot_eager_decomp_partition", fullgraph=True)
    weights = {p.numel() for p in encoder.parameters()}
    found: list[Tensor] = []

    def seen(x: Tensor) -> Tensor:
        if x.numel() not in weights:
            found.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(seen, lambda x: x):
        result = step(encoder)
    return result, sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in found}.values())


@pytest.mark.parametrize(("tuning", "share"), [("full", 0.85), ("vpt+bitfit", 0.8)])
def test_a_step_keeps_less_and_is_as_exact(tuning: str, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    two_blocks(monkeypatch)
    torch.manual_seed(0)
    encoder = build(**TINY_VIT, tuning=tuning)
    exact = step(copy.deepcopy(encoder).double(), None)
    found, bytes_kept = compiled(encoder)
    for name in ("normed", "activated"):
        monkeypatch.setattr(f"proxymetric.encoders.vit.{name}", lambda module, x: module(x))
    modules, bytes_of_modules = compiled(encoder)
    assert torch.equal(found[0], modules[0])
    assert error(found, exact) < 1.25 * error(modules, exact)
    assert bytes_kept < share * bytes_of_modules


def test_a_step_that_is_not_compiled_runs_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    two_blocks(monkeypatch)
    encoder = build(**TINY_VIT, tuning="vpt+bitfit")
    wanted = step(encoder)
    for name in ("Norm", "Gelu"):
        monkeypatch.delattr(lean, name)
    for got, want in zip(step(encoder), wanted, strict=True):
        assert torch.equal(got, want)
    encoder._compiled = torch.compile(encoder._pooled, backend="aot_eager", fullgraph=True)
    step(encoder, None)
    with pytest.raises(Exception, match="Norm"):
        step(encoder)
