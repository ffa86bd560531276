"""Factors of a loss that count as constants in its gradient, and a way to freeze them in a test.

The gradient of such a loss is not the gradient of its value. It is the gradient of a surrogate: the value as a function
of its arguments with the factors frozen. Circle loss weights each similarity by how far it is from its optimum, and
that weight has no gradient; AdaFace and CurricularFace have factors of the same kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor


class Factors:
    """The factors of one evaluation of a loss, recorded once and used again at other arguments.

    A test records the factors at one point and replays them at nearby points: finite differences of the replayed
    values approximate the gradient of the surrogate.

    Example:
        >>> import torch
        >>> def square(x):
        ...     return held(x) * x
        >>> factors = Factors()
        >>> with factors.record():
        ...     square(torch.tensor(3.0))
        tensor(9.)
        >>> with factors.replay():
        ...     square(torch.tensor(4.0))
        tensor(12.)
    """

    def __init__(self) -> None:
        self.values: list[Tensor] = []
        """the factors in the order in which the loss passed them to `held`"""
        self._position: int | None = None

    @contextmanager
    def record(self) -> Iterator[None]:
        """Record every factor that a loss passes to `held` inside this context."""
        self.values.clear()
        self._position = None
        with self._active():
            yield

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Make `held` return the recorded factors, in the order of recording, instead of its argument."""
        self._position = 0
        with self._active():
            yield
        assert self._position == len(self.values), "a replay must call `held` as often as the recording"

    @contextmanager
    def _active(self) -> Iterator[None]:
        token = _factors.set(self)
        try:
            yield
        finally:
            _factors.reset(token)

    def _next(self, factor: Tensor) -> Tensor:
        if self._position is None:
            self.values.append(factor)
            return factor
        self._position += 1
        return self.values[self._position - 1]


_factors: ContextVar[Factors | None] = ContextVar("factors", default=None)


def held(factor: Tensor) -> Tensor:
    """Mark a factor of a loss that counts as a constant in its gradient; returns `factor.detach()`.

    A loss that uses this is declared in its catalogue row: `surrogate_gradient=True`. Use it for factors of the value
    only. Masks and indices have no gradient and need no declaration.

    Args:
        factor: any tensor.

    Returns:
        The same values without gradient. Inside `Factors.replay`, the recorded values; code that torch.compile has
        compiled neither records nor replays.

    Example:
        >>> import torch
        >>> x = torch.tensor(3.0, requires_grad=True)
        >>> (held(x) * x).backward()
        >>> x.grad  # the gradient of x * x is 6
        tensor(3.)
    """
    # torch.compile cannot trace a context variable.
    factors = None if torch.compiler.is_compiling() else _factors.get()
    return factor.detach() if factors is None else factors._next(factor.detach())
