"""How alike a query and a reference are: row by row, or class by class where a class has several references."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Similarity(NamedTuple):
    """The similarity of a query to a class of K references.

    "soft": `S(x, c) = sum_k softmax_k(s_ck / gamma) s_ck`, Eq. 1 of the MPA paper (SoftTriple's); "max" and "mean" are
    its limits for gamma -> 0 and gamma -> infinity.
    """

    kind: str = "soft"
    gamma: float = 0.1

    def check(self) -> Similarity:
        if self.kind not in ("soft", "max", "mean"):
            raise ValueError(f"similarity: got {self.kind!r}, expected 'soft', 'max' or 'mean'")
        if not self.gamma > 0:
            raise ValueError(f"gamma: got {self.gamma}, expected a number above 0")
        return self

    def __call__(self, grouped: Tensor, dim: int = -1) -> Tensor:
        """Similarities to the references of a class, K along `dim` -> to the class, without that dimension."""
        if grouped.shape[dim] == 1:
            return grouped.squeeze(dim)
        if self.kind == "soft":
            return (torch.softmax(grouped / self.gamma, dim) * grouped).sum(dim)
        return grouped.amax(dim) if self.kind == "max" else grouped.mean(dim)

    def slopes(self, grouped: Tensor, of_class: Tensor, dim: int = -1) -> Tensor:
        """`dS / ds_k` in the shape of `grouped`, where `of_class` is S; of several largest ones, each an equal share.

        >>> alike = torch.tensor([0.5, 0.1], requires_grad=True)
        >>> S = Similarity()(alike)
        >>> S.backward()
        >>> torch.testing.assert_close(Similarity().slopes(alike, S), alike.grad)
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
