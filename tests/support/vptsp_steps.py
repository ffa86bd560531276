"""Shared parts of the tests of VPTSP: a criterion on a toy encoder, batches, and the oracle's values of a step."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import proxymetric as pm
from oracles import vptsp as oracle
from proxymetric.criterion import Criterion
from proxymetric.papers.contract import DIM, PIXELS, Toy
from proxymetric.sources import SemanticProxies

C, D = 5, DIM
LABELS = [3, 0, 1, 3, 0, 3]
"""three samples of class 3 and two of class 0, not side by side; class 1 once, classes 2 and 4 not at all"""
NUMBERS = {"scale": 4.0, "margin": 0.1}
CLOSE = {"rtol": 1e-9, "atol": 1e-11}
SLOPE = {"rtol": 1e-6, "atol": 1e-8}
GATES = {"gru": "zrh", "gru-tanh": "zrh", "rnn": "h", "lstm": "ifog"}
"""the gates of a cell in the order in which its matrices lie"""


def weights(cell: nn.Module, name: str) -> dict[str, np.ndarray]:
    """The matrices and biases of a cell by the paper's names."""
    if name == "attention":
        Wk, Wv = array(cell.of_sample.weight).reshape(2, D, D)
        return {"Wq": array(cell.of_state.weight), "Wk": Wk, "Wv": Wv}
    found = {}
    for i, gate in enumerate(GATES.get(name, "")):
        part = slice(i * D, (i + 1) * D)
        found["W" + gate] = array(cell.of_sample.weight)[part]
        found["U" + gate] = array(cell.of_state.weight)[part]
        found["b" + gate] = array(cell.of_sample.bias)[part]
    return found


def step_of(name: str, w: dict[str, np.ndarray], lam: float = 0.8) -> oracle.Step:
    return {
        "ema": lambda P, p: oracle.ema(P, p, lam=lam),
        "ema-mean": lambda P, members: oracle.ema_of_mean(P, members, lam=lam),
        "gru": lambda P, p: oracle.gru(P, p, w),
        "gru-tanh": lambda P, p: oracle.gru(P, p, w, tanh=True),
        "rnn": lambda P, p: oracle.rnn(P, p, w),
        "lstm": lambda state, p: oracle.lstm(state, p, w),
        "attention": lambda P, members: oracle.attention(P, members, w),
    }[name]


def array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().numpy().copy()


def build(name: str = "gru", seed: int = 0, toy: Toy | None = None, **arguments: Any) -> tuple[Criterion, Any, Toy]:
    """A criterion in float64 with biases and gains away from their initial values, its source and its encoder."""
    torch.manual_seed(seed)
    method = "vptsp-m" if name.startswith("ema") else "vptsp-g"
    criterion = pm.method(method, classes=C, dim=D, accumulate=name, **NUMBERS | {"prompts": 2} | arguments)
    toy = (toy or Toy()).double()
    criterion.bind(toy).double()
    source = criterion.objective.source
    assert isinstance(source, SemanticProxies)
    for part in (source.head, source.cell):
        for parameter in part.parameters() if part is not None else ():
            if parameter.ndim == 1:
                parameter.data += 0.3 * torch.randn_like(parameter)
    return criterion, source, toy


def batch(seed: int, labels: list[int] = LABELS) -> tuple[Tensor, Tensor, Tensor]:
    """Embeddings, labels and "images"."""
    generator = torch.Generator().manual_seed(seed)
    x, images = (torch.randn(len(labels), n, generator=generator, dtype=torch.float64) for n in (D, PIXELS))
    return x.requires_grad_(), torch.tensor(labels), images


def give(source: SemanticProxies, *draws: Tensor) -> list[Tensor]:
    """Make the source draw these numbers; return the list of those that are not drawn yet."""
    left = list(draws)

    def drawn(*shape: int) -> Tensor:
        numbers = left.pop(0)
        assert numbers.shape == shape
        return numbers

    source._random = drawn  # type: ignore[method-assign]
    return left


def features(source: SemanticProxies, toy: Toy, images: Tensor, labels: Tensor) -> Tensor:
    """The features of each image with the prompts of its class, computed one by one from the whole table."""
    rows, blocks = source.prompts.values, [0, *np.cumsum(source.per_block)]
    found = []
    for image, label in zip(images, labels):
        prompts = [rows[label, i:j][None] if j > i else None for i, j in itertools.pairwise(blocks)]
        found.append(toy.features(image[None], prompts=prompts, shared=source.shared))
    return torch.cat(found)


def head(source: SemanticProxies) -> dict[str, np.ndarray]:
    norm, linear = source.head
    return {"gain": norm.weight, "shift": norm.bias, "W": linear.weight, "b": linear.bias}


class Stepped(NamedTuple):
    """The oracle's values of one step, as a function of all trained parameters except the class prompts."""

    source: SemanticProxies
    name: str
    every: str
    before: np.ndarray
    features: np.ndarray
    labels: np.ndarray
    order: list[int]
    head: tuple[str, ...]
    cell: tuple[str, ...]
    positive_norm: str = "all"

    def states(self, *weights: np.ndarray) -> np.ndarray:
        """The memory after the step, computed from the arrays of the head, then of the cell."""
        samples = oracle.head(self.features, dict(zip(self.head, weights)))
        step = step_of(self.name, dict(zip(self.cell, weights[len(self.head) :])))
        if self.source.cell.whole:
            return oracle.accumulate_sets(self.before, samples, self.labels, step)
        return oracle.accumulate(self.before, samples, self.labels, self.order, step, every=self.every)

    def value(self, x: np.ndarray, free: np.ndarray, *weights: np.ndarray) -> float:
        reading = {"positive_norm": self.positive_norm, "normalise_free": self.source.normalise_free}
        return oracle.value(x, self.labels, self.states(*weights), free, a=0.4, **NUMBERS, **reading)
