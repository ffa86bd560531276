"""How alike a query and a reference are: row by row, or class by class where a class has several references."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from proxymetric.seam import References


class Similarity(NamedTuple):
    """The similarity of a query to a class of K references.

    "soft": `S(x, c) = sum_k softmax_k(s_ck / gamma) s_ck`, Eq. 1 of the MPA paper (SoftTriple's); "max" and "mean" are
    its limits for gamma -> 0 and gamma -> infinity.
    """

    kind: str = "soft"
    gamma: float = 0.1

    def check(self) -> Similarity:
        if self.kind not in ("soft", "max", "mean"):
            raise ValueError(f"similarity: got {self.kind!r}, wanted 'soft', 'max' or 'mean'")
        if not self.gamma > 0:
            raise ValueError(f"gamma: got {self.gamma}, wanted a number above 0")
        return self

    def __call__(self, grouped: Tensor) -> Tensor:
        """Similarities (..., K) to the references of a class -> (...) to the class."""
        if grouped.shape[-1] == 1:
            return grouped.squeeze(-1)
        if self.kind == "soft":
            return (torch.softmax(grouped / self.gamma, -1) * grouped).sum(-1)
        return grouped.amax(-1) if self.kind == "max" else grouped.mean(-1)


class Columns(NamedTuple):
    """What queries were compared with, column by column."""

    similarity: Tensor
    """(B, columns)"""
    positive: Tensor
    """(B, columns) bool: a pair of one class"""
    negative: Tensor
    """(B, columns) bool: a pair of two classes"""
    labels: Tensor
    """(columns,) class of each"""


def similarities(queries: Tensor, labels: Tensor, refs: References, of_class: Similarity | None = None) -> Columns:
    """Similarities (B, columns) with the masks of their positive and negative pairs.

    A column is a reference row, or a class where `of_class` says how its K rows become one similarity.

    >>> refs = References(torch.eye(4)[:, :2], torch.tensor([0, 0, 1, 1]), per_class=2)
    >>> s, positive, negative, _ = similarities(torch.eye(2), torch.tensor([0, 1]), refs, Similarity("max"))
    >>> s
    tensor([[1., 0.],
            [1., 0.]])
    >>> positive
    tensor([[ True, False],
            [False,  True]])
    """
    s = queries @ refs.vectors.T
    if of_class is None:
        return Columns(s, *refs.positives(labels), refs.labels)
    if refs.per_class is None:
        raise ValueError(
            "base: this loss compares with classes of K references each; loose rows have no such structure"
        )
    columns = References(refs.vectors[:: refs.per_class], refs.labels[:: refs.per_class])
    return Columns(of_class(s.unflatten(1, (-1, refs.per_class))), *columns.positives(labels), columns.labels)
