"""What a piece may offer beyond its base class: the traits of a loss, and optional protocols of modules.

`Compare` asks a loss for its traits, `Criterion` looks for the protocols among its modules. A piece that has nothing to
offer defines nothing.
`NeedsSecondPass` (in `core.second_pass`) is another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from proxymetric.core.similarity import Similarity


class LossTraits(NamedTuple):
    """What a loss states of itself, by attributes of the same names."""

    can_shard: bool
    """whether its value is right when processes divide the classes"""
    has_several_labels: bool
    """whether a query may have several labels"""
    of_class: Similarity | None
    """how it combines the K references of a class into one similarity; None: it compares with each of them"""


def traits(loss: object) -> LossTraits:
    """What a loss, or a regulariser, states of itself.

    Args:
        loss: any function or object.

    Example:
        >>> from proxymetric.losses import ArcFace
        >>> traits(ArcFace()).can_shard, traits(len).can_shard
        (True, False)
    """
    return LossTraits(
        can_shard=getattr(loss, "can_shard", False),
        has_several_labels=getattr(loss, "has_several_labels", False),
        of_class=getattr(loss, "of_class", None),
    )


@runtime_checkable
class Prefetches(Protocol):
    """A source that can copy what it needs for the next batch to the device while the current step runs."""

    def prefetch_batch(self, labels: Tensor) -> None:
        """Start the copies. The results of training do not depend on this call.

        Args:
            labels: (B,) labels of the next batch.
        """


@runtime_checkable
class NamesParts(Protocol):
    """A source that names its trained parts for reports."""

    part_names: Mapping[str, str]
    """attribute that holds parameters or a row table -> the name of this part in a report"""


@runtime_checkable
class ReportsFigures(Protocol):
    """A piece that reports numbers about its memory."""

    def figures(self) -> dict[str, float]:
        """The numbers by name, for the log and the report."""


@runtime_checkable
class DeclaresChanges(Protocol):
    """A piece that names what its commit changes, so that training can undo a commit.

    Training then runs its commit before it knows whether the step is finite, and does not wait for the GPU
    (`training.stepper`). Training waits at each step for a piece that has buffers and declares nothing. The commit of a
    piece that declares its changes draws no random numbers, and should not synchronise with the GPU.
    """

    changed_by_commit: tuple[str, ...]
    """names of the buffers of the piece, and of its Python attributes with immutable values, that its commit changes;
    submodules declare their own"""


@runtime_checkable
class EstimatesUncertainty(Protocol):
    """A source that estimates how uncertain it is about each class."""

    def uncertainty(self, draws: int = 1000) -> Tensor:
        """The uncertainty of each class, (C,).

        Args:
            draws: random vectors drawn for each proxy, at least 2.
        """


class ClassProxies(NamedTuple):
    """The proxies of all classes, as points or as Gaussians."""

    vectors: Tensor
    """(P, D), not normalised; of Gaussian proxies, the means"""
    labels: Tensor
    """(P,) the class of each proxy"""
    sigma: Tensor | None = None
    """(P, D) standard deviations of Gaussian proxies; None for points"""


@runtime_checkable
class HasClassProxies(Protocol):
    """A source that can show the proxies of its classes, such as on the map of an index."""

    def class_proxies(self) -> ClassProxies:
        """The proxies of all classes, without gradient."""
