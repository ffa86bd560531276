"""A second look that a source may want the encoder to take at the images of a batch, in one pass with the first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn


class ClassPrompts(NamedTuple):
    """Prompts of the classes in a batch for all blocks of a vision transformer, and which class each image is of."""

    rows: Tensor
    """(U, n, W), those of the first block first"""
    place: Tensor
    """(B,) the row of each image; of several processes, of the images of one"""
    counts: Sequence[int]
    """how many of the n each block has"""

    def of_blocks(self) -> list[Tensor | None]:
        """(B, n_i, W) for each block i, None where it has none."""
        parts = self.rows[self.place].split(list(self.counts), 1)
        return [part if part.shape[1] else None for part in parts]


class SecondPass(NamedTuple):
    """A second look at the batch's images that a source wants the encoder to take, in one pass with the first."""

    prompts: ClassPrompts
    shared: bool
    """they stand behind the encoder's own prompts"""
    by: nn.Module
    """the source that asked"""
    plan: Any
    """what it wants to know again when the step is taken"""


class SecondPassResult(NamedTuple):
    """What came of a second look."""

    look: SecondPass
    features: Tensor
    """(B, F), of the whole batch"""
