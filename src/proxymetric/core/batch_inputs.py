"""Checks of the embeddings and labels of a batch, and a factor that makes the loss NaN if embeddings are not finite."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from proxymetric.arguments.checks import check_has_numbers

MINERS = (
    "the output of a miner has no place here, because miners are part of a method: multi-similarity mines pairs "
    "(epsilon), triplet counts the triplets that are not zero, and a weighting (Compare(..., weighting=...), as in "
    "proxy-isa) weights pairs"
)
"""where the miners of other libraries are, for the message about a third argument"""

EMBEDDING_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""types of embeddings; torch computes no lengths of floats of 8 bits"""


def refuse_others(others: tuple[object, ...]) -> None:
    """Refuse arguments after the labels that have no name, such as the output of a miner.

    Args:
        others: what was given.

    Raises:
        TypeError: something was given.
    """
    if others:
        raise TypeError(
            f"criterion: got a third argument without a name ({type(others[0]).__name__}), expected "
            f"criterion(embeddings, labels), and images= by name; {MINERS}"
        )


def check_embeddings(embeddings: Any, dim: int | None = None) -> Tensor:
    """Refuse embeddings that are not a matrix of floats.

    Args:
        embeddings: what was given as the embeddings of a batch.
        dim: the width that they must have; None: any.

    Returns:
        The same embeddings, (B, D).

    Raises:
        ValueError: the embeddings are not a dense matrix of floats, or their width is not `dim`.

    Example:
        >>> check_embeddings(None)
        Traceback (most recent call last):
        ValueError: embeddings: got NoneType, expected a torch tensor of floats (batch, dim), the output of the network
    """
    if not isinstance(embeddings, Tensor):
        raise ValueError(
            f"embeddings: got {type(embeddings).__name__}, expected a torch tensor of floats (batch, dim), "
            "the output of the network"
        )
    if embeddings.layout != torch.strided:
        raise ValueError("embeddings: got a sparse tensor, expected a dense one: embeddings.to_dense()")
    if embeddings.ndim != 2 or embeddings.dtype not in EMBEDDING_TYPES:
        kinds = "floats" if not embeddings.is_floating_point() else "floats of 16, 32 or 64 bits"
        raise ValueError(
            f"embeddings: got shape {tuple(embeddings.shape)} of {embeddings.dtype}, expected {kinds} (batch, dim)"
        )
    check_has_numbers("embeddings", embeddings)
    if dim is not None and embeddings.shape[1] != dim:
        raise ValueError(f"embeddings: got {embeddings.shape[1]} dimensions, expected dim={dim}")
    return embeddings


def as_class_numbers(labels: Any, embeddings: Tensor, several_of: int | None = None) -> Tensor:
    """The labels of a batch as a tensor.

    Args:
        labels: a tensor, an array or a list of whole numbers, one for each embedding.
        embeddings: (B, D). Labels that are not a tensor are copied to the device of the embeddings.
        several_of: C, if an embedding may have several labels (`as_label_masks`); None: it has one.

    Returns:
        (B,) int64; a mask (B, C) if several labels are given and allowed.

    Raises:
        ValueError: the labels are not whole numbers, or there is not one for each embedding.

    Example:
        >>> as_class_numbers([2, 0], torch.zeros(2, 3))
        tensor([2, 0])
        >>> as_class_numbers(["cat", "dog"], torch.zeros(2, 3))
        Traceback (most recent call last):
        ValueError: labels: got text ('cat', ...), expected whole numbers from 0; number the classes of all training
        images once: names, numbers = numpy.unique(texts, return_inverse=True)
    """
    if several_of is not None and are_several(labels):
        return as_label_masks(labels, embeddings, several_of)
    if not isinstance(labels, Tensor):
        labels = _from_array(labels, embeddings.device)
    if (
        labels.shape != embeddings.shape[:1]
        or labels.is_floating_point()
        or labels.is_complex()
        or labels.dtype == torch.bool
    ):
        raise ValueError(
            f"labels: got shape {tuple(labels.shape)} of {labels.dtype}, "
            f"expected {len(embeddings)} whole numbers, one for each embedding"
        )
    check_has_numbers("labels", labels)
    return labels.long()


def are_several(labels: Any) -> bool:
    """Whether labels have two axes: several labels for each query.

    Args:
        labels: what was given as the labels of a batch.

    Example:
        >>> are_several(torch.zeros(2, 3)), are_several([[0, 2], [1, -1]]), are_several([0, 1])
        (True, True, False)
    """
    if isinstance(labels, Tensor | np.ndarray):
        return labels.ndim == 2
    if not isinstance(labels, list | tuple) or not labels:
        return False
    return all(isinstance(row, list | tuple) for row in labels)


def as_label_masks(labels: Any, embeddings: Tensor, classes: int) -> Tensor:
    """The labels of queries with several labels each, as a mask; whole numbers on a GPU are waited for.

    Args:
        labels: (B, C) bool, or (B, L) whole numbers in [0, C), padded with -1: a tensor, an array or nested lists.
        embeddings: (B, D).
        classes: C.

    Returns:
        (B, C) bool, on the device of the embeddings.

    Raises:
        ValueError: the shape or a number does not fit.

    Example:
        >>> as_label_masks(torch.tensor([[0, 2], [1, -1]]), torch.zeros(2, 4), classes=3)
        tensor([[ True, False,  True],
                [False,  True, False]])
    """
    if isinstance(labels, list | tuple) and len(lengths := {len(row) for row in labels}) > 1:
        raise ValueError(
            f"labels: got rows of {min(lengths)} to {max(lengths)} labels, expected rows of one length, padded with -1"
        )
    given = labels if isinstance(labels, Tensor) else _from_array(labels, embeddings.device)
    wrong_kind = given.is_floating_point() or given.is_complex() or given.ndim != 2
    if wrong_kind or len(given) != len(embeddings) or (given.dtype == torch.bool and given.shape[1] != classes):
        raise ValueError(
            f"labels: got shape {tuple(given.shape)} of {given.dtype}, expected a mask ({len(embeddings)}, {classes}) "
            f"or whole numbers ({len(embeddings)}, L), padded with -1"
        )
    check_has_numbers("labels", given)
    given = given.to(embeddings.device)
    if given.dtype == torch.bool:
        return given
    numbers = given.long()
    if numbers.numel():
        low, high = (int(end) for end in torch.aminmax(numbers))
        if low < -1 or high >= classes:
            raise ValueError(
                f"labels: got {low if low < -1 else high}, expected 0 to {classes - 1} (classes={classes}), or -1 for "
                "no label"
            )
        if numbers.shape[1] == classes > 2 and low >= 0 and high <= 1:
            raise ValueError(
                f"labels: got shape {tuple(numbers.shape)} of {given.dtype} with only 0 and 1, expected a mask of bool "
                "(labels.bool()), or whole numbers, padded with -1"
            )
    mask = torch.zeros(len(numbers), classes + 1, dtype=torch.bool, device=numbers.device)
    return mask.scatter_(1, numbers.where(numbers >= 0, classes), True)[:, :classes]


def check_range(labels: Tensor, classes: int) -> None:
    """Refuse labels outside [0, C); this synchronises with the GPU.

    Args:
        labels: (B,).
        classes: C.
    """
    if len(labels):
        low, high = (int(end) for end in torch.aminmax(labels))
        if low < 0 or high >= classes:
            raise ValueError(f"labels: got {low if low < 0 else high}, expected 0 to {classes - 1} (classes={classes})")


class LabelCheck:
    """Refuses labels outside [0, C), without waiting for a GPU.

    Labels in main memory are checked at once, and so are the first labels on a GPU. Later ones are checked by the GPU
    itself: it writes the answer into main memory when it gets there, and the next call reads it. Until then, labels out
    of range are moved into the range, so that they index nothing outside of a table.

    Example:
        >>> LabelCheck().within(torch.tensor([0, 2]), classes=2)
        Traceback (most recent call last):
        ValueError: labels: got 2, expected 0 to 1 (classes=2)
    """

    def __init__(self) -> None:
        self._unread: tuple[Tensor, int] | None = None
        """labels that a GPU is checking, and their C"""
        self._wrong: Tensor | None = None
        """the answer, in memory that the GPU can write"""
        self._answered: torch.cuda.Event | None = None

    def within(self, labels: Tensor, classes: int) -> Tensor:
        """Check labels.

        Args:
            labels: (B,).
            classes: C.

        Returns:
            Labels in [0, C): the given ones, if they are right.

        Raises:
            ValueError: these labels, or labels of the last call, are out of range.
        """
        if self._unread is not None:
            self.settle(wait=True)
        if labels.device.type != "cuda" or self._wrong is None or self._answered is None:
            check_range(labels, classes)
            if labels.device.type == "cuda":
                self._wrong = torch.zeros((), dtype=torch.bool, pin_memory=True)
                self._answered = torch.cuda.Event()
            return labels
        inside = labels.clamp(0, classes - 1)
        self._wrong.copy_((inside != labels).any(), non_blocking=True)
        self._answered.record(torch.cuda.current_stream(labels.device))
        self._unread = labels, classes
        return inside

    def settle(self, wait: bool = False) -> None:
        """Read the answer for the last labels.

        Args:
            wait: whether to wait for the GPU; False: do nothing if it has not answered yet.

        Raises:
            ValueError: the labels were out of range.
        """
        if self._unread is None:
            return
        assert self._answered is not None
        assert self._wrong is not None
        if not wait and not self._answered.query():
            return
        self._answered.synchronize()
        (labels, classes), self._unread = self._unread, None
        if self._wrong.item():
            check_range(labels, classes)


class LengthCheck:
    """Refuses embeddings of finite numbers whose length overflows, without waiting for a GPU.

    The length is computed anyway (`all_length`). In main memory it is read at once. A GPU writes it into main memory
    when it gets there, and the next call reads it. NaN and infinity are not refused: mixed precision makes them, and
    such a step has a loss of NaN, which a scaler skips.

    Example:
        >>> embeddings = torch.full((1, 2), 1e20)
        >>> LengthCheck().watch(embeddings, all_length(embeddings))
        Traceback (most recent call last):
        ValueError: embeddings: got numbers up to 1e+20, whose squares overflow torch.float32, expected numbers below
        1e+18
    """

    def __init__(self) -> None:
        self._unread: Tensor | None = None
        """embeddings whose length a GPU is computing"""
        self._length: Tensor | None = None
        """the length, in memory that the GPU can write"""
        self._answered: torch.cuda.Event | None = None

    def watch(self, embeddings: Tensor, length: Tensor) -> None:
        """Check embeddings.

        Args:
            embeddings: (B, D).
            length: `all_length(embeddings)`.

        Raises:
            ValueError: the length of these embeddings, or of those of the last call, overflows.
        """
        if self._unread is not None:
            self.settle(wait=True)
        if length.device.type == "cpu":
            _check_length(embeddings, float(length))
        elif length.device.type == "cuda":
            if self._length is None or self._answered is None or self._length.dtype != length.dtype:
                self._length = torch.zeros((), dtype=length.dtype, pin_memory=True)
                self._answered = torch.cuda.Event()
            self._length.copy_(length, non_blocking=True)
            self._answered.record(torch.cuda.current_stream(length.device))
            self._unread = embeddings.detach()

    def settle(self, wait: bool = False) -> None:
        """Read the length of the last embeddings.

        Args:
            wait: whether to wait for the GPU; False: do nothing if it has not answered yet.

        Raises:
            ValueError: the length overflowed.
        """
        if self._unread is None:
            return
        assert self._answered is not None
        assert self._length is not None
        if not wait and not self._answered.query():
            return
        self._answered.synchronize()
        embeddings, self._unread = self._unread, None
        _check_length(embeddings, float(self._length))


def _check_length(embeddings: Tensor, length: float) -> None:
    """Refuse embeddings whose length is infinite and whose numbers are not."""
    if length != math.inf:
        return
    largest = float(embeddings.detach().abs().amax())
    if largest != math.inf:
        limit = 10.0 ** math.floor(math.log10(torch.finfo(embeddings.dtype).max) / 2 - 1)
        raise ValueError(
            f"embeddings: got numbers up to {largest:.3g}, whose squares overflow {embeddings.dtype}, expected numbers "
            f"below {limit:.0e}"
        )


@cache
def _one(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.ones((), dtype=dtype, device=device)


def all_length(embeddings: Tensor) -> Tensor:
    """The length of all rows together, without gradient.

    It is not finite if a row holds NaN or infinity, and also if the sum of squares overflows: the normalisation would
    turn such a row into a zero vector.

    Args:
        embeddings: (B, D), float32 or wider.

    Returns:
        A scalar.

    Example:
        >>> all_length(torch.tensor([[3.0], [4.0]])), all_length(torch.full((1, 2), 1e30))
        (tensor(5.), tensor(inf))
    """
    return torch.linalg.vector_norm(embeddings.detach())


def one_if_finite(length: Tensor) -> Tensor:
    """A factor of the loss: exactly 1, or NaN if the length of the embeddings is not finite.

    A number times 1 has the same bits, so the factor 1 changes neither the loss nor its gradient. The factor stays on
    the device, and nothing synchronises with the GPU.

    Args:
        length: `all_length` of the embeddings.

    Returns:
        A scalar.

    Example:
        >>> [one_if_finite(torch.tensor(length)) for length in (2.0, torch.inf, torch.nan)]
        [tensor(1.), tensor(nan), tensor(nan)]
    """
    if torch.compiler.is_compiling():
        return length * 0 + 1
    # One operator: 1 - (1 - length) * 0, and 0 * infinity is NaN.
    return torch.lerp(length, _one(length.dtype, length.device), 1.0)


def _from_array(labels: Any, device: torch.device) -> Tensor:
    try:
        array = np.asarray(labels)
    except (TypeError, ValueError):  # such as lists of different lengths
        array = np.empty(0, dtype=object)
    if array.dtype.kind in "US":
        text = repr(str(array.flat[0])) if array.size else "none"
        raise ValueError(
            f"labels: got text ({text}, ...), expected whole numbers from 0; number the classes of all training "
            "images once: names, numbers = numpy.unique(texts, return_inverse=True)"
        )
    if array.size == 0 and array.dtype.kind != "O":
        array = array.astype(np.int64)
    if array.dtype.kind not in "iufb":
        raise ValueError(
            f"labels: got {type(labels).__name__}, expected a tensor, an array or a list of whole numbers, "
            "one for each embedding"
        )
    # A copy, because torch would warn about sharing the memory of a read-only array.
    return torch.from_numpy(np.array(array, dtype=np.int64 if array.dtype.kind in "iu" else None)).to(device)
