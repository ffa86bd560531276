"""The arithmetic of optimisers for single rows: each row has its own state and its own step count.

`torch.optim` steps whole parameters, and `torch.optim.SparseAdam` has no weight decay. `RowTable` steps a few rows of a
large table with the functions here; a row that is not touched is neither moved nor decayed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from proxymetric.arguments.signatures import one_of
from proxymetric.core.host_rows import copy_rows

OPTIMIZER_STATE: dict[str, dict[str, str]] = {
    "adamw": {"average": "row", "square": "row"},
    "adam": {"average": "row", "square": "row"},
    "sgd": {"average": "row"},
    "rowwise-adagrad": {"square": "number"},
}
"""optimiser -> the state it keeps for each row, and its size: as large as the row, or one number"""


def rowwise_adagrad_(rows: Tensor, gradients: Tensor, square: Tensor, lr: float, eps: float = 1e-8) -> None:
    """One step of row-wise Adagrad, in place: `G += mean(g^2)`, `row -= lr g / (sqrt G + eps)`.

    No temporary tensor has the size of the rows.

    Args:
        rows: (n, ...), changed in place.
        gradients: (n, ...).
        square: (n, 1, ...) G of each row, changed in place.
        lr: learning rate.
        eps: added to the denominator.

    Example:
        >>> rows, square = torch.zeros(1, 2), torch.zeros(1, 1)
        >>> rowwise_adagrad_(rows, torch.tensor([[3.0, 4.0]]), square, lr=0.5)
        >>> rows * 12.5**0.5, square
        (tensor([[-1.5000, -2.0000]]), tensor([[12.5000]]))
    """
    dtype = torch.promote_types(gradients.dtype, torch.float32)
    lengths = torch.linalg.vector_norm(gradients.flatten(1), dim=1, dtype=dtype).view_as(square)
    square += lengths.square() * (len(rows) / max(rows.numel(), 1))
    rows.addcmul_(gradients, (square.sqrt() + eps).reciprocal().to(rows.dtype), value=-lr)


class RowOptimizer(NamedTuple):
    """An optimiser for rows, without its state.

    Args:
        name: "adamw", "adam", "sgd", or "rowwise-adagrad".
        betas: decay rates of Adam's two averages.
        eps: added to the denominator of Adam and Adagrad.
        weight_decay: decoupled in "adamw", added to the gradient in the others.
        momentum: of "sgd".

    Example:
        >>> optimizer = RowOptimizer("sgd", momentum=0.5)
        >>> rows, gradients, state = torch.zeros(1, 2), torch.ones(1, 2), {"average": torch.ones(1, 2)}
        >>> optimizer.stepped(rows, gradients, state, torch.ones(1), lr=0.1)
        (tensor([[-0.1500, -0.1500]]), {'average': tensor([[1.5000, 1.5000]])})
    """

    name: str = "adamw"
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.9

    def check(self) -> None:
        """Refuse an unknown optimiser.

        Raises:
            ValueError: the name is not a key of `OPTIMIZER_STATE`.
        """
        one_of("optimizer", self.name, OPTIMIZER_STATE)

    @property
    def state_names(self) -> tuple[str, ...]:
        """The names of the state tensors."""
        return tuple(OPTIMIZER_STATE[self.name])

    def state_shape(self, name: str, table: torch.Size) -> tuple[int, ...]:
        """The shape of a state tensor for a table (N, ...); (0,) if the optimiser does not keep this tensor.

        Example:
            >>> RowOptimizer("rowwise-adagrad").state_shape("square", torch.Size([9, 4, 2]))
            (9, 1, 1)
        """
        size = OPTIMIZER_STATE[self.name].get(name)
        if size is None:
            return (0,)
        return tuple(table) if size == "row" else (table[0], *(1,) * (len(table) - 1))

    def stepped(
        self, rows: Tensor, gradients: Tensor, state: dict[str, Tensor], steps: Tensor, lr: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """One step of each row.

        Args:
            rows: (n, ...) the rows before the step.
            gradients: (n, ...).
            state: the state tensors of these rows, on the device of the rows.
            steps: (n,) the number of each row's step, from 1; it may lie in host memory.
            lr: learning rate.

        Returns:
            The rows and their state after the step; the inputs do not change.
        """
        if self.name != "adamw":
            gradients = gradients + self.weight_decay * rows
        if self.name == "sgd":
            average = self.momentum * state["average"] + gradients
            return rows - lr * average, {"average": average}
        per_row = (-1, *(1,) * (rows.ndim - 1))
        if self.name == "rowwise-adagrad":
            rows, square = rows.clone(), state["square"].clone()
            rowwise_adagrad_(rows, gradients, square, lr, self.eps)
            return rows, {"square": square}
        if self.name == "adamw":
            rows = rows * (1 - lr * self.weight_decay)
        average_decay, square_decay = self.betas
        average = average_decay * state["average"] + (1 - average_decay) * gradients
        square = square_decay * state["square"] + (1 - square_decay) * gradients.square()
        average_correction, square_correction = self._bias_corrections(steps, rows).view(2, *per_row)
        step = lr * (average / average_correction) / ((square / square_correction).sqrt() + self.eps)
        return rows - step, {"average": average, "square": square}

    def _bias_corrections(self, steps: Tensor, rows: Tensor) -> Tensor:
        """Adam's `1 - beta^step` for both averages, (2, n), with the device and dtype of the rows."""
        # In float64: 1 - 0.999^1 keeps only four digits in float32.
        corrections = torch.stack([1 - decay ** steps.double() for decay in self.betas]).to(rows.dtype)
        return copy_rows(corrections, torch.arange(2, device=corrections.device), rows.device)
