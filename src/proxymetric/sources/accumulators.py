"""Cells that accumulate the samples of a class in its state (VPTSP, section 4.3, Table 7).

A cell is a small module `forward(state (P, S), sample (P, D)) -> (P, S)` for P classes with one sample each. S = D,
except for the LSTM, whose state is the proxy followed by its cell (`parts` 2). A cell that is `whole` takes all samples
of a class at once: `forward(state (P, D), samples (P, T, D), present (P, T) bool)`. Cells do not normalise; the caller
does. `forward` is `step(state, read(sample))`: `read` needs no state, so that it can run once for a whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from proxymetric.arguments.checks import at_least_zero
from proxymetric.arguments.signatures import one_of


class Cell(nn.Module):
    """The base class of cells."""

    parts: int = 1
    """S / D"""
    whole: bool = False
    """True: `forward` takes all samples of a class at once"""

    def read(self, samples: Tensor) -> Tensor:
        """The inputs of `step` from samples (..., D)."""
        return samples

    def step(self, state: Tensor, read: Tensor) -> Tensor:
        """The state after one sample of each class.

        Args:
            state: (P, S).
            read: the output of `read` for these samples, P rows.

        Returns:
            (P, S).
        """
        raise NotImplementedError

    def gated(self, state: Tensor, read: Tensor) -> tuple[Tensor, Tensor | None]:
        """The output of `step`, and its gate: the weight (P, D) of the new state; None for a cell without a gate."""
        return self.step(state, read), None

    def forward(self, state: Tensor, sample: Tensor) -> Tensor:
        return self.step(state, self.read(sample))


def gates(dim: int, count: int, bias: bool) -> nn.Linear:
    """A layer of `count` (D, D) matrices, each of which is initialised separately (Xavier uniform); biases are 0."""
    linear = nn.Linear(dim, count * dim, bias=bias)
    for matrix in linear.weight.data.chunk(count):
        nn.init.xavier_uniform_(matrix)
    if bias:
        nn.init.zeros_(linear.bias)
    return linear


class EMA(Cell):
    """`lam P + (1 - lam) p` (Eq. 3).

    The paper prints 1 instead of the first lam. After normalisation, that is an average of the same form, in which the
    past has the weight 1 / (2 - lam).

    Args:
        lam: weight of the past, in [0, 1]; 0.8 in the released code.

    Example:
        >>> EMA(lam=0.75)(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]]))
        tensor([[0.7500, 0.2500]])
    """

    def __init__(self, lam: float = 0.8) -> None:
        super().__init__()
        at_least_zero(lam=lam)
        if lam > 1:
            raise ValueError(f"lam: got {lam}, expected at most 1")
        self.lam = lam

    def step(self, state: Tensor, read: Tensor) -> Tensor:
        return self.lam * state + (1 - self.lam) * read


class MeanEMA(EMA):
    """`lam P + (1 - lam) mean(p)`: one step per batch, to the mean of the class's samples (the released code)."""

    whole = True

    def forward(self, state: Tensor, samples: Tensor, present: Tensor) -> Tensor:  # type: ignore[override]
        weights = present.to(samples)
        return self.step(state, (samples * weights[:, :, None]).sum(1) / weights.sum(1, keepdim=True))


class GRU(Cell):
    """A gated recurrent unit: gates weight the past state and the new sample (Eqs. 4-7)::

        z = sigmoid(Wz p + Uz P + bz),  r = sigmoid(Wr p + Ur P + br),  n = relu(Wh p + r (Uh P) + bh)
        (1 - z) P + z n

    It differs from `nn.GRUCell`: ReLU instead of tanh keeps the scale, each gate has one bias, and z is the weight of
    the new state, as in the paper. It has six (D, D) matrices, initialised xavier-uniform, and three biases of 0.

    Args:
        dim: D.
        activation: "relu" or "tanh" (Table 7).

    Example:
        >>> sum(p.numel() for p in GRU(384).parameters())
        885888
    """

    def __init__(self, dim: int, activation: str = "relu") -> None:
        super().__init__()
        self.of_sample = gates(dim, 3, bias=True)
        self.of_state = gates(dim, 3, bias=False)
        self.activation = {"relu": torch.relu, "tanh": torch.tanh}[activation]

    def read(self, samples: Tensor) -> Tensor:
        return self.of_sample(samples)

    def step(self, state: Tensor, read: Tensor) -> Tensor:
        return self.gated(state, read)[0]

    def gated(self, state: Tensor, read: Tensor) -> tuple[Tensor, Tensor]:
        dim = state.shape[1]
        sample_zr, sample_h = read.split([2 * dim, dim], 1)
        state_zr, state_h = self.of_state(state).split([2 * dim, dim], 1)
        z, r = torch.sigmoid(sample_zr + state_zr).chunk(2, 1)
        return torch.lerp(state, self.activation(torch.addcmul(sample_h, r, state_h)), z), z


class RNN(Cell):
    """`tanh(W p + U P + b)`: a recurrent cell without gates (Table 7)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.of_sample = gates(dim, 1, bias=True)
        self.of_state = gates(dim, 1, bias=False)

    def read(self, samples: Tensor) -> Tensor:
        return self.of_sample(samples)

    def step(self, state: Tensor, read: Tensor) -> Tensor:
        return torch.tanh(read + self.of_state(state))


class LSTM(Cell):
    """`c = f c + i g`, `P = o tanh(c)`; gates i, f, o and g depend on p and P (Table 7). A state is P, then c."""

    parts = 2

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.of_sample = gates(dim, 4, bias=True)
        self.of_state = gates(dim, 4, bias=False)

    def read(self, samples: Tensor) -> Tensor:
        return self.of_sample(samples)

    def step(self, state: Tensor, read: Tensor) -> Tensor:
        proxy, cell = state.chunk(2, 1)
        i, f, o, g = (read + self.of_state(proxy)).chunk(4, 1)
        cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
        return torch.cat([torch.sigmoid(o) * torch.tanh(cell), cell], 1)


class Attention(Cell):
    """`sum_i softmax_i(Wq P . Wk p_i / sqrt D) Wv p_i` over the class's samples in this batch (Table 7).

    The stored proxy is only the query: the new proxy consists of this batch's samples only.
    """

    whole = True

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.of_sample = gates(dim, 2, bias=False)
        self.of_state = gates(dim, 1, bias=False)

    def forward(self, state: Tensor, samples: Tensor, present: Tensor) -> Tensor:  # type: ignore[override]
        keys, values = self.of_sample(samples).chunk(2, 2)
        logits = torch.einsum("pd,ptd->pt", self.of_state(state), keys) / math.sqrt(state.shape[1])
        weights = logits.masked_fill(~present, -torch.inf).softmax(1)
        return torch.einsum("pt,ptd->pd", weights, values)


ACCUMULATORS: dict[str, Callable[[int, float], Cell]] = {
    "gru": lambda dim, lam: GRU(dim),
    "gru-tanh": lambda dim, lam: GRU(dim, "tanh"),
    "rnn": lambda dim, lam: RNN(dim),
    "lstm": lambda dim, lam: LSTM(dim),
    "attention": lambda dim, lam: Attention(dim),
    "ema": lambda dim, lam: EMA(lam),
    "ema-mean": lambda dim, lam: MeanEMA(lam),
}
"""name -> a function (dim, lam) that makes the cell; only moving averages use lam"""


def accumulator(name: str, dim: int, lam: float = 0.8) -> Cell:
    """The cell of this name.

    Args:
        name: a key of `ACCUMULATORS`.
        dim: D.
        lam: weight of the past in the moving averages, in [0, 1].

    Raises:
        ValueError: there is no such cell.

    Example:
        >>> accumulator("lstm", 4).parts
        2
    """
    one_of("accumulate", name, ACCUMULATORS)
    return ACCUMULATORS[name](dim, lam)
