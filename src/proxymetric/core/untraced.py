"""A check of labels in Python that runs at every call of a compiled criterion, as one operator of its graph.

torch.compile cannot trace a check that reads values, version counters or events. A function that it must not trace
(`torch.compiler.disable`) splits the graph in two, and each part costs guards and a node of autograd at every call. An
operator is a node of the graph whose code is not traced.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor


class ChecksLabels(Protocol):
    """An object with a check of labels that torch.compile calls and does not trace."""

    def check_labels(self, labels: Tensor, trains: bool) -> Tensor:
        """Refuse wrong labels.

        Args:
            labels: (B,).
            trains: whether the call is part of a training step.

        Returns:
            The labels, or others of the same shape and type in their place.
        """


class HasStep(Protocol):
    """An object that counts its steps."""

    step: int


class TracedProgress:
    """A `Progress` that reads its fields when a piece asks for them.

    torch.compile compiles a function anew when a number that it has read changes: only methods that ask for the step
    are compiled for every step.

    Args:
        counter: has the number of commits so far.
        epoch: returns the epochs so far.
    """

    def __init__(self, counter: HasStep, epoch: Callable[[], float | None]) -> None:
        self._counter, self._epoch = counter, epoch

    @property
    def step(self) -> int:
        return self._counter.step

    @property
    def epoch(self) -> float | None:
        return self._epoch()


_numbers = count()
_owners: WeakValueDictionary[int, ChecksLabels] = WeakValueDictionary()
"""the objects by number: an operator takes no objects"""


def numbered(owner: ChecksLabels) -> Tensor:
    """Register an object for `checked_labels`; it is forgotten when nothing else refers to it.

    Args:
        owner: whose `check_labels` is called.

    Returns:
        Its number, a scalar in main memory: torch.compile compiles code anew for another int, not for another tensor.
    """
    number = next(_numbers)
    _owners[number] = owner
    return torch.tensor(number, device="cpu")


def checked_labels(labels: Tensor, trains: bool, number: Tensor) -> Tensor:
    """`owner.check_labels(labels, trains)` as one operator.

    Args:
        labels: (B,).
        trains: whether the call is part of a training step.
        number: the number of the owner, from `numbered`.

    Returns:
        The labels of the check; a copy, because the result of an operator must not be its argument.

    Example:
        >>> class Refuses:
        ...     def check_labels(self, labels, trains):
        ...         raise ValueError(f"labels: got {labels.tolist()}")
        >>> number = numbered(owner := Refuses())
        >>> compiled = torch.compile(lambda labels: checked_labels(labels, True, number) + 1, backend="eager")
        >>> compiled(torch.tensor([2, 0]))
        Traceback (most recent call last):
        ValueError: labels: got [2, 0]
    """
    checked: Tensor = torch.ops.proxymetric.checked_labels(labels, trains, number)
    return checked


# A recorded CUDA graph would not run the check again; old versions of torch have no such tag.
_TAGS = (torch.Tag.cudagraph_unsafe,) if hasattr(torch.Tag, "cudagraph_unsafe") else ()
torch.library.define("proxymetric::checked_labels", "(Tensor labels, bool trains, Tensor number) -> Tensor", tags=_TAGS)


@torch.library.impl("proxymetric::checked_labels", "CompositeExplicitAutograd")
def _checked_labels(labels: Tensor, trains: bool, number: Tensor) -> Tensor:
    checked = _owners[int(number)].check_labels(labels, trains)
    return labels.clone() if checked is labels else checked


@torch.library.register_fake("proxymetric::checked_labels")
def _like_checked_labels(labels: Tensor, trains: bool, number: Tensor) -> Tensor:
    return torch.empty_like(labels)
