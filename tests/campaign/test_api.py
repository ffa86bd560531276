"""Wrong arguments to every method from Python give a ValueError or TypeError of one sentence, or a right value."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import proxymetric as pm
from campaign_cases import some
from proxymetric.papers import CATALOGUE
from proxymetric.papers.contract import PIXELS, builder, make, sample, train_step

pytestmark = pytest.mark.slow

CLASSES, DIM = 6, 8


def put(value: float, everywhere: bool) -> Callable[[Tensor, Tensor], tuple[Any, Any]]:
    def change(embeddings: Tensor, labels: Tensor) -> tuple[Any, Any]:
        embeddings = embeddings.detach().clone()
        embeddings[... if everywhere else (2, 1)] = value
        return embeddings.requires_grad_(), labels

    return change


NOT_FINITE = {
    "a nan": put(math.nan, False),
    "all nan": put(math.nan, True),
    "an infinity": put(math.inf, False),
    "a negative infinity": put(-math.inf, False),
}
REFUSED: dict[str, Callable[[Tensor, Tensor], tuple[Any, Any]]] = {
    "no embeddings": lambda e, y: (None, y),
    "no labels": lambda e, y: (e, None),
    "embeddings of whole numbers": lambda e, y: (e.long(), y),
    "flat embeddings": lambda e, y: (e.flatten(), y),
    "embeddings of three axes": lambda e, y: (e[None], y),
    "too few labels": lambda e, y: (e, y[:-1]),
    "too large a label": lambda e, y: (e, y + CLASSES),
    "a negative label": lambda e, y: (e, y - CLASSES),
    "labels that are fractions": lambda e, y: (e, y + 0.5),
    "labels of two axes": lambda e, y: (e, y[:, None]),
    "text": lambda e, y: ("embeddings", y),
    "too wide": lambda e, y: (torch.cat([e, e], 1), y),
}
REFUSED_BY: dict[str, Callable[[pm.Criterion], bool]] = {
    "too large a label": lambda criterion: criterion.objective.classes is not None,
    "a negative label": lambda criterion: criterion.objective.classes is not None,
    "labels of two axes": lambda criterion: criterion.name != "proxy-anchor",
    "too wide": lambda criterion: criterion.objective.dim is not None,
}
"""whether a method refuses: only proxies have classes, only proxies and memories have a width, and Proxy-Anchor takes
several labels of a query"""
TAKEN: dict[str, Callable[[Tensor, Tensor], tuple[Any, Any]]] = {
    "a list of labels": lambda e, y: (e, y.tolist()),
    "labels of NumPy": lambda e, y: (e, y.numpy()),
    "32-bit labels": lambda e, y: (e, y.int()),
    "float64": lambda e, y: (e.double(), y),
    "large": lambda e, y: (e * 1e18, y),
    "small": lambda e, y: (e * 1e-18, y),
    "zeros": lambda e, y: (e * 0, y),
    "not contiguous": lambda e, y: (e.repeat(1, 2)[:, ::2].contiguous().T.contiguous().T, y),
}
CASES = [(name, case) for name in CATALOGUE for case in (*NOT_FINITE, *REFUSED, *TAKEN, "empty", "deepcopy", "pickle")]


def call(criterion: pm.Criterion, embeddings: Any, labels: Any) -> Tensor:
    """The loss in training, with images if the method needs them."""
    rows = len(embeddings) if isinstance(embeddings, Tensor) else len(labels)
    images = torch.rand(rows, PIXELS) if "images" in criterion.needs else None
    loss: Tensor = criterion(embeddings, labels, images=images)
    return loss


def criterion_of(name: str) -> pm.Criterion:
    criterion = make(builder(name))
    train_step(criterion, None, 0)
    return criterion


@pytest.mark.slow(cases=12)
@pytest.mark.parametrize(("name", "case"), some(CASES))
def test_a_wrong_argument_is_refused_and_an_odd_one_taken(name, case):
    torch.manual_seed(0)
    criterion = criterion_of(name)
    embeddings, labels = sample()
    embeddings.requires_grad_()
    if case in NOT_FINITE:
        loss = call(criterion, *NOT_FINITE[case](embeddings, labels))
        assert not torch.isfinite(loss), f"a finite loss: {loss}"
    elif case in REFUSED_BY and not REFUSED_BY[case](criterion):
        assert torch.isfinite(call(criterion, *REFUSED[case](embeddings, labels)))
    elif case in REFUSED:
        with pytest.raises((ValueError, TypeError)) as refusal:
            call(criterion, *REFUSED[case](embeddings, labels))
        assert ": got " in str(refusal.value), refusal.value
    elif case in TAKEN:
        assert torch.isfinite(call(criterion, *TAKEN[case](embeddings, labels)))
    elif case == "empty":
        assert torch.isfinite(call(criterion, embeddings[:0], labels[:0]))
    else:
        call(criterion, embeddings, labels)
        before = {key: value.clone() for key, value in criterion.state_dict().items()}
        other = copy.deepcopy(criterion) if case == "deepcopy" else pickle.loads(pickle.dumps(criterion))
        other.commit(lr=1e-2, network_lr=1e-3)
        after = criterion.state_dict()
        assert all(torch.equal(before[key], after[key]) for key in before), "the copy changed the original"


def test_metrics_take_odd_inputs_and_refuse_wrong_ones():
    vectors, labels = np.random.default_rng(0).normal(size=(12, 4)), np.arange(12) % 3
    for odd in (labels.astype(str), labels.tolist(), torch.tensor(labels)):
        assert set(pm.evaluate(vectors, odd, metrics=("R@1",))) == {"R@1"}
    for wrong in (None, labels[:-1], vectors):
        with pytest.raises((ValueError, TypeError)):
            pm.evaluate(vectors, wrong, metrics=("R@1",))
    for name in ("nDCG@100000000000000000000", "R@0", "R@-1", "R@x", "MAP", ""):
        with pytest.raises(ValueError, match="metrics: got"):
            pm.evaluate(vectors, labels, metrics=(name,))
    with pytest.raises((ValueError, TypeError), match="got"):
        pm.evaluate(torch.eye(12).to_sparse(), labels, metrics=("R@1",))
