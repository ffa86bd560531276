"""Cells that take what a class's new sample says into what is remembered of the class (VPTSP, section 4.3, Table 7).

A cell is a small module `forward(state (P, S), sample (P, D)) -> (P, S)`: P classes each take one sample of their own.
S = D, but for the LSTM, whose cell lies behind the proxy (`parts` 2). A cell that is `whole` sees all samples of a
class at once, `forward(state (P, D), samples (P, T, D), there (P, T) bool)`. None of them normalises: who asks does.
What a cell makes of samples alone, `read(samples)`, can be had for a whole batch at once; `forward` is then `step`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from proxymetric.checks import at_least_zero


class Cell(nn.Module):
    """What all cells have: how wide a state is, and whether they want all samples of a class at once."""

    parts: int = 1
    """S / D"""
    whole: bool = False

    def read(self, samples: Tensor) -> Tensor:
        """What `step` wants to know of samples (..., D)."""
        return samples

    def step(self, state: Tensor, read: Tensor) -> Tensor:
        """The state (P, S) after one sample of each class, as `read` gave them."""
        raise NotImplementedError

    def gated(self, state: Tensor, read: Tensor) -> tuple[Tensor, Tensor | None]:
        """What `step` gives, and the gate (P, D) that says how much of it is new; None for a cell without one."""
        return self.step(state, read), None

    def forward(self, state: Tensor, sample: Tensor) -> Tensor:
        return self.step(state, self.read(sample))


def gates(dim: int, count: int, bias: bool) -> nn.Linear:
    """`count` matrices (D, D) side by side, each xavier-uniform by itself; biases 0."""
    linear = nn.Linear(dim, count * dim, bias=bias)
    for part in linear.weight.data.chunk(count):
        nn.init.xavier_uniform_(part)
    if bias:
        nn.init.zeros_(linear.bias)
    return linear


class EMA(Cell):
    """`lam P + (1 - lam) p` (Eq. 3, which prints 1 instead of lam: once normalised, that is lam = 1 / (2 - lam)).

    lam: in [0, 1], weight of the past; 0.8 in the released code.

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
    """`lam P + (1 - lam) mean(p)`: one step a batch, towards the mean of the class's samples (the released code)."""

    whole = True

    def forward(self, state: Tensor, samples: Tensor, there: Tensor) -> Tensor:  # type: ignore[override]
        present = there.to(samples)
        return self.step(state, (samples * present[:, :, None]).sum(1) / present.sum(1, keepdim=True))


class GRU(Cell):
    """Gates decide what of the past goes and what of the sample comes (Eqs. 4-7)::

        z = sigmoid(Wz p + Uz P + bz),  r = sigmoid(Wr p + Ur P + br),  n = relu(Wh p + r (Uh P) + bh)
        (1 - z) P + z n

    Not `nn.GRUCell`: ReLU instead of tanh, which keeps the scale; one bias a gate, and z as the paper has it, the share
    of the new. Six (D, D) matrices, xavier-uniform, and three biases, 0. activation: "relu" or "tanh" (Table 7).

    >>> sum(p.numel() for p in GRU(384).parameters())
    885888
    """

    def __init__(self, dim: int, activation: str = "relu") -> None:
        super().__init__()
        self.of_sample, self.of_state = gates(dim, 3, bias=True), gates(dim, 3, bias=False)
        self.activation = {"relu": torch.relu, "tanh": torch.tanh}[activation]

    def read(self, samples: Tensor) -> Tensor:
        return self.of_sample(samples)

    def step(self, state: Tensor, read: Tensor) -> Tensor:
        return self.gated(state, read)[0]

    def gated(self, state: Tensor, read: Tensor) -> tuple[Tensor, Tensor]:
        dim = state.shape[1]
        (new_zr, new_h), (old_zr, old_h) = (each.split([2 * dim, dim], 1) for each in (read, self.of_state(state)))
        z, r = torch.sigmoid(new_zr + old_zr).chunk(2, 1)
        return torch.lerp(state, self.activation(torch.addcmul(new_h, r, old_h)), z), z


class RNN(Cell):
    """`tanh(W p + U P + b)`: no gates (Table 7)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.of_sample, self.of_state = gates(dim, 1, bias=True), gates(dim, 1, bias=False)

    def read(self, samples: Tensor) -> Tensor:
        return self.of_sample(samples)

    def step(self, state: Tensor, read: Tensor) -> Tensor:
        return torch.tanh(read + self.of_state(state))


class LSTM(Cell):
    """`c = f c + i g`, `P = o tanh(c)`, gates i, f, o and candidate g of p and P (Table 7); a state is P, then c."""

    parts = 2

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.of_sample, self.of_state = gates(dim, 4, bias=True), gates(dim, 4, bias=False)

    def read(self, samples: Tensor) -> Tensor:
        return self.of_sample(samples)

    def step(self, state: Tensor, read: Tensor) -> Tensor:
        proxy, cell = state.chunk(2, 1)
        i, f, o, g = (read + self.of_state(proxy)).chunk(4, 1)
        cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
        return torch.cat([torch.sigmoid(o) * torch.tanh(cell), cell], 1)


class Attention(Cell):
    """`sum_i softmax_i(Wq P . Wk p_i / sqrt D) Wv p_i` over the class's samples in this batch (Table 7).

    The stored proxy only asks: what it says itself comes from this batch alone.
    """

    whole = True

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.of_sample, self.of_state = gates(dim, 2, bias=False), gates(dim, 1, bias=False)

    def forward(self, state: Tensor, samples: Tensor, there: Tensor) -> Tensor:  # type: ignore[override]
        keys, values = self.of_sample(samples).chunk(2, 2)
        odds = torch.einsum("pd,ptd->pt", self.of_state(state), keys) / math.sqrt(state.shape[1])
        shares = odds.masked_fill(~there, -torch.inf).softmax(1)
        return torch.einsum("pt,ptd->pd", shares, values)


ACCUMULATORS: dict[str, Callable[[int, float], Cell]] = {
    "gru": lambda dim, lam: GRU(dim),
    "gru-tanh": lambda dim, lam: GRU(dim, "tanh"),
    "rnn": lambda dim, lam: RNN(dim),
    "lstm": lambda dim, lam: LSTM(dim),
    "attention": lambda dim, lam: Attention(dim),
    "ema": lambda dim, lam: EMA(lam),
    "ema-mean": lambda dim, lam: MeanEMA(lam),
}
"""name -> the cell for this dim, and for this lam where it is a moving average"""


def accumulator(name: str, dim: int, lam: float = 0.8) -> Cell:
    """The cell of that name.

    >>> accumulator("lstm", 4).parts
    2
    """
    if name not in ACCUMULATORS:
        raise ValueError(f"accumulate: got {name!r}, expected one of {', '.join(ACCUMULATORS)}")
    return ACCUMULATORS[name](dim, lam)
