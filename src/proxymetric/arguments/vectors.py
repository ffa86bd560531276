"""Checks of vectors and labels, and their conversion to tensors."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from proxymetric.arguments.checks import check_has_numbers

Vectors = Tensor | np.ndarray
Labels = Tensor | np.ndarray | Sequence[int] | Sequence[str]
"""whole numbers, or text; texts are numbered in alphabetical order"""

_EXACT_IN_FLOAT32 = (torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int16)


def as_vectors(name: str, value: Any, device: torch.device | str | None = None) -> Tensor:
    """Convert vectors (N, D) to float32 or float64 without changing a number (whole numbers: up to 2^53).

    Args:
        name: the name of the argument, for errors.
        value: a tensor, an array or nested lists.
        device: where to put the vectors; None: where they are.

    Raises:
        ValueError: the value is not a finite real matrix with at least one row and one column.
    """
    vectors = _tensor(name, value, "real numbers")
    if vectors.ndim != 2:
        raise ValueError(f"{name}: got shape {tuple(vectors.shape)}, expected two axes, items x dimensions")
    if 0 in vectors.shape:
        raise ValueError(f"{name}: got shape {tuple(vectors.shape)}, expected at least one item and one dimension")
    if vectors.is_complex() or vectors.dtype == torch.bool:
        raise ValueError(f"{name}: got {vectors.dtype}, expected real numbers")
    if vectors.dtype not in (torch.float32, torch.float64):
        vectors = vectors.to(torch.float32 if vectors.dtype in _EXACT_IN_FLOAT32 else torch.float64)
    vectors = vectors.to(device) if device is not None else vectors
    bad_rows = sum(int((~part.isfinite().all(dim=1)).sum()) for part in vectors.split(512))
    if bad_rows:
        raise ValueError(f"{name}: got NaN or infinity in {bad_rows} of {len(vectors)} rows, expected finite numbers")
    return vectors


def as_labels(name: str, value: Any, of: str = "", vectors: Tensor | None = None) -> Tensor:
    """Convert labels (N,) to int64.

    Args:
        name: the name of the argument, for errors.
        value: a tensor, an array or a list of whole numbers or of text.
        of: the name of the vectors, for errors.
        vectors: the vectors, one for each label; the labels are moved to their device. None: no check.

    Raises:
        ValueError: the value is not a list of whole numbers, or its length differs from that of the vectors.
    """
    labels = _tensor(name, number_texts(value)[0], "whole numbers")
    if labels.ndim != 1:
        raise ValueError(f"{name}: got shape {tuple(labels.shape)}, expected one axis, a class for each item")
    if len(labels) == 0:
        raise ValueError(f"{name}: got no labels, expected at least one")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(f"{name}: got {labels.dtype}, expected whole numbers")
    if vectors is None:
        return labels.long()
    if len(labels) != len(vectors):
        raise ValueError(f"{name}: got {len(labels)} labels, expected {len(vectors)}, one for each row of {of}")
    return labels.to(vectors.device, torch.long)


def number_texts(*labels: Any) -> list[Any]:
    """Replace text by numbers, the same text by the same number in all arguments.

    Args:
        *labels: labels of any kind.

    Returns:
        The labels; labels that are not text are unchanged.

    Raises:
        ValueError: some are text and others are not.

    Example:
        >>> [numbers.tolist() for numbers in number_texts(["dog", "cat"], ["eel", "cat"])]
        [[1, 0], [2, 0]]
    """
    texts = [_as_text(values) for values in labels]
    if all(text is None for text in texts):
        return list(labels)
    if any(text is None for text in texts):
        raise ValueError("labels, gallery_labels: got text and numbers, expected text for both or numbers for both")
    arrays = [text for text in texts if text is not None]
    numbers = np.unique(np.concatenate([array.ravel() for array in arrays]), return_inverse=True)[1]
    ends = np.cumsum([array.size for array in arrays])[:-1]
    return [part.reshape(array.shape) for part, array in zip(np.split(numbers.ravel(), ends), arrays, strict=True)]


def _as_text(labels: Any) -> np.ndarray | None:
    """The labels as an array of text; None if they are something else."""
    if isinstance(labels, Tensor) or (isinstance(labels, list | tuple) and not any(isinstance(x, str) for x in labels)):
        return None
    if isinstance(labels, list | tuple) and not all(isinstance(x, str) for x in labels):
        return None
    try:
        array = np.asarray(labels)
    except ValueError:
        return None
    if array.dtype.kind == "O" and array.size and all(isinstance(x, str) for x in array.flat):
        array = array.astype(str)  # such as a column of pandas
    return array if array.dtype.kind == "U" and array.ndim == 1 else None


def count_relevant(labels: Tensor, item_labels: Tensor) -> Tensor:
    """The number of items (N,) that have each query's label."""
    classes, counts = item_labels.unique(return_counts=True)
    positions = torch.searchsorted(classes, labels).clamp(max=len(classes) - 1)
    return torch.where(classes[positions] == labels, counts[positions], 0)


def _tensor(name: str, value: Any, content: str) -> Tensor:
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            raise ValueError(f"{name}: got a sparse tensor, expected a dense one: {name}.to_dense()")
        check_has_numbers(name, value)
        return value.detach()
    try:
        # np.require copies a read-only array, because torch would warn about sharing its memory.
        return torch.from_numpy(np.require(value, requirements=["C", "W"]))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: got {type(value).__name__}, expected an array of {content}") from error
