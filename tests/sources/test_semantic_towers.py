"""Two forward passes in one run of the blocks: features, the last block, steps of a learner and of two processes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import proxymetric as pm
from encoders.tuning.test_tunings import TIMMS
from groups import together
from proxymetric.core.pieces import Compare, Objective, Sum
from proxymetric.core.second_pass import ClassPrompts
from proxymetric.criterion import Criterion
from proxymetric.encoders import Encoder, build
from proxymetric.encoders.vit import Tower, first_tokens, last_tokens
from proxymetric.losses import ProxyAnchor
from proxymetric.schemes import AlternatingProjections
from proxymetric.sources import LearnedProxies, SemanticProxies
from proxymetric.training.learner import Learner
from vits import drawn, pictures, stir, two_blocks

EXACT: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-11}
B, C, D = 4, 6, 8
SMALL: dict[str, Any] = {"backbone": "test_vit", "dim": D, "size": 32, "pretrained": False}
VPT: dict[str, Any] = {"prompts": 3, "step": 1}


def vit(kind: str, tuning: str, monkeypatch: pytest.MonkeyPatch, blocks: int = 3, **options: Any) -> Encoder:
    """A narrow timm ViT of few blocks in double precision, with 3, 2 and 1 prompts of its own."""
    name, size, more = TIMMS[kind]
    with monkeypatch.context() as patch:
        two_blocks(patch, depth=blocks, embed_dim=32, num_heads=2, **more)
        table = {"name": tuning, **(VPT if "vpt" in tuning else {})}
        torch.manual_seed(0)
        encoder = build(name, dim=D, size=size, pretrained=False, tuning=table, **options).double()
    stir(encoder)
    return encoder


def small(tuning: str = "vpt+bitfit", **options: Any) -> Encoder:
    torch.manual_seed(0)
    encoder = build(**SMALL, tuning={"name": tuning, **VPT}, **options)
    stir(encoder.tuning)
    return encoder


def inputs(module: nn.Module) -> list[torch.Size]:
    """The shapes that `module` will be called with."""
    actual: list[torch.Size] = []
    module.register_forward_hook(lambda _, given, out: actual.append(given[0].shape))
    return actual


def slopes(encoder: nn.Module, outputs: tuple[Tensor, ...], leaves: list[Tensor]) -> dict[str, Tensor]:
    """Gradients of a random sum of all outputs in all trained parameters and in `leaves`."""
    total = sum((actual * drawn(50 + i, *actual.shape).to(actual)).sum() for i, actual in enumerate(outputs))
    named: dict[str, Tensor] = {
        name: p for name, p in encoder.named_parameters() if p.requires_grad and not name.startswith("head.")
    }
    named |= {f"given {i}": leaf for i, leaf in enumerate(leaves)}
    actual = torch.autograd.grad(total, list(named.values()), allow_unused=True)  # type: ignore[arg-type]
    return {name: torch.zeros_like(named[name]) if g is None else g for name, g in zip(named, actual)}


def alike(actual: dict[str, Tensor], expected: dict[str, Tensor], **tolerance: Any) -> None:
    assert actual.keys() == expected.keys()
    for name, want in expected.items():
        torch.testing.assert_close(actual[name], want, **tolerance, msg=f"{name}: {{}}".format)


# Both passes at once


def given(form: str, width: int) -> tuple[Any, list[Tensor | None], list[Tensor]]:
    """Prompts for three blocks: as `features_twice` takes them, as a list for each block, and their leaves."""
    if form.startswith("by class"):
        counts = [3, 1, 0] if form.endswith("fewer") else [0, 2, 2]
        rows, place = drawn(3, 3, 4, width).requires_grad_(), torch.tensor([2, 0, 2, 1])
        each, first = [], 0
        for count in counts:
            each.append(torch.stack([rows[i, first : first + count] for i in place.tolist()]) if count else None)
            first += count
        return ClassPrompts(rows, place, counts), each, [rows]
    sizes = {"list, fewer": [4, 2, None], "list, short": [None, 1], "list, empty": [0, None, 2]}[form]
    made = [None if n is None else drawn(3 + i, B, n, width).requires_grad_() for i, n in enumerate(sizes)]
    return made, made, [tokens for tokens in made if tokens is not None]


def plainly(encoder: Encoder, images: Tensor, prompts: list[Tensor | None] | None, shared: bool = False) -> Tensor:
    """One pass: whole blocks over prompts and tokens; the outputs of the prompts are dropped after each block."""
    net: Any = encoder.backbone
    tokens = first_tokens(net, encoder.normalise(images))
    for i, block in enumerate(net.blocks):
        own = encoder.tuning.prompts(i) if prompts is None or shared else []
        extra = prompts[i] if prompts is not None and i < len(prompts) else None
        front = [each.expand(len(images), -1, -1) for each in own] + ([] if extra is None else [extra])
        x = torch.cat([*front, tokens], 1)
        if beside := encoder.tuning.beside(i):
            x = x + block.attn(block.norm1(x))
            change = block.mlp(block.norm2(x))
            for module in beside:
                change = module(x, change)
            x = x + change
        else:
            x = block(x)
        tokens = x[:, x.shape[1] - tokens.shape[1] :]
    return encoder.pool(net.norm(tokens))


FORMS = ("list, fewer", "list, short", "list, empty", "by class, fewer", "by class, later")
TUNINGS = ("vpt", "vpt+bitfit", "vpt+adapter", "vpt+lora", "bitfit", "full")
CASES = [("vit", tuning) for tuning in TUNINGS]
CASES += [(kind, tuning) for kind in list(TIMMS)[1:] for tuning in ("vpt+bitfit", "full")]
FALLBACK = ("norm behind", "parallel")


@pytest.mark.parametrize(("kind", "tuning"), CASES)
def test_two_looks_in_one_pass_are_two_passes(kind: str, tuning: str, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = vit(kind, tuning, monkeypatch)
    x, patches = pictures(B, encoder.size), inputs(encoder.backbone.patch_embed)
    blocks = [] if kind in FALLBACK else inputs(encoder.backbone.blocks[1].attn.proj)
    # What a form is turned into does not depend on the kind of ViT: the plain one gets all of them.
    for form in FORMS if kind == "vit" else ("list, short", "list, empty", "by class, later"):
        prompts, by_hand, leaves = given(form, encoder.backbone.embed_dim)
        for shared in (False, True):
            expected = plainly(encoder, x, None), plainly(encoder, x, by_hand, shared)
            assert (expected[0] - expected[1]).abs().max() > 1e-6
            graded = slopes(encoder, expected, leaves)
            apart = encoder.features(x), encoder.features(x, by_hand, shared)
            alike(slopes(encoder, apart, leaves), graded, **EXACT)
            patches.clear()
            blocks.clear()
            actual = encoder.features_twice(x, prompts, shared)
            assert [shape[0] for shape in patches] == [B], "one patch embedding for both"
            assert kind in FALLBACK or [shape[0] for shape in blocks] == [2 * B], "one pass through the blocks"
            alike(slopes(encoder, actual, leaves), graded, **EXACT)
            for got, alone, want in zip(actual, apart, expected, strict=True):
                torch.testing.assert_close(got, want, **EXACT)
                torch.testing.assert_close(alone, want, **EXACT)
            assert all(graded[f"given {i}"].abs().max() > 1e-6 for i, leaf in enumerate(leaves) if leaf.numel())


# The last block

BY_CLASS = ("vit", "deit 3, no place for the class token", "dino", "dino v2, registers", "clip, pre-norm")
POOLED = [
    *((kind, "auto", kind in BY_CLASS) for kind in TIMMS if kind not in FALLBACK),
    ("vit", "avg", False), ("vit", "gem", False), ("dino v2, registers", "avg+max", False),
]  # fmt: skip


@pytest.mark.parametrize("tuning", ["vpt+bitfit", "full"])
@pytest.mark.parametrize(("kind", "pooling", "short"), POOLED)
def test_of_the_last_block_only_what_is_pooled(
    kind: str, pooling: str, short: bool, tuning: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The features equal those of all tokens, but the MLP of the last block gets one token if only that is pooled."""
    encoder = vit(kind, tuning, monkeypatch, blocks=2, pooling=pooling)
    x, each = pictures(B, encoder.size), [inputs(block.mlp) for block in encoder.backbone.blocks]
    prompts = [drawn(3, B, 2, 32), drawn(4, B, 1, 32)]
    for towers in ([Tower()], [Tower(), Tower(prompts, True)]):
        tokens = first_tokens(encoder.backbone, encoder.normalise(x))
        expected = encoder.pool(last_tokens(encoder.backbone, tokens, encoder.tuning, towers))
        whole = (len(towers) * B, *tokens.shape[1:])
        assert [shapes[-1] for shapes in each] == [whole, whole], "prompts are not among the tokens"
        actual = encoder.features(x) if len(towers) == 1 else torch.cat(encoder.features_twice(x, prompts, True))
        torch.testing.assert_close(actual, expected, **EXACT)
        alike(slopes(encoder, (actual,), []), slopes(encoder, (expected,), []), **EXACT)
        last = (whole[0], 1, whole[2])
        prompted = tuning != "full" or len(towers) == 2
        assert [shapes[-1] for shapes in each] == [whole, last if short and prompted else whole]


# Steps of a learner

LABELS = torch.tensor([3, 0, 1, 3, 0, 3])


def semantic(**options: Any) -> Objective:
    return Compare(ProxyAnchor(4.0, 0.1), SemanticProxies(C, D, prompts=2, **options))


def free() -> Objective:
    return Compare(ProxyAnchor(4.0, 0.1), LearnedProxies(C, D, 1, "kaiming"))


def learner_of(criterion: Criterion, **options: Any) -> Learner:
    learner = Learner(small(**options).double(), criterion.double()).train()
    for table in criterion.row_tables():  # Adam would turn gradients that are only rounding into whole steps
        table.follow("sgd", (0.9, 0.999), 0.01, 0.9)
    return learner


def stepped(learner: Learner, number: int, at_once: bool = True) -> dict[str, Tensor]:
    """One step: the loss, all gradients, and the memory after it."""
    torch.manual_seed(number)
    x, y, criterion = pictures(len(LABELS)).roll(number, 0), LABELS, learner.criterion
    learner.zero_grad()
    loss = learner(x, y) if at_once else criterion(learner.encoder(x), y, images=x)
    loss.backward()
    actual = {"loss": loss.detach()} | {
        f"{name}.grad": p.grad for name, p in learner.named_parameters() if p.grad is not None
    }
    for i, table in enumerate(criterion.row_tables()):
        (leaf,) = table.leaves()
        assert leaf.grad is not None
        actual |= {f"rows {i}": leaf.detach().clone(), f"rows {i}.grad": leaf.grad.clone()}
    with torch.no_grad():
        for parameter in learner.parameters():
            if parameter.grad is not None:
                parameter.sub_(0.05 * parameter.grad)
    criterion.commit(lr=0.1, network_lr=0.1)
    return actual | {name: value.clone() for name, value in learner.state_dict().items()}


def same_steps(learner: Learner, passes: tuple[int, int]) -> None:
    """Steps with both passes in one run equal steps with separate passes; `passes` are runs of the encoder per step."""
    other = copy.deepcopy(learner)
    counts = [inputs(each.encoder.backbone.patch_embed) for each in (learner, other)]
    for number in range(2):
        actual, expected = stepped(learner, number), stepped(other, number, at_once=False)
        alike(actual, expected, **EXACT)
        assert expected["rows 0.grad"].abs().max() > 1e-6
    assert tuple(map(len, counts)) == (2 * passes[0], 2 * passes[1])


@pytest.mark.parametrize("blocks", [{}, {"prompts": 3, "step": 1}, {"prompts": 2, "depth": 1}])
@pytest.mark.parametrize("class_prompts", ["only", "with_shared"])
@pytest.mark.parametrize("method", ["vptsp-m", "vptsp-g"])
def test_a_step_of_a_learner_is_that_of_two_passes(
    method: str, class_prompts: str, blocks: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    two_blocks(monkeypatch)
    options: dict[str, Any] = {"scale": 4.0, "class_prompts": class_prompts, "dropout": 0.1, **blocks}
    same_steps(learner_of(pm.method(method, classes=C, dim=D, **options)), (1, 2))


SCHEMES: dict[str, tuple[Callable[[], Objective], tuple[int, int]]] = {
    "beside free proxies": (lambda: Sum(free=(0.5, free()), seen=(2.0, semantic())), (1, 2)),
    "two that ask": (lambda: Sum(one=(1.0, semantic()), other=(2.0, semantic(accumulate="ema"))), (3, 3)),
    "projections": (lambda: AlternatingProjections(Sum(free=(0.5, free()), seen=(2.0, semantic())), pool=1), (1, 2)),
}


@pytest.mark.parametrize("kind", SCHEMES)
def test_schemes_pass_the_look_on(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    two_blocks(monkeypatch)
    make, passes = SCHEMES[kind]
    learner = learner_of(Criterion(make(), needs=("encoder", "images")))
    learner.criterion.boundary(0.0, (drawn(1, 4 * C, D), torch.arange(C).repeat(4)))
    same_steps(learner, passes)


def test_nobody_looks_twice_without_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    two_blocks(monkeypatch)
    learner = learner_of(pm.method("vptsp-g", classes=C, dim=D))
    x, blocks = pictures(len(LABELS)), inputs(learner.encoder.backbone.blocks[0].attn.proj)
    with torch.no_grad():
        learner(x, LABELS)
    learner.eval()(x, LABELS)
    assert [shape[0] for shape in blocks] == [len(LABELS)] * 2
    learner.criterion.commit()
    assert learner.criterion.step == 0


# Two processes

SPLITS = {"unequal": [4, 2], "one has none": [6, 0], "the first has none": [0, 6]}


def whole_learner() -> Learner:
    torch.manual_seed(5)
    return learner_of(pm.method("vptsp-g", classes=C, dim=D, scale=4.0, **VPT))


def of_two(rank: int, folder: Path) -> None:
    """A step of one of two processes: the rows that its blocks got, the averaged gradients, the memory."""
    kept: dict[str, Tensor] = {}
    for name, counts in SPLITS.items():
        learner = whole_learner()
        learner.world = 2
        mine = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
        blocks = inputs(learner.encoder.backbone.blocks[-1].attn.proj)
        torch.manual_seed(7 * rank)
        loss = learner(pictures(len(LABELS))[mine], LABELS[mine])
        loss.backward()
        actual = {"loss": loss.detach(), "blocks": torch.tensor([shape[0] for shape in blocks])}
        (leaf,) = learner.criterion.row_tables()[0].leaves()
        assert leaf.grad is not None
        actual["rows 0.grad"] = leaf.grad
        for key, parameter in learner.named_parameters():
            if parameter.requires_grad:
                grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                torch.distributed.all_reduce(grad)
                actual[f"{key}.grad"] = grad / 2
        learner.criterion.commit(lr=0.0, network_lr=0.0)
        actual["stored"] = learner.criterion.state_dict()["objective.source.stored"]
        kept |= {f"{name}: {key}": value for key, value in actual.items()}
    save_file(kept, folder / str(rank))


def test_of_two_processes_each_looks_at_its_own_images_alone(tmp_path: Path) -> None:
    together(2, of_two, tmp_path)
    learner = whole_learner()
    torch.manual_seed(0)
    loss = learner(pictures(len(LABELS)), LABELS)
    loss.backward()
    leaves = dict(learner.named_parameters()) | {"rows 0": learner.criterion.row_tables()[0].leaves()[0]}
    expected = {"loss": loss.detach()} | {f"{name}.grad": p.grad for name, p in leaves.items() if p.grad is not None}
    learner.criterion.commit(lr=0.0, network_lr=0.0)
    expected["stored"] = learner.criterion.state_dict()["objective.source.stored"]
    for rank in (0, 1):
        kept = load_file(tmp_path / str(rank))
        for name, counts in SPLITS.items():
            actual = {key.partition(": ")[2]: value for key, value in kept.items() if key.startswith(f"{name}:")}
            assert actual.pop("blocks").tolist() == [2 * counts[rank] or 1], "a process without images runs a black one"
            alike(actual, expected, **EXACT)
