"""VPTSP: cells and whole steps against the oracle, the order of samples, inputs of the second pass, ablations."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import proxymetric as pm
from oracles import vptsp as oracle
from proxymetric.core.normalisation import unit
from proxymetric.core.pieces import Compare, References
from proxymetric.criterion import Criterion
from proxymetric.encoders import build as build_encoder
from proxymetric.losses import ProxyAnchor
from proxymetric.papers.contract import CHECKS, PIXELS, Toy, builder, same, snapshot
from proxymetric.sources import ACCUMULATORS, RowTable, SemanticProxies
from vptsp_steps import (
    CLOSE,
    LABELS,
    NUMBERS,
    SLOPE,
    C,
    D,
    Stepped,
    array,
    batch,
    build,
    features,
    give,
    head,
    step_of,
    weights,
)

# The oracle itself


def test_the_oracles_gru_by_hand() -> None:
    """D = 1, all weights 1 and biases 0 but b_h = -1, P = 0.5, p = 1: z = r = s(1.5), n = relu(1 + r/2 - 1) = r/2."""
    one, none = np.ones((1, 1)), np.zeros(1)
    w = {key + gate: one for key in "WU" for gate in "zrh"} | {"bz": none, "br": none, "bh": -np.ones(1)}
    s = 1 / (1 + math.exp(-1.5))
    actual = oracle.gru(np.array([0.5]), np.array([1.0]), w)
    assert actual.item() == pytest.approx((1 - s) / 2 + s * s / 2, rel=1e-14)
    below = oracle.gru(np.array([0.5]), np.array([1.0]), w | {"bh": -2 * np.ones(1)})
    assert below.item() == pytest.approx((1 - s) / 2, rel=1e-14), "the candidate is cut off at 0"


def test_the_oracles_average_by_hand() -> None:
    """lam = 3/4 and two samples of class 0 at right angles to it: (3, 1)/sqrt 10, then (9/sqrt 10, 3/sqrt 10 + 1)."""
    stored, samples = np.array([[1.0, 0.0], [0.6, 0.8]]), np.array([[0.0, 2.0], [0.0, 5.0]])
    step = step_of("ema", {}, lam=0.75)
    actual = oracle.accumulate(stored, samples, np.array([0, 0]), [0, 1], step)
    expected = np.array([9, 3 + math.sqrt(10)])
    np.testing.assert_allclose(actual[0], expected / np.linalg.norm(expected), rtol=1e-14)
    assert actual[1].tolist() == [0.6, 0.8]
    # Once a batch: 3/4 (3/4, 1/4) + (0, 1/4) = (9, 7)/16.
    actual = oracle.accumulate(stored, samples, np.array([0, 0]), [0, 1], step, every="batch")
    np.testing.assert_allclose(actual[0], np.array([9, 7]) / math.sqrt(130), rtol=1e-14)


# Whole steps


@pytest.mark.parametrize("every", ["step", "batch"])
@pytest.mark.parametrize("name", ACCUMULATORS)
def test_every_step_is_the_oracles(name: str, every: str) -> None:
    agrees_with_the_oracle(name, normalise_every=every)


TEXT = {"positive_norm": "present", "class_prompts": "with_shared"}
READINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "M of the text": ("ema", TEXT),
    "G of the text": ("gru", TEXT),
    "M as released": ("ema-mean", {"positive_norm": "all", "class_prompts": "only"}),
    "G as released": ("gru", {"normalise_every": "batch", "positive_norm": "all", "class_prompts": "only"}),
    "M with a true ratio": ("ema", {"normalise_free": True}),
    "G with a true ratio": ("gru", {"normalise_free": True} | TEXT),
}


@pytest.mark.parametrize("reading", READINGS)
def test_every_reading_of_the_paper_is_the_oracles(reading: str) -> None:
    name, arguments = READINGS[reading]
    agrees_with_the_oracle(name, **arguments)


def agrees_with_the_oracle(name: str, **arguments: Any) -> None:
    """Compare value, memory, and the gradients of everything that is trained except the class prompts."""
    criterion, source, toy = build(name, a=0.4, **arguments)
    every, norm = source.normalise_every, criterion.objective.loss.positive_norm
    states = array(source.stored)
    for number in range(3):
        labels = [LABELS, [2, 2, 2, 1, 0, 2], [4]][number]  # later batches have new classes
        x, y, images = batch(number, labels)
        keys = torch.rand(len(labels), generator=torch.Generator().manual_seed(number))
        left = give(source, keys)
        seen = array(features(source, toy, images, y))
        criterion.zero_grad()
        loss = criterion(x, y, images=images)
        assert not left
        np.testing.assert_array_equal(array(source.stored), states, err_msg="P is written in commit only")
        loss.backward()

        own = {key: array(value) for key, value in head(source).items()}
        cell = weights(source.cell, name)

        stepped = Stepped(
            source, name, every, states, seen, y.numpy(), keys.argsort().tolist(), tuple(own), tuple(cell), norm
        )
        arrays = [array(x), array(source.free), *own.values(), *cell.values()]
        np.testing.assert_allclose(loss.item(), stepped.value(*arrays), **CLOSE)
        slopes = oracle.slopes(stepped.value, arrays)
        np.testing.assert_allclose(x.grad.numpy(), slopes[0], **SLOPE)
        np.testing.assert_allclose(source.free.grad.numpy(), slopes[1], **SLOPE)
        for (key, parameter), slope in zip(head(source).items(), slopes[2:]):
            np.testing.assert_allclose(parameter.grad.numpy(), slope, err_msg=key, **SLOPE)
        graded = copy.deepcopy(source.cell)
        for own_parameter, parameter in zip(graded.parameters(), source.cell.parameters()):
            own_parameter.data = parameter.grad
        for key, slope in zip(cell, slopes[2 + len(own) :]):
            np.testing.assert_allclose(weights(graded, name)[key], slope, err_msg=key, **SLOPE)
        assert np.abs(slopes[2]).max() > 1e-4, "the tower's head moves the loss"

        criterion.commit(lr=0.1, network_lr=0.1)
        expected = stepped.states(*arrays[2:])
        np.testing.assert_allclose(array(source.stored), expected, **CLOSE)
        np.testing.assert_allclose(np.linalg.norm(expected[:, :D], axis=1), 1, rtol=1e-6)
        absent = sorted(set(range(C)) - set(labels))
        np.testing.assert_array_equal(array(source.stored)[absent], states[absent])
        states = array(source.stored)


@pytest.mark.parametrize("class_prompts", ["only", "with_shared"])
@pytest.mark.parametrize(
    ("prompts", "depth", "step", "blocks"),
    [(2, None, 0, [2, 2]), (3, None, 2, [3, 1]), (2, 1, 0, [2, 0]), (2, None, 2, [2, 0]), (2, None, 3, [2, 0])],
)
def test_the_class_prompts_have_the_gradient_of_the_value(prompts, depth, step, blocks, class_prompts) -> None:
    criterion, source, _ = build(prompts=prompts, depth=depth, step=step, class_prompts=class_prompts)
    assert source.per_block == blocks
    x, y, images = batch(0)
    keys = torch.rand(len(y))

    def value() -> Tensor:
        give(source, keys)
        return criterion(x, y, images=images)

    value().backward()
    (leaf,) = source.prompts.leaves()
    present = source.prompts._taken[0][0]
    assert present.tolist() == [3, 0, 1]
    criterion.discard()
    (expected,) = oracle.slopes(_valued(value, source.prompts, criterion), [array(source.prompts.values)])
    np.testing.assert_allclose(leaf.grad.numpy(), expected[present], **SLOPE)
    assert np.abs(expected[present]).min(axis=(1, 2)).max() > 1e-7
    assert not expected[[2, 4]].any()


def _valued(value: Callable[[], Tensor], table: RowTable, criterion: Criterion) -> Callable[[np.ndarray], float]:
    def of(values: np.ndarray) -> float:
        table.values.copy_(torch.from_numpy(values))
        actual = value().item()
        criterion.discard()
        return actual

    return of


def test_no_gradient_from_one_batch_to_the_next() -> None:
    criterion, source, _ = build()
    optimizer = torch.optim.SGD(criterion.param_groups(lr=0.1, network_lr=0.1), lr=0.1)
    for number in range(3):
        x, y, images = batch(number)
        criterion(x, y, images=images).backward()  # through an earlier batch this would fail: its graph is gone
        optimizer.step()
        criterion.commit(optimizer)
        assert not source.stored.requires_grad


def test_an_optimiser_made_before_the_head_is_refused() -> None:
    _, _, encoder = build()
    criterion = pm.method("vptsp-g", classes=C, dim=D)
    criterion.param_groups(lr=0.1, network_lr=0.1)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"class prompts, proxies' own head.*bind\(encoder\) before"):
            criterion.bind(encoder)
    criterion.param_groups(lr=0.1, network_lr=0.1)
    assert criterion.bind(encoder) is criterion


def test_what_is_compared_is_the_mix() -> None:
    """In eval mode, Eq. 8 uses the stored states: the encoder does not run and nothing is random."""
    for a in (0.0, 0.3, 1.0):
        criterion, source, _ = build(a=a)
        x, y, images = batch(0)
        before = torch.get_rng_state()
        actual = criterion.eval()(x, y, images=images)
        assert torch.equal(actual, criterion(x, y)), "nor are images"
        assert torch.equal(before, torch.get_rng_state())
        expected = oracle.value(array(x), y.numpy(), array(source.stored), array(source.free), a=a, **NUMBERS)
        assert actual.item() == pytest.approx(expected, rel=1e-10)
        groups = {group["name"]: group["params"] for group in criterion.param_groups(lr=1.0)}
        assert ("proxies" in groups) == (a > 0)
        criterion.train()(x, y, images=images).backward()
        assert (source.free.grad is None) == (a == 0)
        if a == 1:
            refs = References(unit(source.free), torch.arange(C), 1)
            plain = ProxyAnchor(**NUMBERS, positive_norm="all")(unit(x), y, refs)
            torch.testing.assert_close(actual, plain)


@pytest.mark.parametrize("length", [0.1, 1.0, 30.0])
def test_the_length_of_free_proxies_matters_unless_they_are_normalised(length: float) -> None:
    x, y, _ = batch(0)
    values = {}
    for normalised in (False, True):
        criterion, source, _ = build(normalise_free=normalised)
        source.free.data = unit(source.free.data)
        before = criterion.eval()(x, y)
        source.free.data *= length
        values[normalised] = (before, criterion(x, y))
    torch.testing.assert_close(*values[True])
    torch.testing.assert_close(values[False][0], values[True][0])
    assert (length == 1) == torch.allclose(*values[False])


def test_free_proxies_start_as_released_and_can_start_so_without_semantic_ones() -> None:
    """Xavier-uniform of (C, D), divided by 8."""
    for name, other in (("vptsp-m", {}), ("vptsp-g", {}), ("proxy-anchor", {"init": "xavier/8"})):
        torch.manual_seed(3)
        source = pm.method(name, classes=C, dim=D, **other).objective.source
        first = source.vectors if name == "proxy-anchor" else source.free
        torch.manual_seed(3)
        assert torch.equal(first, torch.empty(C, D).uniform_(-1, 1) * math.sqrt(6 / (C + D)) / 8)


def test_what_is_trained_is_counted_by_name() -> None:
    criterion, source, _ = build("gru")
    counted = criterion.parts()
    assert list(counted) == ["free proxies", "GRU", "proxies' own head", "class prompts"]
    assert sum(counted.values()) == sum(p.numel() for p in criterion.parameters()) + source.prompts.values.numel()
    assert counted["class prompts"] == source.prompts.values.numel()
    assert list(pm.method("vptsp-m", classes=3, dim=4).parts()) == ["free proxies"], "not bound to an encoder yet"


def test_positive_norm_is_a_choice() -> None:
    x, y, images = batch(0)
    actual = [build(positive_norm=norm)[0].eval()(x, y, images=images) for norm in ("all", "present")]
    assert actual[0] < actual[1]
    assert pm.method("vptsp-g", classes=C, dim=D).objective.loss == ProxyAnchor(32.0, 0.1, "all")


def test_a_skipped_step_and_several_passes_before_one_commit() -> None:
    criterion, source, _ = build()
    kept = snapshot(criterion)
    x, y, images = batch(0)
    criterion(x, y, images=images).backward()
    criterion.discard()
    criterion.commit()
    assert same(kept, snapshot(criterion))
    assert source.prompts.leaves() == []
    # Classes 3 and 0, then 0 and 1: class 0 is stored as in the second pass, which started from the state before both.
    first, second = batch(1, [3, 0]), batch(2, [0, 1])
    for x, y, images in (first, second):
        criterion(x, y, images=images).backward()
    criterion.commit(lr=0.1, network_lr=0.1)
    alone, other, _ = build()
    x, y, images = second
    alone(x, y, images=images).backward()
    alone.commit(lr=0.1, network_lr=0.1)
    torch.testing.assert_close(source.stored[[0, 1]], other.stored[[0, 1]], rtol=0, atol=0)
    assert not torch.equal(source.stored[3], other.stored[3])
    assert source.prompts.steps.tolist() == [1, 1, 0, 1, 0]


@pytest.mark.parametrize(("name", "parts"), [("gru", 1), ("lstm", 2)])
def test_dropout_is_on_the_states_that_move(name: str, parts: int) -> None:
    """Values whose random number is below the rate become 0, others grow, before normal(); the LSTM's cell stays."""
    criterion, source, toy = build(name, dropout=0.25)
    x, y, images = batch(0, [3, 0])
    masks = torch.rand(2, parts * D, generator=torch.Generator().manual_seed(3))
    left = give(source, torch.tensor([0.2, 0.1]), masks)
    own = {key: array(value) for key, value in head(source).items()}
    seen = oracle.head(array(features(source, toy, images, y)), own)
    step, before = step_of(name, weights(source.cell, name)), array(source.stored)
    criterion(x, y, images=images)
    assert not left
    criterion.commit(lr=0.0, network_lr=0.0)
    for mask, label, sample in zip(masks.numpy(), (0, 3), (1, 0)):  # one sample of each class, in their order
        expected = step(before[label], oracle.normal(seen[sample]))
        expected[:D] = oracle.normal(expected[:D] * (mask[:D] >= 0.25) / 0.75)
        np.testing.assert_allclose(array(source.stored)[label], expected, rtol=1e-6)
    assert (source.stored[[0, 3], :D] == 0).any()


VARIANTS: dict[str, dict[str, Any]] = {
    **{name: {"accumulate": name} for name in ("gru-tanh", "rnn", "lstm", "attention")},
    **{name: {"source": name, "a": 0.0} for name in ("sample", "encoder", "fixed_encoder")},
    "as the text says": {"class_prompts": "with_shared", "positive_norm": "present"},
    "as released": {"normalise_every": "batch", "dropout": 0.5, "prompts": 3, "step": 2},
    "a true ratio": {"normalise_free": True},
}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_keeps_the_contract(variant: str, check: str) -> None:
    """Gradients are compared along random directions, those of the plain method entry by entry."""
    CHECKS[check](replace(builder("vptsp-g", **VARIANTS[variant]), fast=True))


# What the tower sees


def test_the_tower_computes_in_what_the_encoder_does_and_the_rest_in_full() -> None:
    class Watched(Toy):
        seen: tuple[torch.dtype, ...] = ()

        def features(self, *args: Any, **kwargs: Any) -> Tensor:
            actual = super().features(*args, **kwargs)
            self.seen = (*self.seen, self.embed(args[0]).dtype)
            return actual

    criterion = pm.method("vptsp-g", classes=C, dim=D).bind(toy := Watched())
    _, y, images = batch(0)
    images = images.float()
    with torch.autocast("cpu", torch.bfloat16):
        loss = criterion(toy(images), y, images=images)
    criterion(toy(images), y, images=images)
    assert toy.seen == (torch.bfloat16, torch.bfloat16, torch.float32, torch.float32)
    assert loss.dtype == torch.float32
    loss.backward()


@pytest.mark.parametrize("class_prompts", ["only", "with_shared"])
def test_the_encoders_own_prompts_are_there_only_when_asked(class_prompts: str) -> None:
    criterion, _, toy = build(class_prompts=class_prompts)
    x, y, images = batch(0)
    criterion(x, y, images=images).backward()
    assert (toy.own_prompts.grad is not None) == (class_prompts == "with_shared")
    assert toy.blocks[0].bias.grad.abs().sum() > 0, "parameters of both passes get gradients from both"


@pytest.mark.parametrize("class_prompts", ["only", "with_shared"])
def test_proxies_from_samples_without_prompts(class_prompts: str) -> None:
    """Table 5, "Sample": the blocks without any prompts and without gradient; only the head learns."""
    criterion, source, toy = build(a=0.0, source="sample", class_prompts=class_prompts)
    assert criterion.row_tables() == []
    x, y, images = batch(0)
    keys = torch.rand(len(y))
    give(source, keys)
    loss = criterion(x, y, images=images)
    loss.backward()
    assert all(p.grad is None for p in toy.parameters())
    assert source.head[1].weight.grad.abs().sum() > 0
    seen = array(toy.features(images, prompts=[None, None]))
    samples = oracle.head(seen, {key: array(value) for key, value in head(source).items()})
    step = step_of("gru", weights(source.cell, "gru"))
    states = oracle.accumulate(array(source.stored), samples, y.numpy(), keys.argsort().tolist(), step)
    expected = oracle.value(array(x), y.numpy(), states, np.zeros((C, D)), a=0.0, **NUMBERS)
    assert loss.item() == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("kind", ["encoder", "fixed_encoder"])
def test_proxies_from_the_encoder_itself_with_and_without_gradient(kind: str) -> None:
    """Table 5, "Encoder" and "Fixed Encoder": the same value, with and without gradients through the proxies."""
    criterion, source, _ = build(a=0.0, source=kind)
    assert source.head is None
    x, y, _ = batch(0)
    keys = torch.rand(len(y), generator=torch.Generator().manual_seed(0))
    give(source, keys)
    loss = criterion(x, y, images=x)
    loss.backward()
    step, states = step_of("gru", weights(source.cell, "gru")), array(source.stored)

    def value(x: np.ndarray, again: np.ndarray) -> float:
        moved = oracle.accumulate(states, again, y.numpy(), keys.argsort().tolist(), step)
        return oracle.value(x, y.numpy(), moved, np.zeros((C, D)), a=0.0, **NUMBERS)

    assert loss.item() == pytest.approx(value(array(x), array(x)), rel=1e-10)
    queries, samples = oracle.slopes(value, [array(x), array(x)])
    assert np.abs(samples).max() > 1e-3
    expected = queries if kind == "fixed_encoder" else queries + samples
    np.testing.assert_allclose(x.grad.numpy(), expected, **SLOPE)


@pytest.mark.parametrize(
    ("method", "arguments", "message"),
    [
        ("vptsp-g", {"accumulate": "ema"}, "accumulate: got 'ema', a cell of vptsp-m; expected one of gru, "),
        ("vptsp-m", {"accumulate": "gru"}, "accumulate: got 'gru', a cell of vptsp-g; expected one of ema, ema-mean"),
        ("vptsp-g", {"accumulate": "grU"}, "accumulate: got 'grU', expected one of gru, gru-tanh"),
        ("vptsp-g", {"a": 1.5}, "a: got 1.5, expected at most 1"),
        ("vptsp-g", {"dropout": 1.0}, "dropout: got 1.0, expected less than 1"),
        ("vptsp-m", {"lam": 1.5}, "lam: got 1.5, expected at most 1"),
        ("vptsp-g", {"prompts": 0}, "prompts: got 0, expected a whole number of at least 1"),
        ("vptsp-g", {"depth": 0}, "depth: got 0, expected a whole number of at least 1"),
        ("vptsp-g", {"depth": 3}, "depth: got 3, expected at most 2, the blocks of this encoder"),
        ("vptsp-g", {"step": -1}, "step: got -1, expected a whole number of at least 0"),
        ("vptsp-g", {"source": "x"}, "source: got 'x', expected one of prompts, sample, encoder, fixed_encoder"),
        ("vptsp-g", {"class_prompts": "x"}, "class_prompts: got 'x', expected one of only, with_shared"),
        ("vptsp-g", {"normalise_every": "x"}, "normalise_every: got 'x', expected one of step, batch"),
        ("vptsp-g", {"positive_norm": "x"}, "positive_norm: got 'x'"),
    ],
)
def test_what_cannot_be_meant_is_refused(method: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        pm.method(method, classes=C, dim=D, **arguments).bind(Toy())


def test_encoders_and_batches_that_do_not_suit_are_refused() -> None:
    criterion = pm.method("vptsp-g", classes=C, dim=D)
    with pytest.raises(ValueError, match=r"^encoder: got Linear, which has no features"):
        criterion.bind(nn.Linear(PIXELS, D))
    with pytest.raises(ValueError, match=r"^encoder: got SmallConvNet, which takes no prompts, expected a vision"):
        criterion.bind(build_encoder("small", dim=D, size=16))
    criterion.bind(Toy())
    with pytest.raises(ValueError, match=r"^encoder: got sizes \(7, 2, 7\) \(features, blocks, width\), expected"):
        criterion.bind(Toy(width=7))
    bare = Criterion(Compare(ProxyAnchor(), SemanticProxies(C, D)))
    x, y, images = (part.float() if part.is_floating_point() else part for part in batch(0))
    with pytest.raises(ValueError, match=r"^encoder: got none, expected criterion.bind"):
        bare(x, y, images=images)
    bare.bind(Toy())
    with pytest.raises(ValueError, match=r"^images: got none for 6 labels"):
        bare(x, y)
    with pytest.raises(ValueError, match=r"^images: got 2 for 6 labels"):
        bare(x, y, images=images[:2])
    queue = pm.method("moco", classes=C, dim=D, base="vptsp-g").bind(Toy())
    with pytest.raises(ValueError, match=r"^images: got none for 6 labels"):
        queue(x, y, images=images)


def test_rebinding_an_encoder_of_the_same_sizes_keeps_what_was_learned() -> None:
    criterion, _, _ = build()
    kept = snapshot(criterion)
    criterion.bind(Toy())
    assert same(kept, snapshot(criterion))
