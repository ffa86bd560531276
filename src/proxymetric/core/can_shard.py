"""Whether processes may divide the classes of a method: its losses and regularisers must declare it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from proxymetric.core.capabilities import traits
from proxymetric.core.pieces import Compare, Source


def check_can_shard(method: nn.Module, sources: Sequence[Source]) -> None:
    """Refuse to divide sources whose references are read by what does not declare `can_shard`.

    A loss that is right with a part of the classes reads the references only through the reductions of `ops`, which
    add up the parts of all processes. Any other would have another value in each process.

    Args:
        method: the criterion.
        sources: the sources in it that are to be divided.

    Raises:
        ValueError: a loss or a regulariser does not declare it, or a source is outside of a `Compare`.

    Example:
        >>> from proxymetric import losses, sources
        >>> compare = Compare(losses.Triplet(), sources.LearnedProxies(3, 2))
        >>> check_can_shard(compare, [compare.source])
        Traceback (most recent call last):
        ValueError: shard: got the loss Triplet, which does not declare `can_shard = True`, expected a loss that does:
        one that reads the references only through the reductions of `ops`, such as ProxyAnchor
    """
    compared = set[nn.Module]()
    for comparison in (module for module in method.modules() if isinstance(module, Compare)):
        parts = set(comparison.source.modules())
        if parts.intersection(sources):
            _check_declared("loss", comparison.loss)
            if comparison.regulariser is not None:
                _check_declared("regulariser", comparison.regulariser)
        compared |= parts
    for source in sources:
        if source not in compared:
            raise ValueError(
                f"shard: got {type(source).__name__} outside of a Compare, expected Compare(loss, source) with a loss "
                "that declares `can_shard = True`"
            )


def _check_declared(kind: str, piece: object) -> None:
    if not traits(piece).can_shard:
        raise ValueError(
            f"shard: got the {kind} {getattr(piece, '__name__', type(piece).__name__)}, which does not declare "
            f"`can_shard = True`, expected a {kind} that does: one that reads the references only through the "
            "reductions of `ops`, such as ProxyAnchor"
        )
