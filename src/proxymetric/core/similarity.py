"""The similarity of a query to a class that has several references."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from proxymetric.arguments.checks import above_zero, usually
from proxymetric.arguments.signatures import one_of

KINDS = ("soft", "max", "mean")


class Similarity(NamedTuple):
    """The similarity S of a query to a class of K references, from the similarities s_k to each of them.

    - "soft": `S(x, c) = sum_k softmax_k(s_ck / gamma) s_ck`, Eq. 1 of the MPA paper, as in SoftTriple;
    - "max": `max_k s_ck`, the limit of "soft" for gamma -> 0;
    - "mean": `1/K sum_k s_ck`, the limit of "soft" for gamma -> infinity.

    Args:
        kind: "soft", "max" or "mean".
        gamma: the temperature of "soft", above 0.
    """

    kind: str = "soft"
    gamma: float = 0.1

    def check(self) -> Similarity:
        """Refuse an unknown kind and a gamma that is not positive; return the similarity itself."""
        one_of("similarity", self.kind, KINDS)
        above_zero(gamma=self.gamma)
        usually(1e-3, 10, "smaller values act like 'max', larger values like 'mean'", gamma=self.gamma)
        return self

    def __call__(self, grouped: Tensor, dim: int = -1) -> Tensor:
        """Reduce the similarities to a class's K references, along `dim`, to the similarity to the class."""
        if grouped.shape[dim] == 1:
            return grouped.squeeze(dim)
        if self.kind == "soft":
            return (torch.softmax(grouped / self.gamma, dim) * grouped).sum(dim)
        return grouped.amax(dim) if self.kind == "max" else grouped.mean(dim)

    def slopes(self, grouped: Tensor, of_class: Tensor, dim: int = -1) -> Tensor:
        """The derivatives `dS / ds_k`.

        Args:
            grouped: similarities to the K references, along `dim`.
            of_class: S, the similarity to the class.
            dim: the dimension of the K references in `grouped`.

        Returns:
            The derivatives in the shape of `grouped`. With "max", references that tie for the largest similarity share
            the derivative equally.

        Example:
            >>> grouped = torch.tensor([0.5, 0.1], requires_grad=True)
            >>> S = Similarity()(grouped)
            >>> S.backward()
            >>> torch.testing.assert_close(Similarity().slopes(grouped, S), grouped.grad)
        """
        if grouped.shape[dim] == 1:
            return torch.ones_like(grouped)
        S = of_class.unsqueeze(dim)
        if self.kind == "soft":
            return torch.softmax(grouped / self.gamma, dim) * (1 + (grouped - S) / self.gamma)
        if self.kind == "mean":
            return torch.full_like(grouped, 1 / grouped.shape[dim])
        largest = (grouped == S).to(grouped)
        return largest / largest.sum(dim, keepdim=True)
