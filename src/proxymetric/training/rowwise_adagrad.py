"""Row-wise Adagrad: one number of optimiser state per proxy, for very many classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from proxymetric.core.row_optimizers import rowwise_adagrad_


def with_rowwise(kind: type[Optimizer]) -> type[Optimizer]:
    """Extend an optimiser class: row-wise Adagrad updates the groups whose key "rowwise" is true.

    For a row p with gradient g::

        g <- g + weight_decay p,   G <- G + mean(g^2),   p <- p - lr g / (sqrt G + eps)

    No temporary tensor has the size of the parameter.

    Args:
        kind: the optimiser class for all other groups.

    Example:
        >>> p = torch.nn.Parameter(torch.zeros(1, 2))
        >>> optimizer = with_rowwise(torch.optim.SGD)([{"params": [p], "rowwise": True}], lr=0.5, momentum=0.9)
        >>> p.grad = torch.tensor([[3.0, 4.0]])
        >>> optimizer.step(); p.data * 12.5**0.5
        tensor([[-1.5000, -2.0000]])
    """

    class Mixed(kind):  # type: ignore[misc, valid-type]
        @torch.no_grad()
        def step(self, closure: Callable[[], float] | None = None) -> Any:
            groups: list[dict[str, Any]] = self.__dict__["param_groups"]
            self.param_groups = [group for group in groups if not group.get("rowwise")]
            try:
                loss = super().step(closure) if self.param_groups else None
            finally:
                self.param_groups = groups
            for group in groups:
                for p in group["params"] if group.get("rowwise") else ():
                    if p.grad is not None:
                        _step_rows(p, p.grad, self.state[p], group["lr"], group["weight_decay"])
            return loss

    return Mixed


def _step_rows(p: Any, grad: torch.Tensor, state: dict[str, torch.Tensor], lr: float, decay: float) -> None:
    """Update one parameter and its state in place."""
    if not state:
        state["square"] = p.new_zeros(len(p), *(1 for _ in p.shape[1:]), dtype=torch.float32)
        state["step"] = torch.zeros(())  # Adam expects this key in every state that it loads
    state["step"] += 1
    if decay:
        grad.add_(p, alpha=decay)
    rowwise_adagrad_(p, grad, state["square"], lr)
