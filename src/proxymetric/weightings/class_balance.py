"""Weights and margins for each class, such as larger ones for rare classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from proxymetric.arguments.checks import above_zero, at_least_zero
from proxymetric.arguments.signatures import did_you_mean
from proxymetric.core.pair_weights import PairWeights, equal_pairs
from proxymetric.core.pieces import Commit, Context, Loss, References, Source, Weighting, nothing

Numbers = Sequence[float] | np.ndarray | Tensor
ClassNumbers = Numbers | str | None
"""a number for each class, "frequency", or None"""


class ClassBalance(Weighting):
    """Give each class its own weight in the mean, its own margin, or both; nothing is learned.

    By frequency, with n_c training images of class c:

    ``w_c = C (1/n_c) / sum_k (1/n_k)``, so that the weights are 1 on average

    ``m_c = margin (min_k n_k / n_c)^{1/4}``, the margins of LDAM (Cao et al. 2019, Eq. 13)

    Args:
        classes: C.
        weights: how much a class counts in the mean: C numbers above 0, "frequency" (inverse, 1 on average), or None:
            all the same.
        margins: a margin for each class: C numbers of at least 0, "frequency" (`margin` for the rarest class, falling
            with the fourth root of the number of images), or None: that of the loss.
        counts: C numbers of training images, for "frequency"; `proxymetric train` counts them.
        margin: the margin of the rarest class, for margins="frequency".

    Example:
        >>> balance = ClassBalance(2, "frequency", "frequency", counts=[16, 1], margin=0.5)
        >>> balance.weights, balance.margins
        (tensor([0.1176, 1.8824]), tensor([0.2500, 0.5000]))
    """

    asks = "has_class_balance"
    takes_several_labels = True
    classes: int
    changed_by_commit = ()
    weights: Tensor | None
    margins: Tensor | None

    def __init__(
        self,
        classes: int,
        weights: ClassNumbers = None,
        margins: ClassNumbers = None,
        counts: Numbers | None = None,
        margin: float = 0.0,
    ) -> None:
        super().__init__()
        self.classes = classes
        images = None if counts is None else _numbers("counts", counts, classes)
        if is_frequency(weights):
            rarity = 1 / _known(images, "weights")
            weights = (rarity / rarity.mean()).tolist()
        if is_frequency(margins):
            images = _known(images, "margins")
            margins = (margin * (images.min() / images) ** 0.25).tolist()
        self.register_buffer("weights", None if weights is None else _numbers("weights", weights, classes).float())
        self.register_buffer("margins", None if margins is None else _numbers("margins", margins, classes).float())

    def check(self, loss: Loss, source: Source) -> None:
        """Refuse also margins that the loss itself would refuse."""
        super().check(loss, source)
        inner = cast(Any, getattr(loss, "loss", loss))  # that of `Nested`
        for margin in () if self.margins is None else {self.margins.min().item(), self.margins.max().item()}:
            try:
                replace(inner, margin=margin)
            except ValueError as error:
                raise ValueError(f"margins: got {margin:g} for a class; {error}") from None

    def forward(self, ctx: Context, queries: Tensor, refs: References) -> tuple[PairWeights, Commit]:
        equal = equal_pairs(self.classes, queries)
        weights = PairWeights(equal, equal, class_weights=self.weights, class_margins=self.margins, are_equal=True)
        return weights, nothing


def _known(images: Tensor | None, argument: str) -> Tensor:
    if images is None:
        raise ValueError(
            f"counts: got none, expected the number of training images of each class: {argument}='frequency' needs it"
        )
    return images


def is_frequency(values: object) -> bool:
    """Whether weights or margins are to be computed from the numbers of training images.

    Example:
        >>> is_frequency("frequency"), is_frequency(np.ones(3))
        (True, False)
    """
    return isinstance(values, str) and values == "frequency"


def _numbers(argument: str, values: Numbers | str, classes: int) -> Tensor:
    """One number for each class, (C,) float64."""
    expected = "a number for each class" if argument == "counts" else "'frequency' or a number for each class"
    if isinstance(values, str):
        raise ValueError(f"{argument}: got {values!r}, expected {expected}{did_you_mean(values, ['frequency'])}")
    try:
        numbers = [float(value) for value in values]
    except (TypeError, ValueError):  # a single number, or a table
        shape = tuple(getattr(values, "shape", ()))
        got = f"shape {shape}" if shape else f"{values!r:.60}"
        raise ValueError(f"{argument}: got {got}, expected {expected}") from None
    if len(numbers) != classes:
        raise ValueError(f"{argument}: got {len(numbers)} numbers, expected {classes}, one for each class")
    for number in numbers:
        (at_least_zero if argument == "margins" else above_zero)(**{argument: number})
    return torch.tensor(numbers, dtype=torch.float64)
