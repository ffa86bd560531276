"""Nested losses against NumPy, in every implementation of the reductions, in shards, and with closed forms."""

from __future__ import annotations

import importlib.util
import os

import numpy as np
import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported

import proxymetric as pm
from losses.test_losses import C, D, K, agrees, problem, tensors
from oracles import losses as oracle
from oracles import vcpa
from proxymetric.core.class_shards import Shard
from proxymetric.core.normalisation import NORMALISATIONS
from proxymetric.core.pieces import Compare, Energy, References
from proxymetric.losses import MPAAP, CosFace, Nested, ProxyAnchor, Triplet
from proxymetric.ops import using

SIZES = [2, 3, D]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLEMENTATIONS = ["plain", "chunked", *(["triton"] if importlib.util.find_spec("triton") else [])]


def mean_of_cuts(reference, x, *rows):
    """The oracle: the loss of NumPy on the first m numbers of all vectors, which it normalises itself."""
    return float(np.mean([reference(x[:, :m], *(each[:, :m] for each in rows)) for m in SIZES]))


@pytest.mark.parametrize(
    ("name", "arguments", "per_class", "reference"),
    [
        ("proxy-anchor", {}, 1, lambda y: lambda x, p: oracle.proxy_anchor(x, y, p)),
        (
            "mpa-ap",
            {"per_class": K, "scale": 9.0, "tau": 0.0},
            K,
            lambda y: lambda x, p: oracle.mpa_ap(x, y, p, K, 9.0, 0.1, 0.1, 0.0, kind="soft"),
        ),
    ],
)
def test_a_nested_proxy_loss_is_the_mean_over_the_cuts(name, arguments, per_class, reference):
    x, y, p = problem(0, per_class)
    criterion = pm.method(name, classes=C, dim=D, nested=SIZES, **arguments).double()
    vectors = criterion.objective.source.vectors
    vectors.data.copy_(torch.from_numpy(p))
    (tx,) = tensors(x)
    of_cuts = reference(y)
    agrees(criterion(tx, torch.from_numpy(y)), (x, p), (tx, vectors), lambda x, p: mean_of_cuts(of_cuts, x, p))


def test_a_nested_pair_loss_is_the_mean_over_the_cuts():
    x, y, _ = problem(1)
    (tx,) = tensors(x)
    criterion = pm.Criterion(Compare(Nested(Triplet(0.3), tuple(SIZES)), pm.sources.InBatch()))
    agrees(
        criterion(tx, torch.from_numpy(y)), (x,), (tx,), lambda x: mean_of_cuts(lambda x: oracle.triplet(x, y, 0.3), x)
    )


def test_in_the_ball_a_cut_is_divided_by_the_length_of_the_whole_vector():
    x, y, p = problem(2)
    x[0] *= 0.1  # inside the ball
    tx, tp = (torch.from_numpy(each) for each in (x, p))
    refs = References(tp, torch.arange(C), per_class=1, normalise="ball")
    got = Nested(CosFace(4.0, 0.1), (2, D))(NORMALISATIONS["ball"](tx), torch.from_numpy(y), refs)
    in_ball = [v / np.maximum(np.sqrt((v**2).sum(1, keepdims=True)), 1) for v in (x, p)]
    logits = [4.0 * (in_ball[0][:, :m] @ in_ball[1][:, :m].T) - 0.4 * (y[:, None] == np.arange(C)) for m in (2, D)]
    wanted = np.mean([np.mean(np.log(np.exp(z).sum(1)) - z[np.arange(len(y)), y]) for z in logits])
    assert got.item() == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("loss", [ProxyAnchor(8.0), MPAAP(8.0), CosFace(8.0)], ids=lambda loss: type(loss).__name__)
@pytest.mark.parametrize("normalise", ["l2", "ball"])
@pytest.mark.parametrize("shard", [False, True], ids=["whole", "shard"])
def test_every_implementation_gives_the_same(loss, normalise, shard, tmp_path):
    x, y, p = (torch.from_numpy(each).to(DEVICE) for each in problem(3))
    results = []
    if shard:
        torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for impl in IMPLEMENTATIONS:
            leaves = [each.float().clone().requires_grad_() for each in (x, p)]
            rows = torch.arange(C, device=DEVICE)
            part = Shard.of(C, 0, 1) if shard and impl != "plain" else None
            refs = References(leaves[1], rows, 1, normalise=normalise, shard=part, all_classes=True)
            with using(impl, rows=2):
                value = Nested(loss, (2, 4, D))(NORMALISATIONS[normalise](leaves[0]), y, refs)
            results.append([value.detach(), *torch.autograd.grad(value, leaves)])
    finally:
        if shard:
            torch.distributed.destroy_process_group()
    for other in results[1:]:
        for wanted, got in zip(results[0], other, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_newton_steps_have_the_mean_of_the_oracles_closed_forms():
    x, y, p = problem(4)
    queries, labels = NORMALISATIONS["l2"](torch.from_numpy(x)), torch.from_numpy(y)
    refs = References(torch.from_numpy(p), torch.arange(C), 1)
    loss = Nested(ProxyAnchor(8.0, 0.1, "all"), tuple(SIZES))
    got = Energy(loss, queries, labels).closed_forms(refs)(refs.rows)
    wanted = [np.zeros((C, D)), np.zeros((C, D))]
    for m in SIZES:
        for total, part in zip(wanted, vcpa.gradient_and_curvature(p[:, :m], x[:, :m], y, scale=8.0, margin=0.1)):
            total[:, :m] += part / len(SIZES)
    for each, expected in zip(got, wanted, strict=True):
        np.testing.assert_allclose(each.numpy(), expected, rtol=1e-10, atol=1e-12)


def test_closed_forms_in_the_ball_are_autograds_with_the_length_held():
    x, y, p = problem(5)
    queries, labels = NORMALISATIONS["ball"](torch.from_numpy(x)), torch.from_numpy(y)
    points, inner = torch.from_numpy(p), ProxyAnchor(8.0, 0.1)
    points[0] *= 0.1
    refs = References(points, torch.arange(C), 1)
    held = points.norm(dim=1, keepdim=True).clamp(min=1.0)

    def value(flat: Tensor) -> Tensor:
        rows = flat.view_as(points) / held
        parts = [inner(queries[:, :m], labels, refs._replace(rows=rows[:, :m])) for m in SIZES]
        return torch.stack(parts).mean()

    gradient, curvature = Energy(Nested(inner, tuple(SIZES)), queries, labels, "ball").closed_forms(refs)(points)
    flat = points.flatten().requires_grad_()
    (slope,) = torch.autograd.grad(value(flat), flat)
    hessian = torch.autograd.functional.hessian(value, flat).diagonal()
    torch.testing.assert_close(gradient.flatten(), slope, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(curvature.flatten(), hessian, rtol=1e-10, atol=1e-12)


def test_a_loss_without_closed_forms_stays_without_when_it_is_nested():
    assert not hasattr(Nested(CosFace(), (2, 4)), "closed_forms")
    assert not hasattr(Nested(CosFace(), (2, 4)), "of_class")
    assert Nested(MPAAP(), (2, 4)).of_class == MPAAP().of_class
    with pytest.raises(ValueError, match="newton_steps: got 10, but CosFace offers no closed-form curvature"):
        pm.method("vcpa", classes=3, dim=4, base="cosface", nested=[2, 4])


@pytest.mark.parametrize(
    ("nested", "message"),
    [
        ([64, 128], r"got \[64, 128\] for vectors of 8 dimensions, expected a last size of 8"),
        ([4, 2, 8], r"got \[4, 2, 8\], expected ascending dimensions"),
        ([], r"got \[\], expected a list of dimensions"),
        ("4,8", "got '4,8', expected a list of dimensions"),
        (8, "got 8, expected a list of dimensions"),
        ([0, 8], "got 0, expected"),
        ([2.5, 8], "got 2.5, expected"),
    ],
)
def test_wrong_sizes_are_refused(nested, message):
    with pytest.raises(ValueError, match=f"^nested: {message}"):
        pm.method("proxy-anchor", classes=3, dim=8, nested=nested)


def test_other_uses_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match=r"^nested: got \[2, 4\] for vectors of 3 dimensions, expected"):
        Nested(Triplet(), (2, 4))(torch.eye(3), torch.arange(3), References(torch.eye(3), torch.arange(3)))
    with pytest.raises(ValueError, match=r"^base: got nested=\[2, 4\] in its table, expected nested as an argument of"):
        pm.method("ccp", classes=3, dim=4, base={"method": "proxy-anchor", "nested": [2, 4]})
