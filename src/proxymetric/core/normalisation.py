"""How vectors are normalised before they are compared, with the gradient in closed form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

MIN_DIVISORS = {"l2": 1e-12, "ball": 1.0}
"""lengths by normalisation: a vector is divided by its own length or by this length, whichever is larger"""


def unit(vectors: Tensor) -> Tensor:
    """`v / ||v||`, row by row; a zero row stays zero.

    Example:
        >>> unit(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
        tensor([[0.6000, 0.8000],
                [0.0000, 0.0000]])
    """
    return _normalised(vectors, "l2")


def ball(vectors: Tensor) -> Tensor:
    """`v / max(||v||, 1)`, row by row: vectors inside the unit ball do not change (CCP's Lipschitz choice).

    Example:
        >>> ball(torch.tensor([[3.0, 4.0], [0.3, 0.4]]))
        tensor([[0.6000, 0.8000],
                [0.3000, 0.4000]])
    """
    return _normalised(vectors, "ball")


NORMALISATIONS: dict[str, Callable[[Tensor], Tensor]] = {"l2": unit, "ball": ball}
"""the normalisations by name"""


def cut(vectors: Tensor, size: int, name: str = "l2") -> Tensor:
    """The first numbers of normalised vectors, normalised again; 16-bit vectors are divided in float32.

    Args:
        vectors: (..., D), normalised.
        size: numbers that stay; D returns the vectors themselves.
        name: "l2" or "ball". With "ball", the first numbers are inside the ball and stay as they are.

    Example:
        >>> cut(torch.tensor([[0.6, 0.0, 0.8]]), 2)
        tensor([[1., 0.]])
    """
    if size == vectors.shape[-1]:
        return vectors
    first = vectors[..., :size]
    if first.dtype in (torch.half, torch.bfloat16):
        return NORMALISATIONS[name](first.float()).to(first.dtype)
    return NORMALISATIONS[name](first)


def divisors_of(vectors: Tensor, name: str, keepdim: bool = False) -> tuple[Tensor, Tensor | None]:
    """What vectors are divided by, and whether this is their length; made outside of autograd.

    Args:
        vectors: (..., D).
        name: "l2" or "ball".
        keepdim: whether the last dimension stays, with the size 1.

    Returns:
        The divisors (...,), and whether each is the length of its vector; None: each is. With keepdim, (..., 1).

    Example:
        >>> divisors_of(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), "ball")
        (tensor([5., 1.]), tensor([ True, False]))
    """
    lengths = torch.linalg.vector_norm(vectors, dim=-1, keepdim=keepdim)
    # With "l2", a vector too short to be divided by its length is zero, and a zero row has no radial part.
    return lengths.clamp(min=MIN_DIVISORS[name]), lengths >= MIN_DIVISORS[name] if name == "ball" else None


class Normalised(NamedTuple):
    """Normalised rows, and what their gradient needs; made outside of autograd."""

    rows: Tensor
    """(..., D)"""
    divisors: Tensor
    """(..., 1) what each vector was divided by"""
    by_length: Tensor | None
    """(..., 1) whether this was its length; None: it was, for all of them"""

    @staticmethod
    def of(vectors: Tensor, name: str) -> Normalised:
        """Normalise vectors.

        Args:
            vectors: (..., D).
            name: "l2" or "ball".

        Example:
            >>> Normalised.of(torch.tensor([[3.0, 4.0]]), "l2")
            Normalised(rows=tensor([[0.6000, 0.8000]]), divisors=tensor([[5.]]), by_length=None)
        """
        divisors, by_length = divisors_of(vectors, name, keepdim=True)
        return Normalised(vectors / divisors, divisors, by_length)

    def gradient(self, in_rows: Tensor) -> Tensor:
        """The gradient in the vectors, from the gradient g in the rows u: `(g - (g . u) u) / divisor`.

        A vector that was divided by a constant has the gradient `g / divisor`.

        Args:
            in_rows: (..., D).

        Returns:
            (..., D).

        Example:
            >>> Normalised.of(torch.tensor([[3.0, 4.0]]), "l2").gradient(torch.tensor([[1.0, 0.0]]))
            tensor([[ 0.1280, -0.0960]])
        """
        radial = (in_rows * self.rows).sum(-1, keepdim=True)
        if self.by_length is not None:
            radial = radial * self.by_length
        return torch.addcmul(in_rows, self.rows, radial, value=-1).div_(self.divisors)


class _Normalise(torch.autograd.Function):
    """vectors, name -> normalised rows; seven operators in all, where autograd would need eighteen."""

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, name: str) -> Tensor:
        normalised = Normalised.of(vectors, name)
        ctx.normalisation = name
        ctx.save_for_backward(vectors, *normalised)
        return normalised.rows

    @staticmethod
    def backward(ctx: Any, in_rows: Tensor) -> tuple[Tensor, None]:
        vectors, *normalised = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative is wanted: autograd must see how the rows were made
            rows = _by_autograd(vectors, ctx.normalisation)
            return torch.autograd.grad(rows, vectors, in_rows, create_graph=True)[0], None
        return Normalised(*normalised).gradient(in_rows), None


def _normalised(vectors: Tensor, name: str) -> Tensor:
    # torch.compile fuses the operators itself, and a tensor without gradient needs no function.
    if vectors.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        rows: Tensor = _Normalise.apply(vectors, name)
        return rows
    return _by_autograd(vectors, name)


def _by_autograd(vectors: Tensor, name: str) -> Tensor:
    return functional.normalize(vectors, dim=-1, eps=MIN_DIVISORS[name])
