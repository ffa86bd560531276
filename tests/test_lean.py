"""What steps in 16 bits keep for their backward pass: less, and as exact as what autocast keeps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from proxymetric.encoders import Encoder, build, lean
from proxymetric.encoders.vit import first_tokens
from proxymetric.look import ByClass
from vits import TINY_VIT, drawn, pictures, stir, two_blocks

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
    """The same as `kept`, of a compiled step."""
    torch.compiler.reset()
    encoder._compiled = torch.compile(encoder._pooled, backend="aot_eager_decomp_partition", fullgraph=True)
    return kept(encoder)


def kept(encoder: Encoder) -> tuple[list[Tensor], int]:
    """`step`, and the bytes of activations that were kept for its backward pass."""
    result, found = held(encoder)
    return result, sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in found}.values())


def held(encoder: Encoder) -> tuple[list[Tensor], list[Tensor]]:
    """`step`, and what was kept."""
    weights = {p.numel() for p in encoder.parameters()}
    found: list[Tensor] = []

    def seen(x: Tensor) -> Tensor:
        if x.numel() not in weights:
            found.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(seen, lambda x: x):
        result = step(encoder)
    return result, found


@pytest.mark.parametrize(("tuning", "share"), [("full", 0.85), ("vpt+bitfit", 0.8)])
def test_a_step_keeps_less_and_is_as_exact(tuning: str, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    two_blocks(monkeypatch)
    torch.manual_seed(0)
    encoder = build(**TINY_VIT, tuning=tuning)
    exact = step(copy.deepcopy(encoder).double(), None)
    found, bytes_kept = compiled(encoder)
    monkeypatch.setattr(lean, "short", lambda x: None)
    modules, bytes_of_modules = compiled(encoder)
    assert torch.equal(found[0], modules[0])
    assert error(found, exact) < 1.25 * error(modules, exact)
    assert bytes_kept < share * bytes_of_modules


def test_two_towers_keep_their_tokens_in_16_bits_and_no_images(monkeypatch: pytest.MonkeyPatch) -> None:
    two_blocks(monkeypatch)
    encoder = build(**TINY_VIT, tuning="vpt+bitfit")
    images, tokens = pictures(4), first_tokens(encoder.backbone, encoder.normalise(pictures(4)))
    encoder._compiled = torch.compile(encoder._pooled, backend="aot_eager_decomp_partition", fullgraph=True)
    for each in held(encoder)[1]:
        assert each.numel() != images.numel(), "those that a patch embedding saw, whose weights are frozen"
        assert each.dtype != torch.float32 or each.numel() < 2 * tokens.numel(), "once for both is enough"


@pytest.mark.parametrize("trained", ["weight and bias", "weight", "bias", ""])
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_a_sum_and_its_norm_to_the_last_bit(trained: str, kind: torch.dtype) -> None:
    norm = nn.LayerNorm(WIDTH)
    for i, (name, parameter) in enumerate(norm.named_parameters()):
        parameter.data.add_(drawn(i, WIDTH)).requires_grad_(name in trained)
    x, change = drawn(2, 5, 7, WIDTH).float().requires_grad_(), drawn(3, 5, 7, WIDTH).to(kind).requires_grad_()
    wanted = [x, change, *(p for p in norm.parameters() if p.requires_grad)]
    backs = [drawn(i, 5, 7, WIDTH).float() for i in (4, 5)]
    assert lean.in_parts(norm, x, change)
    found = lean.added(norm, x, change)
    total = x + change
    for got, want in zip(found, (total, norm(total)), strict=True):
        assert torch.equal(got, want)
    grads = [torch.autograd.grad(both, wanted, backs) for both in (found, (total, norm(total)))]
    for got, want in zip(*grads, strict=True):
        assert got.dtype == want.dtype
        # The sum over rows, of a bias whose weight is frozen, has an order of its own.
        exact = {"rtol": 1e-6, "atol": 1e-6} if trained == "bias" and got.ndim == 1 else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(got, want, **exact)


def test_where_the_sum_is_no_more_to_keep_than_its_parts() -> None:
    norm, x = nn.LayerNorm(WIDTH), drawn(2, 5, WIDTH).float()
    short = x.bfloat16().requires_grad_()
    with torch.no_grad():
        assert not lean.in_parts(norm, x, short)
    assert not lean.in_parts(norm, x, short), "nobody keeps an x without a gradient"
    x.requires_grad_()
    assert lean.in_parts(norm, x, short)
    assert not lean.in_parts(norm, x, x)
    assert not lean.in_parts(norm, short, short)
    assert not lean.in_parts(nn.Identity(), x, short)


@pytest.mark.parametrize("checkpointing", [False, "mlp"])
@pytest.mark.parametrize("tuning", ["vpt+bitfit", "vpt", "vpt+adapter", "vpt+lora"])
def test_what_is_not_compiled_keeps_no_sums(
    tuning: str, checkpointing: bool | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But what they are made of, in 16 bits. Of the last of three blocks only one token is computed."""
    two_blocks(monkeypatch, depth=3)
    encoder = build(**TINY_VIT, tuning=tuning, checkpointing=checkpointing)
    stir(encoder.tuning)
    found, bytes_kept = kept(encoder)
    for module in ("lean", "vit"):
        monkeypatch.setattr(f"proxymetric.encoders.{module}.in_parts", lambda *given: False)
    modules, bytes_of_modules = kept(encoder)
    for got, want in zip(found, modules, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    blocks = 2 if "bitfit" in tuning else 1  # nothing is trained before the first but the bias of the patches
    rows, tokens = 8, 5
    assert bytes_of_modules - bytes_kept == 2 * blocks * rows * tokens * encoder.width


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
