"""Classes of K proxies that a loss combines into one similarity, as in SoftTriple and the MPA family."""

from __future__ import annotations

from collections.abc import Callable

from proxymetric.core.pieces import Compare, Loss
from proxymetric.losses import Spread
from proxymetric.ops import Similarity
from proxymetric.papers.assembled import Builder
from proxymetric.sources import proxies

BY_DEFAULT = Similarity()


def of_class(similarity: str = BY_DEFAULT.kind, gamma: float = BY_DEFAULT.gamma) -> Similarity:
    """The similarity to a class, from the arguments of a method.

    Args:
        similarity: how the K proxies of a class are combined: "soft" (the paper), "max" or "mean".
        gamma: > 0; temperature of the soft similarity to the K proxies of a class.
    """
    return Similarity(similarity, gamma)


def compare_groups(build: Builder, loss: Callable[..., Loss]) -> Compare:
    """A loss on the similarities to classes of K proxies, and the regulariser that merges proxies."""
    return Compare(build(loss, of_class=build(of_class)), build(proxies), regulariser=build.unless(Spread, tau=0))
