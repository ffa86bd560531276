"""Pair losses: the samples of a batch are compared with each other."""

from __future__ import annotations

from proxymetric.core.pieces import Compare, Loss
from proxymetric.sources import InBatch


def in_batch(loss: Loss, normalise: str = "l2") -> Compare:
    """A loss on the pairs of a batch.

    Args:
        loss: a pair loss.
        normalise: "l2" or "ball", a key of `NORMALISATIONS`.
    """
    return Compare(loss, InBatch(), normalise=normalise)
