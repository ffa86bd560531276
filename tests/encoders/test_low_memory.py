"""16-bit steps keep less for the backward pass than autocast does, and their gradients are as exact."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.compilers import nop
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes

from proxymetric.core.second_pass import ClassPrompts
from proxymetric.encoders import TUNINGS, Encoder, build, low_memory, vit
from proxymetric.encoders.vit import first_tokens
from scale_shift import ScaleShift
from vits import TINY_VIT, drawn, pictures, stir, two_blocks

pytestmark = pytest.mark.slow

WIDTH = 24
CONVERTED = torch.ops.prims.convert_element_type.default


@pytest.fixture(autouse=True)
def afresh(same_kernels: None) -> Iterator[None]:
    torch.compiler.reset()
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        # torch does the same, with a warning, after its first product in bfloat16.
        torch.backends.mkldnn.enabled = False
    yield
    torch.compiler.reset()


def slopes(module: nn.Module, function: Callable[[Tensor], Tensor], x: Tensor, back: Tensor) -> list[Tensor]:
    """Return the output, and its gradients for the input and all trained parameters of the module."""
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
        return low_memory.Norm.apply(x, norm.weight, norm.bias, norm.eps, torch.float32)

    found = slopes(norm, run, x.float(), back.float())
    torch.testing.assert_close(found[0].double(), wanted[0], rtol=1e-5, atol=1e-5)
    step = math.sqrt(WIDTH) / 65534  # the precision of u; 35 tokens are summed
    for got, want in zip(found[1:], wanted[1:], strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=2 * math.sqrt(35) * step)


def test_a_token_of_which_one_number_is_all() -> None:
    """Its standardised value is sqrt(D), the largest that 16 bits must hold."""
    norm, x, back = nn.LayerNorm(WIDTH, eps=0), torch.zeros(2, WIDTH), torch.ones(2, WIDTH)
    x[0, 3], x[1, 5] = 1e6, -1e6
    y = norm(x)
    assert (y.abs().amax(1) > 0.9 * math.sqrt(WIDTH)).all()
    found = slopes(norm, lambda x: low_memory.Norm.apply(x, norm.weight, norm.bias, 0, torch.float32), x, back)
    torch.testing.assert_close(found[2], y.sum(0), rtol=1e-4, atol=1e-4)  # the gradient of the weight is u itself


def test_a_gelu_and_its_slope() -> None:
    gelu, x = nn.GELU(), torch.linspace(-9, 9, 20_001)
    y, slope = slopes(gelu, low_memory.Gelu.apply, x, torch.ones_like(x))
    assert torch.equal(y, gelu(x))
    exact = slopes(gelu, gelu, x.double(), torch.ones_like(x))[1]
    assert exact.min() > low_memory.MIN_SLOPE
    assert exact.max() < low_memory.MAX_SLOPE
    assert (slope - exact).abs().max() < 1 / 400


def step(encoder: Encoder, kind: torch.dtype | None = torch.bfloat16) -> list[Tensor]:
    """Return the features of a pass of two towers, and the gradients of class prompts and trained parameters."""
    rows = drawn(3, 3, 4, encoder.width).to(encoder.mean.dtype).requires_grad_()
    with torch.autocast("cpu", kind, enabled=kind is not None):
        found = torch.cat(encoder.features_twice(pictures(4), ClassPrompts(rows, torch.tensor([2, 0, 2, 1]), [3, 1])))
    back = drawn(5, *found.shape).to(found)
    wanted = [rows, *(p for p in encoder.parameters() if p.requires_grad)]
    grads = torch.autograd.grad(found, wanted, back, allow_unused=True)
    return [found.detach(), *(grad for grad in grads if grad is not None)]


def error(got: list[Tensor], exact: list[Tensor]) -> float:
    """Return the distance of all gradients from the exact ones, relative to the length of the exact ones."""
    away, long = (torch.cat([each.flatten() for each in all_[1:]]) for all_ in (got, exact))
    return float((away - long).norm() / long.norm())


def divided(joint: fx.GraphModule, given: Any, **rest: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return the forward and the backward graph, simplified and partitioned as by torch's compiler.

    torch before 2.13 also drops a conversion to 16 bits and back; here this is done with every version.
    """
    joint_graph_passes(joint)
    for node in joint.graph.find_nodes(op="call_function", target=CONVERTED):
        if node.args[0].target is CONVERTED and node.args[0].args[1].is_floating_point:
            node.args = (node.args[0].args[0], node.args[1])
    joint.graph.eliminate_dead_code()
    joint.recompile()
    return min_cut_rematerialization_partition(joint, given, compiler="inductor", **rest)


def pressed(encoder: Encoder) -> Encoder:
    """Trace, simplify and partition the passes of `encoder` as torch's compiler does, but run torch's kernels."""
    torch.compiler.reset()
    ways = {"fw_compiler": nop, "bw_compiler": nop, "decompositions": select_decomp_table, "partition_fn": divided}
    encoder._compiled = torch.compile(encoder._pooled, backend=aot_autograd(**ways), fullgraph=True)
    return encoder


def kept(encoder: Encoder) -> tuple[list[Tensor], int]:
    """Return the result of `step`, and the bytes of activations that were kept for the backward pass."""
    result, found = held(encoder)
    return result, sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in found}.values())


def held(encoder: Encoder) -> tuple[list[Tensor], list[Tensor]]:
    """Return the result of `step`, and the tensors that were kept for the backward pass."""
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
    """The mean of four encoders is compared: in a single one, the rounding errors of autocast may cancel by chance."""
    two_blocks(monkeypatch)
    encoders = []
    for seed in range(4):
        torch.manual_seed(seed)
        encoders.append(build(**TINY_VIT, tuning=tuning))
    exact = [step(copy.deepcopy(encoder).double(), None) for encoder in encoders]

    def steps() -> tuple[list[list[Tensor]], int]:
        encoder = pressed(copy.deepcopy(encoders[0]))
        first, number = kept(encoder)
        return [first, *(step(loaded(encoder, other)) for other in encoders[1:])], number

    found, bytes_kept = steps()
    monkeypatch.setattr(vit, "compiled_16_bit_dtype", lambda x: None)
    modules, bytes_of_modules = steps()
    assert all(torch.equal(got[0], want[0]) for got, want in zip(found, modules, strict=True))
    assert sum(map(error, found, exact)) < 1.25 * sum(map(error, modules, exact))
    assert bytes_kept < share * bytes_of_modules


def loaded(encoder: Encoder, other: Encoder) -> Encoder:
    """Copy the weights of another encoder, so that `encoder` need not be traced again."""
    encoder.load_state_dict(other.state_dict())
    return encoder


def test_two_towers_keep_their_tokens_in_16_bits_and_no_images(monkeypatch: pytest.MonkeyPatch) -> None:
    two_blocks(monkeypatch)
    encoder = build(**TINY_VIT, tuning="vpt+bitfit")
    images, tokens = pictures(4), first_tokens(encoder.backbone, encoder.normalise(pictures(4)))
    for each in held(pressed(encoder))[1]:
        assert each.numel() != images.numel(), "those that a patch embedding saw, whose weights are frozen"
        assert each.dtype != torch.float32 or each.numel() < 2 * tokens.numel(), "once for both is enough"


def test_nobody_holds_normalised_images_while_blocks_run(monkeypatch: pytest.MonkeyPatch) -> None:
    two_blocks(monkeypatch)
    encoder, made, found = build(**TINY_VIT, tuning="vpt"), [], []
    normalise = encoder.normalise

    def watched(images: Tensor) -> Tensor:
        made.append(weakref.ref(result := normalise(images)))
        return result

    monkeypatch.setattr(encoder, "normalise", watched)
    encoder.backbone.blocks[1].norm1.register_forward_hook(lambda *given: found.append(made[0]() is None))
    encoder.features(pictures(4))
    assert found
    assert all(found)


@pytest.mark.parametrize("trained", ["weight and bias", "weight", "bias", ""])
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_a_sum_and_its_norm_to_the_last_bit(trained: str, kind: torch.dtype) -> None:
    norm = nn.LayerNorm(WIDTH)
    for i, (name, parameter) in enumerate(norm.named_parameters()):
        parameter.data.add_(drawn(i, WIDTH)).requires_grad_(name in trained)
    x, change = drawn(2, 5, 7, WIDTH).float().requires_grad_(), drawn(3, 5, 7, WIDTH).to(kind).requires_grad_()
    wanted = [x, change, *(p for p in norm.parameters() if p.requires_grad)]
    backs = [drawn(i, 5, 7, WIDTH).float() for i in (4, 5)]
    assert low_memory.keeps_summands(norm, x, change)
    found = low_memory.add_and_norm(norm, x, change, None)
    total = x + change
    for got, want in zip(found, (total, norm(total)), strict=True):
        assert torch.equal(got, want)
    grads = [torch.autograd.grad(both, wanted, backs) for both in (found, (total, norm(total)))]
    for got, want in zip(*grads, strict=True):
        assert got.dtype == want.dtype
        # If the weight is frozen, the gradient of the bias is summed over rows in another order.
        exact = {"rtol": 1e-6, "atol": 1e-6} if trained == "bias" and got.ndim == 1 else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(got, want, **exact)


def test_where_the_sum_is_no_more_to_keep_than_its_parts() -> None:
    norm, x = nn.LayerNorm(WIDTH), drawn(2, 5, WIDTH).float()
    short = x.bfloat16().requires_grad_()
    with torch.no_grad():
        assert not low_memory.keeps_summands(norm, x, short)
    assert not low_memory.keeps_summands(norm, x, short), "nobody keeps an x without a gradient"
    x.requires_grad_()
    assert low_memory.keeps_summands(norm, x, short)
    assert not low_memory.keeps_summands(norm, x, x)
    assert not low_memory.keeps_summands(norm, short, short)
    assert not low_memory.keeps_summands(nn.Identity(), x, short)


@pytest.mark.parametrize("checkpointing", [False, "mlp"])
@pytest.mark.parametrize("tuning", ["vpt+bitfit", "vpt", "vpt+adapter", "vpt+lora"])
def test_what_is_not_compiled_keeps_no_sums(
    tuning: str, checkpointing: bool | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps the summands instead, in 16 bits. In the last of three blocks, only one token is computed."""
    two_blocks(monkeypatch, depth=3)
    encoder = build(**TINY_VIT, tuning=tuning, checkpointing=checkpointing)
    stir(encoder.tuning)
    found, bytes_kept = kept(encoder)
    for module in ("low_memory", "vit"):
        monkeypatch.setattr(f"proxymetric.encoders.{module}.keeps_summands", lambda *given: False)
    modules, bytes_of_modules = kept(encoder)
    for got, want in zip(found, modules, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    blocks = 2 if "bitfit" in tuning else 1  # before the first block, only the bias of the patches is trained
    rows, tokens = 8, 5
    assert bytes_of_modules - bytes_kept == 2 * blocks * rows * tokens * encoder.width


def test_a_step_that_is_not_compiled_runs_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    two_blocks(monkeypatch)
    encoder = build(**TINY_VIT, tuning="vpt+bitfit")
    wanted = step(encoder)
    for name in ("Norm", "Gelu"):
        monkeypatch.delattr(low_memory, name)
    for got, want in zip(step(encoder), wanted, strict=True):
        assert torch.equal(got, want)
    encoder._compiled = torch.compile(encoder._pooled, backend="aot_eager", fullgraph=True)
    step(encoder, None)
    with pytest.raises(Exception, match="Norm"):
        step(encoder)


def test_a_compiled_step_with_checkpointing_keeps_the_tokens_between_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs the modules, because torch 2.11 on a GPU keeps the tensors inside functions such as `Norm`."""
    two_blocks(monkeypatch, depth=3)
    encoder = build(**TINY_VIT, tuning="vpt+bitfit", checkpointing=True)
    exact, wanted = step(copy.deepcopy(encoder).double(), None), step(encoder)
    for name in ("Norm", "Gelu"):
        monkeypatch.delattr(low_memory, name)
    result, found = held(pressed(encoder))
    assert error(result, exact) < 1.25 * error(wanted, exact)
    rows, tokens = 8, 5
    assert sum(each.numel() >= rows * tokens * encoder.width for each in found) == 2


@pytest.mark.parametrize(
    ("tuning", "checkpointing", "compiled"),
    [("ssf", False, True), ("ssf", "mlp", False), ("vpt+ssf", False, True), ("vpt+ssf", False, False)],
)
def test_a_tuning_that_hooks_norms_takes_part_in_16_bit_steps(
    tuning: str, checkpointing: bool | str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parameters change the features, and their gradients are as exact as those of the other parameters."""
    two_blocks(monkeypatch)
    monkeypatch.setitem(TUNINGS, "ssf", ScaleShift)
    torch.manual_seed(0)
    encoder = build(**TINY_VIT, tuning=tuning, checkpointing=checkpointing)
    stir(encoder.tuning)
    exact = one_tower(copy.deepcopy(encoder).double(), None)
    result = one_tower(pressed(encoder) if compiled else encoder)
    assert len(result) == len(exact), "every trained parameter has a gradient"
    torch.testing.assert_close(result[0].double(), exact[0], rtol=0.05, atol=0.05)
    assert error(result, exact) < 0.03


def one_tower(encoder: Encoder, kind: torch.dtype | None = torch.bfloat16) -> list[Tensor]:
    """The features of a plain pass, and the gradients of all parameters that have one."""
    with torch.autocast("cpu", kind, enabled=kind is not None):
        features = encoder.features(pictures(4))
    parameters = [p for p in encoder.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(features, parameters, drawn(5, *features.shape).to(features), allow_unused=True)
    return [features.detach(), *(gradient for gradient in gradients if gradient is not None)]


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
@pytest.mark.parametrize("tuning", ["full", "vpt+bitfit"])
def test_hooks_inside_a_block_run_in_every_kind_of_step(
    tuning: str, register: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_blocks(monkeypatch)
    encoder = build(**TINY_VIT, tuning=tuning)
    for place in ("norm1", "norm2", "mlp", "mlp.act", "attn", "attn.qkv"):
        calls: list[object] = []
        module = encoder.backbone.blocks[0].get_submodule(place)
        hook = getattr(module, register)(lambda *given, calls=calls: calls.append(given))
        for kind in (None, torch.bfloat16):
            monkeypatch.setattr(vit, "compiled_16_bit_dtype", lambda x: kind)  # noqa: B023  (a compiled step has a type)
            calls.clear()
            one_tower(encoder)
            assert calls, f"the hook of {place} with 16-bit functions of type {kind}"
        hook.remove()
