"""What people hand in, checked: vectors and labels as tensors."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

Vectors = Tensor | np.ndarray
Labels = Tensor | np.ndarray | Sequence[int]

_EXACT_IN_FLOAT32 = (torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int16)


def as_vectors(name: str, value: Any, device: torch.device | str | None = None) -> Tensor:
    """Vectors (N, D) in float32 or float64, every number as it was given (whole numbers up to 2^53)."""
    vectors = _tensor(name, value, "real numbers")
    if vectors.ndim != 2:
        raise ValueError(f"{name}: got shape {tuple(vectors.shape)}, expected two axes, items x dimensions")
    if 0 in vectors.shape:
        raise ValueError(f"{name}: got shape {tuple(vectors.shape)}, which is empty; expected at least one item")
    if vectors.is_complex() or vectors.dtype == torch.bool:
        raise ValueError(f"{name}: got {vectors.dtype}, expected real numbers")
    if vectors.dtype not in (torch.float32, torch.float64):
        vectors = vectors.to(torch.float32 if vectors.dtype in _EXACT_IN_FLOAT32 else torch.float64)
    vectors = vectors.to(device) if device is not None else vectors
    bad = sum(int((~part.isfinite().all(dim=1)).sum()) for part in vectors.split(512))
    if bad:
        raise ValueError(f"{name}: {bad} of {len(vectors)} rows hold NaN or infinity; expected finite numbers")
    return vectors


def as_labels(name: str, value: Any, of: str = "", vectors: Tensor | None = None) -> Tensor:
    """Labels (N,) as int64, one for each of the `vectors` and on their device."""
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
    """The number of items (N,) that carry each query's label."""
    known, counts = item_labels.unique(return_counts=True)
    place = torch.searchsorted(known, labels).clamp(max=len(known) - 1)
    return torch.where(known[place] == labels, counts[place], 0)


def _tensor(name: str, value: Any, wanted: str) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    try:
        # A copy where the array may not be written to: torch would warn about sharing it.
        return torch.from_numpy(np.require(value, requirements=["C", "W"]))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: got {type(value).__name__} that cannot be read as an array of {wanted}") from error
