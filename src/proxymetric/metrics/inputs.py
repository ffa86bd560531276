"""Checks of vectors and labels, and their conversion to tensors."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

Vectors = Tensor | np.ndarray
Labels = Tensor | np.ndarray | Sequence[int]

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
        value: a tensor, an array or a list of whole numbers.
        of: the name of the vectors, for errors.
        vectors: the vectors, one for each label; the labels are moved to their device. None: no check.

    Raises:
        ValueError: the value is not a list of whole numbers, or its length differs from that of the vectors.
    """
    labels = _tensor(name, value, "whole numbers")
    if labels.ndim != 1:
        raise ValueError(f"{name}: got shape {tuple(labels.shape)}, expected one axis, a class for each item")
    if len(labels) == 0:
        raise ValueError(f"{name}: got none, expected at least one")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(f"{name}: got {labels.dtype}, expected whole numbers")
    if vectors is None:
        return labels.long()
    if len(labels) != len(vectors):
        raise ValueError(f"{name}: got {len(labels)} for {len(vectors)} {of}, expected one for each")
    return labels.to(vectors.device, torch.long)


def count_relevant(labels: Tensor, item_labels: Tensor) -> Tensor:
    """The number of items (N,) that have each query's label."""
    classes, counts = item_labels.unique(return_counts=True)
    place = torch.searchsorted(classes, labels).clamp(max=len(classes) - 1)
    return torch.where(classes[place] == labels, counts[place], 0)


def _tensor(name: str, value: Any, content: str) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    try:
        # np.require copies a read-only array, because torch would warn about sharing its memory.
        return torch.from_numpy(np.require(value, requirements=["C", "W"]))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: got {type(value).__name__}, expected an array of {content}") from error
