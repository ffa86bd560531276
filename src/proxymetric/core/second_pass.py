"""A second forward pass of the encoder over the images of a batch, made together with the first one.

Most methods compare the embeddings of one forward pass. VPTSP also needs features of the same images that a vision
transformer computes with prompts of each image's class. `NeedsSecondPass` is how a source asks for them, so that
`Learner` can compute both passes in one run through the blocks:

1. `Criterion.second_pass` finds the source and returns its request, a `SecondPass`;
2. the learner runs the encoder and hands the features to the criterion, as a `SecondPassResult`;
3. the criterion hands the result to the source for the duration of the step.

A source that receives no result runs the encoder itself, through `Context.encode`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor


class ClassPrompts(NamedTuple):
    """Prompts of the classes in a batch, for all blocks of a vision transformer."""

    rows: Tensor
    """(U, n, W) the prompts of each class, those of the first block first"""
    place: Tensor
    """(B,) the row of each image's class; with several processes, only for the images of this process"""
    counts: Sequence[int]
    """how many of the n prompts belong to each block"""

    def of_blocks(self) -> list[Tensor | None]:
        """The prompts of each image, (B, n_i, W) for each block i; None for a block without prompts."""
        parts = self.rows[self.place].split(list(self.counts), 1)
        return [part if part.shape[1] else None for part in parts]


class SecondPass(NamedTuple):
    """A request for a second forward pass of the encoder."""

    prompts: ClassPrompts
    shared: bool
    """True: the prompts follow the encoder's own prompts; False: the prompts replace the encoder's prompts"""
    plan: Any = None
    """data of the source that made the request; it comes back unchanged in the result"""


class SecondPassResult(NamedTuple):
    """The features of a second forward pass."""

    request: SecondPass
    features: Tensor
    """(B, F) features of the whole batch; with several processes, of the images of all of them"""


@runtime_checkable
class NeedsSecondPass(Protocol):
    """A source that needs a second forward pass. The criterion looks for this protocol among its modules."""

    @property
    def needs_second_pass(self) -> bool:
        """Whether the source needs a second pass as it is configured now."""

    def second_pass(self, labels: Tensor, rows: slice) -> SecondPass:
        """Request a second pass, before the step.

        Args:
            labels: (B,) labels of the whole batch, preferably in host memory.
            rows: the part of the batch whose images this process holds.

        Returns:
            The request. It holds prompts for the images in `rows` only.
        """

    def receive(self, result: SecondPassResult | None) -> None:
        """Take the result that the next `forward` must use.

        Args:
            result: the features and the request that this source made; None: drop the earlier result.
        """
